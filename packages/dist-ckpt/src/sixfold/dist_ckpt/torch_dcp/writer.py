"""``Writer``: torch DCP's ``StorageWriter`` over this engine.

    torch.distributed.checkpoint.save --> its planner --> Writer (this file) --> frames, digests --> commit of a store

torch's ``save`` calls, on each rank: set_up_storage_writer, prepare_local_plan; on the first: prepare_global_plan; on
each: write_data; on the first: finish. Between them torch gathers and scatters, and an error of one rank ends the
save on all. So the first rank begins the save in the store, and each rank writes its parts there. Then finish writes
the small files and commits. The older checkpoint stays until then, also after an error or a kill.

[Note: cached plans] With ``enable_plan_caching`` a planner hands a rank the plan of an earlier save. With it comes
the ticket of that save, which has ended. A ticket is used once, so such a rank begins a save of its own, and finish
takes its parts over. If the save failed, finish takes nothing over. The rank's next save, or the end of its Writer,
removes those parts.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from sixfold.dist_ckpt.errors import CheckpointError, ShardingError, typed
from sixfold.dist_ckpt.formats import compact_manifest, weights_only, zstd
from sixfold.dist_ckpt.formats import metadata as schema
from sixfold.dist_ckpt.formats.integrity import Content, FileDigest
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.interpreter import collection_paused
from sixfold.dist_ckpt.plans.plan import Write, file_counts
from sixfold.dist_ckpt.save_load import writer
from sixfold.dist_ckpt.save_load.saving import check_if_exists
from sixfold.dist_ckpt.state.records import Piece, ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import check_readable
from sixfold.dist_ckpt.storage.frame_file import PartFile
from sixfold.dist_ckpt.storage.local import located, store_at
from sixfold.dist_ckpt.storage.store import Part, Save, Store, complete, part_name
from sixfold.dist_ckpt.storage.url import is_known
from sixfold.dist_ckpt.torch_dcp import metadata as dcp_metadata

Place = str | os.PathLike[str] | Store
_FRAME_BYTES = 6144  # around the values of a tensor, at most
_OURS = re.compile(r"names sixfold\.dist_ckpt\.[\w.]*?(\w+);")  # a class of ours in a pickle, as an error says it
_Places = list[tuple[MetadataIndex, ByteRange]]  # of a file, in its order


@dataclass(slots=True)
class _Ticket:
    """What a rank is told of a save, with its plan; ``used``: see [Note: cached plans]."""

    save: Save
    number: int
    used: bool = False


class _Placed(NamedTuple):
    """What a rank tells of a frame; ``digest``, of the whole file, comes with the first one of it."""

    frame: ByteRange
    save: Save
    digest: FileDigest | None
    is_compressed: bool


class _PlannerError(CheckpointError):
    """The planner's own error is the cause: no store asks again after it."""


