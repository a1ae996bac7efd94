"""Hello from every rank: who it is, where it runs, and whether it hears the others.

    torchrun --standalone --nproc-per-node=2 distributed_hello.py
    srun --nodes=2 --ntasks-per-node=2 python distributed_hello.py    # Slurm, one task per rank

NCCL where every rank has a GPU of its own, gloo where no node has GPUs. A missing GPU is refused.
"""

import os
import re
import socket

import torch
import torch.distributed as dist


def join() -> torch.device:
    """Join the group; return this rank's GPU, or the CPU if no node has GPUs.

    Raises ValueError, on all ranks and before any of them waits, if a rank can have no GPU.
    """
    store, rank, world_size = next(dist.rendezvous("env://"))
    gpus, ranks_here = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    wants_cpu = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_gpus = not wants_cpu and (gpus > 0 or os.path.exists("/dev/nvidia0"))
    store.add("ranks whose node has GPUs", int(has_gpus))
    store.add("ranks without a GPU", int(not has_gpus or gpus < ranks_here))
    if store.add("ranks that looked", 1) == world_size:
        store.set("all have looked", "")
    store.wait(["all have looked"])
    without = store.add("ranks without a GPU", 0)
    if without and store.add("ranks whose node has GPUs", 0):
        told = f"{without} of {world_size} ranks have no GPU of their own; {socket.gethostname()}"
        told += f" has {ranks_here} ranks and {gpus} GPUs that torch sees"
        raise ValueError(f"{told}. For the CPU: CUDA_VISIBLE_DEVICES= on every node")
    how = {"store": store, "rank": rank, "world_size": world_size}
    if not has_gpus:
        dist.init_process_group("gloo", **how)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **how)
    return device


if "RANK" not in os.environ:  # not torchrun's: srun has numbered the ranks, under other names
    slurm = os.environ
    tasks_here = re.match(r"\d+", slurm["SLURM_STEP_TASKS_PER_NODE"])  # of "2(x4)"
    # The first of "rack[1-2]-gpu[03-07],login" is rack1-gpu03.
    first_node = re.match(r"(\[.*?\]|[^,[])+", slurm["SLURM_STEP_NODELIST"])[0]
    os.environ |= {"RANK": slurm["SLURM_PROCID"], "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"]}
    os.environ |= {"LOCAL_RANK": slurm["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": tasks_here[0]}
    os.environ["MASTER_ADDR"] = re.sub(r"\[(\d+).*?\]", r"\1", first_node)
    os.environ["MASTER_PORT"] = str(20_000 + int(slurm["SLURM_JOB_ID"]) % 10_000)

device = join()
backend = dist.get_backend()
rank = dist.get_rank()
world_size = dist.get_world_size()
host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
total = torch.tensor(rank + 1, device=device)
dist.all_reduce(total)  # 1 + 2 + ... + world_size
said = f"rank {rank} of {world_size} on {host}, {device}, {backend}: the ranks add up to {total}"
print(said + "\n", end="")  # in one piece: torchrun's ranks do not buffer, and lines would mix
assert total == world_size * (world_size + 1) // 2, "some rank was not heard"
dist.destroy_process_group()
