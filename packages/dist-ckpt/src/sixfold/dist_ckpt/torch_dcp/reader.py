"""``Reader``: torch DCP's ``StorageReader`` over this engine.

    folder --> Metadata --> torch's planner --> read items --> Reader (this file): ranges, blocks hashed --> tensors

torch's ``load`` calls, on each rank: read_metadata, set_up_storage_reader, prepare_local_plan; on the first:
prepare_global_plan; on each: read_data. Between them torch gathers and scatters. With its plan each rank sends which
blocks it will touch. It gets back which of them it hashes: each block is hashed by one rank. An error of one rank
ends the load on all.

[Note: mirrors that become one] What lies behind a URL is read through a local mirror. Each rank must first make one
for itself, to read the metadata. Later the first rank knows what all will touch. From then on the ranks of a host
read in the mirror of the first one among them, and each block is fetched and hashed by one of them.
"""

from __future__ import annotations

import io
import os
import socket
import uuid
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from sixfold.dist_ckpt.checkpoint.opening import VERIFY_MODES, Checkpoint
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, MismatchError, ShardingError, at, typed
from sixfold.dist_ckpt.formats.integrity import Block, Span
from sixfold.dist_ckpt.geometry.box import Box
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Stored
from sixfold.dist_ckpt.interpreter import collection_paused, older_objects_skipped
from sixfold.dist_ckpt.mirror.leases import Host, this_host
from sixfold.dist_ckpt.mirror.mirror import Mirror
from sixfold.dist_ckpt.plans import plan as plans
from sixfold.dist_ckpt.plans.shard_table import raise_problems
from sixfold.dist_ckpt.save_load import loading
from sixfold.dist_ckpt.save_load import reader as engine
from sixfold.dist_ckpt.save_load.host_view import HostView, Shares
from sixfold.dist_ckpt.serialization import await_saves_to
from sixfold.dist_ckpt.state.in_place import fresh_like, raise_versions, two_values
from sixfold.dist_ckpt.state.records import ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import check_writable, same_bits
from sixfold.dist_ckpt.storage.local import store_at
from sixfold.dist_ckpt.storage.store import Store
from sixfold.dist_ckpt.torch_dcp import metadata as dcp_metadata
from sixfold.dist_ckpt.torch_dcp.writer import Place, is_place


class _Wish(NamedTuple):
    """What a rank tells the first one, in the ``storage_data`` of its plan; the last three are of its mirror."""

    touched: list[Span]
    cpus: tuple[str, int]
    save_id: str | None
    room: tuple[str, int] | None
    host: Host | None
    token: str


class _Share(NamedTuple):
    """What the first rank answers: which blocks this rank, and those whose mirrors become one with its own, hash and
    fetch; how many threads it has; by rank the tokens of those mirrors."""

    rank: int
    blocks: Shares
    threads: int
    tokens: dict[int, str]


