"""Inherit what descendants leave when they die, so that it can be found and ended."""

import ctypes
import sys

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every process whose own parent, a descendant of ours, dies.

    Without it they would go to init, and nobody could tell whose they were. Linux alone has it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
