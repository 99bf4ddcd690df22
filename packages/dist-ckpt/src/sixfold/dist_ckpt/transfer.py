"""Transfer: a save plan becomes bytes.

    save plan + tensors --> write (this file) --> frames
    load plan + frames --> reader.py --> the caller's tensors

No group and no decision: what goes where was planned. Tensors on other devices pass through a CPU copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sixfold.dist_ckpt import frame as frames
from sixfold.dist_ckpt.crc import crc32, join_pieces
from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.integrity import FileDigest, hash_pieces
from sixfold.dist_ckpt.manifest import ByteRange, StoredChunk
from sixfold.dist_ckpt.mapping import ShardedTensor
from sixfold.dist_ckpt.plan import Write
from sixfold.dist_ckpt.sources import comparable
from sixfold.dist_ckpt.storage import FrameFile

_HASH_ONCE_BYTES = 1 << 20  # joining CRC-32s costs some 20 us a piece, as much as hashing this much again


@dataclass(slots=True)
class Written:
    """What one rank wrote; ``empty`` are tensors without a single element, which have no chunk."""

    chunks: list[tuple[str, torch.dtype, tuple[int, ...], StoredChunk]] = field(default_factory=list)
    objects: list[tuple[str, ByteRange]] = field(default_factory=list)
    files: dict[str, FileDigest] = field(default_factory=dict)
    empty: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)


def write(
    staging: Path,
    rank: int,
    records: Sequence[ShardedTensor],
    plan: Sequence[Write],
    objects: Sequence[tuple[str, bytes]],
    *,
    check_finite: bool,
) -> Written:
    """Write this rank's chunks and objects as frames of ``__<rank>_0.distcp``; no file if there are none."""
    written = Written(empty={r.key: (r.dtype, r.global_shape) for r in records if 0 in r.global_shape})
    if not plan and not objects:
        return written
    with FrameFile(staging, f"__{rank}_0.distcp") as file:
        for step in plan:
            tensor = _on_cpu(records[step.record].view(step.piece))
            if check_finite:
                _check_finite(tensor, step, rank)
            frame = _append_frame(file, tensor, step)
            written.chunks.append((step.key, step.dtype, step.shape, StoredChunk(step.piece.box, frame)))
        for stored_key, data in objects:
            start = file.position
            file.append(data)
            written.objects.append((stored_key, ByteRange(file.name, start, len(data))))
        written.files[file.name] = file.finish()
    return written


def _append_frame(file: FrameFile, tensor: torch.Tensor, step: Write) -> ByteRange:
    """Write one chunk. Its data is hashed once, for the frame's CRC-32 and for the file's blocks."""
    start, raw = file.position, frames.tensor_bytes(tensor)
    pickled = frames.data_pickle(step.dtype, step.piece.box.size)
    if len(raw) < _HASH_ONCE_BYTES:
        pieces, crc = None, crc32(raw)
    else:
        # The CRC-32 stands in the head but does not change its length.
        head_bytes = len(frames.build(pickled, len(raw), 0, start).head)
        pieces = hash_pieces(raw, start + head_bytes)
        crc = join_pieces(pieces)
    frame = frames.build(pickled, len(raw), crc, start)
    file.append(frame.head)
    file.append(raw, pieces)
    file.append(frame.tail)
    return ByteRange(file.name, start, file.position - start)


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
