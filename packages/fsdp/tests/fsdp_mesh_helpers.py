"""A model whose parameters lie on three meshes, and the ranks that share each emulated in one process.

test_meshes.py --> MoeNet, emulate_meshes (this file)

No tokens travel: a rank's experts see its own batch. What is under test is who adds what. Imports nothing of sixfold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from fsdp_helpers import VOCABULARY, Seen, batch, local_gradients, make_adamw
from torch import Tensor, nn

WIDTH = 13


class MoeBlock(nn.Module):
    """Shared parameters; ``expert`` is one of a few, ``own`` is this rank's alone. The spare ones nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 19)
        self.expert = nn.Linear(19, WIDTH)
        self.expert_frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.expert_tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.own = nn.Linear(WIDTH, WIDTH, bias=False)
        self.own_spare = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.expert(F.gelu(self.up(h))) + self.expert_frozen(self.own(h)) + self.expert_tied(h)


class MoeNet(nn.Module):
    """Two blocks whose ``expert_tied`` is one parameter; every rank seeds its experts by their global number.

    ``uneven``: another expert has other sizes.
    """

    def __init__(self, expert: int, own: int, *, uneven: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(MoeBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks[1].expert_tied.weight = self.blocks[0].expert_tied.weight
        for block in self.blocks:
            block.expert_spare = nn.Linear(3, 5 + 40 * expert * uneven)
        for kind, seed in (("expert", 100 + expert), ("own", 200 + own)):
            torch.manual_seed(seed)
            for name, parameter in self.named_parameters():
                if kind_of(name) == kind:
                    nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def kind_of(name: str) -> str:
    """ "shared", "expert" or "own"."""
    parts = name.split(".")
    if parts[0] != "blocks":
        return "shared"
    return parts[2].partition("_")[0] if parts[2].startswith(("expert", "own")) else "shared"


Groups = Callable[[str, int], Sequence[Sequence[int]]]


def emulate_meshes(
    nets: list[MoeNet],
    groups: Groups,
    *,
    steps: int,
    accumulate: int,
    per_microbatch: bool,
    param_dtype: torch.dtype | None = None,
    seen: Seen = lambda name, main: main,
) -> list[dict[str, Tensor]]:
    """Final weights of every rank.

    Args:
        nets: by rank, with their start values; they are trained.
        groups: ``(kind, rank)`` -> who shares a parameter with ``rank``: sums inside groups, then over them.
        seen: the weight that layers see of a main weight.
    """
    ranks = len(nets)
    optimizers = [make_adamw([p for p in net.parameters() if p.requires_grad]) for net in nets]
    computes = [copy.deepcopy(net).to(param_dtype) for net in nets]
    for step in range(steps):
        totals: list[dict[str, Tensor]] = [{} for _ in nets]
        rounds = [[k] for k in range(accumulate)] if per_microbatch else [list(range(accumulate))]
        for microbatches in rounds:
            sums: list[dict[str, Tensor]] = [{} for _ in nets]
            for rank, net in enumerate(nets):
                for k in microbatches:
                    local_gradients(net, computes[rank], batch(step, k, rank), sums[rank], seen=seen)
            for rank, total in enumerate(totals):
                for name in sums[rank]:
                    reduced = _sum_of_sums(groups(kind_of(name), rank), [one[name] for one in sums]) / ranks
                    total[name] = total[name] + reduced if name in total else reduced
        for rank, net in enumerate(nets):
            for name, parameter in net.named_parameters():
                parameter.grad = totals[rank].get(name)
            optimizers[rank].step()
            optimizers[rank].zero_grad()
    return [{name: value.clone() for name, value in net.state_dict().items()} for net in nets]


def _sum_of_sums(groups: Sequence[Sequence[int]], values: Sequence[Tensor]) -> Tensor:
    total: Tensor | None = None
    for group in groups:
        inner = values[group[0]].clone()
        for rank in group[1:]:
            inner += values[rank]
        total = inner if total is None else total + inner
    assert total is not None, "nobody shares the parameter"
    return total
