"""What a killed lesson or exercise may leave behind: processes, networks, interfaces."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import psutil

MARK = f"STARTED_BY_TEST={os.getpid()}\0".encode()  # inherited by all that a lesson starts
MARKED = os.environ | {"CUDA_VISIBLE_DEVICES": "", "STARTED_BY_TEST": str(os.getpid())}


def gone(besides: int | None = None) -> bool:
    """True once no process that bears our mark is left, `besides` this one: then none can hold a
    network, either. Those that stay are named in the test's output. To end takes a process that
    has loaded torch many seconds on a busy machine.
    """
    stop = time.monotonic() + 120
    while True:
        left = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if pid != besides and MARK in Path(f"/proc/{pid}/environ").read_bytes():
                    left.append(pid)
        if not left:
            return True
        if time.monotonic() > stop:
            break
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            print("left:", pid, process.status(), *process.cmdline())
    return False


def left_in(folder: Path) -> list[str]:
    """Command lines of the processes that still work in this folder, ours apart."""
    found = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if process.info["cwd"] == str(folder) and process.pid != os.getpid():
            found.append(" ".join(process.info["cmdline"] or []))
    return found


def networks(pids: list[int]) -> set[str]:
    """The network namespaces that these processes are in, ours apart."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found - {os.readlink("/proc/self/ns/net")}


def machine() -> dict:
    """What a lesson might leave: interfaces, qdiscs, named namespaces."""
    named = Path("/run/netns")
    tc = subprocess.run(["tc", "qdisc"], capture_output=True, text=True).stdout
    return {
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "qdiscs": tc,
        "named": sorted(os.listdir(named)) if named.exists() else [],
    }
