"""Attention over context-parallel ranks: keys and values come to the queries, gathered or around a ring.

    q, k, v of the rank's chunks --> gathered_keys (this file) --> a back end of attention.py
                                 `-> ring          (this file): blocks of partial_attention.py, joined

Queries stay. A rank's keys and values travel together, key heads and not the query heads that share them.

[Note: sums of key gradients] Gradients of gathered keys are exchanged and added in float32, in the order of ranks. It
is a reduce-scatter whose result has fixed bits, and whose wait has the group's deadline. gloo's own has none.

[Note: the ring] In step j a rank has the keys of rank - j, sends them on and computes meanwhile. It holds its own,
those that it computes with and those that arrive, never more. Partial results are joined by their log-sum-exp in
float32. Backward sends the keys around once more, and behind them their gradients in float32, to which each rank adds
its part; after as many steps as there are ranks they are at home. Every rank posts the same sends and receives in the
same order, each send together with its receive, so none waits for another to begin. Blocks of which no query sees
anything are not computed. A wait on the CPU has the axis's deadline: one given to a group that is made does not reach
its messages. On a GPU the back end's watchdog has the group's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sixfold.gpt.parallel.axes import Axis
from sixfold.gpt.parallel.lost_ranks import axis_collective
from sixfold.gpt.parallel.partial_attention import Sight, gradients, partial
from sixfold.gpt.parallel.sequence_parts import KeyBlock

# Its names from torch 2.13 on, and before.
_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_KEYS, _GRADIENTS = 1, 2  # tags of messages, where the back end has tags
_CONTENTS = {_KEYS: "keys and values", _GRADIENTS: "gradients of keys and values"}


def gathered_keys(k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Keys and values (b, s, key heads, d) of all ranks, (b, S, key heads, d) in the row's order."""
    whole: tuple[Tensor, Tensor] = _Gathered.apply(k, v, axis)  # type: ignore[no-untyped-call]
    return whole


@dataclass(frozen=True, slots=True)
class RingPlan:
    """What a rank computes in the ring.

    Attributes:
        blocks: by rank of ``axis``, of which queries see something. first: (b, s). places: (s,), cap; see ``Sight``.
    """

    axis: Axis
    blocks: tuple[tuple[KeyBlock, ...], ...]
    first: Tensor
    places: Tensor
    cap: float = 0.0

    def source(self, step: int) -> int:
        """Whose keys are here in a step."""
        return (self.axis.rank - step) % self.axis.size

    def sight(self, block: KeyBlock) -> Sight:
        """What the queries of ``block`` see."""
        begin, end = block.queries
        return Sight(block.seen, self.first[:, begin:end], self.places[begin:end], block.first_key, self.cap)


