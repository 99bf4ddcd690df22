"""The reader: a load plan becomes bytes in the caller's tensors, blocks hashed on the way.

    load plan + this rank's blocks --> windows of work --> Reader (this file) --> the caller's tensors

[Note: one pass over a block] One rank hashes a block. It reads the block with ``preadv`` straight into the tensors
that want its bytes, and hashes what it has just read there. What no tensor of the rank wants, and small tensors, it
hashes in the page cache, by a mapping. All other ranks of the node copy their part of the block from the page cache.
So each byte is read once, whoever wants it.

[Note: windows] Files are walked in windows, by all ranks in the same order. A rank first reads and hashes its own
blocks of a window. Then it copies out of the window before what others have read and hashed. So reading and copying
overlap across ranks, and a checkpoint larger than memory is still read once. Pages that were mapped for a window are
given back after it. dtype_conversion.py converts values in parts of ``PART_BYTES``, some four of them for each thread.
glibc may keep thrice as much: memory of tensors is aligned, and pieces that come and go fragment its heap.

[Note: taken for ours] Where bytes arrive while they are read, planning must not wait for the head of each frame. It
waits for the first one. If that is ours, all frames of the length of ours are taken for ours. Their heads are looked
at later, when their bytes are there. For a chunk that is copied, that is before the copy. For a run of bytes, it is
before its record counts as complete. A frame of another form, as another version of torch writes, is then read again
by its zip directory.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.checkpoint.opening import Checkpoint
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, at
from sixfold.dist_ckpt.formats import frame as frames
from sixfold.dist_ckpt.formats import weights_only, zstd
from sixfold.dist_ckpt.formats.integrity import Block, Hasher, spans_of
from sixfold.dist_ckpt.geometry.box import Box, Ints, describe
from sixfold.dist_ckpt.geometry.manifest import ByteRange, StoredChunk
from sixfold.dist_ckpt.interpreter import Pool, collection_paused
from sixfold.dist_ckpt.plans.plan import LoadPlan, Read
from sixfold.dist_ckpt.save_load.dtype_conversion import copy_values
from sixfold.dist_ckpt.state.dcp_names import is_plain as is_plain_object
from sixfold.dist_ckpt.state.records import ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import is_plain

WINDOW_BYTES = 1 << 28
_MOST_KEYS = 8  # in the text of an error
_DIRECT_BYTES = 1 << 16  # shorter runs are read together and copied apart

WindowPlace = tuple[str, int]  # a file and the number of a window in it
OnComplete = Callable[[int], None]


class ByteRun(NamedTuple):
    """Bytes [start, stop) of a file, wanted at ``address`` in memory."""

    start: int
    stop: int
    address: int

    def cut(self, start: int, stop: int) -> ByteRun:
        """The part of the run inside [start, stop)."""
        low = max(self.start, start)
        return ByteRun(low, min(self.stop, stop), self.address + low - self.start)


class Sources:
    """The frames of a checkpoint, each looked into once: where the values of a chunk lie, or the chunk itself.

    A frame of this package is recognised by comparing it with the template of its dtype and shape. A frame of torch
    or megatron is recognised by its zip directory, once. Its CRC-32, which they write and never look at, is checked
    then. What is not plain values in row-major order goes through torch's weights-only reader when it is copied. The
    chunks decoded last are kept, for the next reads of the same.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._starts: dict[ByteRange, int | None] = {}
        self._taken: dict[ByteRange, frames.Template] = {}  # for ours, until their heads are looked at
        self._first_is_ours: bool | None = None
        # The reads of a chunk follow each other, so that the last two are enough.
        self._decoded = lru_cache(maxsize=2)(self._decode)

    def start(self, step: Read) -> int | None:
        """Byte of the file at which the chunk's values begin in row-major order; None if they are not plain."""
        frame = step.chunk.frame
        if frame not in self._starts:
            self._starts[frame] = self._values_of(step)
        start, (_, first) = self._starts[frame], _in_frame(step.chunk)
        return None if start is None else start + first * step.stored_dtype.itemsize

    def seen_start(self, step: Read) -> int | None:
        """``start`` when the head of the frame has been looked at; for threads. See [Note: taken for ours]."""
        frame = step.chunk.frame
        template = self._taken.get(frame)
        if template is not None:
            if not self._has_head(frame, template):
                self._starts[frame] = self._parsed(step)
            self._taken.pop(frame, None)  # when its start is right
        return self.start(step)

    def chunk(self, step: Read) -> torch.Tensor:
        """The chunk as a tensor of the shape of its box: mapped, or decoded if it is not plain."""
        start, box = self.seen_start(step), step.chunk.box
        if start is not None:
            stop = start + box.volume * step.stored_dtype.itemsize
            self._checkpoint.await_bytes(step.chunk.frame.file, start, stop)
            data = self._checkpoint.map(step.chunk.frame.file).data
            return torch.frombuffer(data, dtype=step.stored_dtype, count=box.volume, offset=start).view(box.size)
        return self._decoded(step.chunk, step.stored_dtype)

    def _values_of(self, step: Read) -> int | None:
        chunk, frame, dtype = step.chunk, step.chunk.frame, step.stored_dtype
        decoder = self._checkpoint.manifest.decoder
        if decoder is not None:
            return frame.offset if decoder.is_plain(chunk) else None
        if frame.file in self._checkpoint.manifest.compressed:
            zstd.check_readable()
            return None
        if self._checkpoint.integrity is not None:
            shape, _ = _in_frame(chunk)
            for streamed in (False, True):  # as a folder has it, and a store
                template = frames.template(dtype, shape, frame.offset, streamed=streamed)
                if frame.length == template.nbytes and self._is_ours(frame, template):
                    return frame.offset + template.head_bytes
        return self._parsed(step)

    def _parsed(self, step: Read) -> int | None:
        frame, (shape, _) = step.chunk.frame, _in_frame(step.chunk)
        start = self._plain_start(self._checkpoint.frame(frame), step.stored_dtype, shape)
        return None if start is None else frame.offset + start

    def _plain_start(self, view: memoryview, dtype: torch.dtype, shape: Ints) -> int | None:
        """``frames.plain_start``; a CRC-32 that nothing else covers is compared."""
        start = frames.plain_start(view, dtype, shape)
        if self._checkpoint.integrity is None and self._checkpoint.verify != "off":
            frames.check_records(view)
        return start

    def _is_ours(self, frame: ByteRange, template: frames.Template) -> bool:
        """See [Note: taken for ours]."""
        if self._checkpoint.arrives is None:
            return self._has_head(frame, template)
        if self._first_is_ours is None:
            self._first_is_ours = self._has_head(frame, template)
        elif self._first_is_ours:
            self._taken[frame] = template
        return self._first_is_ours

    def _has_head(self, frame: ByteRange, template: frames.Template) -> bool:
        head = self._checkpoint.map(frame.file).view(frame.offset, frame.offset + template.head_bytes)
        first, *rest = template.head  # between them, if there is a rest, lies the CRC-32
        return head[: len(first)] == first and (not rest or head[len(first) + 4 :] == rest[0])

    def _decode(self, chunk: StoredChunk, dtype: torch.dtype) -> torch.Tensor:
        """The chunk of a frame that is not plain."""
        frame, decoder = chunk.frame, self._checkpoint.manifest.decoder
        if decoder is not None:
            self._checkpoint.await_bytes(frame.file, frame.offset, frame.offset + frame.length)
            return decoder.decode(self._checkpoint.folder, chunk)
        shape, first = _in_frame(chunk)
        view, elements, start = self._checkpoint.frame(frame, prod(shape) * dtype.itemsize), prod(shape), None
        if frame.file in self._checkpoint.manifest.compressed:
            start = self._plain_start(view, dtype, shape)
        value: Any = None
        if start is not None:
            raw = bytearray(view[start : start + elements * dtype.itemsize])
            value = torch.frombuffer(raw, dtype=dtype).view(shape)
        else:
            value = weights_only.load(bytes(view), str(frame), ())
        if not isinstance(value, torch.Tensor):
            raise CorruptError(f"{frame} holds a {type(value).__name__}, not a tensor")
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise CorruptError(f"{frame} holds {value.dtype} {tuple(value.shape)}; .metadata says {dtype} {shape}")
        if chunk.run is None:
            return value
        return value.reshape(-1)[first : first + chunk.box.volume].view(chunk.box.size)


