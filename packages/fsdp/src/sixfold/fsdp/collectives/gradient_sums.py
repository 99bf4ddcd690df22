"""The ways to sum gradients: over the ranks of a group, and one to another of another dtype.

    engine/reduce.py --> GradSum (this file) --> comm.py
    buffers/gradients.py --> add_into (this file)

Sums start now and are finished later by the callable that they return. They allocate nothing: what a sum needs beside
what is sent and its result comes in as ``scratch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sixfold.fsdp.collectives.comm import Comm, GlooComm

Wait = Callable[[Any], None]  # waits for a Work with a deadline (faults/deadlines.py)
Finish = Callable[[Wait], Tensor]  # waits, adds what is left to add, returns the sum


class GradSum(Protocol):
    """How local sums become sums over ranks, in ``result``'s dtype.

    ``scratch`` is in the dtype of ``sent``; ``wide`` as in ``add_into``.
    """

    exchanges_shards: bool  # a sum into shards is an exchange, which needs ``exchanged_numel`` elements of scratch
    exchanges_whole: bool  # so is an all-reduce

    def reduce_scatter(self, comm: Comm, sent: Tensor, result: Tensor, scratch: Tensor, wide: Tensor | None) -> Finish:
        """Start: ``result`` (n,) is to be this rank's shard of the sum of ``sent`` (size * n,), which is used up."""

    def all_reduce(self, comm: Comm, sent: Tensor, result: Tensor, scratch: Tensor, wide: Tensor | None) -> Finish:
        """Start: ``result`` is to be the whole sum of ``sent`` (same shape), which is used up."""


class BackendSum:
    """The back end's own order: fastest, and from three ranks on different for every place in a buffer."""

    exchanges_shards = exchanges_whole = False

    def reduce_scatter(self, comm: Comm, sent: Tensor, result: Tensor, scratch: Tensor, wide: Tensor | None) -> Finish:
        """One reduce-scatter in the dtype of ``sent``."""
        direct = sent.dtype == result.dtype
        part = result if direct else sent.view(comm.size, -1)[comm.rank]
        work = comm.reduce_scatter(part, sent)

        def finish(wait: Wait) -> Tensor:
            wait(work)
            return result if direct else result.copy_(part)

        return finish

    def all_reduce(self, comm: Comm, sent: Tensor, result: Tensor, scratch: Tensor, wide: Tensor | None) -> Finish:
        """One all-reduce in the dtype of ``sent``."""
        work = comm.all_reduce(sent)

        def finish(wait: Wait) -> Tensor:
            wait(work)
            return result if result.data_ptr() == sent.data_ptr() else result.copy_(sent)

        return finish


class RankOrderSum:
    """Ranks 0, 1, 2 ... from left to right in ``result``'s dtype: the same bits for every layout and back end.

    All shards travel in the dtype of ``sent`` and are added here, so bf16 halves the bytes and rounds
    each addend once, never the sum (cf. pytorch#106395).
    """

    exchanges_shards = exchanges_whole = True

    def _add_up(self, parts: Sequence[Tensor], result: Tensor, wide: Tensor | None) -> Tensor:
        """(n,) each, the first one first; ``result`` may be one of the first two. All but it may be written to."""
        return _left_to_right(parts, result, wide)

    def reduce_scatter(self, comm: Comm, sent: Tensor, result: Tensor, scratch: Tensor, wide: Tensor | None) -> Finish:
        """One all-to-all, then a local sum. It sends the bytes of a reduce-scatter."""
        if comm.size == 2:
            return self._reduce_scatter_of_two(comm, sent, result, scratch, wide)
        received = scratch[: sent.numel()]
        work = comm.all_to_all(received, sent)

        def finish(wait: Wait) -> Tensor:
            wait(work)
            return self._add_up(received.view(comm.size, -1).unbind(), result, wide)

        return finish

    def _reduce_scatter_of_two(
        self, comm: Comm, sent: Tensor, result: Tensor, scratch: Tensor, wide: Tensor | None
    ) -> Finish:
        """Each rank receives what it lacks, and nothing of its own."""
        parts = list(sent.view(2, -1).unbind())
        received = scratch[: parts[0].numel()]
        work = comm.swap(received, parts[1 - comm.rank])
        parts[1 - comm.rank] = received

        def finish(wait: Wait) -> Tensor:
            wait(work)
            return self._add_up(parts, result, wide)

        return finish

    def all_reduce(self, comm: Comm, sent: Tensor, result: Tensor, scratch: Tensor, wide: Tensor | None) -> Finish:
        """The same, and the shards are gathered again where they divide; else every rank adds all."""
        if sent.numel() % comm.size:
            received = scratch[: comm.size * sent.numel()]
            work = comm.spread(received, sent)

            def finish_whole(wait: Wait) -> Tensor:
                wait(work)
                return self._add_up(received.view(comm.size, -1).unbind(), result, wide)

            return finish_whole
        start = self.reduce_scatter(comm, sent, result.view(comm.size, -1)[comm.rank], scratch, wide)

        def finish(wait: Wait) -> Tensor:
            wait(comm.spread(result, start(wait)))
            return result

        return finish