def ring(q: Tensor, k: Tensor, v: Tensor, plan: RingPlan) -> Tensor:
    """Attention of the rank's queries to the keys of all ranks, (b, s, heads, d)."""
    out: Tensor = _Ring.apply(q, k, v, plan)  # type: ignore[no-untyped-call]
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
        ctx.axis, size = axis, axis.size
        b, s, groups, d = k.shape
        parts = k.new_empty(size, 2, b, 2, s // 2, groups, d)
        with axis_collective(axis, "all-gather of keys and values over cp"):
            _gather(parts.view(size * 2, b, s, groups, d), torch.stack((k, v)), group=axis.group)
        whole = k.new_empty(2, b, 2 * size, s // 2, groups, d)
        for rank in range(size):
            for at, chunk in enumerate((rank, 2 * size - 1 - rank)):
                whole[:, :, chunk] = parts[rank, :, :, at]
        keys, values = whole.view(2, b, size * s, groups, d).unbind(0)
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        axis, size = ctx.axis, ctx.axis.size
        b, row, groups, d = upstream[0].shape
        parts = upstream[0].new_empty(size, 2, b, 2, row // size // 2, groups, d)
        for number, one in enumerate(upstream):
            chunks = one.reshape(b, 2 * size, -1, groups, d)
            for rank in range(size):
                for at, chunk in enumerate((rank, 2 * size - 1 - rank)):
                    parts[rank, number, :, at] = chunks[:, chunk]
        received = torch.empty_like(parts)
        with axis_collective(axis, "exchange of gradients of keys and values over cp"):
            dist.all_to_all_single(received, parts, group=axis.group)
        total = received[0].float()
        for part in received[1:]:
            total += part
        grad_k, grad_v = total.to(parts.dtype).view(2, b, row // size, groups, d).unbind(0)
        return grad_k, grad_v, None


class _Passing:
    """One buffer on its way to the next rank, and that of the rank before on its way here."""

    def __init__(self, sent: Tensor, axis: Axis, tag: int) -> None:
        group = axis.group
        assert group is not None, "a ring of one rank"
        self._sent, self._received = sent, torch.empty_like(sent)  # kept until they have travelled
        after, before = ((axis.rank + step) % axis.size for step in (1, -1))
        messages = [
            dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=after),
            dist.P2POp(dist.irecv, self._received, group=group, tag=tag, group_peer=before),
        ]
        # Given to NCCL, the host would wait for the device.
        self._deadline = () if axis.timeout is None or sent.is_cuda else (axis.timeout,)
        self._axis, self._what = axis, f"ring of {_CONTENTS[tag]} over cp"
        with axis_collective(axis, self._what):
            self._works = dist.batch_isend_irecv(messages)

    def wait(self) -> Tensor:
        """What came."""
        with axis_collective(self._axis, self._what):
            for work in self._works:
                work.wait(*self._deadline)
        return self._received


class _Ring(torch.autograd.Function):
    """See [Note: the ring]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan) -> Tensor:
        size = plan.axis.size
        total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
        keys = torch.stack((k, v))
        for step in range(size):
            passing = _Passing(keys, plan.axis, _KEYS) if step < size - 1 else None
            for block in plan.blocks[plan.source(step)]:
                queries, seen = slice(*block.queries), slice(*block.keys)
                part = partial(q[:, queries], keys[0, :, seen], keys[1, :, seen], plan.sight(block))
                _join(total[:, queries], lse[..., queries], *part)
            if passing is not None:
                keys = passing.wait()
        out = total.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        size, (g,) = plan.axis.size, upstream
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        keys, returning = torch.stack((k, v)), None
        for step in range(size):
            passing = _Passing(keys, plan.axis, _KEYS) if step < size - 1 else None
            grads = torch.zeros(keys.shape, dtype=torch.float32, device=q.device)
            for block in plan.blocks[plan.source(step)]:
                queries, seen = slice(*block.queries), slice(*block.keys)
                mine = (g[:, queries], q[:, queries], keys[0, :, seen], keys[1, :, seen], out[:, queries])
                for all_of_it, part in zip(
                    (grad_q[:, queries], grads[0, :, seen], grads[1, :, seen]),
                    gradients(*mine, lse[..., queries], plan.sight(block)),
                    strict=True,
                ):
                    all_of_it += part
            if returning is not None:
                grads += returning.wait()
            returning = _Passing(grads, plan.axis, _GRADIENTS)
            if passing is not None:
                keys = passing.wait()
        assert returning is not None, f"a ring of {size} ranks"
        grad_k, grad_v = returning.wait().to(k.dtype).unbind(0)
        return grad_q.to(q.dtype), grad_k, grad_v, None


def _join(total: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a part (b, m, heads, d) with its log-sum-exp (b, heads, m) into what there is of both, in place."""
    joined = torch.logaddexp(lse, part_lse)
    kept, taken = ((one - joined).exp_().transpose(1, 2).unsqueeze(-1) for one in (lse, part_lse))
    total.mul_(kept).add_(part * taken)
    lse.copy_(joined)
