"""Imported by the server that ranks are forked from, and by it alone.

What a rank had started in a session of its own becomes the server's child when the rank dies, and
ranks.py ends it there. When the server's own parent is gone, it goes at once: to take torch down in
good order would take seconds, while its ranks run on.
"""

import atexit
import os
import warnings

from course.subreaper import adopt_orphans

SERVER = os.getpid()


@atexit.register
def leave() -> None:
    if os.getpid() == SERVER:  # and not a process that a rank has forked
        os._exit(0)


adopt_orphans()
warnings.filterwarnings("ignore", "forkserver: waitpid returned")