class TreeSum(RankOrderSum):
    """Ranks 0 and 1, 2 and 3 ..., then these sums in pairs: the lowest levels of a tree over microbatches of which
    rank r of N has r, r + N, r + 2 N ...; N is a power of two. [Note: a tree with missing leaves]

    What travels is in ``result``'s dtype: a narrower one would round the sums of a pair on two ranks and not on one.
    """

    def _add_up(self, parts: Sequence[Tensor], result: Tensor, wide: Tensor | None) -> Tensor:
        """In place, in received memory."""
        level = list(parts)
        while len(level) > 2:
            level = [first.add_(second) for first, second in zip(level[::2], level[1::2], strict=True)]
        return torch.add(level[0], level[1], out=result)


class GlooSum:
    """Shards in rank order, whole sums by the back end.

    An exchange and the additions cost less than gloo's reduce-scatter; its all-reduce is good.
    """

    exchanges_shards, exchanges_whole = True, False

    def __init__(self) -> None:
        self._shards, self._whole = RankOrderSum(), BackendSum()

    def reduce_scatter(self, comm: Comm, sent: Tensor, result: Tensor, scratch: Tensor, wide: Tensor | None) -> Finish:
        """As RankOrderSum, in the dtype of ``sent``: as a reduce-scatter rounds."""
        if sent.dtype == result.dtype:
            return self._shards.reduce_scatter(comm, sent, result, scratch, wide)
        finish_sum = self._shards.reduce_scatter(comm, sent, sent.view(comm.size, -1)[comm.rank], scratch, wide)
        return lambda wait: result.copy_(finish_sum(wait))

    def all_reduce(self, comm: Comm, sent: Tensor, result: Tensor, scratch: Tensor, wide: Tensor | None) -> Finish:
        """As BackendSum."""
        return self._whole.all_reduce(comm, sent, result, scratch, wide)


def _left_to_right(parts: Sequence[Tensor], result: Tensor, wide: Tensor | None) -> Tensor:
    first, second, *rest = parts
    if first.dtype == result.dtype:
        torch.add(first, second, out=result)
    else:
        result.copy_(first)
        add_into(result, second, wide)
    for part in rest:
        add_into(result, part, wide)
    return result


def add_into(target: Tensor, addend: Tensor, scratch: Tensor | None) -> None:
    """``target += addend`` in the wider dtype of the two, rounded once to ``target``'s.

    A CPU makes a whole copy in the wider dtype first; with ``scratch`` (1-D, of that dtype) it goes in parts as long
    as the scratch, which is made once. None where a kernel converts as it reads.
    """
    if target.dtype == addend.dtype or scratch is None:
        target.add_(addend)
        return
    narrow_target = target.dtype.itemsize < addend.dtype.itemsize
    target, addend = target.view(-1), addend.reshape(-1)
    for at in range(0, target.numel(), scratch.numel()):
        into, part = target[at : at + scratch.numel()], addend[at : at + scratch.numel()]
        wide = scratch[: into.numel()]
        if narrow_target:
            wide.copy_(into)
            wide.add_(part)
            into.copy_(wide)
        else:
            wide.copy_(part)
            into.add_(wide)


def grad_sum_of(name: str, comm: Comm) -> GradSum:
    """``"backend"``, ``"rank_order"`` or ``"tree"``; a group of one has nothing to add."""
    if comm.size == 1:
        return BackendSum()
    if name == "tree":
        return TreeSum()
    if name == "rank_order":
        return RankOrderSum()
    return GlooSum() if isinstance(comm, GlooComm) else BackendSum()
