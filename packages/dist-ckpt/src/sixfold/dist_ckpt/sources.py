"""Sources: where the values of a stored chunk lie, or the chunk itself where its frame is of another form.

    load plan --> Sources (this file) --> reader.py

A frame of this package is recognised by comparing it with the template of its dtype and shape; a frame of
torch or megatron by its zip directory, once, and its CRC-32, which they write and never look at, is checked
on the way. What is not plain values in row-major order goes through torch's weights-only reader.
"""

from __future__ import annotations

from typing import Any

import torch

from sixfold.dist_ckpt import frame as frames
from sixfold.dist_ckpt import weights_only
from sixfold.dist_ckpt.errors import CorruptError
from sixfold.dist_ckpt.folder import Checkpoint
from sixfold.dist_ckpt.manifest import ByteRange
from sixfold.dist_ckpt.plan import Read


class Sources:
    """The frames of a checkpoint, each looked into once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._starts: dict[ByteRange, int | None] = {}
        self._decoded: dict[ByteRange, torch.Tensor] = {}

    def start(self, step: Read) -> int | None:
        """Byte of the file at which the chunk's values begin in row-major order; None if they are not plain."""
        frame = step.chunk.frame
        if frame not in self._starts:
            self._starts[frame] = self._values_of(step)
        start = self._starts[frame]
        return None if start is None else start + step.chunk.first * step.stored_dtype.itemsize

    def chunk(self, step: Read) -> torch.Tensor:
        """The chunk as a tensor of the shape of its box: mapped, or decoded if it is not plain."""
        start, box = self.start(step), step.chunk.box
        if start is not None:
            data = self._checkpoint.map(step.chunk.frame.file)
            return torch.frombuffer(data, dtype=step.stored_dtype, count=box.volume, offset=start).view(box.size)
        tensor = self._decoded_frame(step)
        if step.chunk.run is None:
            return tensor
        return tensor.reshape(-1)[step.chunk.first : step.chunk.first + box.volume].view(box.size)

    def _values_of(self, step: Read) -> int | None:
        chunk, frame, dtype = step.chunk, step.chunk.frame, step.stored_dtype
        decode = self._checkpoint.manifest.decode_chunk
        if decode is not None:
            tensor = decode(self._checkpoint.folder, chunk)
            if tensor is None:
                return 0
            self._decoded[frame] = tensor
            return None
        shape = chunk.frame_shape
        template = frames.template(dtype, shape, frame.offset)
        if frame.length == template.nbytes:
            data, first = self._checkpoint.map(frame.file), frame.offset + len(template.head[0])
            if (
                data[frame.offset : first] == template.head[0]
                and data[first + 4 : frame.offset + template.head_bytes] == template.head[1]
                and self._checkpoint.integrity is not None
            ):
                return frame.offset + template.head_bytes
        layout = self._checked_layout(frame)
        plain = layout.data_bytes == chunk.frame_elements * dtype.itemsize
        if plain and layout.pickle == frames.data_pickle(dtype, shape):
            return frame.offset + layout.data_start
        return None

    def _checked_layout(self, frame: ByteRange) -> frames.Layout:
        view = self._checkpoint.frame(frame)
        layout = frames.parse(view)
        if self._checkpoint.integrity is None and self._checkpoint.verify != "off":
            frames.check_records(view)
        return layout

    def _decoded_frame(self, step: Read) -> torch.Tensor:
        chunk, frame = step.chunk, step.chunk.frame
        if frame not in self._decoded:
            value: Any = weights_only.load(bytes(self._checkpoint.frame(frame)), str(frame), ())
            if not isinstance(value, torch.Tensor):
                raise CorruptError(f"{frame} holds a {type(value).__name__}, not a tensor")
            self._decoded[frame] = value
        tensor = self._decoded[frame]
        expected = chunk.box.size if self._checkpoint.manifest.decode_chunk is not None else chunk.frame_shape
        if tuple(tensor.shape) != expected or tensor.dtype != step.stored_dtype:
            raise CorruptError(
                f"{frame} holds {tensor.dtype} {tuple(tensor.shape)}; .metadata says {step.stored_dtype} {expected}"
            )
        return tensor


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """float8 types have few kernels; float32 holds each of their values."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
