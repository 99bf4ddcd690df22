"""A training step as a user of torch.distributed.pipelining writes it, and the same on this executor.

Two processes of one machine; the lines that differ are marked.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from sixfold.pipeline import TorchSchedule  # differs

RANKS, CHUNKS, M, WIDTH = 2, 2, 6, 16


def stages_of(rank):
    """torch's stage objects; both executors take them."""
    stages = []
    for index in range(rank, RANKS * CHUNKS, RANKS):
        torch.manual_seed(index)
        module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        stages.append(PipelineStage(module, index, RANKS * CHUNKS, torch.device("cpu"), group=dist.group.WORLD))
    return stages


def step(schedule, rank, x, y):
    """torch's calls; both schedules take them."""
    losses = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    return losses


def work(rank, folder):
    """One rank, first with torch's schedule, then with ours."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(7)
    x, y = torch.randn(4 * M, WIDTH), torch.randn(4 * M, WIDTH)

    theirs = stages_of(rank)
    schedule = ScheduleInterleaved1F1B(theirs, n_microbatches=M, loss_fn=torch.nn.functional.mse_loss)
    step(schedule, rank, x, y)

    ours = stages_of(rank)
    schedule = TorchSchedule("Interleaved1F1B", ours, n_microbatches=M, loss_fn=torch.nn.functional.mse_loss)  # differs
    losses = step(schedule, rank, x, y)

    pairs = [
        (a.grad, b.grad)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one.submod.parameters(), other.submod.parameters(), strict=True)
    ]
    equal = sum(torch.equal(a, b) for a, b in pairs)
    print(f"rank {rank}: {equal} of {len(pairs)} gradients have torch's bits", *[f"{loss:.4f}" for loss in losses])
    assert equal == len(pairs)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, args=(folder,), nprocs=RANKS, start_method="fork")
