"""Several broken lines in one play of a lesson, if each is told by claims of its own.

A play takes seconds, whatever is broken. Breaks whose claims are disjoint are all seen at once: if
one of them no longer did harm, the claims that it alone fails would pass.
"""

from collections.abc import Sequence
from itertools import pairwise

from course.lessons import ROOT

Change = tuple[str, str]  # a passage of the lesson, which occurs once, and what it becomes


def changes_of(entry: tuple) -> list[Change]:
    """What (old, new, claims), ((old, new), claims) or ([(old, new), ...], claims) changes."""
    *changes, _ = entry
    if len(changes) == 2:
        return [tuple(changes)]
    (changes,) = changes
    return [changes] if isinstance(changes, tuple) else list(changes)


def merged(breaks: dict[str, tuple], names: Sequence[str]) -> tuple[list[Change], set[str]]:
    """All that these breaks change, and all claims that they fail."""
    changes = []
    claims = set()
    for name in names:
        changes += changes_of(breaks[name])
        claims |= breaks[name][-1]
    return changes, claims


def together(
    lesson: str, breaks: dict[str, tuple], alone: Sequence[str] = (), most: int = 4
) -> list[tuple[str, ...]]:
    """Divide the breaks among plays, at most so many in each; `alone` are those that end the lesson
    early, or change what others would have done. No two of a play share a claim or a line.
    """
    assert set(alone) <= set(breaks), set(alone) - set(breaks)
    source = (ROOT / lesson).read_text()
    by_itself = [name for name in breaks if name in alone or not breaks[name][-1]]
    plays: list[list[str]] = []
    for name in breaks:
        if name in by_itself:
            continue
        room = [play for play in plays if len(play) < most]
        fits = [play for play in room if apart(source, breaks, [*play, name])]
        if fits:
            fits[0].append(name)
        else:
            plays.append([name])
    return [tuple(play) for play in plays] + [(name,) for name in by_itself]


def apart(source: str, breaks: dict[str, tuple], names: Sequence[str]) -> bool:
    """Whether no claim is failed by two of them, and no passage changed by two."""
    changes, claims = merged(breaks, names)
    spans = sorted((source.find(old), source.find(old) + len(old)) for old, _ in changes)
    touching = any(end >= begin for (_, end), (begin, _) in pairwise(spans))
    return len(claims) == sum(len(breaks[name][-1]) for name in names) and not touching
