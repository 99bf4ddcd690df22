"""``Reader``: torch DCP's ``StorageReader`` over this engine.

    folder --> Metadata --> torch's planner --> read items --> Reader (this file): ranges, blocks hashed --> tensors

torch's ``load`` calls, on each rank: read_metadata, set_up_storage_reader, prepare_local_plan; on the first:
prepare_global_plan; on each: read_data. Between them torch gathers and scatters: with its plan each rank sends which
blocks it will touch, and gets back which of them it is to hash, each block one rank. An error of one rank ends the
load on all.

[Note: mirrors that become one] What lies behind a URL is read through a local mirror, which each rank must make for
itself to read the metadata. When the first rank has heard what all will touch, the ranks of a host read on in that of
the first one among them: each block is fetched and hashed by one of them.
"""

from __future__ import annotations

import io
import os
import socket
import uuid
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from sixfold.dist_ckpt.doors import dcp_metadata
from sixfold.dist_ckpt.doors.dcp_items import box_of, check_whole, is_writable, outside, part_of
from sixfold.dist_ckpt.doors.dcp_write import Place, is_place
from sixfold.dist_ckpt.errors import (
    CheckpointError,
    CorruptError,
    MismatchError,
    at,
    retold,
    typed,
)
from sixfold.dist_ckpt.files import frame as frames
from sixfold.dist_ckpt.files import weights_only
from sixfold.dist_ckpt.files.integrity import Span, spans_of
from sixfold.dist_ckpt.geometry.box import Box
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Stored, StoredChunk
from sixfold.dist_ckpt.plans import plan as plans
from sixfold.dist_ckpt.road import hosts, loading
from sixfold.dist_ckpt.road import reader as engine
from sixfold.dist_ckpt.state.records import Piece, ShardedTensor
from sixfold.dist_ckpt.stores import Store, store_at
from sixfold.dist_ckpt.stores.folder import VERIFY_MODES, Checkpoint, open_checkpoint
from sixfold.dist_ckpt.stores.leases import Host, check_room
from sixfold.dist_ckpt.stores.mirror import Mirror

_Goal = tuple[ReadItem, torch.Tensor]  # and what the planner gave for it


class _Wish(NamedTuple):
    """What a rank tells the first one, in the ``storage_data`` of its plan."""

    touched: list[Span]
    cpus: tuple[str, int]
    save_id: str | None
    seen: _Seen | None = None


class _Seen(NamedTuple):
    """A rank's mirror."""

    host: Host
    token: str
    room: tuple[str, int]  # where it lies, and the bytes that are free there


class _Mates(NamedTuple):
    """The ranks of a host, whose mirror becomes one: by rank the tokens of their mirrors and what each fetches."""

    rank: int
    tokens: dict[int, str]
    shares: dict[int, list[Span]]


class _Share(NamedTuple):
    """What the first rank answers: the blocks that this rank hashes, with how many threads it works, and with whom."""

    spans: list[Span]
    threads: int
    mates: _Mates | None = None


