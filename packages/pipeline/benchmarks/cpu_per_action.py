"""CPU per action of the executor, beside torch.distributed.pipelining, over five schedules.

    python cpu_per_action.py [steps [rounds [schedules, as in gpipe,1f1b]]]

Two ranks on one host, one thread each, m = 32, a stage of one 64x64 linear layer and a tanh, four rows per
microbatch, so that nearly all time is overhead. In each round every contender runs ``steps`` steps in one pair of
processes; figures are the median over rounds and the least. The unit is an F or a B (I and W together are a B); from
its cost the module work alone (the same forwards and backwards in a plain loop) is taken off. Equal work: both sides
cut the batch, make the losses and give them back; torch is called as trainers call it (losses, no outputs).
"sixfold" has edges of shared memory, "gloo" those of gloo, which torch's are. "process" is ``process_time``,
gloo's threads included; "main" is the thread that runs the schedule. Ratios are of both ranks' sums over bare.
Takes about 4 minutes with the defaults (10 steps, 9 rounds) on a quiet machine of two cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from sixfold.pipeline import PipelineRunner, Program, Stage, gpipe, interleaved, looped_bfs, one_f_one_b, zb_v

RANKS, M, ROWS, WIDTH = 2, 32, 4, 64
Call = Callable[[], object]
SCHEDULES: dict[str, tuple[Program, Any]] = {
    "gpipe": (gpipe(RANKS, M), ScheduleGPipe),
    "1f1b": (one_f_one_b(RANKS, M), Schedule1F1B),
    "interleaved": (interleaved(RANKS, M, 2), ScheduleInterleaved1F1B),
    "looped_bfs": (looped_bfs(RANKS, M, 2), ScheduleLoopedBFS),
    "zb_v": (zb_v(RANKS, M), ScheduleZBVZeroBubble),
}
CONTENDERS = ("bare", "sixfold", "gloo", "torch")


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference."""
    return ((output - target) ** 2).mean()


def module() -> nn.Module:
    """One tiny stage."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def bare_work(program: Program, rank: int) -> Call:
    """The same forwards and backwards without any pipeline."""
    stages = [(s, module()) for s in program.stages_of(rank)]
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    def step() -> None:
        for _ in range(M):
            for s, stage in stages:
                output = stage(x.detach().requires_grad_(s > 0))
                if s == program.stages - 1:
                    (loss(output, y) / M).backward()
                else:
                    output.backward(y)

    return step


def ours(program: Program, rank: int, edges: Any) -> Call:
    """This package's runner."""
    stages = [Stage(module(), s) for s in program.stages_of(rank)]
    runner = PipelineRunner(program, stages, dist.group.WORLD, loss, timeout_s=60, edges=edges)
    x, y = torch.randn(M * ROWS, WIDTH), torch.randn(M * ROWS, WIDTH)
    return lambda: runner.step(x, y)


def torchs(program: Program, rank: int, make: Any) -> Call:
    """torch's runtime of the same schedule."""
    mine = program.stages_of(rank)
    stages = [PipelineStage(module(), s, program.stages, torch.device("cpu")) for s in mine]
    schedule = make(stages if len(mine) > 1 else stages[0], M, loss)
    x, y = torch.randn(M * ROWS, WIDTH), torch.randn(M * ROWS, WIDTH)
    inputs = (x,) if 0 in mine else ()
    last = program.stages - 1 in mine

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        if last:
            schedule.step(*inputs, target=y, losses=losses, return_outputs=False)
        else:
            schedule.step(*inputs, return_outputs=False)
        return losses

    return step


def contenders(name: str, rank: int) -> dict[str, Call]:
    """One step of each."""
    program, theirs = SCHEDULES[name]
    return {
        "bare": bare_work(program, rank),
        "sixfold": ours(program, rank, None),
        "gloo": ours(program, rank, "groups"),
        "torch": torchs(program, rank, theirs),
    }


def work(rank: int, folder: str, steps: int, rounds: int, names: list[str]) -> None:
    """One rank: all contenders in turn, schedule by schedule."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found: dict[str, dict[str, list[list[float]]]] = {}
    for name in names:
        program, _ = SCHEDULES[name]
        calls = contenders(name, rank)
        found[name] = {contender: [] for contender in calls}
        units = steps * 2 * M * len(program.stages_of(rank))
        for _ in range(rounds):
            for contender, call in calls.items():
                call()
                dist.barrier()
                clocks = [time.process_time(), time.thread_time(), time.perf_counter()]
                for _ in range(steps):
                    call()
                now = [time.process_time(), time.thread_time(), time.perf_counter()]
                found[name][contender].append(
                    [(end - begin) / units * 1e6 for begin, end in zip(clocks, now, strict=True)]
                )
    (Path(folder) / str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print microseconds per action, and torch's over ours."""
    steps, rounds = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 10), (2, 9)))
    names = sys.argv[3].split(",") if len(sys.argv) > 3 else list(SCHEDULES)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder, steps, rounds, names), nprocs=RANKS)
        ranks = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)]
    for word, of in (("median", statistics.median), ("least", min)):
        print(
            f"\nµs per action, {word:6s}      process  main thread    wall   over bare: process   main   torch's / this"
        )
        ratios: dict[str, list[float]] = {}
        for name in names:
            figures: dict[str, list[float]] = {}
            for contender in CONTENDERS:
                of_ranks = [[of(column) for column in zip(*rank[name][contender], strict=True)] for rank in ranks]
                figures[contender] = [sum(column) for column in zip(*of_ranks, strict=True)]
            bare = figures["bare"]
            for contender, (process, thread, wall) in figures.items():
                line = f"{name:12s} {contender:10s} {process / 2:10.1f} {thread / 2:12.1f} {wall / 2:7.1f}"
                if contender != "bare":
                    ratio = (figures["torch"][0] - bare[0]) / (process - bare[0])
                    ratios.setdefault(contender, []).append(ratio)
                    line += f" {(process - bare[0]) / 2:20.1f} {(thread - bare[1]) / 2:6.1f} {ratio:12.2f}"
                print(line)
        for contender in ("sixfold", "gloo"):
            found = ratios[contender]
            print(f"torch's / {contender}: mean {statistics.mean(found):.2f}, least {min(found):.2f}")


if __name__ == "__main__":
    main()
