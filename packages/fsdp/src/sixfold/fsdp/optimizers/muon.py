"""Muon over pieces of matrices: whole ones at their owners for the length of Newton-Schulz, and nowhere else.

    parts of buffers/layout.py --> spread_owners, plan_groups (pure) --> PieceMuon --> sharded_optimizer.py

torch.optim.Muon needs whole matrices in one place only: the iteration. Momentum, weight decay and the update itself
are elementwise and stay with the shards. So every matrix has an owner. Owners are chosen over all matrices of the
optimizer, so that ranks have about equal work. Pieces of the update travel to owners and back, by one all-to-all each
way for all matrices of a shape. [Note: bf16 on the wire] torch rounds to bfloat16 before the first product and returns
bfloat16. So bfloat16 travels and no bit is lost.

Knows no unit and no hook.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.collectives.comm import Comm

Shape = tuple[int, int]
Parts = Sequence[tuple[int, int, int]]  # (rank, start, stop) of a flattened matrix, in the order of ranks


def orthogonal_work(shape: Shape) -> int:
    """Multiplications of one Newton-Schulz iteration: two products with the matrix, one of its Gram matrix."""
    short, long = min(shape), max(shape)
    return 2 * short * short * long + short**3


def spread_owners(shapes: Sequence[Shape], ranks: int) -> list[int]:
    """An owner for each matrix, so that the busiest rank has as little to do as the longest-first rule gives.

    That is at most the even share plus the last matrix that it took. With many matrices per rank it is nearly even;
    with fewer matrices than ranks it is one matrix. The same on every rank, whatever it holds.

    Cost: O(M log M) for M matrices. Source: Graham 1969, "Bounds on multiprocessing timing anomalies".
    """
    queue = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(shapes)
    for at in sorted(range(len(shapes)), key=lambda i: (-orthogonal_work(shapes[i]), i)):
        load, owner = queue[0]
        heapq.heapreplace(queue, (load + orthogonal_work(shapes[at]), owner))
        owners[at] = owner
    return owners


@dataclass(frozen=True)
class Piece:
    """Elements of matrix ``at`` (its place in the optimizer's list) in a buffer of the exchange."""

    at: int
    offset: int
    numel: int


@dataclass(frozen=True)
class ShapeGroup:
    """The exchange of all matrices of one shape, as one rank sees it.

    Attributes:
        mine: pieces that lie here, in the order they are sent: by owner, then by matrix.
        owned: for each matrix that is whole here, its pieces as they arrive: by sender, in the matrix's own order.
        sent, received: elements to and from each rank. The way back is the same, turned round.
    """

    shape: Shape
    mine: tuple[Piece, ...]
    owned: tuple[tuple[Piece, ...], ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def __str__(self) -> str:
        whole = ",".join(str(pieces[0].at) for pieces in self.owned) or "none"
        return f"{self.shape[0]}x{self.shape[1]} owns {whole} sends {list(self.sent)} receives {list(self.received)}"


def plan_groups(
    shapes: Sequence[Shape], parts: Sequence[Parts], owners: Sequence[int], rank: int, ranks: int
) -> list[ShapeGroup]:
    """What ``rank`` sends and receives, for each shape in the order in which it first appears."""
    by_shape: dict[Shape, list[int]] = {}
    for at, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(at)
    return [_group(shape, members, parts, owners, rank, ranks) for shape, members in by_shape.items()]


def _group(
    shape: Shape, members: Sequence[int], parts: Sequence[Parts], owners: Sequence[int], rank: int, ranks: int
) -> ShapeGroup:
    outgoing: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]  # by owner: (matrix, elements)
    incoming: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]  # by sender
    for at in members:
        for holder, start, stop in parts[at]:
            if holder == rank:
                outgoing[owners[at]].append((at, stop - start))
            if owners[at] == rank:
                incoming[holder].append((at, stop - start))
    arriving: dict[int, list[Piece]] = {at: [] for at in members if owners[at] == rank and parts[at]}
    for piece in _in_a_row(incoming):
        arriving[piece.at].append(piece)
    return ShapeGroup(
        shape,
        tuple(_in_a_row(outgoing)),
        tuple(tuple(pieces) for pieces in arriving.values()),
        tuple(sum(numel for _, numel in one) for one in outgoing),
        tuple(sum(numel for _, numel in one) for one in incoming),
    )


def _in_a_row(by_rank: Sequence[Sequence[tuple[int, int]]]) -> list[Piece]:
    flat = [entry for one in by_rank for entry in one]
    offsets = accumulate((numel for _, numel in flat), initial=0)
    return [Piece(at, offset, numel) for (at, numel), offset in zip(flat, offsets, strict=False)]


@dataclass(frozen=True)
class _Flight:
    group: ShapeGroup
    pieces: Tensor  # (sum of group.sent,) bfloat16: updates on the way out, orthogonal ones when they are back
    whole: Tensor  # (sum of group.received,) bfloat16
    work: Any


