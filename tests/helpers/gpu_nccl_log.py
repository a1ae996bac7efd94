"""What NCCL writes with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL, for pretended GPUs.

Lines are in the format of NCCL's src/init.cc and src/enqueue.cc (2.30). The first communicator has
a commId, others are split off it, and each rank has its own addresses. A pretended all-to-all is a
Send and a Recv per rank, oneself included, which is what torch asks of NCCL.
"""

import os
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import TextIO

import torch
import torch.distributed as dist

DATATYPES = [torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64]
DATATYPES += [torch.float16, torch.float32, torch.float64, torch.bfloat16]
DATATYPES += [torch.float8_e4m3fn, torch.float8_e5m2]

communicators: dict[str, str] = {}  # by the group's name: an address
op_counts: Counter = Counter()


def wanted() -> bool:
    asked = os.environ.get("NCCL_DEBUG") == "INFO" and "NCCL_DEBUG_FILE" in os.environ
    return asked and "COLL" in os.environ.get("NCCL_DEBUG_SUBSYS", "")


@cache
def log_file() -> TextIO:
    """Open once, as NCCL does: the file may be removed meanwhile."""
    return open(os.environ["NCCL_DEBUG_FILE"], "w", buffering=1)


def log(name: str, named: dict, group: dist.ProcessGroup, inputs: list) -> None:
    """Write what NCCL would, as an operation of c10d is asked of it."""
    if not wanted():
        return
    rank = dist.get_rank(group)
    prefix = f"node0:{os.getpid()}:{os.getpid() + 7} [{dist.get_rank()}] NCCL INFO"
    if group.group_name not in communicators:
        log_file().write(f"{prefix} {birth(group, rank)} - Init COMPLETE\n")
    communicator = communicators[group.group_name]
    for call, tensor, root in calls(name, named, group, inputs):
        datatype = DATATYPES.index(tensor.dtype)
        log_file().write(
            f"{prefix} {call}: opCount {op_counts[communicator]:x} sendbuff (nil) "
            f"recvbuff {tensor.data_ptr():#x} count {tensor.numel()} datatype {datatype} op 0 "
            f"root {root} comm {communicator} [nranks={group.size()}] stream 0x5581\n"
        )
    op_counts[communicator] += 1


def birth(group: dist.ProcessGroup, rank: int) -> str:
    """How a communicator is announced; from now on it has an address."""
    address = f"{0x55D000000000 + 0x1000 * len(communicators) + 0x10 * dist.get_rank():#x}"
    communicators[group.group_name] = address
    where = f"rank {rank} nranks {group.size()} cudaDev {rank} nvmlDev {rank} busId 1b000"
    if len(communicators) == 1:
        return f"ncclCommInitRankConfig comm {address} {where} commId 0x6e99db63b024eb76"
    parent = next(iter(communicators.values()))
    color = zlib.crc32(str(dist.get_process_group_ranks(group)).encode())
    split = f"parent {parent} childCount {zlib.crc32(group.group_name.encode()) % 97}"
    return f"ncclCommSplit comm {address} {where} {split} color {color} key {rank}"


def calls(
    name: str, named: dict, group: dist.ProcessGroup, inputs: list
) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Each call of NCCL's in it: its name, a tensor as large as its count, its root or peer."""
    if name == "barrier":
        yield "AllReduce", torch.ones(1), 0
    elif name == "_allgather_base_":
        yield "AllGather", named["input_tensor"], 0
    elif name == "allgather_":
        yield "AllGather", named["input_tensors"][0], 0
    elif name == "_reduce_scatter_base_":
        yield "ReduceScatter", named["output_tensor"], 0
    elif name == "alltoall_base_":
        for rank, part in enumerate(named["input"].chunk(group.size())):
            yield "Send", part, rank
            yield "Recv", part, rank
    elif name == "send":
        yield "Send", inputs[0], named["dst"]
    elif name == "recv_":
        yield "Recv", inputs[0], named["src"]
    elif name == "broadcast_":
        yield "Broadcast", inputs[0], named["root_rank"]
    else:
        yield "AllReduce", inputs[0], 0
