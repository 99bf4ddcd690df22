"""Sources: where the values of a stored chunk lie, or the chunk itself where its frame is of another form.

    load plan --> Sources (this file) --> reader.py

A frame of this package is recognised by comparing it with the template of its dtype and shape; a frame of
torch or megatron by its zip directory, once, and its CRC-32, which they write and never look at, is checked
on the way. What is not plain values in row-major order goes through torch's weights-only reader, when it is copied:
the chunks decoded last are kept, for the next reads of the same.

[Note: taken for ours] Where bytes arrive while they are read, planning must not wait for the head of each frame. It
waits for the first one. If that is ours, all frames of the length of ours are taken for ours. Their heads are looked at
when their bytes are there: before a chunk is copied, and of what was read as a run of bytes before its record counts as
complete. One of another form, such as another version of torch writes, is then read again by its zip directory.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch

from sixfold.dist_ckpt.checkpoint.opening import Checkpoint
from sixfold.dist_ckpt.errors import CorruptError
from sixfold.dist_ckpt.formats import frame as frames
from sixfold.dist_ckpt.formats import weights_only
from sixfold.dist_ckpt.geometry.manifest import ByteRange, StoredChunk
from sixfold.dist_ckpt.plans.plan import Read


class Sources:
    """The frames of a checkpoint, each looked into once."""

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
        start = self._starts[frame]
        return None if start is None else start + step.chunk.first * step.stored_dtype.itemsize

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
        shape = chunk.frame_shape
        if self._checkpoint.integrity is not None:
            for streamed in (False, True):  # as a folder has it, and a store
                template = frames.template(dtype, shape, frame.offset, streamed=streamed)
                if frame.length == template.nbytes and self._is_ours(frame, template):
                    return frame.offset + template.head_bytes
        return self._parsed(step)

    def _parsed(self, step: Read) -> int | None:
        chunk, frame, dtype = step.chunk, step.chunk.frame, step.stored_dtype
        view = self._checkpoint.frame(frame)
        layout = frames.parse(view)
        if self._checkpoint.integrity is None and self._checkpoint.verify != "off":
            frames.check_records(view)
        plain = layout.data_bytes == prod(chunk.frame_shape) * dtype.itemsize
        plain = plain and layout.pickle == frames.data_pickle(dtype, chunk.frame_shape)
        return frame.offset + layout.data_start if plain else None

    def _is_ours(self, frame: ByteRange, template: frames.Template) -> bool:
        """See [Note: taken for ours]."""
        if not self._checkpoint.is_arriving:
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
        value: Any = weights_only.load(bytes(self._checkpoint.frame(frame)), str(frame), ())
        if not isinstance(value, torch.Tensor):
            raise CorruptError(f"{frame} holds a {type(value).__name__}, not a tensor")
        if tuple(value.shape) != chunk.frame_shape or value.dtype != dtype:
            raise CorruptError(
                f"{frame} holds {value.dtype} {tuple(value.shape)}; .metadata says {dtype} {chunk.frame_shape}"
            )
        if chunk.run is None:
            return value
        return value.reshape(-1)[chunk.first : chunk.first + chunk.box.volume].view(chunk.box.size)


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """float8 types have few kernels; float32 holds each of their values."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
