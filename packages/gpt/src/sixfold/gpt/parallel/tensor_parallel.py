"""Layers over tensor-parallel ranks: what travels before and behind the linears of a rank's part.

    (b, s / tp, hidden) --> columns: gather, q k v or gate up --> heads or ffn columns --> out or down --> joined: sum
                            (this file)                                                                    (this file)

The linears stay ``nn.Linear`` of the rank's part; collectives are autograd Functions around them. With sequence
parallelism hidden states between blocks are cut along the sequence: an all-gather comes before and a reduce-scatter
behind, in backward the other way round. Without it every rank has them whole: nothing travels before and an all-reduce
behind, in backward the other way round. On an axis of one rank nothing happens at all.

[Note: gathered again] What the linears read is (b, s, hidden) and is not kept for backward. The rank keeps its own (b,
s / tp, hidden), once. The first linear in backward gathers for all of them. A part that is recomputed gathers it in
that recomputation, which keeps it for that backward alone; where backward is split, W gathers once more.

[Note: chunks] With ``overlap`` each chunk of the rank's part has its own gather. All gathers start before the first
product. A chunk's products run while the next chunks travel. In backward a chunk's sum travels while the gradients of
the next are made. If collectives are not asynchronous, this gains nothing. The only change is then the order in which a
weight's gradient is summed: by chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo  # which imports torch._dynamo when it is called, not here
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.parallel.axes import Axes, Axis
from sixfold.gpt.parallel.lost_ranks import axis_collective
from sixfold.pipeline import made_again

# Their names from torch 2.13 on, and before.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

CHUNKS = 4  # the most of which the gather is made

Product = Callable[[Tensor], Tensor]


def columns(
    x: Tensor, products: Sequence[Product], axes: Axes, *, recomputed: bool = False, once: bool = False
) -> list[Tensor]:
    """Run ``products`` on the whole sequence; they share one gather, and in backward one sum.

    Args:
        x: (b, s, hidden), or (b, s / tp, hidden) with sequence parallelism.
        products: linears of columns of this rank, (b, s, hidden) -> (b, s, n).
        recomputed: it runs in a part that backward computes again.
        once: ``products`` are called once, with the whole: those that are units of fsdp.
    """
    if axes.tp.size == 1:
        return [product(x) for product in products]
    chunks = _chunks_of(x.shape[1]) if axes.overlap and axes.sequence and not once else 1
    if torch.compiler.is_compiling():
        return _columns_uncompiled(x, products, axes, recomputed, chunks)
    return _columns(x, products, axes, recomputed, chunks)


def joined(x: Tensor, axes: Axes) -> Tensor:
    """The sum over tensor-parallel ranks of ``x`` (b, s, hidden), cut along the sequence as between blocks."""
    if axes.tp.size == 1:
        return x
    return _joined_uncompiled(x, axes) if torch.compiler.is_compiling() else _joined(x, axes)


def embedded(tokens: Tensor, table: Product, rows: int, axes: Axes) -> Tensor:
    """Look up ``tokens`` in a table of ``rows`` rows on each rank.

    Args:
        tokens: (b, s) numbers of the whole table.
        table: the rank's, (b, s) -> (b, s, hidden).
    Returns:
        Hidden states as between blocks.
    """
    if axes.tp.size == 1:
        return table(tokens)
    torch._assert_async(((tokens >= 0) & (tokens < axes.tp.size * rows)).all())  # as a whole table's own
    mine = tokens - axes.tp.rank * rows
    elsewhere = (mine < 0) | (mine >= rows)
    return joined(table(mine.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0), axes)


def whole_rows(x: Tensor, axis: Axis) -> Tensor:
    """The last dimension of all ranks, in their order; its gradient is the same on all of them."""
    if axis.size == 1:
        return x
    whole: Tensor = _Beside.apply(x, axis)  # type: ignore[no-untyped-call]
    return whole


def check_length(s: int, axes: Axes) -> None:
    """A row of ``s`` tokens has a part of equal length for each rank.

    Raises:
        ConfigError: sequence parallelism, and it has not.
    """
    if axes.sharded_sequence and s % axes.tp.size:
        raise ConfigError(
            f"rows have {s} tokens and parallel.tp is {axes.tp.size}; with parallel.sequence tp divides their length: "
            f"parallel.sequence = false works"
        )


def _columns(x: Tensor, products: Sequence[Product], axes: Axes, recomputed: bool, chunks: int) -> list[Tensor]:
    if not axes.sequence:
        shared: Tensor = _Copied.apply(x, axes.tp)  # type: ignore[no-untyped-call]
        return [product(shared) for product in products]
    if chunks > 1:
        return _columns_by_chunks(x, products, axes.tp, recomputed, chunks)
    return _of_whole(_Gathered.apply(x, axes.tp), products, axes.tp, recomputed)  # type: ignore[no-untyped-call]


def _of_whole(whole: Tensor, products: Sequence[Product], axis: Axis, recomputed: bool) -> list[Tensor]:
    if whole.grad_fn is None:
        return [product(whole) for product in products]
    again = _Again(whole, axis)
    made_again(whole, again.promise)  # read where the backward is split
    if recomputed:
        return [product(whole) for product in products]
    with saved_tensors_hooks(again.pack, again.unpack):
        return [product(whole) for product in products]


def _columns_by_chunks(
    x: Tensor, products: Sequence[Product], axis: Axis, recomputed: bool, chunks: int
) -> list[Tensor]:
    """[Note: chunks]"""
    sums: list[Any] = []
    parts = _Departed.apply(x, chunks, sums)  # type: ignore[no-untyped-call]
    arriving = [_start_gather(part.detach(), axis) for part in parts]
    found: list[list[Tensor]] = [[] for _ in products]
    for part, (gathered, work) in zip(parts, arriving, strict=True):
        whole = _Arrived.apply(part, axis, gathered, work, sums)  # type: ignore[no-untyped-call]
        for outs, out in zip(found, _of_whole(whole, products, axis, recomputed), strict=True):
            outs.append(out.view(out.shape[0], axis.size, -1, out.shape[2]))
    return [torch.cat(outs, 2).flatten(1, 2) for outs in found]


def _chunks_of(s: int) -> int:
    """Of equal length: the most that there may be of ``s`` tokens."""
    return next(n for n in range(CHUNKS, 0, -1) if s % n == 0)


def _joined(x: Tensor, axes: Axes) -> Tensor:
    function = _Scattered if axes.sequence else _Summed
    out: Tensor = function.apply(x, axes.tp)  # type: ignore[no-untyped-call]
    return out


# What travels stays outside of compiled parts, and with it the linears that share a gather.
_columns_uncompiled, _joined_uncompiled = _disable_dynamo(_columns), _disable_dynamo(_joined)


class _Place(NamedTuple):
    """Stands for the gathered tensor among what autograd saved."""

    shape: torch.Size


class _Again:
    """A gathered tensor that backward gathers once more. [Note: gathered again]

    Where a linear's backward is whole, autograd asks for it by ``unpack``. Where it is split I calls ``promise``, while
    the graph still has the rank's part, and W calls what that gives.
    """

    def __init__(self, whole: Tensor, axis: Axis) -> None:
        self._axis = axis
        self._node: Any = whole.grad_fn  # which has saved the rank's part, under whatever hooks are around the layer
        self._at, self._numel = whole.data_ptr(), whole.numel()
        self._awaited = 0  # takers that have been seen and have not taken
        self._part: Tensor | None = None  # between I and W
        self._made: Tensor | None = None

    def pack(self, saved: Tensor) -> Tensor | _Place:
        if saved.data_ptr() != self._at or saved.numel() != self._numel or not saved.is_contiguous():
            return saved
        self._awaited += 1
        return _Place(saved.shape)

    def unpack(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return self._take(self._node.saved_tensors[0]).view(packed.shape)

    def promise(self) -> Callable[[], Tensor]:
        self._awaited += 1
        if self._part is None:
            self._part = self._node.saved_tensors[0].detach()
        return self._keep

    def _keep(self) -> Tensor:
        assert self._part is not None, "W takes as often as I has asked"
        made = self._take(self._part)
        if self._made is None:
            self._part = None
        return made

    def _take(self, part: Tensor) -> Tensor:
        made = self._made
        if made is None:
            made = self._made = gather_sequence(part.detach(), self._axis)
        self._awaited -= 1
        if self._awaited <= 0:  # the last one; of a second backward each
            self._made = None
        return made


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(x)  # for _Again
        return gather_sequence(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return scatter_sequence(gradients[0], ctx.axis), None


class _Departed(torch.autograd.Function):
    """The chunks of a rank's part. In backward their sums are on their way: here is where they are waited for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: int, sums: list[Any]) -> tuple[Tensor, ...]:
        ctx.sums = sums
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in x.chunk(chunks, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        for axis, work, _ in ctx.sums:
            with axis_collective(axis, "reduce-scatter of a chunk of the sequence over tp"):
                work.wait()
        ctx.sums.clear()
        return torch.cat(gradients, 1), None, None


class _Arrived(torch.autograd.Function):
    """One chunk's gather, that was started; in backward its sum, which is started."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Axis, gathered: Tensor, work: Any, sums: list[Any]) -> Tensor:
        ctx.axis, ctx.sums = axis, sums
        ctx.save_for_backward(part)  # for _Again
        with axis_collective(axis, "all-gather of a chunk of the sequence over tp"):
            work.wait()
        return _by_rows(gathered, axis, part.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        parts = _by_ranks(gradients[0], ctx.axis)
        out = parts.new_empty(parts.shape[1:])
        work = _scatter(out, parts.flatten(0, 1), group=ctx.axis.group, async_op=True)
        ctx.sums.append((ctx.axis, work, parts))  # which is read until then
        return out, None, None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return scatter_sequence(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(gradients[0], ctx.axis), None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.axis), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _sum(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.width = axis, x.shape[-1]
        parts = x.new_empty(axis.size, *x.shape)
        with axis_collective(axis, "all-gather of columns over tp"):
            _gather(parts.flatten(0, 1), x.contiguous(), group=axis.group)
        return torch.cat(parts.unbind(0), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, ctx.axis.rank * ctx.width, ctx.width), None


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """(b, s / tp, hidden) of each rank -> (b, s, hidden)."""
    parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    with axis_collective(axis, "all-gather of the sequence over tp"):
        _gather(parts, x.contiguous(), group=axis.group)
    return _by_rows(parts, axis, x.shape[0])


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """(b, s, hidden) -> the sum of all ranks' parts (b, s / tp, hidden)."""
    parts = _by_ranks(x, axis)
    out = x.new_empty(parts.shape[1:])
    with axis_collective(axis, "reduce-scatter of the sequence over tp"):
        _scatter(out, parts.flatten(0, 1), group=axis.group)
    return out


def _start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Any]:
    """Where the parts of all ranks arrive, behind one another, and the work to wait for."""
    parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    return parts, _gather(parts, x, group=axis.group, async_op=True)


def _by_rows(parts: Tensor, axis: Axis, b: int) -> Tensor:
    """(ranks * b, s / tp, hidden), as it was gathered -> (b, s, hidden)."""
    _, s, *rest = parts.shape
    if b == 1:
        return parts.view(1, axis.size * s, *rest)
    return parts.view(axis.size, b, s, *rest).transpose(0, 1).reshape(b, axis.size * s, *rest)


def _by_ranks(x: Tensor, axis: Axis) -> Tensor:
    """(b, s, hidden) -> (ranks, b, s / tp, hidden)."""
    b, s, *rest = x.shape
    return x.reshape(b, axis.size, s // axis.size, *rest).transpose(0, 1).contiguous()


def _sum(x: Tensor, axis: Axis) -> Tensor:
    """A new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    with axis_collective(axis, "sum of hidden states over tp"):
        dist.all_reduce(total, group=axis.group)
    return total
