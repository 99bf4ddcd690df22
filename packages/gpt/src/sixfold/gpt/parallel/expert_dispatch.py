"""Tokens to their experts and back.

    (n, hidden) tokens, choices --> spread: a row for each choice, expert by expert --> outward --> experts
    (n, hidden) <-- combined: weighted sums <-- inward <----------------------------------------------'   (this file)

[Note: rows travel] ``axes.exchange`` has ep x tp ranks. A row goes to all tensor-parallel ranks of the expert-parallel
rank that has its expert. Each of them has a part of the expert's ffn columns. What comes back from them is summed.
Numbers of rows go first, in one small message, and are read by the host once; on an axis of one rank nothing travels
and nothing is read. Both ways are one all-to-all, in backward each is the other's gradient.

[Note: no atomics] Every gradient is a gather by an index that is known, never an addition to one: bits do not depend on
the order in which a device's threads come by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sixfold.gpt.parallel.axes import Axes, Axis
from sixfold.gpt.parallel.lost_ranks import axis_collective

# Its names before and from torch 2.12 on.
_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Choices of tokens as rows, expert by expert, of one expert in the order of tokens.

    Attributes:
        pair: (rows,) number of the choice of a row: ``token * k + which``.
        row: (tokens, k) row of each choice.
        counts: (experts,) rows of each expert.
    """

    pair: Tensor
    row: Tensor
    counts: Tensor

    @classmethod
    def of(cls, choices: Tensor, experts: int) -> TokenOrder:
        """Of ``choices`` (tokens, k), experts by number. Reads nothing on the host."""
        flat = choices.flatten()
        ordered, pair = flat.sort(stable=True)
        row = torch.empty_like(pair).scatter_(0, pair, torch.arange(len(pair), device=pair.device))
        ends = torch.searchsorted(ordered, torch.arange(experts, device=flat.device), right=True)
        return cls(pair, row.view(choices.shape), ends.diff(prepend=ends.new_zeros(1)))

    @property
    def token(self) -> Tensor:
        """(rows,) the token of each row."""
        return self.pair.div(self.row.shape[1], rounding_mode="floor")


