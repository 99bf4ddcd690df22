"""Small models, and data parallel emulated in one process: the oracle of the bitwise tests.

    tests --> Net, emulate, train_steps, resumed (this file)

``emulate`` runs every rank's micro-batches on one plain copy of the model and adds gradients as spec'd: local fp32
sums, ranks 0, 1, 2 ... from left to right, one true division. It imports nothing of sixfold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_fill_freed
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 17

fsdp_fill_freed.apply()


class Block(nn.Module):
    """Norm, two linears, residual; ``recompute``: None, "inside" (non-reentrant) or "reentrant"."""

    def __init__(self, width: int, recompute: str | None = None, hidden: int = 19) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute in ("inside", "reentrant"):
            return x + checkpoint(self.inner, x, use_reentrant=self.recompute == "reentrant")
        return x + self.inner(x)


class Net(nn.Module):
    """Embedding, blocks, norm, head. Widths are odd so that shards are uneven.

    Options: ``tied`` head, ``frozen`` (block 1's ``up`` is frozen), ``unused`` (a linear nobody calls),
    ``recompute`` ("around" wraps each block from outside).
    """

    def __init__(
        self,
        *,
        width: int = 13,
        layers: int = 3,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        recompute: str | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        inside = None if recompute == "around" else recompute
        self.blocks = nn.ModuleList(Block(width, inside, hidden=19 + 4 * i) for i in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[1].up.requires_grad_(False)
        if unused:
            self.spare = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute == "around" else block(x)
        return self.head(self.norm(x))


def make_net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batch(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + rank)
    return torch.randint(0, VOCABULARY, (2, 5), generator=generator)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def train_steps(model: Any, optimizer: Any, rank: int, *, steps: int, accumulate: int, hint: bool = True) -> None:
    """The plain loop; without ``hint`` every backward may be the last of its step."""
    for step in range(steps):
        for k in range(accumulate):
            tokens = batch(step, k, rank)
            with model.microbatch(last=not hint or k == accumulate - 1):
                loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(
    build: Callable[[], tuple[Any, Any]], rank: int, set_apart: Callable[[Any], None] = lambda optimizer: None
) -> tuple[list, list[str]]:
    """Two steps, and one beside a step after loading the first one's state records: those not taken, what differs.

    ``build``: a model and its optimizer. ``set_apart``: sets what records do not hold.
    """

    def step(model: Any, optimizer: Any, number: int) -> None:
        loss_of(model(batch(number, 0, rank)), batch(number, 0, rank)).backward()
        optimizer.step()
        model.zero_grad()

    model, optimizer = build()
    step(model, optimizer, 0)
    saved = {(r.name, r.key): r.tensor.clone() for r in model.state_records(optimizer)}
    step(model, optimizer, 1)
    again, other = build()
    again.materialize_state(other)
    for record in again.state_records(other):
        record.tensor.copy_(saved.pop((record.name, record.key)))
    set_apart(other)
    again.refresh()
    step(again, other, 1)
    return sorted(saved), same(model.full_state_dict(), again.full_state_dict())


Seen = Callable[[str, Tensor], Tensor]  # the weight that layers see of a main weight, by name


def local_gradients(
    net: nn.Module,
    compute: nn.Module,
    tokens: Tensor,
    sums: dict[str, Tensor],
    loss: Callable[..., Tensor] = loss_of,
    seen: Seen = lambda name, main: main,
) -> None:
    """Add one micro-batch's gradients to ``sums`` in fp32; ``compute`` is ``net`` in the compute dtype."""
    with torch.no_grad():
        for (name, high), low in zip(net.named_parameters(), compute.parameters(), strict=True):
            low.copy_(seen(name, high))
            low.grad = None
    loss(compute(tokens), tokens).backward()
    for name, parameter in compute.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.to(torch.float32)
            sums[name] = sums[name] + gradient if name in sums else gradient


def emulate(
    *,
    ranks: int,
    steps: int,
    accumulate: int,
    net_options: dict[str, Any],
    per_microbatch: bool,
    param_dtype: torch.dtype | None = None,
    seen: Seen = lambda name, main: main,
    reduce_dtype: torch.dtype = torch.float32,
    sum_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Final weights of ``ranks`` ranks of data parallel, in one process.

    Local sums are rounded to ``reduce_dtype``, added over ranks in ``sum_dtype``; what is kept of main gradients
    between reductions is rounded to ``grad_dtype``.
    ``per_microbatch``: sum over ranks after each micro-batch (gradients sharded), else after the last.
    A parameter that no rank used has no gradient.
    """
    net = make_net(**net_options)
    compute = make_net(**net_options)
    if param_dtype is not None:
        compute.to(param_dtype)
    optimizer = make_adamw(net.parameters())
    for step in range(steps):
        total: dict[str, Tensor] = {}
        rounds = [[k] for k in range(accumulate)] if per_microbatch else [list(range(accumulate))]
        for microbatches in rounds:
            locals_R: list[dict[str, Tensor]] = []
            for rank in range(ranks):
                sums: dict[str, Tensor] = {}
                for k in microbatches:
                    local_gradients(net, compute, batch(step, k, rank), sums, seen=seen)
                locals_R.append(sums)
            for name, first in locals_R[0].items():
                reduced = first.to(reduce_dtype).to(sum_dtype, copy=True)
                for other in locals_R[1:]:
                    reduced += other[name].to(reduce_dtype).to(sum_dtype)
                reduced = reduced.float() / ranks
                kept = total[name] + reduced if name in total else reduced
                total[name] = kept.to(grad_dtype).float()
        for name, parameter in net.named_parameters():
            parameter.grad = total.get(name)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names whose bits differ; empty is what a test wants."""
    assert left.keys() == right.keys(), f"{sorted(left)} against {sorted(right)}"
    return [name for name in left if not torch.equal(left[name], right[name])]
