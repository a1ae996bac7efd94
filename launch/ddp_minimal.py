"""Train a small CNN on images with DistributedDataParallel: a file to copy.

    torchrun --standalone --nproc-per-node=2 ddp_minimal.py    # NCCL on 2 GPUs; no GPUs: gloo
    srun --nodes=2 --ntasks-per-node=8 python ddp_minimal.py    # Slurm, one task per rank

Put your own in `build_model` and `load_data`. The digits come with scikit-learn.
"""

import os
import re
import socket

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

EPOCHS = 6
BATCH = 96  # of all ranks together: their number then changes the speed, and not the result
LEARNING_RATE = 0.1


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # 8 x 8 pixels to 4 x 4
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),  # to 2 x 2
        nn.Flatten(), nn.Linear(32 * 2 * 2, 10),
    )  # fmt: skip


def load_data() -> tuple[Dataset, Dataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(data, order[:1440]), Subset(data, order[1440:])


def name_ranks_as_torchrun_does() -> None:
    """Under srun, one task per rank: set the variables that torchrun would have set."""
    slurm = os.environ
    tasks_here = re.match(r"\d+", slurm["SLURM_STEP_TASKS_PER_NODE"])  # of "2(x4)"
    # The first of "rack[1-2]-gpu[03-07],login" is rack1-gpu03.
    first_node = re.match(r"(\[.*?\]|[^,[])+", slurm["SLURM_STEP_NODELIST"])[0]
    os.environ |= {"RANK": slurm["SLURM_PROCID"], "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"]}
    os.environ |= {"LOCAL_RANK": slurm["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": tasks_here[0]}
    os.environ["MASTER_ADDR"] = re.sub(r"\[(\d+).*?\]", r"\1", first_node)
    os.environ["MASTER_PORT"] = str(20_000 + int(slurm["SLURM_JOB_ID"]) % 10_000)


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


def main() -> None:
    if "RANK" not in os.environ:
        name_ranks_as_torchrun_does()
    device = join()
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model().to(device))  # all ranks get the weights of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)

    train, test = load_data()
    sampler = DistributedSampler(train)  # rank r gets sample r, r + world_size, ... of a shuffle
    batches = DataLoader(train, BATCH // world_size, sampler=sampler)  # files: num_workers=8
    own_test = Subset(test, range(rank, len(test), world_size))  # unlike a sampler, pads nothing

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # else every epoch has the same order
        model.train()
        for x, y in batches:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()  # averages the gradients of all ranks
            optimizer.step()

        model.eval()
        counts = torch.zeros(2, dtype=torch.long, device=device)  # right, seen
        with torch.no_grad():
            for x, y in DataLoader(own_test, 100):  # .module: ranks may have unequally many batches
                right = model.module(x.to(device)).argmax(1) == y.to(device)
                counts += torch.tensor([right.sum(), len(y)], device=device)
        dist.all_reduce(counts)  # whatever the sizes of the last batches were
        if rank == 0:
            print("epoch {}: {} of {} test images right".format(epoch, *counts.tolist()))

    if rank == 0:
        torch.save(model.module.state_dict(), "ddp_minimal.pt")
    dist.barrier()  # gloo's threads are done with the last gradients: else an exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