class PieceMuon:
    """The step of one ``torch.optim.Muon`` over matrices that are sharded over ``comm``.

    Args:
        matrices: (index of the parameter group, record) of each, the same list on all ranks.
        wait: waits for a Work, with the deadline.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        matrices: Sequence[tuple[int, ParamRecord]],
        comm: Comm,
        wait: Callable[[Any], None],
    ) -> None:
        self._optimizer = optimizer
        self._matrices = matrices
        self._comm = comm
        self._wait = wait
        shapes: list[Shape] = [(record.spec.shape[0], record.spec.shape[1]) for _, record in matrices]
        self.owners = spread_owners(shapes, comm.size)
        parts = [record.flat_buffer.cut.layout.parts(record.name) for _, record in matrices]
        self.groups = plan_groups(shapes, parts, self.owners, comm.rank, comm.size)

    def report(self) -> dict[str, Any]:
        """What a step moves, and the work of the busiest rank over the even share."""
        loads = [0] * self._comm.size
        for (_, record), owner in zip(self._matrices, self.owners, strict=True):
            loads[owner] += orthogonal_work((record.spec.shape[0], record.spec.shape[1]))
        return {
            "matrices": len(self._matrices),
            "ranks": len(loads),
            "exchanges": 2 * len(self.groups),
            "sent_bytes": 2 * sum(sum(group.sent) + sum(group.received) for group in self.groups),
            "imbalance": max(loads) * len(loads) / max(sum(loads), 1),
        }

    def step(self) -> None:
        """One step, collective. A matrix without a gradient takes part with zeros and is left as it is.

        (Who holds no piece of it cannot know, and all ranks must send the same.)
        """
        out = [self._send(group) for group in self.groups]
        back = [self._orthogonalise(flight) for flight in out]
        for flight in back:
            self._wait(flight.work)
        for flight in back:  # all or none: where a rank was lost no weight has moved
            for piece in flight.group.mine:
                self._apply(piece, flight)

    def _send(self, group: ShapeGroup) -> _Flight:
        device = self._matrices[0][1].flat_buffer.device
        pieces = torch.empty(sum(group.sent), dtype=torch.bfloat16, device=device)
        for piece in group.mine:
            place = pieces[piece.offset : piece.offset + piece.numel]
            update = self._update(piece.at)
            if update is None:
                place.zero_()
            else:
                place.copy_(update.view(-1))  # [Note: bf16 on the wire]
        whole = torch.empty(sum(group.received), dtype=torch.bfloat16, device=device)
        return _Flight(group, pieces, whole, self._exchange(whole, pieces, group.received, group.sent))

    def _exchange(self, received: Tensor, sent: Tensor, incoming: Sequence[int], outgoing: Sequence[int]) -> Any:
        # As bytes: not every back end sends bfloat16.
        return self._comm.all_to_all_uneven(
            received.view(torch.uint8), sent.view(torch.uint8), [2 * n for n in incoming], [2 * n for n in outgoing]
        )

    def _update(self, at: int) -> Tensor | None:
        """Momentum, as torch's: elementwise."""
        number, record = self._matrices[at]
        main, options = record.main, self._optimizer.param_groups[number]
        assert main is not None, f"{record.name} has a piece here and no main parameter"
        if main.grad is None:
            return None
        state = self._optimizer.state[main]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(main.grad, memory_format=torch.preserve_format)
        momentum, buffer = options["momentum"], state["momentum_buffer"]
        buffer.lerp_(main.grad, 1 - momentum)
        update: Tensor = main.grad.lerp(buffer, momentum) if options["nesterov"] else buffer
        return update

    def _orthogonalise(self, flight: _Flight) -> _Flight:
        self._wait(flight.work)
        for pieces in flight.group.owned:
            options = self._optimizer.param_groups[self._matrices[pieces[0].at][0]]
            places = [flight.whole[piece.offset : piece.offset + piece.numel] for piece in pieces]
            update = _newton_schulz(torch.cat(places).view(flight.group.shape), options).reshape(-1)
            torch._foreach_copy_(places, list(torch.split(update, [piece.numel for piece in pieces])))
        group = flight.group
        work = self._exchange(flight.pieces, flight.whole, group.sent, group.received)
        return _Flight(group, flight.pieces, flight.whole, work)

    def _apply(self, piece: Piece, flight: _Flight) -> None:
        """Weight decay and update, as torch's: elementwise."""
        number, record = self._matrices[piece.at]
        main, options = record.main, self._optimizer.param_groups[number]
        if main is None or main.grad is None:
            return
        rate = options["lr"]
        if isinstance(rate, Tensor):
            rate = rate.squeeze()
        adjusted = torch.optim._muon._adjust_lr(rate, options["adjust_lr_fn"], torch.Size(flight.group.shape))
        main.mul_(1 - rate * options["weight_decay"])
        update = flight.pieces[piece.offset : piece.offset + piece.numel]
        main.add_(update.view(main.shape), alpha=-adjusted)


def _newton_schulz(update: Tensor, options: dict[str, Any]) -> Tensor:
    """torch's own iteration, so that bits are torch's."""
    orthogonal: Tensor = torch.optim._muon._zeropower_via_newtonschulz(
        update, options["ns_coefficients"], options["ns_steps"], options["eps"]
    )
    return orthogonal
