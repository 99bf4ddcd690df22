"""Relay: tensors that several ranks want are read by one of them and sent on while the next is read.

    records of all ranks --> balance.py --> agree (this file): what this rank reads, sends, receives
    Reader.run(on_complete) --> Relay (this file) --> the other ranks' tensors

[Note: what is promised is sent] A rank that fails while it reads still sends what its peers wait for, whatever the
bytes are. The load is then an error on every rank, and no rank waits for its deadline.

[Note: few pieces are held] A broadcast passes through ranks that do not want it, and a strided tensor through a
contiguous copy. So what is sent is cut into pieces, and each lane of a rank (sent, received, broadcast) is a thread.
It passes its pieces in the order of their numbers, ``_SLOTS`` of ``_PIECE_BYTES`` at a time. Pieces that lie in the
memory of a tensor and go from one rank to another have no such limit. No piece waits for ever: all before the first
that is not over are over, so that each rank of it posts it. The memory of slots is kept, because pieces that come and
go cost glibc thrice their size.

[Note: who reads is not late] Ranks may read for longer than ``timeout_s`` before they send. So a rank waits for its
peers from when it has read its own share; until then it posts.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from math import prod
from threading import Event
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.errors import LostPeerError, ShardingError
from sixfold.dist_ckpt.geometry.box import Box, range_boxes
from sixfold.dist_ckpt.plans.balance import Shared, share_out
from sixfold.dist_ckpt.reused_memory import recycled
from sixfold.dist_ckpt.state.records import ShardedTensor, ShardId, is_main_replica
from sixfold.dist_ckpt.state.tensor_memory import is_plain

EXCHANGE_ALGORITHMS = ("broadcast", "gather_rounds", "gather_object")
_FIRST_TAG = 0x5D000000  # keeps parts apart from each other and from a trainer's own messages
_CUT_FROM_BYTES = 1 << 20  # smaller shards stay whole
_PIECE_BYTES = 4 << 20
_SLOTS = 8
FilePlace = tuple[str, int]


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


def part_of(record: ShardedTensor, start: int, stop: int) -> ShardedTensor:
    """Elements [start, stop) of a shard's data as a shard of its own, sharing memory."""
    if (start, stop) == (0, identity(record).elements):
        return record
    base = 0 if record.flattened_range is None else record.flattened_range.start
    data = None if record.data is None else record.data.detach().view(-1)[start:stop]
    return replace(record, data=data, flattened_range=slice(base + start, base + stop))


class ShardInfo(NamedTuple):
    """What other ranks must know of a record that one of them may write or read for all."""

    shard: ShardId
    identity: Identity
    unit: int  # elements between two places where it may be cut: a row where rows are small, all where it may not be
    is_main: bool
    device: str  # "" without data


def shard_info(record: ShardedTensor, whole: bool) -> ShardInfo:
    """``whole``: it may not be cut."""
    same, data, row = identity(record), record.data, prod(record.local_shape[1:])
    unit = row if row * 1000 <= same.elements else 1
    if whole or data is None or not data.is_contiguous() or data.nbytes < _CUT_FROM_BYTES:
        unit = max(1, same.elements)
    device = "" if data is None else data.device.type
    return ShardInfo(record.shard_id, same, unit, is_main_replica(record.replica_id), device)


class ShardTransfer(NamedTuple):
    """Elements [start, stop) of a shard, read by ``sender`` and wanted by ``receivers``.

    ``records`` are their indices at the sender and at each receiver.
    """

    number: int
    sender: int
    receivers: tuple[int, ...]
    records: tuple[int, ...]
    start: int
    stop: int
    identity: Identity
    device: str
    shard: ShardId

    @property
    def dtype(self) -> torch.dtype:
        return self.identity.dtype


class _Piece(NamedTuple):
    """Elements [start, stop) of a shard, sent at once. Numbers are the same on all ranks."""

    number: int
    transfer: ShardTransfer
    start: int
    stop: int


def on_accelerator(transfer: ShardTransfer) -> bool:
    """Tensors there have one stream per group: an order that all ranks know, and no tags."""
    return transfer.device != "cpu"


def plan_transfers(by_rank: Sequence[tuple[Mapping[int, ShardInfo], Mapping[int, FilePlace]]]) -> list[ShardTransfer]:
    """Who reads what and whom it is sent to, in the order of the checkpoint, of which records have places. Pure."""
    wanted: dict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)
    wishes: dict[tuple[Any, ...], ShardInfo] = {}
    for rank, (found, _) in enumerate(by_rank):
        copies = Counter[tuple[Any, ...]]()
        for index, wish in found.items():
            kind = (wish.identity, wish.device)
            key = (*kind, copies[kind])  # a second copy on one rank is another shard
            copies[kind] += 1
            wanted[key][rank] = index
            wishes[key] = max(wish, wishes.get(key, wish), key=lambda one: one.unit)

    def place(key: tuple[Any, ...]) -> tuple[FilePlace, str]:
        rank, index = next(iter(wanted[key].items()))
        return by_rank[rank][1].get(index, ("", 0)), key[0].key

    keys = sorted(wanted, key=place)
    shards = [Shared(key[0].elements, key[0].dtype.itemsize, tuple(wanted[key]), wishes[key].unit) for key in keys]
    transfers: list[ShardTransfer] = []
    for key, parts in zip(keys, share_out(shards, len(by_rank)), strict=True):
        for part in parts:
            ranks = (part.rank, *(rank for rank in wanted[key] if rank != part.rank))
            records = tuple(wanted[key][rank] for rank in ranks)
            what = part.start, part.stop, key[0], wishes[key].device, wishes[key].shard
            transfers.append(ShardTransfer(len(transfers), part.rank, ranks[1:], records, *what))
    return transfers


