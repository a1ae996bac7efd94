"""`course write tables`, `course write plumbing`: what is made from one place is written again.

tables     the READMEs' tables, from results/, lessons.toml, exercises/
plumbing   into every lesson: course/plumbing.py, and the passages of course/passages.py it uses
"""

import argparse
import sys


def tables(options: argparse.Namespace) -> int:
    from course.tables import write  # imports torch, for which `course --help` does not wait

    return told(write())


def plumbing(options: argparse.Namespace) -> int:
    from course.shared_code import write

    return told(write())


def told(changed: list[str]) -> int:
    """Say which files were changed."""
    for path in changed:
        print(f"rewritten: {path}")
    if not changed:
        print("Everything is up to date.")
    return 0


def add(subparsers: argparse._SubParsersAction) -> None:
    """Add `course write`."""
    parser = subparsers.add_parser("write", help="for authors: tables and plumbing, made anew")
    what = parser.add_subparsers(metavar="tables|plumbing", required=True)
    what.add_parser("tables", help="READMEs' tables").set_defaults(run=tables)
    what.add_parser("plumbing", help="into every lesson").set_defaults(run=plumbing)


def main() -> int:
    """`python -m course.write tables`, for make."""
    parser = argparse.ArgumentParser("course")
    add(parser.add_subparsers(required=True))
    options = parser.parse_args(["write", *sys.argv[1:]])
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
