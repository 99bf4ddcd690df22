"""Transfer: a save plan becomes bytes.

    save plan + tensors --> write (this file) --> frames
    load plan + frames --> reader.py --> the caller's tensors

No group and no decision: what goes where was planned. Tensors on other devices pass through a CPU copy.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from sixfold.dist_ckpt import frame as frames
from sixfold.dist_ckpt.crc import crc32
from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.integrity import FileDigest
from sixfold.dist_ckpt.manifest import ByteRange
from sixfold.dist_ckpt.mapping import ShardedTensor
from sixfold.dist_ckpt.plan import Write, total_bytes
from sixfold.dist_ckpt.sources import comparable
from sixfold.dist_ckpt.storage import FrameFile
from sixfold.dist_ckpt.table import Encoded


@dataclass(slots=True)
class Written:
    """What one rank wrote, all into one file.

    ``places`` are int64 pairs, start and length of the frame of each write of the plan. ``table`` is the rank's
    table, whose main replicas are these writes in their order; the two are None where the first rank has them.
    """

    table: Encoded | None = None
    places: bytes | None = b""
    objects: list[tuple[str, ByteRange]] = field(default_factory=list)
    files: dict[str, FileDigest] = field(default_factory=dict)


def write(
    staging: Path,
    rank: int,
    records: Sequence[ShardedTensor],
    plan: Sequence[Write],
    objects: Sequence[tuple[str, bytes]],
    *,
    check_finite: bool,
    threads: int = 1,
    moved: Callable[[int], None] | None = None,
) -> Written:
    """Write this rank's chunks and objects as frames of ``__<rank>_0.distcp``; no file if there are none.

    ``moved``: as of ``FrameFile``.
    """
    written = Written()
    if not plan and not objects:
        return written
    nbytes = total_bytes(plan) + sum(len(data) for _, data in objects)
    places = array("q")
    with FrameFile(staging, f"__{rank}_0.distcp", nbytes, threads, moved) as file:
        for step in plan:
            start = file.position
            _add_frame(file, records[step.record], step, rank, check_finite)
            places.extend((start, file.position - start))
        for stored_key, data in objects:
            written.objects.append((stored_key, ByteRange(file.name, file.position, len(data))))
            file.append(data)
        written.files[file.name] = file.finish()
    written.places = places.tobytes()
    return written


def file_bytes(plan: Sequence[Write], objects: Sequence[tuple[str, bytes]]) -> int:
    """The size of the file that ``write`` makes."""
    at = 0
    for step in plan:
        at += frames.template(step.dtype, step.piece.box.size, at).nbytes
    return at + sum(len(data) for _, data in objects)


def _add_frame(file: FrameFile, record: ShardedTensor, step: Write, rank: int, check_finite: bool) -> None:
    """Write one chunk. Its data is hashed once, for the frame's CRC-32 and for the file's blocks."""
    data, flat, size = record.data, step.piece.flat, step.piece.box.size
    if data is None or not data.is_cpu or not _is_plain(data):
        data, flat = _on_cpu(record.view(step.piece)), None
    if check_finite:
        _check_finite(record.view(step.piece), step, rank)
    elements, itemsize = prod(size), step.dtype.itemsize
    first = 0 if flat is None else flat[0]
    assert first + elements <= data.numel(), f"{step} leaves its tensor"
    address, nbytes = data.data_ptr() + first * itemsize, elements * itemsize
    template = frames.template(step.dtype, size, file.position)
    if nbytes < frames.LARGE_BYTES:
        raw = ctypes.string_at(address, nbytes)
        crc = crc32(raw).to_bytes(4, "little")
        (head, more_head), (tail, more_tail) = template.head, template.tail
        file.add((head, crc, more_head, raw, tail, crc, more_tail), template.nbytes)
        return
    if data is not record.data:
        file.keep(data)
    view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    file.add_large(template.head_bytes, view, template.fill)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a CPU tensor is its values in row-major order."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


def _check_finite(tensor: torch.Tensor, step: Write, rank: int) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    bad = ~torch.isfinite(comparable(tensor))
    if bool(bad.any()):
        local = torch.nonzero(bad.reshape(tensor.shape))[0].tolist()
        index = tuple(offset + at for offset, at in zip(step.piece.box.offset, local, strict=True))
        value = tensor[tuple(local)].item()
        raise ShardingError(f"{step.key}{list(index)} is {value} on rank {rank}, and check_finite is set")