def _in_frame(chunk: StoredChunk) -> tuple[Ints, int]:
    """The shape of the tensor in a chunk's frame, and the element of it at which the box begins."""
    return chunk.run or (chunk.box.size, 0)


class _Window:
    """Work on one stretch of one file."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[ByteRun]] = {}  # own ones, with what this rank wants of them
        self.runs: list[ByteRun] = []  # in blocks of other ranks
        self.copies: list[Read] = []  # strided, converted or decoded
        self.steps: list[Read] = []  # all that this window serves


class Reader:
    """Carries out one rank's load plan.

    Args:
        checkpoint: opened; its ``verify`` decides what is checked.
        dtype_policy: one of ``plan.DTYPE_POLICIES``; "strict" differences were refused by the plan.
        threads: how many read, hash and copy at once.
        window_bytes: see [Note: windows]; smaller ones tell ``on_complete`` sooner.
        moved: told of bytes that are in their tensors, from any thread.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype_policy: str,
        threads: int = 1,
        window_bytes: int = WINDOW_BYTES,
        moved: Callable[[int], None] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._policy = dtype_policy
        self._threads = threads
        self._window_bytes, self._block_bytes = window_bytes, checkpoint.block_bytes
        self._moved = moved or (lambda nbytes: None)
        self._sources = Sources(checkpoint)
        self._hashed_elsewhere = checkpoint.integrity is not None and checkpoint.verify != "off"
        self._handles: dict[str, int] = {}
        self._unseen: dict[int, list[tuple[Read, int]]] = defaultdict(list)  # runs by record, where they were taken
        self._looks: Counter[Block] = Counter()  # at blocks that arrive: by runs, and by frames that are copied from
        self.cast_keys: set[str] = set()

    def run(
        self,
        records: Sequence[ShardedTensor],
        plan: LoadPlan,
        blocks: Iterable[Block] = (),
        on_complete: OnComplete | None = None,
    ) -> None:
        """Fill the records' tensors and hash ``blocks``. On an error the tensors' content is undefined.

        Args:
            blocks: of ``integrity.json``, that this rank hashes: the only ones it may not leave to others.
            on_complete: called once with the index of each record when its last byte is in place. The order depends
                on the plan alone. From then on the tensor may be sent on.
        Raises:
            CorruptError: a block has another digest, a file ends early, a frame is none.
            MismatchError: a value does not survive the conversion of dtypes.
        """
        for index, piece in plan.zeroed:
            records[index].view(piece).zero_()
        with collection_paused():
            windows = self._windows(records, plan, blocks)
            if self._checkpoint.arrives is not None:
                self._count_looks(windows)
        order = sorted(windows)
        last = {step.record: place for place in order for step in windows[place].steps}
        left = [index for index in range(len(records)) if index not in last]
        pool = Pool(self._threads) if self._threads > 1 else None
        ahead = Pool(1)  # asking the kernel to read ahead takes as long as a third of the reading
        asked: Future[None] | None = None
        try:
            for own, before, after in zip([*order, None], [None, *order], [*order, None, None][1:], strict=True):
                if asked is not None:
                    asked.result()
                self._open({place[0] for place in (before, own, after) if place is not None})
                asked = None if after is None else ahead.submit(self._prefetch, after, windows[after])
                if own is not None:
                    _run_all(pool, [partial(self._block, own[0], *block) for block in windows[own].blocks.items()])
                if before is not None:
                    _run_all(pool, self._jobs(records, before[0], windows[before]))
                    self._checkpoint.forget(before[0], 0, (before[1] + 1) * self._window_bytes)
                    done = sorted({s.record for s in windows[before].steps if last[s.record] == before})
                    self._read_mistaken(records, done)
                    left += done
                if on_complete is not None:
                    for index in left:
                        on_complete(index)
                left = []
        finally:
            ahead.shutdown(cancel_futures=True)
            if pool:
                pool.shutdown(cancel_futures=True)
            self._open(set())

    def read_value(self, stored_key: str, frame: ByteRange, safe_globals: Sequence[Any]) -> tuple[bytes, Any]:
        """The bytes of a frame, and what torch's weights-only rules make of them."""
        view = self._checkpoint.frame(frame)
        name = f"{self._checkpoint.folder / frame.file}: {stored_key}"
        if self._checkpoint.verify != "off":  # of ours too: damage is told as such, not as what it makes of the object
            at(name, lambda: frames.check_records(view))
        data = bytes(view)
        return data, weights_only.load(data, name, safe_globals)

    def read_object(self, stored_key: str, frame: ByteRange, safe_globals: Sequence[Any]) -> Any:
        """The object of a frame; ours and megatron's are lists of one."""
        _, value = self.read_value(stored_key, frame, safe_globals)
        # A zarr object is a file of its own, without a list, and so is what plain DCP wrote.
        in_list = self._checkpoint.manifest.decoder is None and not is_plain_object(stored_key)
        return value[0] if in_list and isinstance(value, list) and len(value) == 1 else value

    def _windows(
        self, records: Sequence[ShardedTensor], plan: LoadPlan, blocks: Iterable[Block]
    ) -> dict[WindowPlace, _Window]:
        windows: dict[WindowPlace, _Window] = defaultdict(_Window)
        for block in blocks:
            windows[block.file, block.number * self._block_bytes // self._window_bytes].blocks[block.number] = []
        for step in plan.reads:
            try:
                start = self._sources.start(step)
            except CorruptError as error:
                raise self._named(step, error) from error
            if start is not None and (run := self._run(step, records[step.record], start)) is not None:
                self._share(windows, step, run)
                if self._checkpoint.arrives is not None:
                    self._unseen[step.record].append((step, start))
            else:
                frame = step.chunk.frame
                window = windows[frame.file, (frame.offset + frame.length - 1) // self._window_bytes]
                window.copies.append(step)
                window.steps.append(step)
        return windows

    def _count_looks(self, windows: dict[WindowPlace, _Window]) -> None:
        """What looks at each block, so that one is only taken where nothing looks at it again."""
        size = self._block_bytes
        for (file, _), window in windows.items():
            for run in chain(window.runs, *window.blocks.values()):
                self._looks[Block(file, run.start // size)] += 1
            for span in chain.from_iterable(spans_of([step.chunk.frame], size) for step in window.copies):
                self._looks.update(span.blocks())

    def _run(self, step: Read, record: ShardedTensor, start: int) -> ByteRun | None:
        """The read as one run of bytes in file and memory; None if it is none."""
        data, itemsize = record.data, step.stored_dtype.itemsize
        if data is None or not (data.is_cpu and data.dtype == step.stored_dtype and is_plain(data)):
            return None
        if (places := step.places()) is None:
            return None
        start, at, elements = start + places[0] * itemsize, places[1], step.part.volume
        assert at + elements <= data.numel(), f"{step} leaves its tensor"
        return ByteRun(start, start + elements * itemsize, data.data_ptr() + at * itemsize)

    def _share(self, windows: dict[WindowPlace, _Window], step: Read, run: ByteRun) -> None:
        """Give a run's bytes to this rank's blocks, and the rest to the window that holds them."""
        file, size = step.chunk.frame.file, self._block_bytes
        while True:
            number = run.start // size
            stop = (number + 1) * size
            window = windows[file, number * size // self._window_bytes]
            part = run if run.stop <= stop else run.cut(run.start, stop)
            wanted = window.blocks.get(number)
            # Two targets may want the same bytes; the second one copies them.
            if wanted is not None and not (wanted and wanted[-1].stop > part.start):
                wanted.append(part)
            else:
                window.runs.append(part)
            if not window.steps or window.steps[-1] is not step:
                window.steps.append(step)
            if part is run:  # as are most, of small tensors
                return
            run = run.cut(stop, run.stop)

    def _jobs(self, records: Sequence[ShardedTensor], file: str, window: _Window) -> list[Callable[[], None]]:
        """What is copied out of blocks that other ranks have hashed, and what is no run of bytes."""
        jobs: list[Callable[[], None]] = [partial(self._copy, records, step) for step in window.copies]
        batch: list[ByteRun] = []
        for run in window.runs:
            batch.append(run)
            if run.stop - run.start >= _DIRECT_BYTES or len(batch) == 1024:
                jobs.append(partial(self._fetch, file, batch))
                batch = []
        return [*jobs, partial(self._fetch, file, batch)] if batch else jobs

    def _block(self, file: str, number: int, wanted: list[ByteRun]) -> None:
        """Read and hash one block. See [Note: one pass over a block]."""
        integrity = self._checkpoint.integrity
        assert integrity is not None, f"block {number} of {file} without digests"
        at = number * integrity.block_bytes
        stop = min(at + integrity.block_bytes, integrity.files[file].size)
        hasher, small = integrity.hasher(), list[ByteRun]()
        for run in wanted:
            if run.stop - run.start < _DIRECT_BYTES:
                small.append(run)
                continue
            self._pass(file, at, run.start, small, hasher)
            small = []
            self._read(file, run)
            hasher.update_at(run.address, run.stop - run.start)
            at = run.stop
        self._pass(file, at, stop, small, hasher)
        try:
            integrity.compare(self._checkpoint.folder / file, number, hasher.hexdigest())
        except CorruptError as error:
            keys = list[str]()
            with suppress(CheckpointError):  # of a store that fails now: the damage is told all the same
                keys = self._checkpoint.damaged_keys(file, number * integrity.block_bytes, stop)
            more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
            known = f"; damaged: {', '.join(keys[:_MOST_KEYS])}{more}" if keys else ""
            raise CorruptError(f"{error}{known}") from error

    def _pass(self, file: str, start: int, stop: int, wanted: list[ByteRun], hasher: Hasher) -> None:
        """Hash [start, stop) where the page cache has it, and copy out what is wanted of it."""
        if start < stop:
            mapped = self._checkpoint.map(file)
            source = mapped.at(start, stop)
            hasher.update_at(source, stop - start)
            for run in wanted:
                ctypes.memmove(run.address, source + run.start - start, run.stop - run.start)
            self._moved(sum(run.stop - run.start for run in wanted))

    def _prefetch(self, place: WindowPlace, window: _Window) -> None:
        """Have the kernel read this rank's blocks of a window while it works on the one before."""
        for number in window.blocks if self._checkpoint.arrives is None else ():
            at, length = number * self._block_bytes, self._block_bytes
            os.posix_fadvise(self._handles[place[0]], at, length, os.POSIX_FADV_WILLNEED)

    def _open(self, files: set[str]) -> None:
        """Have these files open and no others: a checkpoint may have more of them than a process may open."""
        for file in self._handles.keys() - files:
            os.close(self._handles.pop(file))
        for file in files - self._handles.keys():
            self._handles[file] = os.open(self._checkpoint.folder / file, os.O_RDONLY | os.O_CLOEXEC)

    def _fetch(self, file: str, runs: list[ByteRun]) -> None:
        """Runs in blocks that another rank hashes are copied from the page cache; without digests they are read."""
        copied = 0
        for run in runs:
            if self._hashed_elsewhere or run.stop - run.start < _DIRECT_BYTES:
                mapped = self._checkpoint.map(file)
                ctypes.memmove(run.address, mapped.at(run.start, run.stop), run.stop - run.start)
                copied += run.stop - run.start
            else:
                self._read(file, run)
        self._moved(copied)

    def _read(self, file: str, run: ByteRun) -> None:
        target = memoryview((ctypes.c_char * (run.stop - run.start)).from_address(run.address)).cast("B")
        is_last_look = self._looks[Block(file, run.start // self._block_bytes)] == 1
        if is_last_look and self._checkpoint.take(file, run.start, target):
            self._moved(len(target))
            return
        self._checkpoint.await_bytes(file, run.start, run.stop)
        handle, at = self._handles[file], run.start
        while at < run.stop:
            count = os.preadv(handle, [target[at - run.start :]], at)
            if count == 0:
                raise CorruptError(f"{self._checkpoint.folder / file} ends at byte {at}, while it is read")
            at += count
            self._moved(count)

    def _read_mistaken(self, records: Sequence[ShardedTensor], done: Iterable[int]) -> None:
        """Read again what stood elsewhere in its frame, of records that are else complete: see
        [Note: taken for ours]."""
        integrity = self._checkpoint.integrity
        for step, start in (taken for index in done for taken in self._unseen.pop(index, ())):
            try:
                is_mistaken = self._sources.seen_start(step) != start
            except CorruptError:  # which is found again below, and told with its place
                is_mistaken = True
            if not is_mistaken:
                continue
            self._copy_values(records, step)
            if integrity is not None and self._hashed_elsewhere:  # but blocks that were taken came a second time
                with self._errors_named(step):
                    for span in spans_of([step.chunk.frame], self._block_bytes):
                        integrity.check_blocks(self._checkpoint.folder, span.blocks())

    def _copy(self, records: Sequence[ShardedTensor], step: Read) -> None:
        self._copy_values(records, step)
        self._moved(step.nbytes)

    def _copy_values(self, records: Sequence[ShardedTensor], step: Read) -> None:
        with self._errors_named(step):
            frame = step.chunk.frame
            self._checkpoint.map(frame.file).at(frame.offset, frame.offset + frame.length)
            source = _region(self._sources.chunk(step), step.part, step.chunk.box)
            target = _region(records[step.record].view(step.piece), step.part, step.piece.box)
            copy_values(step.key, source, target, self._policy)
            if target.dtype != source.dtype:
                self.cast_keys.add(step.key)

    @contextmanager
    def _errors_named(self, step: Read) -> Iterator[None]:
        """Damage inside is told with file and key."""
        try:
            yield
        except CorruptError as error:
            raise self._named(step, error) from error

    def _named(self, step: Read, error: CorruptError) -> CorruptError:
        text = describe(step.key, step.part, step.shape)
        return CorruptError(f"{self._checkpoint.folder / step.chunk.frame.file}: {text}: {error}")


def _run_all(pool: Pool | None, jobs: Sequence[Callable[[], None]]) -> None:
    """Jobs in a pool or, without one, in turn; the first job's error is raised."""
    if pool is None or len(jobs) < 2:
        for job in jobs:
            job()
        return
    for future in [pool.submit(job) for job in jobs]:
        future.result()


def _region(tensor: torch.Tensor, part: Box, box: Box) -> torch.Tensor:
    """The elements of ``part`` in a tensor that fills ``box``; both are global."""
    if part == box:
        return tensor
    axes = zip(part.offset, part.size, box.offset, strict=True)
    return tensor[tuple(slice(at - start, at - start + length) for at, length, start in axes)]
