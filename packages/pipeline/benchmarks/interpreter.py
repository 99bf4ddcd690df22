"""CPU per action of the executor in one process, over the bare work of its modules.

    python interpreter.py [rounds]        (20 rounds: half a minute)

All ranks are in one thread, so everything but the modules is the interpreter: calls, hand-overs, messages in memory.
The bare work runs the same forwards, losses and backwards, stage by stage, in the order of a plain loop: "as written"
with ``Tensor.backward``, whose checks in Python the runner goes without, "engine" with the call that it makes of
autograd. ``thread_time``; in each round every program and its bare work take turns; an action is an F, B, I or W. The
first two of a split program are the fused backward, so that these figures hold what splitting costs too;
"split" is over a plain loop of the same F, I and W through the same store: the interpreter alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from sixfold.pipeline import PipelineRunner, Program, Stage, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from sixfold.pipeline.program.action import COMPUTE, Kind
from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

WIDTH, ROWS, M, STEPS = 64, 4, 32, 4


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared difference."""
    return ((output - target) ** 2).mean()


def modules(stages: int) -> list[nn.Module]:
    """Tiny stages."""
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]


ENGINE = torch.autograd.Variable._execution_engine.run_backward


def engine(output: Tensor, gradient: Tensor) -> None:
    """A backward without checks."""
    ENGINE((output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def bare(stages: int, backward: Callable[[Tensor, Tensor], object]) -> Callable[[], object]:
    """The work alone: leaves between stages, as a pipeline has them."""
    net = modules(stages)
    x, y = torch.randn(M, ROWS, WIDTH), torch.randn(M, ROWS, WIDTH)
    share = torch.tensor(1 / M)

    def step() -> None:
        for k in range(M):
            hidden, pairs = x[k], []
            for module in net:
                leaf = hidden.detach()
                if pairs:
                    leaf.requires_grad_()
                hidden = module(leaf)
                pairs.append((leaf, hidden))
            backward(loss(hidden, y[k]), share)
            for (_, output), (leaf, _) in zip(pairs[-2::-1], pairs[:0:-1], strict=True):
                backward(output, leaf.grad)

    return step


def bare_split(stages: int) -> Callable[[], object]:
    """The same with every backward in two, through stores: I of all stages, then W of all."""
    net = modules(stages)
    stores = [WeightGradientStore(Stage(module, index)) for index, module in enumerate(net)]
    x, y = torch.randn(M, ROWS, WIDTH), torch.randn(M, ROWS, WIDTH)
    share = torch.tensor(1 / M)

    def step() -> None:
        for k in range(M):
            hidden, pairs = x[k], []
            for module, store in zip(net, stores, strict=True):
                leaf = hidden.detach()
                if pairs:
                    leaf.requires_grad_()
                hidden = store.forward(k, module, (leaf,), {})
                pairs.append((leaf, hidden))
            gradient = share
            for number in range(stages - 1, -1, -1):
                leaf, output = pairs[number]
                root = loss(output, y[k]) if number == stages - 1 else output
                stores[number].backward(k, (get_gradient_edge(root),), (gradient,))
                gradient = leaf.grad
            for store in stores:
                store.backward_weight(k)

    return step


def ours(program: Program) -> Callable[[], object]:
    """The runner."""
    stages = [Stage(module, index) for index, module in enumerate(modules(program.stages))]
    runner = PipelineRunner(program, stages, loss_fn=loss)
    x, y = torch.randn(M * ROWS, WIDTH), torch.randn(M * ROWS, WIDTH)
    return lambda: runner.step(x, y)


def main() -> None:
    """Print microseconds per action."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    programs = [gpipe(1, M), one_f_one_b(2, M), one_f_one_b(4, M), interleaved(2, M), zb_h1(4, M), zb_v(2, M)]
    for program in programs:
        contenders = [ours(program), bare(program.stages, Tensor.backward), bare(program.stages, engine)]
        is_split = any(a.kind is Kind.W for _, _, a in program.entries())
        contenders += [bare_split(program.stages)] if is_split else []
        actions = sum(len(a.parts) or 1 for _, _, a in program.entries() if a.kind in COMPUTE)
        times: list[list[float]] = [[] for _ in contenders]
        for _ in range(rounds):
            for run, taken in zip(contenders, times, strict=True):
                run()
                begin = time.thread_time()
                for _ in range(STEPS):
                    run()
                taken.append((time.thread_time() - begin) / STEPS / actions * 1e6)
        for word, of in (("median", statistics.median), ("least", min)):
            mine, written, direct, *split = map(of, times)
            name = f"{program.name:12s} p={len(program.ranks)} {word:6s}"
            alone = f", split {mine - split[0]:6.2f}" if split else ""
            print(
                f"{name} {mine:7.2f} us; over bare as written {mine - written:6.2f}, engine {mine - direct:6.2f}{alone}"
            )


if __name__ == "__main__":
    main()