class Reader(StorageReader):
    """Loads of ``torch.distributed.checkpoint`` by ranges, checked; folders of torch, of megatron and of this package.

        dcp.load(state, storage_reader=Reader("run/step-7"))                          # as FileSystemReader
        dcp.load(state, checkpoint_id="run/step-7", storage_reader=Reader(""))        # the id goes before the path

    ``.metadata`` is read without unpickling. Values that are no tensors follow torch's weights-only rules before the
    planner sees them.

    Args:
        path: the folder; a URL that fsspec opens; a Store. "" if each call names a ``checkpoint_id``.
        verify: as of ``sixfold.dist_ckpt.load``: "touched" checks each block that is read, on one rank, "full" all
            blocks, "off" none.
        dtype_policy: where the dtype asked for is not the stored one: "cast" converts as torch does and warns once,
            "exact" refuses values that would be lost, "strict" any difference.
        safe_globals: classes that values may name besides torch's own list.
    Raises:
        CheckpointError: an argument is none of these. In ``load``, inside torch's CheckpointException: CorruptError,
            MismatchError, UnsafeError, StorageError as of ``sixfold.dist_ckpt.load``.
    """

    def __init__(
        self,
        path: Place,
        *,
        verify: str = "touched",
        dtype_policy: str = "cast",
        safe_globals: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        plans.check_policy(dtype_policy)
        if verify not in VERIFY_MODES:
            raise CheckpointError(f"verify is {verify!r}; it is one of {VERIFY_MODES}")
        self.path = path
        self.verify, self.dtype_policy, self.safe_globals = verify, dtype_policy, tuple(safe_globals)
        self.load_id = str(uuid.uuid4())
        self._checkpoint: Checkpoint | None = None
        self._mirror: Mirror | None = None
        self._at_end: weakref.finalize[..., Reader] | None = None  # it keeps the mirrors
        self._mirrors: list[Mirror] = []
        self._failure: CheckpointError | None = None
        self._wished: list[Span] = []

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_checkpoint": None,
            "_mirror": None,
            "_at_end": None,
            "_mirrors": [],
            "_failure": None,
            "_wished": [],
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is the place of a checkpoint."""
        return is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of ``checkpoint_id`` if that is given."""
        if checkpoint_id:
            self.path = checkpoint_id
        self.load_id = str(uuid.uuid4())
        self._checkpoint = self._failure = None

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The place of the next load."""
        return self.path.name if isinstance(self.path, Store) else self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Each rank: open the folder, small files and sizes checked, as torch's ``Metadata``.

        torch's ``load`` takes any error of this for a missing file, asks again for one of this rank alone (``rank``)
        and ends with an error of its own. So the second call hands out nothing, and ``set_up_storage_reader`` raises
        the error.

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
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found

    def _open(self) -> Metadata:
        store = store_at(self.path)
        self._checkpoint = None
        self._drop_mirror()
        if store.local_folder is None:
            self._mirror = Mirror(store)
            self._mirrors = [self._mirror]
            self._at_end = weakref.finalize(self, _close_all, self._mirrors)  # also where nothing is read
            self._mirror.create()
        with self._named():
            place = self._mirror.folder if self._mirror is not None else store.name
            checkpoint = open_checkpoint(place, verify=self.verify)
            if self._mirror is not None:
                checkpoint.fill_by(self._mirror.arrives)
            data = checkpoint.small_file(".metadata")
            trusted = checkpoint.integrity is not None and self.verify != "off"
            found = at(
                checkpoint.folder / ".metadata",
                lambda: dcp_metadata.metadata_of(checkpoint.manifest, data, trusted_bytes=trusted),
            )
        self._checkpoint = checkpoint
        return found

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors inside name the URL and not its mirror."""
        try:
            yield
        except CheckpointError as error:
            if self._mirror is None:
                raise
            text = str(error)
            for mirror in self._mirrors:
                text = text.replace(str(mirror.folder), str(self.checkpoint_id))
            raise retold(error, text) from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Each rank. The metadata is that of ``read_metadata``, which has opened the folder."""
        if self._failure is not None:
            raise self._failure
        self._opened()

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise CheckpointError("read_metadata opens the checkpoint; torch's load calls it first, on the same Reader")
        return self._checkpoint

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Each rank: which blocks its items touch goes with its plan."""
        checkpoint = self._opened()
        self._wished = self._touched(plan.items)
        cpus, mirror = (socket.gethostname(), len(os.sched_getaffinity(0))), self._mirror
        seen = None if mirror is None else _Seen(Host.here(), mirror.token, (mirror.place, mirror.free_bytes))
        return replace(plan, storage_data=_Wish(self._wished, cpus, checkpoint.manifest.save_id, seen))

    def _touched(self, items: Iterable[ReadItem]) -> list[Span]:
        """The blocks of these items that are hashed, or come into a mirror."""
        checkpoint = self._opened()
        integrity = None if self.verify == "off" else checkpoint.integrity
        if integrity is None and self._mirror is None:
            return []
        if integrity is not None and self.verify == "full":
            return integrity.all_spans()
        return spans_of({self._frame(item) for item in items}, hosts.block_bytes(checkpoint))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The first rank: share out who hashes which block.

        Raises:
            CorruptError: the ranks see different checkpoints under the path.
        """
        wishes = [plan.storage_data for plan in plans if isinstance(plan.storage_data, _Wish)]
        if len(wishes) < len(plans):
            return plans  # a planner has made others: then each rank hashes what it touches
        if len({wish.save_id for wish in wishes}) > 1:
            raise CorruptError(
                f"the ranks see different checkpoints under {self.path}: they share no file system, or a save replaced "
                "it while they opened it. Load it again"
            )
        shares = plans_of(wishes)
        for share in {id(s.mates.shares): s for s in shares if s.mates is not None}.values():
            assert self._mirror is not None and share.mates is not None, "mates share a mirror"
            room = wishes[share.mates.rank].seen
            assert room is not None, "of a mirror"
            nbytes = hosts.block_bytes(self._opened())
            needed = sum(self._mirror.nbytes_of(spans, nbytes) for spans in share.mates.shares.values())
            check_room(str(self.checkpoint_id), room.room[0], needed, room.room[1])
        return [replace(plan, storage_data=share) for plan, share in zip(plans, shares, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Each rank: fill the planner's tensors, hash this rank's share, then hand over what is no tensor.

        Raises:
            CorruptError, with file and key: bytes are not those that were saved. MismatchError: shapes or values do not
            fit. UnsafeError: a value names a class that was not allowed. StorageError: the folder was replaced
            meanwhile.
        """
        checkpoint, share, touched = self._opened(), plan.storage_data, self._touched(plan.items)
        if not isinstance(share, _Share):
            share = _Share(touched, 1)
        elif more := outside(touched, self._wished):  # a planner has added items
            share = share._replace(spans=[*share.spans, *more])
        try:
            with self._named():
                checkpoint = self._filling(checkpoint, share)
                typed(lambda: self._read(checkpoint, plan.items, planner, share))
        except BaseException as error:
            for mirror in self._mirrors:
                mirror.give_up(error)
            raise
        finally:
            self._close(checkpoint)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _filling(self, checkpoint: Checkpoint, share: _Share) -> Checkpoint:
        """The checkpoint whose bytes arrive from now on, if it is a mirror. See [Note: mirrors that become one]."""
        if self._mirror is None:
            return checkpoint
        nbytes = hosts.block_bytes(checkpoint)
        if share.mates is None:
            self._mirror.check_room({0: share.spans}, nbytes)
            self._mirror.start({0: share.spans}, nbytes)
            return checkpoint
        rank, tokens, shares = share.mates
        shared, first = self._mirror, next(iter(tokens.values()))
        if shared.token != first:
            shared = Mirror(store_at(self.path), first, rank)
            shared.attach()
            self._mirrors.insert(0, shared)
            checkpoint = open_checkpoint(shared.folder, verify=self.verify)
            checkpoint.fill_by(shared.arrives)
        shared.share(rank, tokens)
        shared.start(shares, nbytes)
        return checkpoint

    def _close(self, checkpoint: Checkpoint) -> None:
        """Let go of maps and mirror. StorageError if another save has taken the place meanwhile: that explains all."""
        self._checkpoint = None
        if self._mirror is None:
            checkpoint.check_unchanged()
            return
        try:
            self._mirror.check_unchanged()
        finally:
            self._drop_mirror()

    def _drop_mirror(self) -> None:
        if self._at_end is not None:
            self._at_end()  # closes it, and keeps it no longer
        self._mirror, self._mirrors, self._at_end = None, [], None

    def _read(self, checkpoint: Checkpoint, items: Sequence[ReadItem], planner: LoadPlanner, share: _Share) -> None:
        check_whole(planner, items, checkpoint.manifest)
        reads, records, filled, whole = list[plans.Read](), list[ShardedTensor](), list[_Goal](), list[_Goal]()
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            stored, chunk = self._stored(checkpoint, item)
            tensor = planner.resolve_tensor(item).detach()
            box = box_of(item, chunk, tensor)
            self._check_dtype(item, stored, tensor)
            if not is_writable(item.storage_index.fqn, tensor):
                whole.append((item, tensor))
                continue
            key = item.storage_index.fqn
            step = (len(records), key, Piece(box, None), chunk, box, stored.dtype, stored.shape)
            reads.append(plans.Read(*step))
            records.append(ShardedTensor(key, tensor, tensor.dtype, box.size, stored.shape, box.offset, None))
            filled.append((item, tensor))
        reads.sort(key=lambda read: (read.chunk.frame.file, read.chunk.frame.offset))
        planned = plans.LoadPlan(reads=tuple(reads), zeroed=(), unexpected=(), mismatches=())
        reader = engine.Reader(checkpoint, self.dtype_policy, share.threads)
        has_digests = checkpoint.integrity is not None and self.verify != "off"
        blocks = [block for span in share.spans for block in span.blocks()] if has_digests else []
        reader.run(records, planned, blocks, lambda index: planner.commit_tensor(*filled[index]))
        for item, tensor in whole:
            tensor.copy_(part_of(self._value(checkpoint, item)[1], item))
            planner.commit_tensor(item, tensor)
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._bytes(checkpoint, item)))
        if reader.cast_keys and self.dtype_policy == "cast":
            keys = ", ".join(sorted(reader.cast_keys))
            warnings.warn(f"values were converted to another dtype in {keys}", stacklevel=2)

    def _check_dtype(self, item: ReadItem, stored: Stored, tensor: torch.Tensor) -> None:
        asked = tensor.dtype
        if asked.is_complex != stored.dtype.is_complex or (self.dtype_policy == "strict" and asked != stored.dtype):
            raise MismatchError(f"{item.storage_index.fqn}: asked for {asked}, stored is {stored.dtype}")

    def _stored(self, checkpoint: Checkpoint, item: ReadItem) -> tuple[Stored, StoredChunk]:
        key, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        stored = checkpoint.manifest.tensors.get(key)
        if stored is not None:
            for chunk in stored.near(Box(offset, (1,) * len(offset))):
                if chunk.box.offset == offset:
                    return stored, chunk
        raise MismatchError(f"{key}: the planner asks for a chunk at {offset}, which the checkpoint does not hold")

    def _frame(self, item: ReadItem) -> ByteRange:
        checkpoint, key = self._opened(), item.storage_index.fqn
        if item.type != LoadItemType.BYTE_IO:
            return self._stored(checkpoint, item)[1].frame
        if key not in checkpoint.manifest.objects:
            raise MismatchError(f"{key}: the planner asks for bytes, which the checkpoint does not hold")
        return checkpoint.manifest.objects[key]

    def _bytes(self, checkpoint: Checkpoint, item: ReadItem) -> bytes:
        """What the planner may ``torch.load`` without rules: it was read by torch's weights-only rules before.

        Where those put stand-ins in the place of numpy's own functions, the value is written anew.
        """
        data, value = self._value(checkpoint, item)
        if b"numpy" not in data:
            return data
        again = io.BytesIO()
        torch.save(value, again)
        return again.getvalue()

    def _value(self, checkpoint: Checkpoint, item: ReadItem) -> tuple[bytes, Any]:
        """The bytes of a frame, and what weights-only rules make of them."""
        key, frame = item.storage_index.fqn, self._frame(item)
        name = f"{checkpoint.folder / frame.file}: {key}"
        view = checkpoint.frame(frame)
        if self.verify != "off":
            try:
                frames.check_records(view)
            except CorruptError as error:
                raise CorruptError(f"{name}: {error}") from error
        data = bytes(view)
        return data, weights_only.load(data, name, self.safe_globals)


def plans_of(wishes: Sequence[_Wish]) -> list[_Share]:
    """Each block that is touched to one rank that touches it, of those that see the same folder."""
    threads = loading.threads_of([wish.cpus for wish in wishes])
    found = [_Share([], threads)] * len(wishes)
    for host in dict.fromkeys(wish.seen and wish.seen.host for wish in wishes):
        ranks = [rank for rank, wish in enumerate(wishes) if (wish.seen and wish.seen.host) == host]
        shares = dict(zip(ranks, plans.assign([wishes[rank].touched for rank in ranks]), strict=True))
        tokens = {rank: seen.token for rank in ranks if (seen := wishes[rank].seen) is not None}
        for rank in ranks:
            found[rank] = _Share(shares[rank], threads, _Mates(rank, tokens, shares) if tokens else None)
    return found


def _close_all(mirrors: list[Mirror]) -> None:
    """The shared one first: who waits for this rank's blocks looks at the lock in its own."""
    for mirror in mirrors:
        mirror.close()
