"""Measured bubbles of sleeping stages, beside torch.distributed.pipelining and beside what is simulated.

    python measured_bubble.py [milliseconds per rank and kind] [steps]

Four gloo ranks, eight microbatches; a rank's share of F, I and W of a microbatch takes 25 ms each. A stage sleeps
inside an autograd Function, which needs no core, so that a laptop shows what the executor adds to a schedule. In each
round every schedule runs one step here and one in torch; the best step of each counts, since other load only adds. A
step lasts from the first rank's start, behind a barrier, to the last rank's end, on the machine's one clock.

Equal work: both sides have the same stages, programs and microbatches, make losses and give no outputs. The input of
stage 0 has no gradient, and torch runs all of stage 0's backward in W: there stage 0 sleeps for I in W, on both sides
and in the simulation. Columns: bubble over ideal as simulated; measured, here and in torch; and by how many points
of the ideal each is above. The last lines are
the floors: a rank's sleeps without anything else, and its stages in a plain loop, whose own Python and torch calls
take a few hundred microseconds behind a sleep. "executor" is how far each is above the same simulation with stages
that last as long as they do alone: what each runtime adds. 25 ms and 4 steps take about 50 s.
"""

from __future__ import annotations

import json
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
from torch.distributed.pipelining import PipelineStage, schedules

from sixfold.pipeline import (
    Costs,
    PipelineRunner,
    Program,
    Stage,
    defer_weight_grad,
    interleaved,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_v,
)

RANKS, M, WIDTH = 4, 8, 8
# Name, ours, torch's class, stages per rank.
PAIRS: list[tuple[str, Callable[[int, int], Program], str, int]] = [
    ("1F1B", one_f_one_b, "1F1B", 1),
    ("interleaved, 2 chunks", interleaved, "Interleaved1F1B", 2),
    ("ZB-H1", zb_h1, "InterleavedZeroBubble", 1),
    ("ZB-V", zb_v, "ZBVZeroBubble", 2),
]


class Forward(torch.autograd.Function):
    """Sleeps in F, and for I in the backward if the input wants a gradient."""

    @staticmethod
    def forward(ctx, x, forward_s, input_s):  # type: ignore[no-untyped-def]
        ctx.input_s = input_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        time.sleep(ctx.input_s)
        return gradient, None, None


class Weight(torch.autograd.Function):
    """Sleeps for W when the gradient of the weight is made."""

    @staticmethod
    def forward(ctx, weight, weight_s):  # type: ignore[no-untyped-def]
        ctx.weight_s = weight_s
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        time.sleep(ctx.weight_s)
        return gradient, None


class Sleeper(nn.Module):
    """One stage of ``share_s`` seconds each for F, I and W."""

    def __init__(self, index: int, share_s: float, deferred: bool) -> None:
        super().__init__()
        self.forward_s = share_s
        self.input_s, self.weight_s = (share_s, share_s) if index else (0.0, 2 * share_s)
        self.deferred = deferred
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The input, after a while."""
        x = Forward.apply(x, self.forward_s, self.input_s)
        if not self.deferred:
            return x + Weight.apply(self.weight, self.weight_s)
        return defer_weight_grad((self.weight,), self.weight_gradient, x)

    def weight_gradient(self, gradient: Tensor) -> tuple[Tensor]:
        """What W runs."""
        time.sleep(self.weight_s)
        return (gradient.sum(0),)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference."""
    return ((output - target) ** 2).mean()


def ours(program: Program, rank: int, share_s: float) -> Callable[[], object]:
    """A step of this package's runner."""
    stages = [Stage(Sleeper(s, share_s, deferred=True), s) for s in program.stages_of(rank)]
    runner = PipelineRunner(program, stages, dist.group.WORLD, loss, timeout_s=60)
    x, y = torch.randn(M, WIDTH), torch.randn(M, WIDTH)
    return lambda: runner.step(x, y)


def torchs(name: str, program: Program, rank: int, share_s: float) -> Callable[[], object]:
    """A step of torch's runtime."""
    device = torch.device("cpu")
    stages = [
        PipelineStage(Sleeper(s, share_s, deferred=False), s, program.stages, device) for s in program.stages_of(rank)
    ]
    single = name == "1F1B"
    schedule = schedules.get_schedule_class(name)(stages[0] if single else stages, M, loss)
    x, y = torch.randn(M, WIDTH), torch.randn(M, WIDTH)
    inputs = [x] if 0 in program.stages_of(rank) else []
    target = y if program.placement[-1] == rank else None
    return lambda: schedule.step(*inputs, target=target, losses=[], return_outputs=False)


