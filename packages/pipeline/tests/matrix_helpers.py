"""Models of all kinds of stages, and the plain loop over them: the matrix's oracle, which knows nothing of the package.

model(stages) --> plain_loop: one process, whole graphs, one microbatch after another
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, WORDS, LENGTH, ROWS = 8, 11, 3, 2


class Embed(nn.Module):
    """Integers in: (rows, LENGTH) ids to hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places


class Block(nn.Module):
    """A transformer block of one head, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(hidden)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1)
        hidden = hidden + self.out(weights @ v)
        return hidden + self.down(functional.gelu(self.up(self.between(hidden))))


class Mix(nn.Module):
    """A linear layer that is used twice in a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(hidden))))


class Fork(nn.Module):
    """One tensor in, three out: a new one, the input itself, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(hidden), hidden, torch.arange(LENGTH).flip(0)


class Join(nn.Module):
    """Three in, one out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, beside: Tensor, order: Tensor) -> Tensor:
        return self.layer(self.norm(hidden)[:, order]) + beside


class Head(nn.Module):
    """Hidden states to logits; the weight has the shape of the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.words(self.norm(hidden))


MIDDLE: tuple[Callable[[], nn.Module], ...] = (Block, Fork, Join, Mix)


def model(stages: int, seed: int = 3) -> list[nn.Module]:
    """A language model in ``stages`` modules, the same for the same ``seed``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if stages == 1:
            return [nn.Sequential(Embed(), Block(), Head())]
        middle = [MIDDLE[s % len(MIDDLE)] for s in range(stages - 2)]
        if middle and middle[-1] is Fork:  # the head takes one tensor
            middle[-1] = Mix
        return [Embed(), *(make() for make in middle), Head()]


def words(m: int, seed: int = 5, rows: int = ROWS) -> tuple[list[Tensor], list[Tensor]]:
    """Ids and next ids of m microbatches."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (m, rows, LENGTH + 1), generator=generator)
    return list(ids[:, :, :-1]), list(ids[:, :, 1:])


def word_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_loop(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    targets: Sequence[Any],
    loss_fn: Callable[[Any, Any], Tensor] = word_loss,
    divisor: float | None = None,
) -> list[Tensor]:
    """Accumulates the gradients of losses divided by their number (or ``divisor``); returns the losses."""
    losses = []
    for x, target in zip(inputs, targets, strict=True):
        value = x
        for module in modules:
            value = module(*value) if isinstance(value, tuple) else module(value)
        loss = loss_fn(value, target)
        (loss / (len(inputs) if divisor is None else divisor)).backward()
        losses.append(loss.detach())
    return losses


def differing(mine: nn.Module, theirs: nn.Module) -> list[str]:
    """Names of parameters whose gradients are not the same bits; one without a gradient differs from one of zeros."""
    names = []
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        if a.grad is None or b.grad is None:
            same = a.grad is b.grad
        else:
            same = torch.equal(a.grad.view(torch.int32), b.grad.view(torch.int32))
        if not same:
            names.append(name)
    return names


def same_losses(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """As many, the same bits, without graphs."""
    return (
        len(mine) == len(theirs)
        and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        and not any(loss.requires_grad for loss in mine)
    )
