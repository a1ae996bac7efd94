"""python -m tests.helpers.pretended_torchrun RANKS LESSON [FLAGS]: a pretended GPU per rank."""

import sys
from pathlib import Path

from course.lessons import ROOT


def main() -> None:
    from tests.helpers.pretended_gpus import play_on_gpus

    ranks, lesson, *flags = sys.argv[1:]
    path = str(Path(lesson).relative_to(ROOT))
    played = play_on_gpus(path, int(ranks), argv=tuple(flags), deadline=500)
    print(played.output)
    sys.exit(played.code)


if __name__ == "__main__":
    main()