class Writer(StorageWriter, BlockingAsyncStager):
    """Saves of ``torch.distributed.checkpoint`` with checksums and in one step, in torch's own format.

        dcp.save(state, storage_writer=Writer("run/step-00000007"))  # as FileSystemWriter
        dcp.async_save(state, checkpoint_id="run/step-00000008", storage_writer=Writer(""))  # the id before the path

    A Writer serves save after save, one at a time; it may be pickled to another process.

    Args:
        path: the folder of the checkpoint, whose parents are made; a URL that fsspec opens; a Store. "" if each call
            names a ``checkpoint_id``.
        if_exists: "replace" a checkpoint in the folder, in one step (the default), or "error" if it is not empty.
        overwrite: the same in torch's words: False is "error".
        thread_count: threads of each rank that write.
        check_finite: NaN or infinity in a tensor that has a name of its own is an error.
        compress: "zstd" compresses each chunk of at least 16 KiB that a rank writes (extra ``zstd``), as torch's own
            extension does; torch and ``Reader`` read it. A load of a part of a chunk decodes all of it.
        owns: names of files that a trainer puts beside the checkpoint into the same folder, such as Lightning's
            ``meta.pt``: they go with the checkpoint that is replaced. Without it a folder of other files is refused.
        cache_staged_state_dict: ``async_save`` copies into the same memory each time, as torch's writer of that
            argument does: faster, and the memory stays. Keep the Writer, and end a save before the next.
        single_file_per_rank, sync_files, per_thread_copy_ahead: torch's, taken and without effect. A rank writes at
            most ``thread_count`` files, and they are synced before the commit.
    Raises:
        CheckpointError: an argument is none of these. Errors of a save are inside torch's CheckpointException:
            StorageError, ShardingError as of ``sixfold.dist_ckpt.save``.
    """

    def __init__(
        self,
        path: Place,
        *,
        if_exists: str | None = None,
        overwrite: bool | None = None,
        thread_count: int = 2,
        check_finite: bool = False,
        compress: str | None = None,
        owns: Iterable[str] = (),
        cache_staged_state_dict: bool = False,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        per_thread_copy_ahead: int = 10_000_000,
    ) -> None:
        StorageWriter.__init__(self)
        BlockingAsyncStager.__init__(self, cache_staged_state_dict)
        if if_exists is not None and overwrite is not None:
            raise CheckpointError(f"overwrite={overwrite} and if_exists={if_exists!r} say the same; pass one of them")
        if_exists = if_exists or ("error" if overwrite is False else "replace")
        check_if_exists(if_exists)
        zstd.check_option(compress)
        if thread_count < 1:
            raise CheckpointError(f"thread_count is {thread_count}; it is >= 1")
        self.path = path
        self.if_exists, self.thread_count, self.check_finite = if_exists, thread_count, check_finite
        self.compress, self.owns = compress, frozenset(owns)
        self.save_id = secrets.token_hex(8)
        self._rank, self._alone = 0, False
        self._ticket: _Ticket | None = None  # the first rank's, of the save that goes on
        self._abandon: weakref.finalize[..., Any] | None = None
        self._stager: DefaultStager | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ticket": None, "_abandon": None, "_stager": None}

    # Staging, for async_save: a copy of everything, in memory of its own, at the call.
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state dict on the CPU, what is no tensor included, as torch's default stager makes it."""
        stager = self._stager or DefaultStager(StagingOptions(False, False, False, False))
        if self.cache_staged_state_dict:
            self._stager = stager  # it copies a tensor into the memory that it made for it before
        staged: Any = stager.stage(state_dict)
        return staged  # type: ignore[no-any-return]

    # The calls of torch's save, in their order.
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is the place of a checkpoint."""
        return is_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, to ``checkpoint_id`` if that is given."""
        if checkpoint_id:
            self.path = checkpoint_id
        self.save_id = secrets.token_hex(8)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The place of the next save."""
        return self.path.name if isinstance(self.path, Store) else self.path

    def storage_meta(self) -> StorageMeta:
        """What planners are told of the save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Each rank, first. ``rank`` and ``use_collectives`` are torch's."""
        rank = kwargs.get("rank")
        self._rank = 0 if rank is None else rank
        self._alone = rank is not None and not kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Each rank: nothing is decided alone."""
        if self._alone:
            raise CheckpointError(
                "use_collectives=False writes one .metadata for each rank and nobody commits them together; save with "
                "collectives, or with torch's FileSystemWriter"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The first rank: check the target and make the staging folder.

        Raises:
            StorageError: the target holds other files, or anything with ``if_exists="error"``; the disk is too small.
        """
        return typed(lambda: self._begin(plans))

    def _begin(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._ticket is not None:  # a save of this writer that failed elsewhere: nobody tells a writer
            self._end()
        store = store_at(self.path)
        if len(plans) > 1 and not store.is_shared:
            raise CheckpointError(f"{store.name} is seen by one process alone; {len(plans)} ranks save")
        save = self._begun(store, self.save_id, sum(_nbytes(item) for plan in plans for item in plan.items))
        tickets = [_Ticket(save, number) for number in range(len(plans))]
        self._ticket = tickets[self._rank]
        return [replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets, strict=True)]

    def _begun(self, store: Store, save_id: str, nbytes: int) -> Save:
        """A save in the store, which is given up when this Writer goes without having ended it."""
        if self._abandon is not None:  # of [Note: cached plans], which no first rank has taken over
            self._abandon()
        save = store.begin(save_id, nbytes, self.if_exists, self.owns.__contains__)
        self._abandon = weakref.finalize(self, _abandon_here, store, save, os.getpid())
        return save

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Each rank: what the planner resolves, one after the other, as frames of one file.

        Raises:
            ShardingError: the planner gives another shape or dtype than it planned; NaN with ``check_finite``.
            StorageError: full disk; another save to the same folder has ended meanwhile; no shared file system.
        """
        store = store_at(self.path)
        save, number = self._own_save(store, plan)
        try:
            results = typed(lambda: self._write(store, save, number, plan.items, planner))
        except BaseException as error:
            self._end()
            if isinstance(error, _PlannerError) and error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        if self._abandon is not None and self._ticket is None and not save.staging:
            self._abandon.detach()  # its parts have their names, under which the first rank commits them
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The first rank: write the small files, move the folder into place, complete torch's ``metadata``."""
        ticket = self._ticket
        if ticket is None:
            raise CheckpointError("finish without write_data: torch's save calls them, on one Writer")
        try:
            typed(lambda: self._commit(ticket.save, metadata, results))
            if self._abandon is not None:
                self._abandon.detach()
        finally:
            self._end()

    # What they do.
    def _own_save(self, store: Store, plan: SavePlan) -> tuple[Save, int]:
        """The save that this rank writes for, and its number in it; one of its own by [Note: cached plans]."""
        ticket = self._ticket or plan.storage_data
        if not isinstance(ticket, _Ticket):
            raise CheckpointError(f"the plan's storage_data is {ticket!r}; a planner hands on what the Writer put in")
        if ticket.used and plan.items:
            return self._begun(store, secrets.token_hex(8), 0), ticket.number
        save = ticket.save
        if not ticket.used:
            ticket.used = True
            store.join(save)
            if store.name != save.target:
                raise ShardingError(
                    f"the ranks save into different folders ({save.target}, {store.name}); pass one path to all"
                )
        return save, ticket.number

    def _write(
        self, store: Store, save: Save, number: int, items: Sequence[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """As many files at once as the store takes, each with the next items of the plan."""
        parts, places, compressed = list[Part](), dict[str, _Places](), set[str]()
        small = [item for item in items if not self._is_compressed(item)]
        for group in (small, [item for item in items if self._is_compressed(item)]):
            left = iter(group)
            for count in file_counts([*map(_nbytes, group)], store.streams) if group else ():
                own, name = [*islice(left, count)], part_name(number, len(parts))
                fill = partial(self._fill, name, own, planner, places)
                parts.append(Part(name=name, fill=fill, nbytes=sum(map(_nbytes, own)), threads=self.thread_count))
                if group is not small:
                    compressed.add(name)
        return [
            WriteResult(index, frame.length, _Placed(frame, save, None if n else digest, part.name in compressed))
            for part, digest in zip(parts, writer.write_parts(store, save, parts), strict=True)
            for n, (index, frame) in enumerate(places[part.name])
        ]

    def _is_compressed(self, item: WriteItem) -> bool:
        return self.compress is not None and _nbytes(item) - _FRAME_BYTES >= zstd.LEAST_BYTES

    def _fill(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner, places: dict[str, _Places], file: PartFile
    ) -> None:
        found, copies = _Places(), writer.Copies()
        for item in items:
            start = file.position
            try:
                data: Any = planner.resolve_data(item)
            except Exception as error:
                raise _PlannerError(f"{item.index.fqn}: {type(error).__name__}: {error}") from error
            if item.type == WriteItemType.BYTE_IO:
                file.append(_readable(item.index.fqn, data))
            else:
                self._add_tensor(file, item, data, copies)
            found.append((item.index, ByteRange(name, start, file.position - start)))
            del data
        places[name] = found

    def _add_tensor(self, file: Any, item: WriteItem, data: torch.Tensor, copies: writer.Copies) -> None:
        planned, key = item.tensor_data, item.index.fqn
        assert planned is not None, f"{key}: a tensor without its place"
        size, offset = tuple(planned.chunk.sizes), tuple(planned.chunk.offsets)
        if tuple(data.shape) != size or data.dtype != planned.properties.dtype:
            raise ShardingError(
                f"{key}: the planner gives {data.dtype} {tuple(data.shape)}, its plan says {planned.properties.dtype} "
                f"{size}; the plan is what .metadata will say"
            )
        data = data.detach()
        try:
            check_readable(key, data)
        except ShardingError:
            if type(data) is torch.Tensor:
                raise
            buffer = io.BytesIO()  # a subclass that computes its values: in torch's own form
            torch.save(data.cpu(), buffer)
            content = buffer.getvalue()
            file.append(zstd.compress([content]) if self._is_compressed(item) else content)
            return
        record = ShardedTensor(key, data, data.dtype, size, tuple(planned.size), offset, None)
        step = Write(0, key, data.dtype, Piece(record.box, None), record.global_shape)
        add = writer.add_compressed if self._is_compressed(item) else writer.add_frame
        add(file, record, step, self._rank, self.check_finite, copies)

    def _commit(self, save: Save, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        store = store_at(self.path)
        places: dict[tuple[str, tuple[int, ...] | None], ByteRange] = {}
        infos: dict[MetadataIndex, _StorageInfo] = {}
        files: dict[str, FileDigest] = {}
        others: dict[str, Save] = {}  # [Note: cached plans]
        compressed = set[str]()
        for result in (result for by_rank in results for result in by_rank):
            frame, written_for, digest, is_compressed = result.storage_data
            if is_compressed:
                compressed.add(frame.file)
            if digest is not None:
                if written_for.save_id != save.save_id:
                    store.take_over(written_for, save, frame.file)
                    others[written_for.save_id] = written_for
                files[frame.file] = digest
            offset = result.index.offset
            places[result.index.fqn, None if offset is None else tuple(offset)] = frame
            infos[result.index] = _StorageInfo(
                frame.file, frame.offset, frame.length, [zstd.DESCRIPTOR] if is_compressed else None
            )
        for other in others.values():
            store.abandon(other)
        with collection_paused():
            index = dcp_metadata.index_of(metadata, places, save.save_id, frozenset(compressed))
        small: dict[str, Content] = {
            ".metadata": lambda: schema.encode_parts(index),
            compact_manifest.FILE_NAME: lambda: compact_manifest.encode(index),
            "common.pt": weights_only.dump({}, "common data"),
        }
        for_torch = partial(schema.encode_parts, index.within(save.inside)) if save.inside else None
        complete(store, save, files, small, schema.CONFIG_JSON, for_torch)
        metadata.storage_data, metadata.storage_meta = infos, self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION

    def _end(self) -> None:
        """Of the save that has ended nothing is left, unless it was committed."""
        if self._abandon is not None:
            self._abandon()
        self._ticket = self._abandon = None
        self.save_id = secrets.token_hex(8)


def is_place(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether this names the place of a checkpoint: a path, or a URL of a protocol that fsspec knows."""
    try:
        place = located(checkpoint_id, "checkpoint_id")
    except CheckpointError:
        return False
    return isinstance(place, Path) or is_known(place)


def _abandon_here(store: Store, save: Save, process: int) -> None:
    """Give up a save, in the process that began it and in no fork of it."""
    if os.getpid() == process:
        store.abandon(save)


def _nbytes(item: WriteItem) -> int:
    """An upper bound of a tensor's frame; nothing of bytes, whose length is not planned."""
    if item.tensor_data is None:
        return 0
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize + _FRAME_BYTES


def _readable(key: str, data: Any) -> bytes:
    """The bytes of a value that is no tensor, in a form that weights-only rules read, if it has one.

    torch pickles a deque or a defaultdict in a way that its own weights-only reader refuses; from plain constructors
    they come back equal, there and here. What was just pickled in this process may be unpickled here.
    """
    if not isinstance(data, io.BytesIO):
        raise ShardingError(f"{key}: the planner gives a {type(data).__name__} for a value; it is a BytesIO")
    content = data.getvalue()
    try:
        weights_only.load(content, key, ())
    except CheckpointError as error:
        if ours := _OURS.search(str(error)):  # which torch would write as it is, of one rank, and nothing reads back
            raise ShardingError(
                f"{key}: a {ours[1]} is for sixfold.dist_ckpt.save; torch's calls do not know it. Save by that one, or "
                "give torch tensors and plain values: those of each rank under a key of its own, as f'rank{rank}'"
            ) from None
        try:
            return weights_only.dump(torch.load(io.BytesIO(content), weights_only=False), key)
        except Exception:  # a class of the user's; his own code may raise anything
            warnings.warn(
                f"saved as it is; to load it, pass the class as Reader(safe_globals=[...]): {error}", stacklevel=2
            )
    return content