@dataclass(slots=True)
class _Opened:
    """A checkpoint that is open, until its ``mirrors`` are closed; ``metadata`` is what torch was told of it."""

    view: HostView
    checkpoint: Checkpoint
    metadata: Metadata
    mirrors: ExitStack
    wished: list[Span] = field(default_factory=list)

    def box(self, item: ReadItem) -> tuple[Stored, Box]:
        """What an item asks for."""
        key, start = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        stored = self.checkpoint.manifest.tensors.get(key)
        if stored is None or len(start) != len(stored.shape):
            raise MismatchError(f"{key}: the planner asks for a chunk at {start}, which the checkpoint does not hold")
        box = Box(tuple(item.storage_offsets), tuple(item.lengths)).shifted(start)
        if not box.within(stored.shape):
            raise MismatchError(f"{key}: the planner asks for {box} of a tensor of shape {stored.shape}")
        return stored, box

    def goal(self, item: ReadItem, planner: LoadPlanner) -> tuple[ReadItem, torch.Tensor, ShardedTensor]:
        """An item, the tensor that the planner gives for it, and the same as a record."""
        stored, box = self.box(item)  # first: a planner may stumble over an item that asks for what is not there
        tensor, key = planner.resolve_tensor(item).detach(), item.storage_index.fqn
        return item, tensor, ShardedTensor(key, tensor, tensor.dtype, box.size, stored.shape, box.offset, None)

    def bytes_at(self, item: ReadItem) -> ByteRange:
        """Where a value lies that is no tensor."""
        key, objects = item.storage_index.fqn, self.checkpoint.manifest.objects
        if key not in objects:
            raise MismatchError(f"{key}: the planner asks for bytes, which the checkpoint does not hold")
        return objects[key]

    def touched(self, items: Sequence[ReadItem]) -> list[Span]:
        """The blocks of the chunks that these items name, those that are hashed or come into a mirror."""
        frames = set[ByteRange]()
        for item in items:
            frame = dcp_metadata.frame_of(self.checkpoint.manifest, item.storage_index)
            if frame is not None:
                frames.add(frame)
            elif item.type == LoadItemType.BYTE_IO:
                frames.add(self.bytes_at(item))
            else:
                self.box(item)  # not a chunk's own: which chunks it is of is found when it is read
        return self.view.touched(self.checkpoint, frames, 1)

    def arriving(self, share: _Share) -> tuple[HostView, Checkpoint]:
        """The checkpoint whose bytes arrive from now on, if it is a mirror. See [Note: mirrors that become one]."""
        view, checkpoint, mirror = self.view, self.checkpoint, self.view.mirror
        if mirror is None:
            return view, checkpoint
        first = next(iter(share.tokens.values()))
        if mirror.token != first:
            mirror = self.mirrors.enter_context(_given_up_on_error(Mirror(view.store, first, share.rank)))
            mirror.attach()
            view = replace(view, folder=mirror.folder, mirror=mirror)
            checkpoint = view.opened(checkpoint.verify)
        mirror.share(share.rank, share.tokens)
        mirror.start(share.blocks, checkpoint.block_bytes)
        return view, checkpoint


@contextmanager
def _given_up_on_error(mirror: Mirror) -> Iterator[Mirror]:
    """A mirror until it is closed; who shares it hears of an error."""
    with closing(mirror), mirror.giving_up():
        yield mirror


