"""Hello from every rank: who it is, where it runs, and whether it hears the others.

    torchrun --standalone --nproc-per-node=2 distributed_hello.py
    srun --nodes=2 --ntasks-per-node=2 python distributed_hello.py    # Slurm, one task per rank

NCCL where every rank of a node has a GPU of its own there, else gloo.
"""

import os
import re
import socket

import torch
import torch.distributed as dist

if "RANK" not in os.environ:  # not torchrun's: srun has numbered the ranks, under other names
    slurm = os.environ
    tasks_here = re.match(r"\d+", slurm["SLURM_STEP_TASKS_PER_NODE"])  # of "2(x4)"
    first_node = re.match(r"([^,[]+)(?:\[(\d+))?", slurm["SLURM_STEP_NODELIST"])  # of "gpu[03-07]"
    os.environ |= {"RANK": slurm["SLURM_PROCID"], "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"]}
    os.environ |= {"LOCAL_RANK": slurm["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": tasks_here[0]}
    os.environ["MASTER_ADDR"] = first_node[1] + (first_node[2] or "")
    os.environ["MASTER_PORT"] = str(20_000 + int(slurm["SLURM_JOB_ID"]) % 10_000)

device = torch.device("cpu")
if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # a GPU for every rank here
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
backend = "nccl" if device.type == "cuda" else "gloo"
dist.init_process_group(backend)
rank = dist.get_rank()
world_size = dist.get_world_size()
host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
total = torch.tensor(rank + 1, device=device)
dist.all_reduce(total)  # 1 + 2 + ... + world_size
said = f"rank {rank} of {world_size} on {host}, {device}, {backend}: the ranks add up to {total}"
print(said + "\n", end="")  # in one piece: torchrun's ranks do not buffer, and lines would mix
assert total == world_size * (world_size + 1) // 2, "some rank was not heard"
dist.destroy_process_group()
