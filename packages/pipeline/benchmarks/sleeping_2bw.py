"""How long ranks stand idle in the steady state of PipeDream-2BW, on stages that sleep.

    python sleeping_2bw.py [milliseconds of a forward] [steps]

Four processes, eight microbatches a batch; a forward takes 25 ms and a backward 50 ms on each rank. A stage sleeps
inside an autograd Function, which needs no core. The steps are called one after the other, without a barrier, behind
three that fill the pipeline. Idle is 1 - work / time of a rank, where work is what its stage should have slept: what a
sleep takes longer, and all that the executor does, counts as idle. The worst rank counts. The column behind it leaves
out what sleeps took longer (their own begins and ends). Beside it the same stages in
a flush of 1F1B, and both as simulated without hops. No other package runs 2BW. 25 ms and 6 steps take about 25 s.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from sixfold.pipeline import Costs, Kind, PipelineRunner, Program, Stage, one_f_one_b, pipedream_2bw, simulate
from sixfold.pipeline.passes import optimizer_step

RANKS, M, WIDTH, FILLING = 4, 8, 8, 3


class Sleep(torch.autograd.Function):
    """One time unit in the forward, two in the backward."""

    @staticmethod
    def forward(ctx, x, weight, unit_s):  # type: ignore[no-untyped-def]
        ctx.unit_s = unit_s
        time.sleep(unit_s)
        return x + weight

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        time.sleep(2 * ctx.unit_s)
        return gradient, gradient.sum(0), None


class Sleeper(nn.Module):
    """One stage."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s = unit_s
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The input, after a while."""
        return Sleep.apply(x, self.weight, self.unit_s)  # type: ignore[no-any-return,no-untyped-call]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference."""
    return ((output - target) ** 2).mean()


def programs() -> dict[str, Program]:
    """By the name of their row."""
    return {"2BW": pipedream_2bw(RANKS, M), "1F1B, flushed": optimizer_step(one_f_one_b(RANKS, M))}


def simulated(name: str, program: Program) -> float:
    """Idle share without hops: of 2BW in steps that neither fill nor drain, so none."""
    costs = Costs.per_rank(program, forward=1.0, backward_input=1.0, backward_weight=1.0)
    return 0.0 if name == "2BW" else simulate(program, costs).bubble_over_total


def work(rank: int, folder: str, unit_s: float, steps: int) -> None:
    """One rank: every program in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {}
    for name, program in programs().items():
        module = Sleeper(unit_s)
        stage = Stage(module, rank, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
        runner = PipelineRunner(program, [stage], dist.group.WORLD, loss, timeout_s=60, profile=True)
        x, y = torch.randn(M, WIDTH), torch.randn(M, WIDTH)
        for _ in range(FILLING):
            runner.step(x, y)
        begin, worked = time.perf_counter(), 0.0
        for _ in range(steps):
            events = runner.step(x, y).events
            worked += sum(end - start for _, action, start, end in events if action.kind in (Kind.F, Kind.B))
        took = time.perf_counter() - begin
        found[name] = [1 - steps * M * 3 * unit_s / took, 1 - worked / took]
        runner.drain()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(unit_s: float, steps: int) -> None:
    """Start the ranks and print a row per program."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, unit_s, steps), RANKS)  # type: ignore[no-untyped-call]
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    print(f"p={RANKS}, m={M}, forward {unit_s * 1000:g} ms, backward {2000 * unit_s:g} ms, {steps} steps")
    print(f"{'program':15} {'simulated':>10} {'idle, worst rank':>17} {'waits':>8}   idle by rank")
    for name, program in programs().items():
        idle, waits = zip(*(rank[name] for rank in found), strict=True)
        shares = " ".join(f"{share:7.2%}" for share in idle)
        print(f"{name:15} {simulated(name, program):10.2%} {max(idle):17.2%} {max(waits):8.2%}   {shares}")


if __name__ == "__main__":
    given = [float(word) for word in sys.argv[1:]]
    main((given[0] if given else 25.0) / 1000, int(given[1]) if len(given) > 1 else 6)
