"""The two recurrences in plain loops over one process: the oracle of weight versions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from pipeline_helpers import square_loss
from torch import Tensor, nn

from sixfold.pipeline import Program

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Batches = list[tuple[list[Tensor], list[Tensor]]]  # of each batch its microbatches and their targets

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "by_name": lambda p: RememberedByParameter(p),
    "replacing": lambda p: Replacing(p),
}


class RememberedByParameter(torch.optim.Optimizer):
    """Its state refers to parameters: it moves each towards what the one before it was."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.order = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        for before, parameter in zip(self.order[-1:] + self.order, self.order, strict=False):
            state = self.state[parameter]
            state["of"] = before
            parameter.add_(parameter.grad + 0.01 * state["of"].mean(), alpha=-0.1)


class Replacing(torch.optim.Optimizer):
    """Gives parameters other storage."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


def made_batches(batches: int, m: int, width: int = 8, rows: int = 2, seed: int = 3) -> Batches:
    """Equal in every process."""
    generator = torch.Generator().manual_seed(seed)

    def microbatches() -> list[Tensor]:
        return [torch.randn(rows, width, generator=generator) for _ in range(m)]

    return [(microbatches(), microbatches()) for _ in range(batches)]


def delayed(modules: Sequence[nn.Module], batches: Batches, make: MakeOptimizer) -> list[list[Tensor]]:
    """``W(t+1) = W(t) - eta grad f_t(W(t-1))``, in place; losses of each batch."""
    optimizers = [make(list(module.parameters())) for module in modules]
    before = [copy.deepcopy(module) for module in modules]  # W(max(t - 1, 0))
    losses = []
    for inputs, targets in batches:
        losses.append(_gradients(before, inputs, targets))
        now = [copy.deepcopy(module) for module in modules]
        for module, old, optimizer in zip(modules, before, optimizers, strict=True):
            _apply(module, old, optimizer)
        before = now
    return losses


def stashed(
    modules: Sequence[nn.Module], batches: Batches, make: MakeOptimizer, reads: Callable[[int, int], int]
) -> list[list[Tensor]]:
    """PipeDream: microbatch k of all reads W(reads(s, k)) on stage s."""
    optimizers = [make(list(module.parameters())) for module in modules]
    history = [[copy.deepcopy(module)] for module in modules]
    losses, k = [], 0
    for inputs, targets in batches:
        sums: list[nn.Module] = []
        losses.append([])
        for x, y in zip(inputs, targets, strict=True):
            read = [copy.deepcopy(made[reads(s, k)]) for s, made in enumerate(history)]
            for now, before in zip(read, sums, strict=False):
                for parameter, other in zip(now.parameters(), before.parameters(), strict=True):
                    parameter.grad = other.grad
            losses[-1] += _gradients(read, [x], [y], len(inputs))
            sums, k = read, k + 1
        for module, old, optimizer, made in zip(modules, sums, optimizers, history, strict=True):
            _apply(module, old, optimizer)
            made.append(copy.deepcopy(module))
    return losses


def reads_of(program: Program) -> Callable[[int, int], int]:
    """The STEPs of a stage before its forward of a microbatch, in the program's lists."""
    made: dict[int, int] = {}
    found: dict[tuple[int, int | None], int] = {}
    for _, _, action in program.entries():
        if action.kind == "F":
            found[action.stage, action.microbatch] = made.get(action.stage, 0)
        elif action.kind == "STEP":
            made[action.stage] = made.get(action.stage, 0) + 1
    return lambda stage, k: found[stage, k]


def _gradients(
    modules: Sequence[nn.Module], inputs: list[Tensor], targets: list[Tensor], share: int | None = None
) -> list[Tensor]:
    losses = []
    for hidden, target in zip(inputs, targets, strict=True):
        for module in modules:
            hidden = module(hidden)
        loss = square_loss(hidden, target)
        (loss / (share or len(inputs))).backward()
        losses.append(loss.detach())
    return losses


def _apply(module: nn.Module, old: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter, other in zip(module.parameters(), old.parameters(), strict=True):
        parameter.grad, other.grad = other.grad, None
    optimizer.step()
    optimizer.zero_grad()


def same_weights(left: Sequence[nn.Module], right: Sequence[nn.Module]) -> bool:
    """Bit for bit."""
    pairs = [
        (a, b)
        for ours, theirs in zip(left, right, strict=True)
        for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    ]
    return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs)
