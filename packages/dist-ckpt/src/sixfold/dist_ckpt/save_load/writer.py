"""Transfer: a save plan becomes bytes.

    save plan + tensors --> write (this file) --> frames --> parts of a store
    load plan + frames --> reader.py --> the caller's tensors

No group and no decision: what goes where was planned. Tensors of callers pass through CPU copies of ``COPY_BYTES``
each (see [Note: what is hashed is written] of storage/frame_file.py), of which ``FrameFile`` holds a few. So a save
into a folder needs 4 MiB times ``4 * threads + 6`` besides the tensors, whatever their size and number. A store that
takes several streams gets several files of a rank at once, each with the next frames of the plan. url.py says what it
holds of them.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import islice
from math import prod
from pathlib import Path
from threading import Event
from typing import Any
from weakref import finalize

import torch

from sixfold.dist_ckpt.errors import CheckpointError, ShardingError
from sixfold.dist_ckpt.formats import frame as frames
from sixfold.dist_ckpt.formats import zstd
from sixfold.dist_ckpt.formats.integrity import Contents, FileDigest, crc32, shift
from sixfold.dist_ckpt.geometry.box import cuts
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.interpreter import Pool
from sixfold.dist_ckpt.plans.plan import Write, file_counts, total_bytes
from sixfold.dist_ckpt.plans.shard_table import Encoded
from sixfold.dist_ckpt.reused_memory import recycled
from sixfold.dist_ckpt.save_load.unchanged import Kept, keep
from sixfold.dist_ckpt.state import plain_types
from sixfold.dist_ckpt.state.records import ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import PLAIN_TENSORS, comparable, has_values, is_plain, tensor_bytes
from sixfold.dist_ckpt.storage.frame_file import PartFile
from sixfold.dist_ckpt.storage.store import Part, Save, Store, part_name

COPY_BYTES = 1 << 22
_SPARSE = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(slots=True)
class Written:
    """What one rank wrote.

    ``table`` is the rank's table, whose main replicas are the writes of its plan in their order.
    ``places`` are int64 pairs, start and length of the frame of each of them; ``numbers`` int64, that of its file in
    ``files``, and empty if all lie in the first.
    ``contents``: as of ``Integrity``. ``compressed``: those of ``files`` that are.
    ``crcs``: of the values under each name of ``RankContent.crcs``, four bytes each.
    """

    table: Encoded
    places: bytes = b""
    objects: list[tuple[str, ByteRange]] = field(default_factory=list)
    files: dict[str, FileDigest] = field(default_factory=dict)
    contents: Contents = field(default_factory=dict)
    numbers: bytes = b""
    crcs: bytes = b""
    compressed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RankContent:
    """What this rank has to save, and where."""

    store: Store
    records: list[ShardedTensor]
    writes: tuple[Write, ...]
    objects: list[tuple[str, bytes]]
    common: dict[Any, Any]
    common_bytes: bytes
    nbytes: int
    table: Encoded
    threads: int = 1
    metadata: str = "torch"  # or "compact": no .metadata is written
    in_common: tuple[str, ...] = ()  # tensors whose values ``common_bytes`` holds too
    since: Path | None = None  # an older checkpoint, of which unchanged frames are linked
    crcs: Mapping[str, int | None] = field(default_factory=dict)  # of tensors of all ranks; None: this one writes it
    compress: bool = False
    is_owned: bool = False  # the tensors lie in memory of this package: nobody changes them while they are written

    @property
    def file_bytes(self) -> int:
        """The size of the files that ``write`` makes, where frames lie end to end in one."""
        at = 0
        for step in self.writes:
            at += frames.template(step.dtype, step.piece.box.size, at).nbytes
        return at + sum(len(data) for _, data in self.objects)

    @property
    def total_bytes(self) -> int:
        """The same with the common data, which the first rank writes."""
        return self.file_bytes + len(self.common_bytes)


def write(
    content: RankContent, save: Save, rank: int, check_finite: bool, moved: Callable[[int], None] | None = None
) -> Written:
    """Write this rank's chunks and objects as frames of its files, the objects into the last; no file without any.

    ``moved``: as of ``Part``.
    """
    store, records, plan, objects = content.store, content.records, content.writes, content.objects
    crcs = {name: crc or 0 for name, crc in content.crcs.items()}  # of one without elements it is 0
    if not plan and not objects:
        return Written(content.table, crcs=array("I", crcs.values()).tobytes())
    copies, failed, kept = Copies(), Event(), Kept()
    own_crcs = dict[int, int]()  # of writes, by their numbers

    def values(number: int) -> Iterator[memoryview]:
        step = plan[number]
        return (part for part, _ in _raw_parts(records[step.record], step, None, copies, 0))

    def checked(number: int) -> Iterator[memoryview]:
        if check_finite:
            step = plan[number]
            check_tensor_finite(step.key, records[step.record].view(step.piece), step.piece.box.offset, rank)
        return values(number)

    def fill(own: _Frames, file: PartFile) -> None:
        """Add the frames of a file; from the start again if that is asked for."""
        own.places, own.object_places = array("q"), []
        start, ahead = file.position, _encoded(plan, own.numbers if own.compressed else (), checked, content.threads)
        for number in own.numbers:
            if failed.is_set():
                raise CheckpointError(f"{own.name} was given up: another file of this rank failed")
            step = plan[number]
            if own.compressed:
                crc, data = next(ahead)
                file.append(data)
                if moved is not None:
                    moved(step.nbytes)
            else:
                crc = add_frame(file, records[step.record], step, rank, check_finite, copies, content.is_owned)
            if step.key in crcs:
                own_crcs[number] = crc
            own.places.extend((start, (end := file.position) - start))
            start = end
        for stored_key, data in own.objects:
            own.object_places.append((stored_key, ByteRange(own.name, file.position, len(data))))
            file.append(data)

    if content.since is not None:
        staging, told = Path(save.staging), moved or (lambda nbytes: None)
        kept = keep(content.since, staging, plan, objects, values, content.threads, told, content.compress)
        for number in kept.places:
            parts_of = checked(number)
            if plan[number].key in crcs:
                own_crcs[number] = reduce(lambda crc, part: crc32(part, crc), parts_of, 0)
    # Beside linked files stand names that none of them has, whichever of them other ranks have found.
    frames_of = _frames_of(content, kept, rank, 0 if content.since is None else int(save.save_id[:8], 16))
    parts = [
        Part(
            name=own.name,
            fill=partial(fill, own),
            nbytes=total_bytes([plan[number] for number in own.numbers]) + sum(len(data) for _, data in own.objects),
            threads=content.threads,
            moved=moved and (lambda _: moved(0)) if own.compressed else moved,  # ``fill`` counts what it reads
        )
        for own in frames_of
    ]
    digests = write_parts(store, save, parts, failed)
    for number, crc in sorted(own_crcs.items()):  # the parts of a tensor in their order
        step = plan[number]
        crcs[step.key] = shift(crcs[step.key], step.nbytes) ^ crc
    files = kept.files | {part.name: digest for part, digest in zip(parts, digests, strict=True)}
    numbers, places = _places(len(plan), kept, frames_of, [*files])
    return Written(
        content.table,
        places=places,
        objects=[*kept.objects.items(), *(place for own in frames_of for place in own.object_places)],
        files=files,
        contents=kept.contents,
        numbers=numbers if len(files) > 1 else b"",
        crcs=array("I", crcs.values()).tobytes(),
        compressed=kept.compressed | {own.name for own in frames_of if own.compressed},
    )


def _frames_of(content: RankContent, kept: Kept, rank: int, number: int) -> list[_Frames]:
    """The files that a rank writes, the first of them with this number, and what goes into each."""
    objects = [(key, data) for key, data in content.objects if key not in kept.objects]
    changed, unlinked = {*range(len(content.writes))} - kept.places.keys() - kept.unlinked, kept.unlinked
    groups: list[tuple[set[int], list[tuple[str, bytes]], bool]] = [(changed, objects, False), (unlinked, [], False)]
    if content.compress:
        large = {number for number, step in enumerate(content.writes) if step.nbytes >= zstd.LEAST_BYTES}
        groups = [(changed & large, [], True), (changed - large, objects, False)]
        groups += [(unlinked & large, [], True), (unlinked - large, [], False)]
    found = list[_Frames]()
    for steps, last_objects, compressed in groups:
        counts = file_counts([content.writes[step].nbytes for step in sorted(steps)], content.store.streams)
        left = iter(sorted(steps))
        for more, count in enumerate(counts, 1 - len(counts)):
            if count or last_objects:
                own_objects, name = () if more else last_objects, part_name(rank, number + len(found))
                found.append(_Frames(name, [*islice(left, count)], own_objects, compressed))
    return found


def _places(count: int, kept: Kept, written: Sequence[_Frames], files: Sequence[str]) -> tuple[bytes, bytes]:
    """``numbers`` and ``places`` of ``Written``, for all writes of a rank."""
    place_M3 = torch.empty(count, 3, dtype=torch.int64, device="cpu")
    numbered = {name: number for number, name in enumerate(files)}
    if kept.places:
        rows = [(numbered[frame.file], *frame[1:]) for frame in kept.places.values()]
        place_M3[torch.tensor([*kept.places], device="cpu")] = torch.tensor(rows, device="cpu")
    for own in (own for own in written if own.numbers):
        row_N = torch.tensor(own.numbers, device="cpu")
        place_M3[row_N, 0] = numbered[own.name]
        place_M3[row_N, 1:] = torch.frombuffer(own.places, dtype=torch.int64).view(-1, 2)
    files_M, places_M2 = place_M3[:, 0], place_M3[:, 1:].flatten()
    return array("q", files_M.tolist()).tobytes(), array("q", places_M2.tolist()).tobytes()


def write_parts(store: Store, save: Save, parts: Sequence[Part], failed: Event | None = None) -> list[FileDigest]:
    """Several files at once, as many as the store takes; ``failed`` is set by the first error."""
    if len(parts) < 2:
        return [store.write_part(save, part) for part in parts]
    with Pool(min(store.streams, len(parts)), thread_name_prefix="sixfold-part") as pool:
        running = [pool.submit(store.write_part, save, part) for part in parts]
        try:
            for done in wait(running, return_when=FIRST_EXCEPTION).done:
                done.result()
            return [future.result() for future in running]
        except BaseException:
            if failed is not None:
                failed.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(slots=True)
class _Frames:
    """What goes into one file, and where it came to lie there."""

    name: str
    numbers: Sequence[int]  # of the plan's writes
    objects: Sequence[tuple[str, bytes]]
    compressed: bool
    places: array[int] = field(default_factory=lambda: array("q"))
    object_places: list[tuple[str, ByteRange]] = field(default_factory=list)


def _encoded(
    plan: Sequence[Write], numbers: Sequence[int], values: Callable[[int], Iterator[memoryview]], threads: int
) -> Iterator[tuple[int, bytes]]:
    """The CRC-32 of the values of each write, and its frame compressed, in order; each thread works on one ahead."""

    def encode(step: Write, raw: bytes) -> tuple[int, bytes]:
        head, tail = frames.template(step.dtype, step.piece.box.size, 0).fill(crc := crc32(raw))
        return crc, zstd.compress((head, raw, tail))

    with Pool(threads) as pool:
        ahead = deque[Future[tuple[int, bytes]]]()
        for number in numbers:
            raw = b"".join(map(bytes, values(number)))  # see [Note: what is hashed is written]
            ahead.append(pool.submit(encode, plan[number], raw))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def add_frame(
    file: PartFile,
    record: ShardedTensor,
    step: Write,
    rank: int,
    check_finite: bool,
    copies: Copies,
    is_owned: bool = False,
) -> int:
    """Write one chunk, an empty one too; the CRC-32 of its data.

    It is hashed once, for the frame's CRC-32 and for the file's blocks.
    """
    size, nbytes = step.piece.box.size, prod(step.piece.box.size) * step.dtype.itemsize
    if check_finite:
        check_tensor_finite(step.key, record.view(step.piece), step.piece.box.offset, rank)
    if nbytes >= frames.LARGE_BYTES:
        plain = None if is_owned else copies
        return file.add_large(step.dtype, size, lambda at: _raw_parts(record, step, plain, copies, at))
    template = frames.template(step.dtype, size, file.position)
    raw = b"".join(bytes(part) for part, _ in _raw_parts(record, step, None, copies, 0))  # the first copy
    crc = (value := crc32(raw)).to_bytes(4, "little")
    (head, more_head), (tail, more_tail) = template.head, template.tail
    file.add((head, crc, more_head, raw, tail, crc, more_tail), template.nbytes)
    return value


def add_compressed(
    file: PartFile, record: ShardedTensor, step: Write, rank: int, check_finite: bool, copies: Copies
) -> None:
    """Write one chunk as one zstd frame; it is in memory twice."""
    if check_finite:
        check_tensor_finite(step.key, record.view(step.piece), step.piece.box.offset, rank)
    raw = b"".join(bytes(part) for part, _ in _raw_parts(record, step, None, copies, 0))
    head, tail = frames.template(step.dtype, step.piece.box.size, 0).fill(crc32(raw))
    file.append(zstd.compress((head, raw, tail)))


def _raw_parts(
    record: ShardedTensor, step: Write, plain: Copies | None, copies: Copies, at: int
) -> Iterator[tuple[memoryview, object]]:
    """The bytes of one chunk, which will lie at byte ``at`` of a file, part by part, and who owns their memory.

    ``plain``: copies of what is plain CPU memory; None gives that where it lies. All else is copied anyway.
    """
    data, piece, itemsize = record.data, step.piece, step.dtype.itemsize
    elements = prod(piece.box.size)
    if not elements:
        return
    if data is not None and data.is_cpu and is_plain(data):
        first = 0 if piece.flat is None else piece.flat[0]
        assert first + elements <= data.numel(), f"{step} leaves its tensor"
        address = data.data_ptr() + first * itemsize
        left = elements * itemsize
        if plain is None:
            yield memoryview((ctypes.c_char * left).from_address(address)).cast("B"), data
        while plain is not None and left:
            take = min(left, COPY_BYTES - at % COPY_BYTES)  # at the borders of the file's blocks
            yield plain.of_bytes(address, take)
            address, at, left = address + take, at + take, left - take
        return
    view = record.view(piece)
    for cut in cuts(view.shape, COPY_BYTES // itemsize):
        yield copies.of(view[cut])


class Copies:
    """CPU memory for parts of tensors, ``COPY_BYTES`` each, used again when the last who looks at it is gone."""

    def __init__(self) -> None:
        self._free: deque[torch.Tensor] = deque()  # its append and pop hold no lock: threads write

    def of(self, part: torch.Tensor) -> tuple[memoryview, object]:
        """The values of ``part`` in row-major order, and the owner of that memory."""
        memory, loan = self._lent()
        copy = memory[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)
        copy.copy_(part)
        return tensor_bytes(copy), loan

    def of_bytes(self, address: int, nbytes: int) -> tuple[memoryview, object]:
        """What lies in memory, and the owner of the copy."""
        memory, loan = self._lent()
        ctypes.memmove(memory.data_ptr(), address, nbytes)
        return tensor_bytes(memory)[:nbytes], loan

    def _lent(self) -> tuple[torch.Tensor, object]:
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cpu")
        loan = _Loan()
        finalize(loan, self._back, memory)
        return memory, loan

    def _back(self, memory: torch.Tensor) -> None:
        recycled(memory)
        self._free.append(memory)


class _Loan:
    """When nobody holds it any more, memory goes back to where it came from."""


def check_tensor_finite(key: str, tensor: torch.Tensor, offset: Sequence[int], rank: int) -> None:
    """ShardingError for a NaN or an infinity; ``offset`` is where the tensor begins in the one that ``key`` names."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype is torch.float4_e2m1fn_x2:
        return  # of integers and of four bits all are finite
    for cut in cuts(tensor.shape, COPY_BYTES // max(4, tensor.element_size())):  # float8 is looked at as float32
        part = tensor[cut]
        bad = ~torch.isfinite(comparable(part))
        if bool(bad.any()):
            local = torch.nonzero(bad.reshape(part.shape))[0].tolist()
            index = [sum(places) for places in zip(offset, (axis.start or 0 for axis in cut), local, strict=True)]
            value = part[tuple(local)].item()
            raise ShardingError(f"{key}{index} is {value} on rank {rank}, and check_finite is set")


def check_value_finite(name: str, value: Any, rank: int, seen: set[int]) -> None:
    """ShardingError for a NaN or an infinity in a tensor or an array that a value is or holds; Python's numbers pass.

    ``seen``: ids of what was looked at. numpy is not imported here.
    """
    if isinstance(value, str | bytes | int | float | type) or id(value) in seen:
        return
    seen.add(id(value))
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        for place, part in _dense_parts(value):
            check_tensor_finite(name + place, part.detach(), (0,) * part.dim(), rank)
    elif numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "fc":
        bad = ~numpy.isfinite(value)
        if bad.any():
            index = [int(places[0]) for places in numpy.nonzero(bad)] if value.ndim else []
            raise ShardingError(f"{name}{index} is {value[tuple(index)]} on rank {rank}, and check_finite is set")
    else:
        for part, below in plain_types.parts_of(value) or [*getattr(value, "__dict__", {}).items()]:
            text = f"{name}.{part}" if isinstance(part, str) else f"{name}[{part!r}]"
            check_value_finite(text, below, rank, seen)


def _dense_parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The dense tensors that hold the values of one of any form, and what their places add to its name."""
    if has_values(tensor):
        return [("", tensor)]
    if type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "__tensor_flatten__"):
        inner = [(name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
        return [(f".{name}{place}", part) for name, held in inner for place, part in _dense_parts(held)]
    if tensor.is_meta or tensor.is_quantized:
        return []
    if tensor.layout is torch.sparse_coo:
        return [(".values", tensor.detach()._values())]
    return [(".values", tensor.detach().values())] if tensor.is_nested or tensor.layout in _SPARSE else []
