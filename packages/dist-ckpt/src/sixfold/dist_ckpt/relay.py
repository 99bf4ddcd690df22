"""Relay: tensors that several ranks want are read by one of them and sent on while the next is read.

    records of all ranks --> balance.py --> relay_through (this file): what this rank reads, sends, receives
    Reader.run(on_complete) --> Relay (this file) --> the other ranks' tensors

[Note: what is promised is sent] A rank that fails while it reads still sends what its peers wait for, whatever
the bytes are: the load that follows is an error on every rank, and no rank waits for its deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sixfold.dist_ckpt.balance import Shared, share_out
from sixfold.dist_ckpt.box import Box
from sixfold.dist_ckpt.errors import LostPeerError, ShardingError
from sixfold.dist_ckpt.exchange import Exchange
from sixfold.dist_ckpt.mapping import ShardedTensor, ShardId

EXCHANGE_ALGORITHMS = ("broadcast", "gather_rounds", "gather_object")
_FIRST_TAG = 0x5D000000  # keeps parts apart from each other and from a trainer's own messages
_CUT_FROM_BYTES = 1 << 20  # smaller shards stay whole
Place = tuple[str, int]


class Identity(NamedTuple):
    """Shards with equal identities hold the same values in the same order."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    elements: int


def identity(record: ShardedTensor) -> Identity:
    """What tells a shard from others, wherever it is held."""
    boxes = tuple(piece.box for piece in record.pieces())
    return Identity(record.key, record.dtype, record.global_shape, boxes, sum(box.volume for box in boxes))


def cut_unit(record: ShardedTensor) -> int:
    """Elements between two places where a shard may be cut: a row where rows are small, all where it may not be."""
    elements = identity(record).elements
    if record.data is None or not record.data.is_contiguous() or elements * record.dtype.itemsize < _CUT_FROM_BYTES:
        return max(1, elements)
    row = prod(record.local_shape[1:])
    return row if row * 1000 <= elements else 1


def part_of(record: ShardedTensor, start: int, stop: int) -> ShardedTensor:
    """Elements [start, stop) of a shard's data as a shard of its own, sharing memory."""
    if (start, stop) == (0, identity(record).elements):
        return record
    base = 0 if record.flattened_range is None else record.flattened_range.start
    data = None if record.data is None else record.data.detach().view(-1)[start:stop]
    return replace(record, data=data, flattened_range=slice(base + start, base + stop))


class _Wish(NamedTuple):
    """What other ranks must know of a record to be loaded."""

    shard: ShardId
    identity: Identity
    relaxed: bool
    device: str
    unit: int
    place: Place  # where in the checkpoint its last bytes lie: the order of reading


class Passage(NamedTuple):
    """Elements [start, stop) of a shard, read by ``sender`` and wanted by ``receivers``.

    ``records`` are their indices at the sender and at each receiver.
    """

    number: int
    sender: int
    receivers: tuple[int, ...]
    records: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype
    device: str
    shard: ShardId


def plan_passages(by_rank: Sequence[Sequence[_Wish]]) -> list[Passage]:
    """Who reads what and whom it is sent to, in the order of the checkpoint. Pure."""
    wanted: dict[tuple[Any, ...], dict[int, int]] = {}
    alone: list[tuple[int, int, _Wish]] = []
    wishes: dict[tuple[Any, ...], _Wish] = {}
    for rank, found in enumerate(by_rank):
        for index, wish in enumerate(found):
            key = (wish.identity, wish.relaxed, wish.device)
            if rank in wanted.setdefault(key, {}):
                alone.append((rank, index, wish))  # a second copy on one rank
            else:
                wanted[key][rank] = index
                wishes[key] = wish if key not in wishes or wish.unit > wishes[key].unit else wishes[key]
    keys = sorted(wanted, key=lambda key: (wishes[key].place, wishes[key].identity.key))
    shards = [
        Shared(w.identity.elements, w.identity.dtype.itemsize, tuple(sorted(wanted[key])), w.unit)
        for key in keys
        for w in [wishes[key]]
    ]
    passages: list[Passage] = []
    for key, parts in zip(keys, share_out(shards, len(by_rank)), strict=True):
        for part in parts:
            others = tuple(rank for rank in sorted(wanted[key]) if rank != part.rank)
            records = tuple(wanted[key][rank] for rank in (part.rank, *others))
            kind = wishes[key]
            what = part.start, part.stop, kind.identity.dtype, kind.device, kind.shard
            passages.append(Passage(len(passages), part.rank, others, records, *what))
    for rank, index, wish in alone:
        what = 0, wish.identity.elements, wish.identity.dtype, wish.device, wish.shard
        passages.append(Passage(len(passages), rank, (), (index,), *what))
    return passages


