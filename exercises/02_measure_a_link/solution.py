"""Measure a link: how late, how fast. Task: exercises/02_measure_a_link/README.md."""

import mmap
import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Protocol

import numpy as np


class Link(Protocol):
    """Two ends, and a clock at the near one."""

    def ping(self, nbytes: int) -> None:
        """Start a message of `nbytes` there and, when it has arrived, an empty answer back. May
        return before that: then the clock has seen the launch and not the messages."""

    def synchronize(self) -> None:
        """Wait until everything started so far is done."""

    def clock(self) -> float:
        """Seconds, from any beginning."""


def measure(link: Link, sizes: list[int]) -> tuple[float, float]:
    """Find alpha and beta of t(n) = alpha + n / beta, the time of one message one way.

    sizes: bytes of the messages to try, two or more, in any order.
    Returns alpha in seconds, and beta in GB/s (1 GB is 1e9 bytes).

    A link where a ping of 1,000 bytes takes 22 us and one of 1,000,000 bytes takes 221 us needs
    199 us for 999,000 bytes more: beta is 5.02 GB/s. The 1,000 bytes themselves take 0.2 us, and
    two messages wait alpha: alpha is 10.9 us.

    The first three pings of each size may be slow, and now and then (one in eight, at times two in
    a row) any ping takes twenty times as long; all others are within 2%. At most 50 pings of each
    size, and of no other. `sizes` stays as it is.
    """
    # --- yours
    times = []
    for nbytes in sizes:
        taken = []
        for _ in range(3 + 15):
            link.synchronize()
            started = link.clock()
            link.ping(nbytes)
            link.synchronize()
            taken.append(link.clock() - started)
        times.append(median(taken[3:]))
    n = np.array(sizes)
    t = np.array(times)
    lines = np.stack([2 / t, n / t], axis=1)  # (2 alpha + n/beta) / t = 1: relative errors
    alpha, inverse = np.linalg.lstsq(lines, np.ones(len(t)), rcond=None)[0]
    return float(alpha), float(1 / inverse / 1e9)
    # --- end


def busbw(collective: str, nbytes: int, seconds: float, n: int) -> float:
    """What a collective's time says of the links: GB/s to hold against their beta.

    collective: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or reduce
    nbytes: of the whole: what all_gather ends with, what each rank of all_reduce starts with

    algbw is nbytes / seconds. busbw is algbw times the share of nbytes that must pass each rank's
    link: 2 (n - 1)/n for all_reduce, (n - 1)/n for all_gather, reduce_scatter and all_to_all, 1
    for broadcast and reduce. An all_reduce of 1 GB over 4 ranks in 0.1 s: 15 GB/s.
    """
    # --- yours
    shares = dict.fromkeys(["all_gather", "reduce_scatter", "all_to_all"], (n - 1) / n)
    shares |= {"all_reduce": 2 * (n - 1) / n, "broadcast": 1, "reduce": 1}
    return shares[collective] * nbytes / seconds / 1e9
    # --- end


# Given: links of this machine, for `python answers/02_measure_a_link.py`. Their figures are shown
# and not judged.

SIZES = [4**k for k in range(3, 12)]  # bytes: 64 B to 4 MiB, on GPUs to 256 MiB


class TCP:
    """Through the loopback to another process, which answers with 8 bytes."""

    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.out, self.into = (memoryview(bytearray(b"x" * SIZES[-1])) for _ in range(2))
        self.shared = memoryview(mmap.mmap(-1, SIZES[-1]))  # the process forked below maps it too
        self.near, self.far = self.connect()
        multiprocessing.get_context("fork").Process(target=self.answer, daemon=True).start()
        self.far.close()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages go at once
        return near, far

    def ping(self, nbytes: int) -> None:
        self.out[:8] = nbytes.to_bytes(8, "little")  # a message begins with its length
        self.near.sendall(self.out[:nbytes])
        receive(self.near, self.into[:8])

    def synchronize(self) -> None:
        """Nothing to wait for: `ping` returns when the message is back."""

    def answer(self) -> None:
        """The other process: take what comes and say so, until the first one leaves."""
        self.near.close()
        with suppress(ConnectionError, KeyboardInterrupt):
            while True:
                receive(self.far, self.into[:8])
                self.take(int.from_bytes(self.into[:8], "little"))
                self.far.sendall(self.into[:8])

    def take(self, nbytes: int) -> None:
        receive(self.far, self.into[8:nbytes])


class SharedMemory(TCP):
    """Through memory that both processes map; its length, through a socket, rings the bell."""

    def connect(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair()

    def ping(self, nbytes: int) -> None:
        self.shared[:nbytes] = self.out[:nbytes]
        self.near.sendall(nbytes.to_bytes(8, "little"))
        receive(self.near, self.into[:8])

    def take(self, nbytes: int) -> None:
        self.into[8:nbytes] = self.shared[8:nbytes]


def receive(end: socket.socket, into: memoryview) -> None:
    """Fill `into`."""
    got = 0
    while got < len(into):
        got += (part := end.recv_into(into[got:]))
        if not part:
            raise ConnectionError("the other process has left")


class Copies:
    """From GPU 0 to another place, cuda:1 or pinned memory of the host. Not yet run on GPUs."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, place: str) -> None:
        import torch

        gpus = {"cuda:0", place} - {"cpu"}  # to wait for others too would add to alpha
        self.wait = [partial(torch.cuda.synchronize, gpu) for gpu in gpus]
        self.near = torch.ones(4**14, dtype=torch.uint8, device="cuda:0")
        self.far = torch.ones(4**14, dtype=torch.uint8, device=place, pin_memory=place == "cpu")

    def ping(self, nbytes: int) -> None:
        self.far[:nbytes].copy_(self.near[:nbytes], non_blocking=True)
        self.near[:1].copy_(self.far[:1], non_blocking=True)

    def synchronize(self) -> None:
        for wait in self.wait:
            wait()


def links() -> Iterator[tuple[str, Link | None, str]]:
    """Name of each link, the link if this machine has it, and what it needs."""
    yield "shared memory", SharedMemory(), ""
    yield "TCP loopback", TCP(), ""
    import torch  # not before the other processes have been forked

    gpus = torch.cuda.device_count()
    yield "GPU 0 and host", Copies("cpu") if gpus > 0 else None, "1 GPU"
    yield "GPU 0 and GPU 1", Copies("cuda:1") if gpus > 1 else None, "2 GPUs"


def main() -> None:
    print(f"{'one way':18}{'alpha':>10}{'beta':>14}{'half of beta from':>22}")
    for name, link, needs in links():
        if link is None:
            print(f"{name:18}   BLOCKED needs {needs}")
            continue
        sizes = SIZES + [4**k for k in range(12, 15)] * isinstance(link, Copies)
        alpha, beta = measure(link, sizes)
        half = alpha * beta * 1e9
        print(f"{name:18}{alpha * 1e6:7.1f} us{beta:9.2f} GB/s{half:16,.0f} bytes")
    print("\nDatasheets, one way: PCIe 5.0 x16 63 GB/s; NVLink 4 450 GB/s, sold as 900, both ways.")


if __name__ == "__main__":
    main()
