"""Transfer: plans become bytes and bytes become tensors.

    save plan + tensors --> write (this file) --> frames
    load plan + frames --> read (this file) --> the caller's tensors

No group and no decision: what goes where was planned. Tensors on other devices pass through a CPU copy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from sixfold.dist_ckpt import frame as frames
from sixfold.dist_ckpt import weights_only
from sixfold.dist_ckpt.box import Box, describe, first_element, is_contiguous
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, MismatchError, ShardingError
from sixfold.dist_ckpt.folder import Checkpoint
from sixfold.dist_ckpt.integrity import FileDigest, hash_pieces, join_pieces
from sixfold.dist_ckpt.manifest import ByteRange, StoredChunk
from sixfold.dist_ckpt.mapping import ShardedTensor
from sixfold.dist_ckpt.plan import LoadPlan, Read, Write
from sixfold.dist_ckpt.storage import FrameFile

DTYPE_POLICIES = ("exact", "cast", "strict")
_HASH_ONCE_BYTES = 1 << 20  # joining CRC-32s costs some 100 us, as much as hashing this much again
_DIRECT_BYTES = 1 << 18  # from here on one preadv into the target beats a copy out of the mapping


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
    bad = ~torch.isfinite(_comparable(tensor))
    if bool(bad.any()):
        local = torch.nonzero(bad.reshape(tensor.shape))[0].tolist()
        index = tuple(offset + at for offset, at in zip(step.piece.box.offset, local, strict=True))
        value = tensor[tuple(local)].item()
        raise ShardingError(f"{step.key}{list(index)} is {value} on rank {rank}, and check_finite is set")


class Reader:
    """Carries out one rank's load plan.

    Args:
        checkpoint: opened; its ``verify`` decides whether CRC-32s of foreign frames are checked.
        dtype_policy: one of ``DTYPE_POLICIES``; "strict" differences were refused by the plan.
    """

    def __init__(self, checkpoint: Checkpoint, dtype_policy: str) -> None:
        self._checkpoint = checkpoint
        self._policy = dtype_policy
        self._layouts: dict[ByteRange, frames.Layout] = {}
        self._fallbacks: dict[ByteRange, torch.Tensor] = {}
        self.cast_keys: set[str] = set()

    def run(self, records: Sequence[ShardedTensor], plan: LoadPlan) -> None:
        """Fill the records' tensors. On an error their content is undefined."""
        for index, piece in plan.zeroed:
            records[index].view(piece).zero_()
        for step in plan.reads:
            view = records[step.record].view(step.piece)
            try:
                self._read(step, _region(view, step.part, step.piece.box))
            except CorruptError as error:
                text = describe(step.key, step.part, step.shape)
                raise CorruptError(f"{self._checkpoint.folder / step.chunk.frame.file}: {text}: {error}") from error

    def read_object(self, stored_key: str, frame: ByteRange, safe_globals: Sequence[Any]) -> Any:
        """The object of a frame; ours and megatron's are lists of one."""
        data = bytes(self._checkpoint.frame(frame))
        name = f"{self._checkpoint.folder / frame.file}: {stored_key}"
        value = weights_only.load(data, name, safe_globals)
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    def _read(self, step: Read, target: torch.Tensor) -> None:
        chunk = step.chunk
        layout = self._layout(chunk.frame)
        if not self._is_plain(layout, step):
            self._copy(step, self._load_whole(step), target)
            return
        start = chunk.frame.offset + layout.data_start + chunk.first * step.stored_dtype.itemsize
        within_chunk = step.part.shifted([-offset for offset in chunk.box.offset])
        if self._fits_directly(step, target) and is_contiguous(within_chunk, chunk.box.size):
            start += first_element(within_chunk, chunk.box.size) * step.stored_dtype.itemsize
            _read_bytes(self._checkpoint.folder / chunk.frame.file, start, frames.tensor_bytes(target))
            return
        data = self._checkpoint.map(chunk.frame.file)
        source = torch.frombuffer(data, dtype=step.stored_dtype, count=chunk.box.volume, offset=start)
        self._copy(step, source.view(chunk.box.size), target)

    def _fits_directly(self, step: Read, target: torch.Tensor) -> bool:
        return (
            target.device.type == "cpu"
            and target.dtype == step.stored_dtype
            and target.is_contiguous()
            and target.numel() * target.element_size() >= _DIRECT_BYTES
        )

    def _layout(self, frame: ByteRange) -> frames.Layout:
        """The frame's directory, parsed once; a foreign frame's CRC-32 is checked on the way."""
        bare = self._checkpoint.manifest.decode_chunk is not None
        if frame not in self._layouts and bare:
            self._layouts[frame] = frames.Layout(b"", 0, frame.length, 0)
        if frame not in self._layouts:
            view = self._checkpoint.frame(frame)
            layout = frames.parse(view)
            if self._checkpoint.integrity is None and self._checkpoint.verify != "off" and layout.data_crc32:
                found = crc32(view[layout.data_start : layout.data_start + layout.data_bytes])
                if found != layout.data_crc32:
                    raise CorruptError(f"{frame}: CRC-32 is {found:08x}, saved was {layout.data_crc32:08x}")
            self._layouts[frame] = layout
        return self._layouts[frame]

    def _is_plain(self, layout: frames.Layout, step: Read) -> bool:
        """Whether the raw bytes are the chunk in row-major order, so that nothing need be unpickled."""
        chunk, dtype = step.chunk, step.stored_dtype
        if self._checkpoint.manifest.decode_chunk is not None:
            return self._decoded(step) is None
        whole = layout.data_bytes == chunk.frame_elements * dtype.itemsize
        return whole and layout.pickle == frames.data_pickle(dtype, chunk.frame_shape)

    def _decoded(self, step: Read) -> torch.Tensor | None:
        """The chunk of a bare file that is not plain values, decoded once; None if it is."""
        frame, decode = step.chunk.frame, self._checkpoint.manifest.decode_chunk
        if frame not in self._fallbacks and decode is not None:
            tensor = decode(self._checkpoint.folder, step.chunk)
            if tensor is None:
                return None
            self._fallbacks[frame] = tensor
        return self._fallbacks[frame]

    def _load_whole(self, step: Read) -> torch.Tensor:
        """A frame in another form than ours (strides, an older pickle) through torch's weights-only reader."""
        chunk, frame = step.chunk, step.chunk.frame
        if frame not in self._fallbacks:
            value = weights_only.load(bytes(self._checkpoint.frame(frame)), str(frame), ())
            if not isinstance(value, torch.Tensor):
                raise CorruptError(f"{frame} holds a {type(value).__name__}, not a tensor")
            self._fallbacks[frame] = value
        tensor = self._fallbacks[frame]
        if tuple(tensor.shape) != chunk.frame_shape or tensor.dtype != step.stored_dtype:
            raise CorruptError(
                f"{frame} holds {tensor.dtype} {tuple(tensor.shape)}; .metadata says {step.stored_dtype} "
                f"{chunk.frame_shape}"
            )
        if chunk.run is None:
            return tensor
        return tensor.reshape(-1)[chunk.first : chunk.first + chunk.box.volume].view(chunk.box.size)

    def _copy(self, step: Read, chunk: torch.Tensor, target: torch.Tensor) -> None:
        source = _region(chunk, step.part, step.chunk.box)
        if target.dtype != source.dtype:
            if self._policy == "exact":
                _check_exact(step, source, target.dtype)
            self.cast_keys.add(step.key)
        target.copy_(source)


