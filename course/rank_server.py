"""Imported by the server that ranks are forked from, and by it alone.

What a rank had started in a session of its own becomes the server's child when the rank dies, and
ranks.py ends it there. When the server's own parent is gone, it goes at once: to take torch down in
good order would take seconds, while its ranks run on. It takes along the folder in which it
listens: the parent does so at the end, but not if it was killed.
"""

import atexit
import contextlib
import gc
import os
import shutil
import socket
import warnings
from pathlib import Path

from course.subreaper import adopt_orphans

SERVER = os.getpid()


def listening_folder() -> Path | None:
    """Where multiprocessing has put the socket that this server is asked through."""
    for descriptor in range(64):
        with contextlib.suppress(OSError):  # not open, or no socket
            with socket.socket(fileno=os.dup(descriptor)) as one:
                address = one.getsockname()
            if isinstance(address, str) and Path(address).parent.name.startswith("pymp-"):
                return Path(address).parent
    return None


FOLDER = listening_folder()


@atexit.register
def leave() -> None:
    if os.getpid() == SERVER:  # and not a process that a rank has forked
        if FOLDER:
            shutil.rmtree(FOLDER, ignore_errors=True)
        os._exit(0)


adopt_orphans()
warnings.filterwarnings("ignore", "forkserver: waitpid returned")
gc.collect()
gc.freeze()  # what was loaded here stays shared: no rank looks through it, and so copies it