def relay_through(
    make: Callable[[], tuple[list[ShardedTensor], dict[int, Place]]],
    within: Exchange,
    memory: dict[str, Any] | None,
    *,
    whole_shards: bool = False,
    only_broadcasts: bool = False,
) -> Relay:
    """Agree with the ranks of ``within`` on who reads what. Collective.

    Args:
        make: gives this rank's records, their data allocated, and where each lies in the checkpoint; may raise:
            then the error is raised on all ranks of ``within``.
        memory: keeps the plan for the next load of the same records; None: nothing is kept.
        whole_shards: cut none.
        only_broadcasts: send CPU tensors too the way that tensors on accelerators go.
    Raises:
        ShardingError: ``memory`` holds the plan of other records.
    """

    def tell() -> tuple[list[ShardedTensor], list[_Wish]]:
        records, places = make()
        return records, [_wish(record, places.get(i, ("", 0)), whole_shards) for i, record in enumerate(records)]

    if memory:
        records, wishes = tell()
        if _without_places(wishes) != memory["wishes"]:
            raise ShardingError(
                "the records are others than at the first load, and do_cache_distribution is set; make a new strategy"
            )
        return Relay(records, memory["passages"], within, only_broadcasts)
    records, passages = within.together(tell, plan_passages)
    if memory is not None:
        wishes = [_wish(record, ("", 0), whole_shards) for record in records]
        memory.update(wishes=_without_places(wishes), passages=passages)
    return Relay(records, passages, within, only_broadcasts)


def _without_places(wishes: list[_Wish]) -> list[_Wish]:
    return [wish._replace(place=("", 0)) for wish in wishes]


def _wish(record: ShardedTensor, place: Place, whole_shards: bool) -> _Wish:
    assert record.data is not None, f"{record} has no data"
    same = identity(record)
    unit = max(1, same.elements) if whole_shards else cut_unit(record)
    return _Wish(record.shard_id, same, record.allow_shape_mismatch, record.data.device.type, unit, place)