class Reader(StorageReader):
    """Loads of ``torch.distributed.checkpoint`` by ranges, checked; folders of torch, of megatron and of this package.

        dcp.load(state, storage_reader=Reader("run/step-00000007"))  # as FileSystemReader
        dcp.load(state, checkpoint_id="run/step-00000007", storage_reader=Reader(""))  # the id goes before the path

    ``.metadata`` is read without unpickling. Values that are no tensors follow torch's weights-only rules before the
    planner sees them.

    Args:
        path: the folder; a URL that fsspec opens; a Store. "" if each call names a ``checkpoint_id``.
        verify: as of ``sixfold.dist_ckpt.load``: "touched" checks each block that is read, on one rank, "full" all
            blocks, "off" none.
        dtype_policy: where the dtype asked for is not the stored one: "cast" converts as torch does and warns once,
            "exact" refuses values that would be lost, "strict" any difference.
        safe_globals: classes that values may name besides torch's own list.
        thread_count: threads of each rank that read; None for this rank's share of the host's cores.
    Raises:
        CheckpointError: an argument is none of these. In ``load``, inside torch's CheckpointException: CorruptError,
            MismatchError, ShardingError, UnsafeError, StorageError as of ``sixfold.dist_ckpt.load``.
    """

    def __init__(
        self,
        path: Place,
        *,
        verify: str = "touched",
        dtype_policy: str = "cast",
        safe_globals: Sequence[Any] = (),
        thread_count: int | None = None,
    ) -> None:
        super().__init__()
        if thread_count is not None and thread_count < 1:
            raise CheckpointError(f"thread_count is {thread_count}; it is >= 1")
        plans.check_policy(dtype_policy)
        if verify not in VERIFY_MODES:
            raise CheckpointError(f"verify is {verify!r}; it is one of {VERIFY_MODES}")
        self.path = path
        self.verify, self.dtype_policy, self.safe_globals = verify, dtype_policy, tuple(safe_globals)
        self.thread_count = thread_count
        self.load_id = str(uuid.uuid4())
        self._now: _Opened | None = None
        self._at_end: weakref.finalize[..., Reader] | None = None  # closes the mirrors
        self._failure: CheckpointError | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_now": None, "_at_end": None, "_failure": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is the place of a checkpoint."""
        return is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of ``checkpoint_id`` if that is given."""
        if checkpoint_id:
            self.path = checkpoint_id
        self.load_id = str(uuid.uuid4())
        self._now = self._failure = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The place of the next load."""
        return self.path.name if isinstance(self.path, Store) else self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Each rank: open the folder, small files and sizes checked, as torch's ``Metadata``.

        torch's ``load`` takes any error of this call for a missing file. It asks again for one of this rank alone
        (``rank``), and ends with an error of its own. So the second call returns nothing, and
        ``set_up_storage_reader`` raises the error.

        Raises:
            MismatchError, CorruptError, UnsafeError, StorageError: as ``sixfold.dist_ckpt.load``.
        """
        if kwargs.get("rank") is not None and self._failure is not None:
            return Metadata({})
        try:
            found = typed(self._open)
        except CheckpointError as error:
            self._failure = error
            raise
        self._failure = None
        assert found.storage_meta is not None, "metadata_of makes one"
        found.storage_meta.load_id = self.load_id
        return found

    def _open(self) -> Metadata:
        store, mirrors = store_at(self.path), ExitStack()
        await_saves_to(store)
        self._close()
        self._at_end = weakref.finalize(self, mirrors.close)  # also where nothing is read
        view = HostView(store, store.local_folder or Path(), None, ((0,),), 0)
        if store.local_folder is None:
            mirror = mirrors.enter_context(_given_up_on_error(Mirror(store)))
            mirror.create()
            view = replace(view, folder=mirror.folder, mirror=mirror)
        with view.errors_named():
            checkpoint = view.opened(self.verify)
            data = checkpoint.small_file(".metadata")
            trusted = checkpoint.integrity is not None and self.verify != "off"
            with collection_paused():
                checkpoint.manifest = checkpoint.manifest.in_memory()  # torch is told of each chunk
                found = at(
                    checkpoint.folder / ".metadata",
                    lambda: dcp_metadata.metadata_of(checkpoint.manifest, data, trusted_bytes=trusted),
                )
        self._now = _Opened(view, checkpoint, found, mirrors)
        return found

    def _close(self) -> None:
        if self._at_end is not None:
            self._at_end()
        self._now = self._at_end = None

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Each rank. The metadata is that of ``read_metadata``, which has opened the folder."""
        if self._failure is not None:
            raise self._failure
        # Until the load ends: torch's plans of 8,000 tensors are a million objects.
        self._opened().mirrors.enter_context(older_objects_skipped())

    def _opened(self) -> _Opened:
        if self._now is None:
            raise CheckpointError("read_metadata opens the checkpoint; torch's load calls it first, on the same Reader")
        return self._now

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Each rank: which blocks its items touch goes with its plan."""
        now = self._opened()
        now.wished, mirror = now.touched(plan.items), now.view.mirror
        mine = (None, "") if mirror is None else (this_host(), mirror.token)
        cpus = (socket.gethostname(), len(os.sched_getaffinity(0)))
        return replace(
            plan, storage_data=_Wish(now.wished, cpus, now.checkpoint.manifest.save_id, now.view.room(), *mine)
        )

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The first rank: share out who hashes which block, each to one rank of those that see the same folder.

        Raises:
            CorruptError: the ranks see different checkpoints under the path.
        """
        now, wishes = self._opened(), [plan.storage_data for plan in plans if isinstance(plan.storage_data, _Wish)]
        if len(wishes) < len(plans):
            return plans  # a planner has made others: then each rank hashes what it touches
        if len({wish.save_id for wish in wishes}) > 1:
            raise CorruptError(
                f"the ranks see different checkpoints under {self.path}: they share no file system, or a save replaced "
                "it while they opened it. Load it again"
            )
        by_host: dict[Host | None, list[int]] = {}
        for rank, wish in enumerate(wishes):
            by_host.setdefault(wish.host, []).append(rank)
        view = replace(now.view, hosts=tuple(map(tuple, by_host.values())))
        blocks = view.shares([wish.touched for wish in wishes])
        view.check_room(blocks, [wish.room for wish in wishes], now.checkpoint.block_bytes)
        threads = loading.threads_of([wish.cpus for wish in wishes])
        shares = [
            _Share(rank, own, threads, {mate: wishes[mate].token for mate in own})
            for rank, own in enumerate(view.parts(blocks))
        ]
        return [replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Each rank: fill the planner's tensors, hash this rank's share, then hand over what is no tensor.

        Raises:
            CorruptError, with file and key: bytes are not those that were saved. ShardingError: a tensor of the planner
            has another shape than its item, holds no values, or two elements in one place. MismatchError: the
            checkpoint does not hold what an item asks for; dtypes or values do not fit. UnsafeError: a value names a
            class that was not allowed. StorageError: the folder was replaced meanwhile.
        """
        now, share = self._opened(), plan.storage_data
        if not isinstance(share, _Share):  # a planner has made another plan
            now.wished, mirror = now.touched(plan.items), now.view.mirror
            share = _Share(0, {0: now.wished}, 1, {0: mirror.token if mirror else ""})
            now.view.check_room([now.wished], [now.view.room()], now.checkpoint.block_bytes)
        try:
            with now.mirrors, now.view.errors_named():
                try:
                    view, checkpoint = now.arriving(share)
                    with view.errors_named():
                        typed(lambda: self._read(now, checkpoint, plan.items, planner, share))
                finally:  # another save that has taken the place meanwhile explains any other error too
                    now.checkpoint.check_unchanged()
                    now.view.check_unchanged()
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(
        self,
        now: _Opened,
        checkpoint: Checkpoint,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
        share: _Share,
    ) -> None:
        with collection_paused():
            _check_whole(planner, now.metadata)
            goals = [now.goal(item, planner) for item in items if item.type != LoadItemType.BYTE_IO]
            records = [record for *_, record in goals]
            planned = plans.plan_load(records, checkpoint.manifest, dtype_policy=self.dtype_policy)
        raise_problems(list(planned.mismatches), "asked for", MismatchError)
        values = [(item, now.bytes_at(item)) for item in items if item.type == LoadItemType.BYTE_IO]
        touched = now.view.touched(checkpoint, planned.frames() | {frame for _, frame in values}, 1)
        # A planner may have added items since the shares were made.
        hashed = _blocks_of(share.blocks[share.rank]) | (_blocks_of(touched) - _blocks_of(now.wished))
        odd = {n for n, record in enumerate(records) if not _is_writable(record, goals[n][1])}
        seconds = _seconds([goal for n, goal in enumerate(goals) if n not in odd])  # [Note: tied weights]
        copies = {n: fresh_like(goals[n][1]) for n in range(len(goals)) if n not in odd and goals[n][2].key in seconds}
        filling = [replace(own, data=copies[n]) if n in copies else own for n, own in enumerate(records)]
        direct = replace(planned, reads=tuple(read for read in planned.reads if read.record not in odd))
        reader = engine.Reader(checkpoint, self.dtype_policy, self.thread_count or share.threads)
        has_digests = checkpoint.integrity is not None and self.verify != "off"

        def filled(number: int) -> None:
            if number not in odd and number not in copies:
                raise_versions([goals[number][1]])
                planner.commit_tensor(*goals[number][:2])

        reader.run(filling, direct, hashed if has_digests else (), filled)
        for number, copy in copies.items():
            item, tensor, record = goals[number]
            if not same_bits(copy, tensor):
                raise MismatchError(two_values(record.key, seconds[record.key]))
            planner.commit_tensor(item, tensor)
        for read in (read for read in planned.reads if read.record in odd):
            item, tensor, _ = goals[read.record]
            tensor.copy_(_part_of(reader.read_value(read.key, read.chunk.frame, self.safe_globals)[1], item))
            planner.commit_tensor(item, tensor)
        for item, frame in values:
            value = reader.read_value(item.storage_index.fqn, frame, self.safe_globals)
            planner.load_bytes(item, self._bytes(*value))
        if reader.cast_keys and self.dtype_policy == "cast":
            keys = ", ".join(sorted(reader.cast_keys))
            warnings.warn(f"values were converted to another dtype in {keys}", stacklevel=2)

    def _bytes(self, data: bytes, value: Any) -> io.BytesIO:
        """What the planner may ``torch.load`` without rules: it was read by torch's weights-only rules before.

        Where those put stand-ins in the place of numpy's own functions, the value is written anew.
        """
        if b"numpy" not in data:
            return io.BytesIO(data)
        again = io.BytesIO()
        torch.save(value, again)
        again.seek(0)
        return again


def _is_writable(record: ShardedTensor, tensor: torch.Tensor) -> bool:
    """Whether bytes can be put where a tensor lies; False for a subclass, which is filled by torch's copy.

    Raises:
        ShardingError: a meta tensor; two elements in one place.
    """
    try:
        check_writable(record, tensor)
    except ShardingError:
        if type(tensor) is torch.Tensor:
            raise
        return False
    return True


def _seconds(goals: Iterable[tuple[ReadItem, torch.Tensor, ShardedTensor]]) -> dict[str, str]:
    """Names whose parts fill the very memory that those of an earlier name fill, which is given with each."""
    parts: dict[str, list[torch.Tensor]] = {}
    for _, tensor, record in goals:
        if tensor.numel():
            parts.setdefault(record.key, []).append(tensor)
    firsts, seconds = dict[Any, list[str]](), dict[str, str]()
    for key, own in parts.items():
        start = min((str(part.device), part.data_ptr()) for part in own)
        same = firsts.setdefault((start, sum(part.numel() for part in own), own[0].dtype), [])
        first = next((name for name in same if _end(parts[name]) == _end(own)), None)
        if first is None:
            same.append(key)
        else:
            seconds[key] = first
    return seconds


def _end(parts: Sequence[torch.Tensor]) -> int:
    """Where the last element of them lies."""
    return max(part[(slice(-1, None),) * part.dim()].data_ptr() for part in parts)


def _part_of(value: Any, item: ReadItem) -> torch.Tensor:
    """What an item wants of a whole chunk."""
    if not isinstance(value, torch.Tensor):
        raise CorruptError(f"{item.storage_index.fqn} is stored as a {type(value).__name__} and not as a tensor")
    if tuple(value.shape) == tuple(item.lengths):
        return value
    return value[tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))]


def _check_whole(planner: LoadPlanner, metadata: Metadata) -> None:
    """CorruptError for elements that are in no chunk, of a tensor that torch's planner asks for: they would stay.

    That chunks overlap ``plan_load`` finds. Planners of users may have reasons to read less.
    """
    if type(planner) not in (DefaultLoadPlanner, _EmptyStateDictLoadPlanner):
        return
    for key, value in vars(planner)["state_dict"].items():
        stored = metadata.state_dict_metadata.get(key)
        if isinstance(stored, TensorStorageMetadata) and isinstance(value, torch.Tensor):
            missing = prod(stored.size) - sum(prod(chunk.sizes) for chunk in stored.chunks)
            if missing > 0:
                raise CorruptError(f"{key}: {missing} of its elements are in no chunk of the checkpoint")


def _blocks_of(spans: Iterable[Span]) -> set[Block]:
    """Each of them."""
    return {block for span in spans for block in span.blocks()}
