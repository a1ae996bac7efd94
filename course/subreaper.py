"""Imported by the server that ranks are forked from: what a dead rank leaves becomes its child.

Without it, a process that a rank had started in a session of its own would go to init, and nobody
could tell whose it was. And when its parent is gone, the server goes at once: to take torch down in
good order would take seconds, while its ranks run on.
"""

import atexit
import ctypes
import os
import sys
import warnings

PR_SET_CHILD_SUBREAPER = 36
SERVER = os.getpid()


def adopt_orphans() -> None:
    """Let this process inherit what its dead descendants leave; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


@atexit.register
def leave() -> None:
    if os.getpid() == SERVER:  # and not a process that a rank has forked
        os._exit(0)


adopt_orphans()
warnings.filterwarnings("ignore", "forkserver: waitpid returned")