def _region(tensor: torch.Tensor, part: Box, box: Box) -> torch.Tensor:
    """The elements of ``part`` in a tensor that fills ``box``; both are global."""
    if part == box:
        return tensor
    axes = zip(part.offset, part.size, box.offset, strict=True)
    return tensor[tuple(slice(at - start, at - start + length) for at, length, start in axes)]


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """float8 types have few kernels; float32 holds each of their values."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor


def _check_exact(step: Read, source: torch.Tensor, dtype: torch.dtype) -> None:
    back = _comparable(source.to(dtype).to(source.dtype))
    values = _comparable(source)
    lost = (back != values) & ~((back != back) & (values != values))  # NaN survives as NaN
    if bool(lost.any()):
        first = source[tuple(torch.nonzero(lost)[0].tolist())].item()
        raise MismatchError(
            f"{step.key}: asked for {dtype}, stored is {source.dtype}, and the value {first} does not survive the way "
            "there and back; ask for the stored dtype, or pass dtype_policy='cast'"
        )


def _read_bytes(path: Path, start: int, target: memoryview) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        while len(target):
            count = os.preadv(handle, [target], start)
            if count == 0:
                raise CorruptError(f"{path} ends at byte {start}, while it is read")
            target, start = target[count:], start + count
    finally:
        os.close(handle)


def check_policy(dtype_policy: str) -> None:
    """Refuse a policy that does not exist."""
    if dtype_policy not in DTYPE_POLICIES:
        raise CheckpointError(f"dtype_policy is {dtype_policy!r}; it is one of {DTYPE_POLICIES}")