Make = Callable[[], tuple[list[ShardedTensor], dict[int, FilePlace]]]
RelayReport = tuple[dict[int, ShardInfo], dict[int, FilePlace]]


def agree(
    make: Make,
    within: Exchange,
    memory: dict[str, Any] | None,
    decide: Callable[[list[RelayReport]], list[ShardTransfer]] = plan_transfers,
    *,
    whole_shards: bool = False,
) -> tuple[list[ShardedTensor], list[ShardTransfer]]:
    """This rank's records, and which rank of ``within`` handles what for all. Collective.

    Args:
        make: gives the records, and where in the checkpoint the last bytes of each lie, if that matters. An error
            that it raises is raised on all ranks of ``within``.
        memory: keeps the plan for the next call with the same records; None: nothing is kept.
        whole_shards: cut none.
    Raises:
        ShardingError: ``memory`` holds the plan of other records.
    """

    def tell() -> tuple[tuple[list[ShardedTensor], RelayReport], RelayReport]:
        records, places = make()
        told = {index: shard_info(record, whole_shards) for index, record in enumerate(records)}, places
        return (records, told), told

    if memory:
        (records, (wishes, _)), _ = tell()
        if wishes != memory["wishes"]:
            raise ShardingError(
                "the state dict is another than at the first call, and do_cache_distribution is set; make a new "
                "strategy for it"
            )
        return records, memory["transfers"]
    (records, (wishes, _)), transfers = within.all_reduce(tell, decide)
    if memory is not None:
        memory.update(wishes=wishes, transfers=transfers)
    return records, transfers


