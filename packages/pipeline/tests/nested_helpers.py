"""Stages that run backwards inside of their backward or forward, and a check of their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from pipeline_helpers import batch, equal_bits, gradients, plain_loop, square_loss
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from sixfold.pipeline import PipelineRunner, Program, Stage, defer_weight_grad

WIDTH = 8
DEPTH = 61  # of backwards in each other: of the first 60 each runs on the thread of the one around it


class Pair(nn.Module):
    """Two layers; what is between and around them is the tests'."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.f, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Implicit(Pair):
    """A deep equilibrium layer: its backward is solved for in a hook, through a graph that F made."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(3):
                z = torch.tanh(self.f(z) * 0.3 + x)
        z = torch.tanh(self.f(z) * 0.3 + x)
        start = z.detach().clone().requires_grad_()
        once = torch.tanh(self.f(start) * 0.3 + x.detach())

        def solve(g: Tensor) -> Tensor:
            y = g
            for _ in range(3):
                y = torch.autograd.grad(once, start, y, retain_graph=True)[0] + g
            return y

        z.register_hook(solve)
        return self.o(z)


class ImplicitLast(Implicit):
    """The solver runs before any other layer's backward."""

    def forward(self, x: Tensor) -> Tensor:
        o, self.o = self.o, nn.Identity()  # type: ignore[assignment]
        try:
            return super().forward(o(x))
        finally:
            self.o = o


class Saved(torch.autograd.Function):
    """Its backward goes through a graph that its forward kept, by ``how``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        ctx.how = how
        with torch.enable_grad():
            ctx.start = x.detach().requires_grad_()
            ctx.inner = layer(ctx.start)
        return ctx.inner.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.how(ctx.inner, ctx.start, gradients[0]), None, None


def of_input(inner: Tensor, start: Tensor, g: Tensor) -> Tensor:
    return torch.autograd.grad(inner, start, g)[0]


def of_all(inner: Tensor, start: Tensor, g: Tensor) -> Tensor:
    inner.backward(g)
    assert start.grad is not None
    return start.grad


def of_all_twice(inner: Tensor, start: Tensor, g: Tensor) -> Tensor:
    torch.autograd.backward(inner, g * 0.3, retain_graph=True)
    torch.autograd.backward(inner, g * 0.6)
    assert start.grad is not None
    return start.grad


def of_named(inner: Tensor, start: Tensor, g: Tensor) -> Tensor:
    torch.autograd.backward(inner, g, inputs=[start])
    assert start.grad is not None
    return start.grad


def of_many(inner: Tensor, start: Tensor, g: Tensor) -> Tensor:
    return torch.autograd.grad(inner, start, torch.stack([g, g * 0.5]), is_grads_batched=True)[0].sum(0)


class Kept(Pair):
    """A Function with a graph of its own in front of a layer, which is used outside of it too."""

    how = staticmethod(of_input)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.tanh(Saved.apply(x, self.f, self.how) + self.f(x)))


def kept(how: Callable[..., Tensor]) -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        module = Kept(seed)
        module.how = how  # type: ignore[method-assign,assignment]
        return module

    return make


class Penalty(Pair):
    """A hook adds the gradients of a penalty, of a forward and a gradient of a gradient of its own."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.f(x))

        def penalty(g: Tensor) -> None:
            with torch.enable_grad():
                start = hidden.detach().requires_grad_()
                [slope] = torch.autograd.grad(torch.tanh(self.o(start)).sum(), start, create_graph=True)
                (slope**2).sum().backward()

        hidden.register_hook(penalty)
        return self.o(hidden)