class Relay:
    """One rank's share of a parallel load.

    Attributes:
        mine: what this rank reads, in the order of the checkpoint: records, or parts of them.
    """

    def __init__(
        self,
        records: Sequence[ShardedTensor],
        passages: Sequence[Passage],
        within: Exchange,
        only_broadcasts: bool = False,
    ) -> None:
        self._within, rank = within, within.rank
        self._records = records
        self._read = [passage for passage in passages if passage.sender == rank]
        self._wanted = [passage for passage in passages if rank in passage.receivers]
        moved = [p for p in passages if p.receivers and p.stop > p.start]
        # Tensors on accelerators have one stream per group: an order that all ranks know, and no tags.
        self._broadcasts = [p for p in moved if only_broadcasts or p.device != "cpu"]
        self._point_to_point = {p.number for p in moved} - {p.number for p in self._broadcasts}
        self.mine = [part_of(records[p.records[0]], p.start, p.stop) for p in self._read]
        self._ready: set[int] = set()
        self._works: list[tuple[dist.Work, int]] = []
        self._keep: list[torch.Tensor] = []  # what is under way
        self._arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []  # into a buffer, then into the tensor
        self._posted = 0

    def start(self) -> None:
        """Post what this rank will receive; nothing may fail between this and ``finish``."""
        for passage in self._wanted:
            if passage.number in self._point_to_point:
                buffer, channel = _bytes(self._buffer(passage)), self._within.channel
                work = dist.irecv(buffer, group=channel, group_src=passage.sender, tag=_tag(passage))
                self._post(work, passage.sender)

    def on_complete(self, index: int) -> None:
        """Number ``index`` of ``mine`` is in place: send it on."""
        passage = self._read[index]
        if passage.number in self._ready:
            return
        self._ready.add(passage.number)
        if passage.number in self._point_to_point:
            data = _bytes(self._flat(passage).contiguous())
            self._keep.append(data)
            for peer in passage.receivers:
                self._post(dist.isend(data, group=self._within.channel, group_dst=peer, tag=_tag(passage)), peer)
        self._broadcast_in_order()

    def finish(self) -> None:
        """Send what is left and wait for all. See [Note: what is promised is sent].

        Raises:
            LostPeerError: a rank died or is late.
        """
        for index in range(len(self._read)):
            self.on_complete(index)
        self._broadcast_in_order()
        for work, peer in self._works:
            self._wait(work, peer)
        for target, buffer in self._arrivals:
            target.copy_(buffer.view(target.shape))
        self._works, self._keep, self._arrivals = [], [], []

    def _broadcast_in_order(self) -> None:
        """Post broadcasts in the one order that all ranks know, as far as own data is there."""
        while self._posted < len(self._broadcasts):
            passage = self._broadcasts[self._posted]
            rank = self._within.rank
            if passage.sender == rank and passage.number not in self._ready:
                return
            if passage.sender == rank:
                data = self._flat(passage).contiguous()
            elif rank in passage.receivers:
                data = self._buffer(passage)
            else:
                data = torch.empty(passage.stop - passage.start, dtype=passage.dtype, device=passage.device)
            self._keep.append(data)
            work = dist.broadcast(_bytes(data), group=self._within.group, group_src=passage.sender, async_op=True)
            self._post(work, passage.sender)
            self._posted += 1

    def _flat(self, passage: Passage) -> torch.Tensor:
        """The values of a passage on this rank as a vector; a copy if the tensor is not contiguous."""
        at = 0 if passage.sender == self._within.rank else 1 + passage.receivers.index(self._within.rank)
        data = self._records[passage.records[at]].data
        assert data is not None, "records of a relay have data"
        return data.detach().reshape(-1)[passage.start : passage.stop]

    def _buffer(self, passage: Passage) -> torch.Tensor:
        """Where a passage arrives: the tensor itself, or a buffer that ``finish`` copies from."""
        at = 1 + passage.receivers.index(self._within.rank)
        data = self._records[passage.records[at]].data
        assert data is not None, "records of a relay have data"
        data = data.detach()
        if data.is_contiguous():
            return data.view(-1)[passage.start : passage.stop]
        assert passage.stop - passage.start == data.numel(), f"{passage} cuts a strided tensor"
        buffer = torch.empty(data.numel(), dtype=data.dtype, device=data.device)
        self._arrivals.append((data, buffer))
        return buffer

    def _post(self, work: dist.Work | None, peer: int) -> None:
        assert work is not None, f"rank {peer} is not in the group"
        self._works.append((work, peer))

    def _wait(self, work: dist.Work, peer: int) -> None:
        timeout_s = self._within.timeout_s
        try:
            if self._broadcasts:  # wait() on an accelerator's work does not block the host
                deadline = time.monotonic() + timeout_s
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise RuntimeError("the deadline has passed")
                    time.sleep(0.0005)
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise LostPeerError(
                f"rank {peer} of {self._within.ranks} is dead or later than timeout_s={timeout_s:g} with the tensors "
                f"that it reads for others (rank {self._within.rank} waited: {reason}). Restart the job"
            ) from error


def _bytes(vector: torch.Tensor) -> torch.Tensor:
    """A contiguous vector as bytes: the back ends know few dtypes."""
    return vector.view(torch.uint8)


def _tag(passage: Passage) -> int:
    return _FIRST_TAG + passage.number