@dataclass(frozen=True, slots=True)
class Route:
    """How rows travel. [Note: rows travel]

    Attributes:
        parts: tensor-parallel ranks, which all get a row.
        out: rows of this rank for each expert-parallel rank.
        into: rows that come from each rank of ``axis``.
        sorted: of the rows that came, from rank after rank, those in the order of experts; and back. None: they are.
        ends: int32, on the rows' device: expert e of this rank has the rows ``ends[e - 1]`` to ``ends[e]``.
        known: the same where the host knows them already.
    """

    axis: Axis
    parts: int
    out: tuple[int, ...]
    into: tuple[int, ...]
    sorted: tuple[Tensor, Tensor] | None
    ends: Tensor
    known: tuple[int, ...] | None

    @classmethod
    def of(cls, counts: Tensor, axes: Axes) -> Route:
        """For ``counts`` (experts,) rows of this rank. Collective over ``axes.exchange``."""
        axis, ep, tp = axes.exchange, axes.ep.size, axes.tp.size
        if axis.size == 1:
            return cls(axis, 1, (), (), None, counts.cumsum(0, dtype=torch.int32), None)
        assert axis.size == ep * tp, f"{axis.size} ranks exchange rows and ep * tp is {ep} * {tp}"
        here = len(counts) // ep  # experts of this rank
        mine = counts.view(ep, 1, here).expand(ep, tp, here).reshape(-1)
        theirs = torch.empty_like(mine)
        with axis_collective(axis, "exchange of numbers of rows over ep"):
            dist.all_to_all_single(theirs, mine, group=axis.group)
        theirs = theirs.view(axis.size, here)
        ends = theirs.sum(0).cumsum(0)
        numbers = torch.cat((counts.view(ep, here).sum(1), theirs.sum(1), ends)).tolist()
        out, into, known = numbers[:ep], numbers[ep : ep + axis.size], numbers[ep + axis.size :]
        by_expert = _by_expert(theirs, known[-1]) if here > 1 else None
        return cls(axis, tp, tuple(out), tuple(into), by_expert, ends.to(torch.int32), tuple(known))

    def outward(self, rows: Tensor) -> Tensor:
        """Rows of this rank -> rows for its experts, expert by expert."""
        sent = rows
        if self.parts > 1:
            sent = torch.cat([part for part in torch.split_with_sizes(rows, self.out) for _ in range(self.parts)])
        came = rows.new_empty(sum(self.into), rows.shape[1])
        with axis_collective(self.axis, "exchange of rows for experts over ep"):
            dist.all_to_all_single(came, sent.contiguous(), list(self.into), self._sent, group=self.axis.group)
        return came if self.sorted is None else came.index_select(0, self.sorted[0])

    def inward(self, rows: Tensor) -> Tensor:
        """What became of the rows that ``outward`` gave -> the sums of their parts, on the rank that they are of."""
        sent = rows if self.sorted is None else rows.index_select(0, self.sorted[1])
        came = rows.new_empty(sum(self._sent), rows.shape[1])
        with axis_collective(self.axis, "exchange of rows from experts over ep"):
            dist.all_to_all_single(came, sent.contiguous(), self._sent, list(self.into), group=self.axis.group)
        if self.parts == 1:
            return came
        parts = torch.split_with_sizes(came, [count * self.parts for count in self.out])
        return torch.cat([part.view(self.parts, len(part) // self.parts, came.shape[1]).sum(0) for part in parts])

    @property
    def _sent(self) -> list[int]:
        """Rows that go to each rank of the axis."""
        return [count for count in self.out for _ in range(self.parts)]


def _by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The permutation of rows from (rank, expert) to (expert, rank), and its inverse; ``counts`` (ranks, experts)."""
    flat = counts.flatten()
    first = (flat.cumsum(0) - flat).view(counts.shape).t().flatten()
    lengths = counts.t().flatten()
    shift = first - (lengths.cumsum(0) - lengths)
    place = torch.arange(rows, device=counts.device)
    there = place + torch.repeat_interleave(shift, lengths, output_size=rows)
    return there, torch.empty_like(there).scatter_(0, there, place)


def permute(tokens: Tensor, order: TokenOrder) -> Tensor:
    """(tokens, hidden) -> (rows, hidden): each token once for each of its choices."""
    rows: Tensor = _Permute.apply(tokens, order)  # type: ignore[no-untyped-call]
    return rows


def combine(rows: Tensor, weights: Tensor, order: TokenOrder) -> Tensor:
    """(rows, hidden), float32 weights (tokens, k) -> (tokens, hidden): sums in float32, the first choice first."""
    tokens: Tensor = _Combine.apply(rows, weights, order)  # type: ignore[no-untyped-call]
    return tokens


def exchange_rows(rows: Tensor, route: Route, *, outward: bool) -> Tensor:
    """``route.outward`` or ``route.inward``; each is the gradient of the other."""
    if route.axis.size == 1:
        return rows
    out: Tensor = _ExchangeRows.apply(rows, route, outward)  # type: ignore[no-untyped-call]
    return out


def own_share(x: Tensor, axis: Axis) -> Tensor:
    """(tokens, hidden), the same on all ranks of ``axis`` -> this rank's share; gradients are those of the whole."""
    if axis.size == 1:
        return x
    share: Tensor = _Share.apply(x, axis)  # type: ignore[no-untyped-call]
    return share


def gather_shares(share: Tensor, tokens: int, axis: Axis) -> Tensor:
    """The shares of all ranks of ``axis`` -> (tokens, hidden); its gradient is the same on all of them."""
    if axis.size == 1:
        return share
    out: Tensor = _GatherShares.apply(share, tokens, axis)  # type: ignore[no-untyped-call]
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: TokenOrder) -> Tensor:
        ctx.order = order
        return tokens.index_select(0, order.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        row = ctx.order.row
        return gradients[0].index_select(0, row.flatten()).view(*row.shape, gradients[0].shape[1]).sum(1), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: TokenOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows, weights)
        total = rows.new_zeros(len(weights), rows.shape[1], dtype=torch.float32)
        for which in range(weights.shape[1]):
            chosen = rows.index_select(0, order.row[:, which]).float()
            total.addcmul_(chosen, weights[:, which : which + 1])
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        order, (g,) = ctx.order, gradients
        of_rows = torch.empty_like(rows)
        torch.mul(g.index_select(0, order.token), weights.flatten()[order.pair].unsqueeze(1), out=of_rows)
        exact = g.float()
        of_weights = [
            rows.index_select(0, order.row[:, which]).float().mul_(exact).sum(-1) for which in range(weights.shape[1])
        ]
        return of_rows, torch.stack(of_weights, 1), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, outward: bool) -> Tensor:
        ctx.route, ctx.was_outward = route, outward
        return route.outward(rows) if outward else route.inward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back = ctx.route.inward if ctx.was_outward else ctx.route.outward
        return back(gradients[0]), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.tokens, ctx.axis = len(x), axis
        return _share(x, axis).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _joined(gradients[0], ctx.tokens, ctx.axis), None


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, tokens: int, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _joined(share, tokens, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _share(gradients[0], ctx.axis).clone(), None, None


def _share(x: Tensor, axis: Axis) -> Tensor:
    """Equal shares in the order of ranks, but for the last ones."""
    each = -(-len(x) // axis.size)
    return x[axis.rank * each : (axis.rank + 1) * each]


def _joined(share: Tensor, tokens: int, axis: Axis) -> Tensor:
    each = -(-tokens // axis.size)
    sent = share if len(share) == each else torch.cat((share, share.new_zeros(each - len(share), share.shape[1])))
    parts = share.new_empty(axis.size * each, share.shape[1])
    with axis_collective(axis, "all-gather of shares of tokens over tp"):
        _gather(parts, sent.contiguous(), group=axis.group)
    return parts[:tokens]
