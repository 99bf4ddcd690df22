"""CPU per action of the executor, beside torch.distributed.pipelining.

    python cpu_per_action.py [steps]

Two gloo ranks, one thread each, 1F1B, m = 32, a stage of one 64x64 linear layer
and a tanh, four rows per microbatch, so that nearly all time is overhead. In each
round every contender runs ``steps`` steps in one pair of processes; figures are
the median over rounds and the least. An action is an F or a B; from
its cost the module work alone (the same forwards and backwards in a plain loop)
is taken off. Equal work: both sides cut the batch, make the losses and give them back; "torch" is
called as trainers call it (losses, no outputs), "torch, outputs" as its documentation does, which
also joins the outputs on the last rank. "process" is ``process_time``, gloo's threads included; "main" is
the thread that runs the schedule.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from sixfold.pipeline import PipelineRunner, Stage, one_f_one_b

RANKS, M, ROWS, WIDTH, ROUNDS = 2, 32, 4, 64, 15


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference."""
    return ((output - target) ** 2).mean()


def module() -> nn.Module:
    """One tiny stage."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def bare_work(rank: int) -> Callable[[], object]:
    """The same forwards and backwards without any pipeline."""
    stage, last = module(), rank == RANKS - 1
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    def step() -> None:
        for _ in range(M):
            leaf = x.detach().requires_grad_(rank > 0)
            output = stage(leaf)
            if last:
                (loss(output, y) / M).backward()
            else:
                output.backward(y)

    return step


def ours(rank: int, edges: str | None = None) -> Callable[[], object]:
    """This package's runner; edges of shared memory, or "groups" of gloo."""
    stages = [Stage(module(), rank)]
    runner = PipelineRunner(one_f_one_b(RANKS, M), stages, dist.group.WORLD, loss, timeout_s=60, edges=edges)
    x, y = torch.randn(M * ROWS, WIDTH), torch.randn(M * ROWS, WIDTH)
    return lambda: runner.step(x, y)


def torchs(rank: int, outputs: bool = False) -> Callable[[], object]:
    """torch's 1F1B: the losses of a step, and with ``outputs`` the joined outputs too."""
    stage = PipelineStage(module(), rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, M, loss)
    x, y = torch.randn(M * ROWS, WIDTH), torch.randn(M * ROWS, WIDTH)
    if rank == 0:
        return lambda: schedule.step(x, return_outputs=outputs)

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        schedule.step(target=y, losses=losses, return_outputs=outputs)
        return losses

    return step


CONTENDERS = {
    "bare": bare_work,
    "sixfold": ours,
    "sixfold, gloo": partial(ours, edges="groups"),
    "torch": torchs,
    "torch, outputs": partial(torchs, outputs=True),
}


def work(rank: int, folder: str, steps: int) -> None:
    """One rank: all contenders in turn, ROUNDS times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    calls = {name: make(rank) for name, make in CONTENDERS.items()}
    rounds: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            dist.barrier()
            clocks = [time.process_time(), time.thread_time(), time.perf_counter()]
            for _ in range(steps):
                call()
            spent = [time.process_time() - clocks[0], time.thread_time() - clocks[1], time.perf_counter() - clocks[2]]
            rounds[name].append([seconds / steps / (2 * M) * 1e6 for seconds in spent])
    (Path(folder) / str(rank)).write_text(json.dumps(rounds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print microseconds per action."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder, steps), nprocs=RANKS)
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)]
    for word, of in (("median", statistics.median), ("least", min)):
        print(f"µs per action, {word:6s}  process  main thread   wall   over bare: process   main")
        for rank in range(RANKS):
            figures = {name: [of(column) for column in zip(*rows, strict=True)] for name, rows in found[rank].items()}
            for name, (process, thread, wall) in figures.items():
                extra = f"{process - figures['bare'][0]:19.1f} {thread - figures['bare'][1]:6.1f}"
                line = f"rank {rank} {name:14s} {process:9.1f} {thread:12.1f} {wall:6.1f}"
                print(line if name == "bare" else f"{line} {extra}")


if __name__ == "__main__":
    main()
