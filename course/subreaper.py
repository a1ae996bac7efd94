"""Imported by the server that ranks are forked from: what a dead rank leaves becomes its child.

Without it, a process that a rank had started in a session of its own would go to init, and nobody
could tell whose it was.
"""

import ctypes
import sys
import warnings

PR_SET_CHILD_SUBREAPER = 36
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    warnings.filterwarnings("ignore", "forkserver: waitpid returned")
