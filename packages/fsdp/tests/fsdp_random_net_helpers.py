"""The nets of random programs: blocks of odd parts in stages, their batches and optimizers, and a driven step.

    fsdp_random_helpers.Program --> Net, make_optimizers, drive (this file) --> both sides of a random program

Imports nothing of sixfold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from fsdp_matrix_helpers import Linear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from fsdp_random_helpers import Program

VOCABULARY, WIDTH = 17, 6
Action = tuple[str, int, int]  # kind, stage, micro-batch


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """``parts``: what a block has beside its two linears, see Block. ``tied``: to the block whose ``up`` it shares."""

    hidden: int
    parts: tuple[str, ...] = ()
    recompute: str | None = None
    frozen: str = "nothing"
    tied: int | None = None


@dataclass(frozen=True, kw_only=True)
class NetSpec:
    """``experts``: which expert each rank has, or () for none; ``cuts``: first block of each stage."""

    blocks: tuple[BlockSpec, ...]
    tied: bool = False
    experts: tuple[int, ...] = ()
    cuts: tuple[int, ...] = (0,)
    split: bool = False


class Boom(Exception):
    """Raised in the middle of a forward or a backward, on all ranks."""


class Bomb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise Boom("in backward")


class Block(nn.Module):
    """Norm, two linears, residual, and odd parts: of no elements, of none or one dimension, zero, tiny, unused."""

    def __init__(self, spec: BlockSpec, rank: int, expert: int) -> None:
        super().__init__()
        parts = spec.parts
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Linear(WIDTH, spec.hidden)
        self.down = Linear(spec.hidden, WIDTH, bias=False)
        self.recompute, self.rank, self.half = spec.recompute, rank, "half" in parts
        shapes = {"row": (1, WIDTH), "column": (WIDTH, 1), "scale": (), "empty": (0,), "norows": (0, 3)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape) + 0.5) if name in parts else None)
        for name, size in (("zero", 0.0), ("tiny", 1e-41)):
            made = Linear(WIDTH, WIDTH, bias=False) if name in parts else None
            if made is not None:
                made.weight.data.mul_(size)
            self.add_module(name, made)
        self.spare = nn.Linear(3, 5) if "spare" in parts else None
        self.partial = nn.Parameter(torch.rand(WIDTH, WIDTH) - 0.5) if "partial" in parts else None  # rank 0 uses it
        self.nested = Block(BlockSpec(hidden=3), rank, expert) if "nested" in parts else None
        self.register_buffer("seen", torch.tensor([1.5, 2.5]) if "buffer" in parts else None)
        self.expert: nn.Module | None = None
        if "expert" in parts:
            with torch.random.fork_rng():
                torch.manual_seed(77 + expert)
                self.expert = nn.Linear(WIDTH, WIDTH)
        if self.half:
            self.to(torch.bfloat16)
        for name, parameter in self.named_parameters():
            if spec.frozen == "all" or name.startswith(spec.frozen):
                parameter.requires_grad_(False)

    def inner(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        for module in (self.zero, self.tiny, self.expert, self.nested):
            y = y if module is None else y + module(x)
        y = y if self.partial is None or self.rank else y + F.linear(x, self.partial)
        for added in (self.row, None if self.column is None else self.column.view(-1)):
            y = y if added is None else y + added
        for summed in (self.empty, self.norows):
            y = y if summed is None else y + summed.sum()
        y = y if self.scale is None else y * self.scale
        return y if self.seen is None else y * self.seen[1].to(y.dtype)

    def forward(self, x: Tensor) -> Tensor:
        given = x.to(torch.bfloat16) if self.half else x
        if self.recompute in ("inside", "reentrant"):
            y = checkpoint(self.inner, given, use_reentrant=self.recompute == "reentrant")
        else:
            y = self.inner(given)
        return x + y.to(x.dtype)


class Stage(nn.Module):
    """Embedding (first), blocks in ``order``, norm and head with the loss (last)."""

    def __init__(self, blocks: Iterable[Block], *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH) if last else None
        self.head = Linear(WIDTH, VOCABULARY, bias=False) if last else None
        self.order = list(range(len(self.blocks)))
        self.boom: tuple[int, str] | None = None  # at which place of the order, and where

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for place, at in enumerate(self.order):
            where = self.boom[1] if self.boom is not None and self.boom[0] == place else ""
            if where == "forward":
                raise Boom("in forward")
            block = self.blocks[at]
            x = checkpoint(block, x, use_reentrant=False) if block.recompute == "around" else block(x)
            if where == "backward":
                x = Bomb.apply(x)
        if self.head is None:
            return x
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Net(nn.Module):
    """Stages one after the other."""

    def __init__(self, spec: NetSpec, rank: int) -> None:
        super().__init__()
        expert = spec.experts[rank] if spec.experts else 0
        blocks = [Block(one, rank, expert) for one in spec.blocks]
        for block, one in zip(blocks, spec.blocks, strict=True):
            if one.tied is not None:
                block.up.weight = blocks[one.tied].up.weight
        ends = [*spec.cuts[1:], len(blocks)]
        self.stages = nn.ModuleList(
            Stage(blocks[start:end], first=at == 0, last=at == len(ends) - 1)
            for at, (start, end) in enumerate(zip(spec.cuts, ends, strict=True))
        )
        if spec.tied:
            self.stages[-1].head.weight = self.stages[0].embedding.weight
        self.aside: list[tuple[nn.Parameter, Tensor]] = []
        for module in self.modules():
            if spec.split and isinstance(module, Linear):
                module.aside = self.aside

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for stage in self.stages:
            x = stage(x, tokens) if stage is self.stages[-1] else stage(x)
        return x


def make_net(program: Program, rank: int, seed: int = 0) -> Net:
    torch.manual_seed(1000 * program.seed + seed)
    return Net(program.net, rank)


def batch(program: Program, key: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(program.seed * 100_003 + 101 * key + rank)
    return torch.randint(0, VOCABULARY, (2, 3), generator=generator)


def make_optimizers(kind: str, net: nn.Module) -> list[torch.optim.Optimizer]:
    """Over the trainable parameters of a net, by name, so that both sides group alike."""
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if p.dim() == 2 and "embedding" not in name and p.numel()]
    rest = [p for name, p in trained if not any(p is one for one in matrices)]
    if kind == "muon" and matrices:
        groups = [
            {"params": matrices[::2], "lr": 0.02, "weight_decay": 0.1},
            {"params": matrices[1::2], "lr": 0.05, "weight_decay": 0.0, "nesterov": False},
        ]
        found: list[torch.optim.Optimizer] = [torch.optim.Muon([one for one in groups if one["params"]])]
        return [*found, torch.optim.AdamW(rest, lr=1e-2)] if rest else found
    every = [p for _, p in trained]
    groups = [{"params": every[::2], "weight_decay": 0.2}, {"params": every[1::2], "lr": 3e-3}]
    groups = [one for one in groups if one["params"]]
    makers: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
        "adamw": lambda: [torch.optim.AdamW(groups, lr=1e-2)],
        "sgd": lambda: [torch.optim.SGD(groups, lr=0.05, momentum=0.9)],
        "adagrad": lambda: [torch.optim.Adagrad(groups, lr=1e-2)],
        "muon": lambda: [torch.optim.AdamW(every)],  # nothing is a matrix
        "two": lambda: [
            torch.optim.AdamW(every[::2], lr=1e-2, weight_decay=0.1),
            *([torch.optim.SGD(every[1::2], lr=0.05, momentum=0.9)] if every[1::2] else []),
        ],
    }
    return makers[kind]()


def drive(net: Net, program: Program, rank: int, actions: tuple[Action, ...], calls: Any) -> Iterator[str]:
    """A driven step, one action at a time: yields the kind of each that ran."""
    key = 50 + sum(ord(kind) for kind, _, _ in actions) % 50
    count = len(net.stages)
    inputs: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    aside: dict[tuple[int, int], list] = {}
    final = {
        s: max((i for i, one in enumerate(actions) if one[1] == s and one[0] in "BW"), default=-1) for s in range(count)
    }
    yield "start"
    for at, (kind, s, m) in enumerate(actions):
        if kind == "F":
            tokens = batch(program, 100 * m + key, rank)
            inputs[s, m] = tokens if s == 0 else outputs[s - 1, m].detach().requires_grad_()
            outputs[s, m] = calls.call(s, inputs[s, m], *([tokens] if s == count - 1 else []))
        elif kind in "BI":
            if kind == "B" and at == final[s]:
                calls.last(s)
            if outputs[s, m].requires_grad:
                outputs[s, m].backward(None if s == count - 1 else inputs[s + 1, m].grad)
            aside[s, m], net.aside[:] = list(net.aside), []
            if kind == "B":
                calls.done(s, m)
        elif kind == "W":
            if at == final[s]:
                calls.last(s)
            for parameter, gradient in aside.pop((s, m)):
                calls.accumulate(s, parameter, gradient)
            calls.done(s, m)
        else:
            calls.hint(kind, s)
        yield kind
    net.aside.clear()