class Attack(Pair):
    """Inputs moved along the sign of their gradients, in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        start = x.detach().clone().requires_grad_()
        [g] = torch.autograd.grad(self.o(torch.tanh(self.f(start))).sum(), start)
        return self.o(torch.tanh(self.f(x + 0.1 * g.sign())))


class Auxiliary(Pair):
    """The forward runs a backward into its weights."""

    def forward(self, x: Tensor) -> Tensor:
        torch.tanh(self.f(x.detach())).mean().backward()
        return self.o(torch.tanh(self.f(x)))


class Segments(Pair):
    """One layer in two checkpoints, and outside of them."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.o(self.f(x))), x, use_reentrant=self.reentrant)
        return self.f(self.o(x))


class SegmentsAgain(Segments):
    reentrant = False


class Deep(Pair):
    """Reentrant checkpoints in each other, so many that autograd runs the innermost on a thread of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.inside(x, DEPTH))

    def inside(self, x: Tensor, depth: int) -> Tensor:
        return checkpoint(self.inside, x, depth - 1, use_reentrant=True) if depth else torch.tanh(self.f(x))


class DeepInside(Deep):
    """The same, gone through by the forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.inside(x.detach().requires_grad_(), DEPTH).mean().backward()
        return self.o(torch.tanh(self.f(x)))


class Everything(Pair):
    """Checkpoints of both kinds, an attack and an embedding, under autocast."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.words = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for reentrant in (True, False, True):
                x = checkpoint(self.inside, x, use_reentrant=reentrant)
            return self.o(self.f(x)).float()

    def inside(self, x: Tensor) -> Tensor:
        ids = (x.detach().float().abs() * 3).long() % 5
        start = x.detach().requires_grad_()
        with torch.enable_grad():
            [g] = torch.autograd.grad(torch.tanh(self.f(start)).sum(), start)
        return torch.tanh(self.o(self.f(x + g)) + self.f(x) + self.o(x) + self.words(ids).mean(1))


class Slope(Pair):
    """The gradient of a gradient of layers' outputs, which goes through no layer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, other = self.f(x), self.o(x)
        wanted = [hidden, get_gradient_edge(other)]
        slopes = torch.autograd.grad(torch.tanh(hidden * other).sum(), wanted, create_graph=True)
        return self.o(hidden + slopes[0] * slopes[1])


class OfUsers(Pair):
    """An operator that defers by itself, in reentrant checkpoints and outside."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.inside, x, use_reentrant=True)
        return self.o(self.inside(x))

    def inside(self, x: Tensor) -> Tensor:
        weight, rows = self.f.weight, x.detach()
        return torch.tanh(defer_weight_grad(weight, lambda g: g.t() @ rows, x @ weight.detach().t()))


MODULES = {
    "implicit": Implicit,
    "implicit last": ImplicitLast,
    "input": kept(of_input),
    "all": kept(of_all),
    "twice": kept(of_all_twice),
    "named": kept(of_named),
    "batched": kept(of_many),
    "attack": Attack,
    "penalty": Penalty,
    "reentrant": Segments,
    "non-reentrant": SegmentsAgain,
    "everything": Everything,
    "of users": OfUsers,
    "slope": Slope,
}


def check(make: Callable[[int], nn.Module], program: Program, steps: int = 2, device: str = "cpu") -> None:
    """Gradients over some steps; the first of a step goes through layers that are watched."""
    ours = [make(seed).to(device) for seed in range(program.stages)]
    oracle = copy.deepcopy(ours)
    runner = PipelineRunner(program, [Stage(m, i) for i, m in enumerate(ours)], loss_fn=square_loss)
    for seed in range(steps):
        x, y = (one.to(device) for one in batch(3 * program.microbatches, seed))
        x.requires_grad_()  # a reentrant checkpoint wants one
        runner.step(list(x.split(3)), y)
        plain_loop(oracle, list(x.detach().requires_grad_().split(3)), list(y.split(3)))
    for stage, (mine, other) in enumerate(zip(ours, oracle, strict=True)):
        names = [name for name, _ in mine.named_parameters()]
        for name, a, b in zip(names, gradients(mine), gradients(other), strict=True):
            assert equal_bits([a], [b]), f"{name} of stage {stage}"
