"""One model, many ways to train it, and the loop that sharded and emulated training share: the cells of the matrix.

    Cell, Net, drive (this file) --> test_matrix_bits.py (sharded, on ranks)            \\
                                 --> fsdp_matrix_oracle_helpers.py (all ranks, plain)  --> final weights, bit by bit

``drive`` is the one training loop. Both sides run it: the sharded side with ``stage_handle`` or the model itself, the
emulation with plain modules whose gradients are harvested after each backward. Imports nothing of sixfold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import combinations
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH = 17, 9
Sums = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to train. ``ranks`` by ``replicas``: HSDP when the second is not 1."""

    strategy: str = "optim_grads_params"
    accumulate: int = 3
    kind: str = "plain"  # of model, see KINDS
    gathered: str | int = "double"  # an int: percent of the way from root + two largest units to all
    prefetch: int | None = None  # bytes
    precision: str = "fp32"  # see PRECISIONS
    way: str = "microbatch"  # see WAYS
    granularity: str | int = "element"
    grad_sum: str = "backend"
    ranks: int = 2
    replicas: int = 1
    bucket: int | None = None  # bytes
    share: bool = False  # one communicator for gathers and reductions
    offload: bool = False
    ep: int = 1  # expert-parallel size; kind "experts" only
    clip: float | None = None  # largest norm
    steps: int = 2  # the first records the order of uses, the second follows it

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(changed) or "default"


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "frozen": {"frozen": "up"},  # a layer inside a unit
    "frozen unit": {"frozen": ""},
    "unused": {"spare": True},  # parameters nobody uses, in a unit and in the root
    "idle": {"idle": True},  # a unit nobody calls
    "partial": {"partial": True},  # a layer that rank 0 alone uses
    "twice": {"twice": True},  # a unit called twice in a forward
    "scalar": {"scalar": True},  # parameters of no dimension and of one element
    "inside": {"recompute": "inside"},
    "around": {"recompute": "around"},
    "reentrant": {"recompute": "reentrant"},
    "experts": {"experts": True},  # a layer whose weights differ between the ranks of an expert-parallel group
    "nested": {"units": (nn.Linear,)},  # units inside units
    "no units": {"units": ()},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16 wire": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "bf16 grads": {"param_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16},
    "fp8": {"param_dtype": torch.bfloat16, "fp8": lambda name: name.endswith(("up.weight", "down.weight"))},
}
# How micro-batches are driven: hints of a plain loop, or stages under a program ("1" or 2 of them on the rank).
WAYS = ("microbatch", "none", "no_sync", "late", "mixed", "fused 1", "fused 2", "split 1", "split 2")


# ---- the model