class Relay:
    """One rank's share of a parallel load, agreed on with the ranks of ``within``: collective, as ``agree``.

    Args:
        make: as of ``agree``; the data of the records is allocated.
        by_broadcast: what all ranks take part in; the rest goes point to point. The same on all ranks.
    Attributes:
        mine: what this rank reads, in the order of the checkpoint: records, or parts of them.
    """

    def __init__(
        self,
        make: Make,
        within: Exchange,
        memory: dict[str, Any] | None,
        *,
        whole_shards: bool = False,
        by_broadcast: Callable[[ShardTransfer], bool] = on_accelerator,
    ) -> None:
        records, transfers = agree(make, within, memory, whole_shards=whole_shards)
        self._within, rank = within, within.rank
        self._read = [transfer for transfer in transfers if transfer.sender == rank]
        self.mine = [part_of(records[p.records[0]], p.start, p.stop) for p in self._read]
        self._tensors: dict[int, torch.Tensor] = {}  # that this rank has or wants, by transfer
        for transfer in transfers:
            ranks = (transfer.sender, *transfer.receivers)
            if rank in ranks:
                data = records[transfer.records[ranks.index(rank)]].data
                assert data is not None, "records of a relay have data"
                self._tensors[transfer.number] = data.detach()
        # Asked here for the index: a thread has another current device.
        self._devices = {kind: torch.empty(0, device=kind).device for kind in {p.device for p in transfers}}
        self._ready, self._has_read = {transfer.number: Event() for transfer in self._read}, Event()
        self._broadcasts = {p.number for p in transfers if p.receivers and by_broadcast(p)}
        pieces = list(_pieces(transfers))
        direct = [piece for piece in pieces if piece.transfer.number not in self._broadcasts]
        self._lanes = (
            [piece for piece in direct if rank in piece.transfer.receivers],
            [piece for piece in direct if rank == piece.transfer.sender],
            [piece for piece in pieces if piece.transfer.number in self._broadcasts],
        )

    def on_complete(self, index: int) -> None:
        """Number ``index`` of ``mine`` is in place: send it on."""
        self._ready[self._read[index].number].set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tensors are sent and received while this lasts, and at its end all. See [Note: what is promised is sent].

        Raises:
            LostPeerError: a rank died or is late.
        """
        # As the mode below, the stream that the caller's kernels are ordered by is of a thread.
        streams = [
            torch.accelerator.current_stream(device) for device in self._devices.values() if device.type != "cpu"
        ]
        with ThreadPoolExecutor(len(self._lanes), initializer=_enter, initargs=(streams,)) as pool:
            run = torch.inference_mode(torch.is_inference_mode_enabled())(self._run)  # of this thread alone
            lanes: list[Future[None]] = []
            try:
                lanes += (pool.submit(run, lane) for lane in self._lanes if lane)
                yield
            finally:
                for ready in (*self._ready.values(), self._has_read):
                    ready.set()
                for lane in lanes:
                    lane.result()

    def _run(self, lane: Sequence[_Piece]) -> None:
        """Pass the pieces of a lane. See [Note: few pieces are held]."""
        slots: dict[tuple[torch.device, int], torch.Tensor] = {}
        under_way: deque[tuple[_Piece, torch.Tensor, list[tuple[dist.Work | None, int]]]] = deque()
        bounded, settled = 0, 0

        def settle() -> int:
            oldest = under_way.popleft()
            self._settle(*oldest)
            return self._is_bounded(oldest[0])

        for piece in lane:
            if piece.transfer.number in self._ready:
                self._ready[piece.transfer.number].wait()
            while self._is_bounded(piece) and bounded - settled == _SLOTS:
                settled += settle()
            data = self._data(piece, slots, bounded % _SLOTS)
            bounded += self._is_bounded(piece)
            under_way.append((piece, data, self._works(piece.transfer, data, piece.number)))
        while under_way:
            settle()

    def _is_bounded(self, piece: _Piece) -> bool:
        """Whether a piece counts among the ``_SLOTS`` of a lane."""
        tensor = self._tensors.get(piece.transfer.number)
        return piece.transfer.number in self._broadcasts or tensor is None or not is_plain(tensor)

    def _data(self, piece: _Piece, slots: dict[tuple[torch.device, int], torch.Tensor], slot: int) -> torch.Tensor:
        """What is sent, or what it is received in: the tensor's own memory if that is dense, else a slot."""
        transfer, tensor = piece.transfer, self._tensors.get(piece.transfer.number)
        if tensor is not None and is_plain(tensor):
            return tensor.view(-1)[piece.start : piece.stop]
        place = self._devices[transfer.device] if tensor is None else tensor.device, slot
        if place not in slots:
            slots[place] = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=place[0])
        data = slots[place][: (piece.stop - piece.start) * transfer.dtype.itemsize].view(transfer.dtype)
        if tensor is not None and transfer.sender == self._within.rank:
            for region, at in _regions(tensor, piece.start, piece.stop):
                data[at].view(region.shape).copy_(region)
        return data

    def _works(self, transfer: ShardTransfer, data: torch.Tensor, number: int) -> list[tuple[dist.Work | None, int]]:
        raw, channel, tag = data.view(torch.uint8), self._within.channel, _FIRST_TAG + number
        sender = transfer.sender  # back ends know few dtypes, but all know bytes
        if transfer.number in self._broadcasts:
            return [(dist.broadcast(raw, group=self._within.group, group_src=sender, async_op=True), sender)]
        if sender == self._within.rank:
            return [(dist.isend(raw, group=channel, group_dst=peer, tag=tag), peer) for peer in transfer.receivers]
        return [(dist.irecv(raw, group=channel, group_src=sender, tag=tag), sender)]

    def _settle(self, piece: _Piece, data: torch.Tensor, works: list[tuple[dist.Work | None, int]]) -> None:
        """Wait for a piece under way, and put it in place."""
        transfer, tensor = piece.transfer, self._tensors.get(piece.transfer.number)
        for work, peer in works:
            self._wait(work, peer, transfer.number in self._broadcasts)
        if tensor is not None and transfer.sender != self._within.rank and not is_plain(tensor):
            for region, at in _regions(tensor, piece.start, piece.stop):
                region.copy_(data[at].view(region.shape))
        if self._is_bounded(piece) and not (tensor is not None and is_plain(tensor)):
            recycled(data)  # a slot

    def _wait(self, work: dist.Work | None, peer: int, polled: bool) -> None:
        """``polled``: wait() on an accelerator's work does not block the host; a message of gloo cannot be polled."""
        timeout_s = self._within.timeout_s
        assert work is not None, f"rank {self._within.rank} is not in the group"
        try:
            while not self._has_read.is_set() and not (polled and work.is_completed()):
                self._has_read.wait(0.0005 if polled else None)  # see [Note: who reads is not late]
            deadline = time.monotonic() + timeout_s
            while polled and not work.is_completed():
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


def _enter(streams: Sequence[torch.Stream]) -> None:
    """Make these the streams of this thread."""
    for stream in streams:
        torch.accelerator.set_stream(stream)


def _pieces(transfers: Sequence[ShardTransfer]) -> Iterator[_Piece]:
    number = 0
    for transfer in transfers:
        step = max(1, _PIECE_BYTES // transfer.dtype.itemsize)
        for start in range(transfer.start, transfer.stop if transfer.receivers else transfer.start, step):
            yield _Piece(number, transfer, start, min(start + step, transfer.stop))
            number += 1


def _regions(tensor: torch.Tensor, start: int, stop: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Elements [start, stop) of a tensor in row-major order as blocks of it, each with its place in that range."""
    at = 0
    for box in range_boxes(tensor.shape, start, stop):
        index = tuple(slice(low, low + length) for low, length in zip(box.offset, box.size, strict=True))
        yield tensor[index], slice(at, at + box.volume)
        at += box.volume