def sleeps(chunks: int, share_s: float) -> None:
    """What a rank sleeps in a step, and nothing else: how much longer it takes is the machine's."""
    for _ in range(3 * chunks * M):
        time.sleep(share_s / chunks)


def alone(chunks: int, share_s: float) -> Callable[[], object]:
    """A rank's stages in a plain loop: all forwards and backwards of a step, without pipeline, messages or waits."""
    modules = [Sleeper(1 + chunk, share_s / chunks, deferred=False) for chunk in range(chunks)]
    gradient = torch.ones(1, WIDTH)

    def step() -> None:
        for _ in range(M):
            for module in modules:
                torch.autograd.backward(module(torch.zeros(1, WIDTH, requires_grad=True)), gradient)

    return step


def work(rank: int, folder: str, share_s: float, steps: int) -> None:
    """One rank: all contenders in turn, ``steps`` times, after one step that makes connections."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, make, torch_name, chunks in PAIRS:
        program = make(RANKS, M)
        calls[name, "ours"] = ours(program, rank, share_s / chunks)
        calls[name, "torch"] = torchs(torch_name, program, rank, share_s / chunks)
    for chunks in (1, 2):
        calls[f"{chunks}", "floor"] = partial(sleeps, chunks, share_s)
        calls[f"{chunks}", "alone"] = alone(chunks, share_s)
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(1 + steps):
        for (name, side), call in calls.items():
            dist.barrier()
            begin = time.monotonic()
            call()
            times.setdefault(f"{name}/{side}", []).append((begin, time.monotonic()))
    (Path(folder) / str(rank)).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def costs_of(program: Program, share_s: float) -> Costs:
    """What the stages sleep."""
    share = [share_s] * program.stages
    return Costs(share, [0.0, *share[1:]], [2 * share_s, *share[1:]])


def best(found: list[dict[str, list[list[float]]]], key: str) -> float:
    """The shortest step: from the first rank's begin to the last rank's end; the first made connections."""
    rows = [each[key][1:] for each in found]
    return min(max(end for _, end in step) - min(begin for begin, _ in step) for step in zip(*rows, strict=True))


def main() -> None:
    """Print the table."""
    milliseconds = float(sys.argv[1]) if len(sys.argv) > 1 else 25.0
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder, milliseconds / 1e3, steps), nprocs=RANKS)
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)]
    ideal_s = 3 * M * milliseconds / 1e3
    floors = {
        (chunks, kind): 100 * (best(found, f"{chunks}/{kind}") / ideal_s - 1)
        for chunks in (1, 2)
        for kind in ("floor", "alone")
    }
    print("bubble over ideal            simulated    here   torch   above, points: here  torch  executor: here  torch")
    mean: list[tuple[float, ...]] = []
    for name, make, _, chunks in PAIRS:
        program = make(RANKS, M)
        simulated = simulate(program, costs_of(program, milliseconds / 1e3 / chunks))
        bubbles = []
        for key in (f"{name}/ours", f"{name}/torch"):
            bubbles.append(best(found, key) / simulated.ideal - 1)
        above = [100 * (bubble - simulated.bubble_over_ideal) for bubble in bubbles]
        longer = simulated.bubble_over_ideal + (1 + simulated.bubble_over_ideal) * floors[chunks, "alone"] / 100
        own = [100 * (bubble - longer) for bubble in bubbles]
        mean.append((*above, *own))
        line = f"{name:28s} {simulated.bubble_over_ideal:9.4f} {bubbles[0]:7.4f} {bubbles[1]:7.4f}"
        print(f"{line} {above[0]:20.2f} {above[1]:6.2f} {own[0]:15.2f} {own[1]:6.2f}")
    here, torchs_, own_here, own_torchs = (sum(column) / len(mean) for column in zip(*mean, strict=True))
    print(f"{'mean':28s} {here:45.2f} {torchs_:6.2f} {own_here:15.2f} {own_torchs:6.2f}")
    print(f"here over torch: above {here / torchs_:.2f}, executor {own_here / own_torchs:.2f}")
    for (chunks, kind), points in floors.items():
        what = "sleeps" if kind == "floor" else "stages"
        print(f"floor: {what} alone, {chunks} to a rank's share: {points:.2f} points longer than asked for")


if __name__ == "__main__":
    main()