class Deferred(torch.autograd.Function):
    """x @ weight.T whose weight gradient is put aside, as a split backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, aside: list) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.aside = weight, aside
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        ctx.aside.append((ctx.parameter, rows.t() @ x.flatten(0, -2)))
        return gradient @ weight, None, None


class Linear(nn.Linear):
    """Defers its weight gradient to ``aside`` where that is a list."""

    aside: list | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.aside is None or not self.weight.requires_grad:
            return F.linear(x, self.weight, self.bias)
        y = Deferred.apply(x, self.weight, self.aside)
        return y if self.bias is None else y + self.bias


class Block(nn.Module):
    """Norm, two linears, residual."""

    def __init__(self, hidden: int, recompute: str | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Linear(WIDTH, hidden)
        self.down = Linear(hidden, WIDTH, bias=False)
        self.recompute = recompute
        self.scale: nn.Parameter | None = None
        self.extra: nn.Module | None = None
        self.uses_extra = False

    def inner(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        if self.uses_extra and self.extra is not None:
            y = y + self.extra(x)
        return y if self.scale is None else y * self.scale

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute in ("inside", "reentrant"):
            return x + checkpoint(self.inner, x, use_reentrant=self.recompute == "reentrant")
        return x + self.inner(x)


class Stage(nn.Module):
    """Embedding (first), blocks, norm and head with the loss (last)."""

    def __init__(self, hidden: Sequence[int], *, first: bool, last: bool, recompute: str | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        inside = None if recompute == "around" else recompute
        self.blocks = nn.ModuleList(Block(width, inside) for width in hidden)
        self.norm = nn.LayerNorm(WIDTH) if last else None
        self.head = Linear(WIDTH, VOCABULARY, bias=False) if last else None
        self.around, self.twice = recompute == "around", False

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for at, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.around else block(x)
            if self.twice and at == 0:
                x = block(x)
        if self.head is None:
            return x
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Net(nn.Module):
    """Stages one after the other; widths are odd so that shards are uneven. Names hold the stage: ``stages.0.``"""

    def __init__(self, cell: Cell, rank: int) -> None:
        super().__init__()
        options = KINDS[cell.kind]
        stages = 2 if cell.way.endswith("2") else 1
        recompute = options.get("recompute")
        hidden = [(7, 11, 15)] if stages == 1 else [(7, 11), (15,)]
        self.stages = nn.ModuleDict(
            {str(s): Stage(h, first=s == 0, last=s == stages - 1, recompute=recompute) for s, h in enumerate(hidden)}
        )
        if options.get("tied"):
            self.last.head.weight = self.first.embedding.weight
        block = self.first.blocks[1]
        if "frozen" in options:
            block.get_submodule(options["frozen"]).requires_grad_(False)
        if options.get("spare"):
            block.extra, self.spare = nn.Linear(3, 5), nn.Linear(2, 3)
        if options.get("idle"):
            self.idle = Block(5)
        if options.get("partial"):
            block.extra, block.uses_extra = nn.Linear(WIDTH, WIDTH), rank == 0
        if options.get("experts"):
            torch.manual_seed(7 + rank % cell.ep)
            block.extra, block.uses_extra = nn.Linear(WIDTH, WIDTH), True
        if options.get("scalar"):
            block.scale = nn.Parameter(torch.tensor(0.7))
            self.last.blocks[-1].scale = nn.Parameter(torch.tensor([1.3]))
        self.first.twice = bool(options.get("twice"))
        self.aside: list[tuple[nn.Parameter, Tensor]] = []
        if cell.way.startswith("split"):
            for module in self.modules():
                if isinstance(module, Linear):
                    module.aside = self.aside

    @property
    def first(self) -> Stage:
        return self.stages["0"]

    @property
    def last(self) -> Stage:
        return self.stages[str(len(self.stages) - 1)]

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for stage in self.stages.values():
            x = stage(x, tokens) if stage is self.last else stage(x)
        return x


def make_net(cell: Cell, rank: int = 0) -> Net:
    torch.manual_seed(0)
    return Net(cell, rank)


def make_adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2, weight_decay=0.1)


def batch(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + rank)
    return torch.randint(0, VOCABULARY, (2, 3), generator=generator)


# ---- the loop, driven alike on both sides


@dataclass
class Driven:
    """What a way of training calls. Plain and sharded sides fill it differently."""

    call: Callable[[Tensor], Tensor]  # the whole model
    stages: list[Any]  # one handle per stage: call, accumulate, after_backward, before_last_backward, reduce_grad
    microbatch: Callable[[bool], AbstractContextManager[Any]]
    no_sync: Callable[[], AbstractContextManager[Any]]
    harvest: Callable[[], None] = lambda: None  # after every backward
    reduced: Callable[[], None] = lambda: None  # at the end of a round, see rounds


def rounds(cell: Cell) -> list[list[int]]:
    """Micro-batches whose gradients are summed locally before ranks are."""
    every = list(range(cell.accumulate))
    if cell.way == "mixed" and cell.accumulate > 1:  # the first under no_sync, the others without hint
        return [every[:2], *([k] for k in every[2:])]
    if cell.way in ("none", "mixed"):
        return [[k] for k in every]
    at_once = cell.way in ("microbatch", "fused 1") and cell.strategy in ("optim_grads", "optim_grads_params")
    return [[k] for k in every] if at_once else [every]


def drive(cell: Cell, net: Net, driven: Driven, step: int, rank: int) -> None:
    """All micro-batches of a step: forward and backward, until the gradients are local or reduced."""
    ends = {group[-1] for group in rounds(cell)}
    if cell.way.startswith(("fused", "split")):
        _drive_stages(cell, net, driven, step, rank, ends)
        return
    for k in range(cell.accumulate):
        last = k == cell.accumulate - 1
        hint: AbstractContextManager[Any] = nullcontext()
        if cell.way == "microbatch":
            hint = driven.microbatch(last)
        elif (
            cell.way == "late" or (cell.way == "no_sync" and not last) or (cell.way == "mixed" and k == 0 and not last)
        ):
            hint = driven.no_sync()
        with hint:
            driven.call(batch(step, k, rank)).backward()
        driven.harvest()
        if k in ends:
            driven.reduced()


def _drive_stages(cell: Cell, net: Net, driven: Driven, step: int, rank: int, ends: set[int]) -> None:
    """Two forwards ahead, then one backward and one forward: micro-batches are in flight together."""
    count, many = cell.accumulate, len(driven.stages)
    inputs: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    split = cell.way.startswith("split")

    def forward(k: int) -> None:
        for s, stage in enumerate(driven.stages):
            tokens = batch(step, k, rank)
            inputs[s, k] = tokens if s == 0 else outputs[s - 1, k].detach().requires_grad_()
            outputs[s, k] = stage.call(inputs[s, k], tokens) if s == many - 1 else stage.call(inputs[s, k])

    def backward(k: int) -> None:
        for s in reversed(range(many)):
            stage = driven.stages[s]
            if k == count - 1 and not split:
                stage.before_last_backward()
            outputs[s, k].backward(None if s == many - 1 else inputs[s + 1, k].grad)
            driven.harvest()
            if split:
                if k == count - 1:
                    stage.before_last_backward()
                aside, net.aside[:] = list(net.aside), []
                for parameter, gradient in aside:
                    stage.accumulate(parameter, gradient)
            stage.after_backward(k)
        if k in ends:
            driven.reduced()

    for k in range(count + 1):
        if k < count:
            forward(k)
        if k > 0:
            backward(k - 1)
    for stage in reversed(driven.stages):
        stage.reduce_grad()


# ---- which cells


def legal(cell: Cell) -> bool:
    """What the specification combines, and what this oracle can tell."""
    if cell.gathered != "double" and cell.strategy == "no_shard":
        return False  # nothing is gathered
    if isinstance(cell.gathered, int) and cell.strategy != "optim_grads_params":
        return False  # the other strategies keep all weights
    if cell.way.startswith("split") and cell.kind == "reentrant":
        return False  # its backward inside a backward has no split form
    if cell.clip is not None and cell.precision == "bf16 grads":
        return False  # where narrow gradients are rounded is not said
    if (cell.kind == "experts") != (cell.ep > 1):
        return False
    if cell.kind == "partial" and cell.way.startswith("split"):
        return False  # a rank without the layer defers nothing for it: one side only
    return cell.ranks % cell.replicas == cell.ranks % cell.ep == 0


def covering(options: dict[str, Sequence[Any]], *, every_pair: bool) -> list[Cell]:
    """Few cells in which every pair of values of two options occurs, or every value with every strategy.

    Pairs that no legal cell has are left out. For each pair still missing, the best of some random completions.
    """
    random = Random(0)
    keys = list(combinations(options, 2)) if every_pair else [("strategy", key) for key in options if key != "strategy"]
    missing = {(a, x, b, y): None for a, b in keys for x in options[a] for y in options[b]}
    chosen: list[Cell] = []
    while missing:
        a, x, b, y = next(iter(missing))
        tries = ({key: random.choice(values) for key, values in options.items()} | {a: x, b: y} for _ in range(60))
        cells = [cell for values in tries if legal(cell := Cell(**values))]
        del missing[a, x, b, y]
        if cells:
            found = [{(a, getattr(c, a), b, getattr(c, b)) for a, b in keys} for c in cells]
            at = max(range(len(cells)), key=lambda at: len(missing.keys() & found[at]))
            chosen.append(cells[at])
            for pair in found[at]:
                missing.pop(pair, None)
    return chosen
