"""Plain American English: none of the words that a reader has to look up, or is slowed down by."""

import re
from pathlib import Path

from course.lessons import ROOT
from tests.form.test_repository import TRACKED

OLD = "foretells? foretold mend(s|ed|ing)? who(m)?ever lest thereof in\\s+vain hence be\\s+it"
STEMS = "initial optim normal quant synchron recogn organ serial parallel util real minim maxim"
STEMS += " summar general special capital visual emphas priorit standard critic random"
BRITISH = (
    r"[a-z]*(?:col|behavi|fav|hon|lab|neighb|harb|endeav)our[a-z]*",
    rf"[a-z]*(?:{'|'.join(STEMS.split())})is(?:e|ed|es|er|ers|ing|ation|ations|able)",
    r"[a-z]*analys(?:e|ed|er|ing)",
    r"(?:label|model|travel|signal)l(?:ed|ing)",
    r"(?:cent|met|fib|lit)re[sd]?",
    r"gr[e]y|licence|defence|artefacts?|judgement|learnt|spelt|whilst|amongst",
)
UNWANTED = re.compile(rf"(?<![a-z])(?:{'|'.join([*OLD.split(' '), *BRITISH])})(?![a-z])", re.I)

WRITTEN = (".py", ".md", ".toml", ".txt", ".sh", ".in", ".sbatch", ".yaml", ".yml")
WRITTEN += (".js", ".css")


def unwanted(text: str) -> list[str]:
    return [found[0].lower() for found in UNWANTED.finditer(text)]


def written() -> list[str]:
    """What people wrote: no results, which lessons print, and not this list of words."""
    kept = []
    for file in TRACKED:
        path = Path(file)
        if path.name == "test_english.py" or file.startswith("results/lessons/"):
            continue
        if path.suffix in WRITTEN or path.name in ("Makefile", "run"):
            kept.append(file)
    return kept


def test_english_is_plain_and_american() -> None:
    wrong = []
    for file in written():
        found = unwanted((ROOT / file).read_text(encoding="utf-8"))
        if found:
            wrong.append(f"{file}: {', '.join(sorted({*found}))}")
    assert not wrong, "\n".join(wrong)


def test_such_words_are_found_in_names_and_over_lines() -> None:
    text = "It waits in\nvain. def foretell_price(): Colours, a neighbour; initialised, dequantise."
    found = "in\nvain|foretell|colours|neighbour|initialised|dequantise"
    assert unwanted(text) == found.split("|")
    right = "recommend commented optimistic parallelism analyses four hours center labeled precise"
    assert unwanted(f"{right} whoa, whence, it may be, its") == []
