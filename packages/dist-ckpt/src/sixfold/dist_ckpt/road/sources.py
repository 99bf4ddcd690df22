"""Sources: where the values of a stored chunk lie, or the chunk itself where its frame is of another form.

    load plan --> Sources (this file) --> reader.py

A frame of this package is recognised by comparing it with the template of its dtype and shape; a frame of
torch or megatron by its zip directory, once, and its CRC-32, which they write and never look at, is checked
on the way. What is not plain values in row-major order goes through torch's weights-only reader, when it is copied:
of what was decoded the last ``KEPT_BYTES`` are kept, for the next reads of the same chunk.

[Note: taken for ours] Where bytes arrive while they are read, planning must not wait for the head of each frame.
A frame of the length of ours, in a checkpoint of ours, is taken for one until its head is looked at: before a copy of
it, before anyone is told that a record is in place, or in the end. Records of frames that were mistaken are read again.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import torch

from sixfold.dist_ckpt.errors import CorruptError
from sixfold.dist_ckpt.files import frame as frames
from sixfold.dist_ckpt.files import weights_only
from sixfold.dist_ckpt.geometry.box import Box
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.plans.plan import Read
from sixfold.dist_ckpt.stores.folder import Checkpoint

KEPT_BYTES = 1 << 26


class Sources:
    """The frames of a checkpoint, each looked into once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._starts: dict[ByteRange, int | None] = {}
        self._unseen: dict[ByteRange, frames.Template] | None = {} if checkpoint.is_arriving else None
        self._mistaken: set[ByteRange] = set()
        self._one_at_a_time = Lock()
        self._decoded = _Decoded()

    def start(self, step: Read) -> int | None:
        """Byte of the file at which the chunk's values begin in row-major order; None if they are not plain."""
        frame = step.chunk.frame
        if frame not in self._starts:
            self._starts[frame] = self._values_of(step)
        start = self._starts[frame]
        return None if start is None else start + step.chunk.first * step.stored_dtype.itemsize

    def chunk(self, step: Read) -> torch.Tensor:
        """The chunk as a tensor of the shape of its box: mapped, or decoded if it is not plain."""
        self.is_known(step.chunk.frame)
        start, box = self.start(step), step.chunk.box
        if start is not None:
            stop = start + box.volume * step.stored_dtype.itemsize
            self._checkpoint.await_bytes(step.chunk.frame.file, start, stop)
            data = self._checkpoint.map(step.chunk.frame.file).data
            return torch.frombuffer(data, dtype=step.stored_dtype, count=box.volume, offset=start).view(box.size)
        tensor = self._decoded.get((step.chunk.frame, box))
        if tensor is None:
            tensor = self._decode(step)
            self._decoded.put((step.chunk.frame, box), tensor)
        return tensor

    def _values_of(self, step: Read) -> int | None:
        chunk, frame, dtype = step.chunk, step.chunk.frame, step.stored_dtype
        decoder = self._checkpoint.manifest.decoder
        if decoder is not None:
            return frame.offset if decoder.is_plain(chunk) else None
        shape = chunk.frame_shape
        template = frames.template(dtype, shape, frame.offset)
        if frame.length == template.nbytes and self._checkpoint.integrity is not None:
            if self._unseen is not None and frame not in self._mistaken:
                self._unseen[frame] = template
            elif not self._is_ours(frame, template):
                return self._start_of(frame, step)
            return frame.offset + template.head_bytes
        return self._start_of(frame, step)

    def is_known(self, frame: ByteRange) -> bool:
        """Whether what was read of a frame is of what it is; waits for its head."""
        unseen = self._unseen or {}
        if frame in unseen:
            with self._one_at_a_time:
                template = unseen.get(frame)
                if template is not None and not self._is_ours(frame, template):
                    self._mistaken.add(frame)
                    del self._starts[frame]
                unseen.pop(frame, None)
        return frame not in self._mistaken

    def mistaken(self) -> set[ByteRange]:
        """The frames that were not what they were taken for; from here on nothing is taken for what it may not be."""
        for frame in list(self._unseen or ()):
            self.is_known(frame)
        found, self._mistaken, self._unseen = self._mistaken, set(), None
        return found

    def _is_ours(self, frame: ByteRange, template: frames.Template) -> bool:
        head, first = self._checkpoint.frame(frame)[: template.head_bytes], len(template.head[0])
        return head[:first] == template.head[0] and head[first + 4 :] == template.head[1]

    def _start_of(self, frame: ByteRange, step: Read) -> int | None:
        """As ``start``, by the frame's own directory."""
        chunk, dtype = step.chunk, step.stored_dtype
        layout = self._checked_layout(frame)
        plain = layout.data_bytes == chunk.frame_elements * dtype.itemsize
        if plain and layout.pickle == frames.data_pickle(dtype, chunk.frame_shape):
            return frame.offset + layout.data_start
        return None

    def _checked_layout(self, frame: ByteRange) -> frames.Layout:
        view = self._checkpoint.frame(frame)
        layout = frames.parse(view)
        if self._checkpoint.integrity is None and self._checkpoint.verify != "off":
            frames.check_records(view)
        return layout

    def _decode(self, step: Read) -> torch.Tensor:
        """The chunk of a frame that is not plain."""
        chunk, frame, decoder = step.chunk, step.chunk.frame, self._checkpoint.manifest.decoder
        if decoder is not None:
            self._checkpoint.await_bytes(frame.file, frame.offset, frame.offset + frame.length)
            return decoder.decode(self._checkpoint.folder, chunk)
        value: Any = weights_only.load(bytes(self._checkpoint.frame(frame)), str(frame), ())
        if not isinstance(value, torch.Tensor):
            raise CorruptError(f"{frame} holds a {type(value).__name__}, not a tensor")
        if tuple(value.shape) != chunk.frame_shape or value.dtype != step.stored_dtype:
            raise CorruptError(
                f"{frame} holds {value.dtype} {tuple(value.shape)}; .metadata says {step.stored_dtype} "
                f"{chunk.frame_shape}"
            )
        if chunk.run is None:
            return value
        return value.reshape(-1)[chunk.first : chunk.first + chunk.box.volume].view(chunk.box.size)


class _Decoded:
    """The chunks decoded last, of ``KEPT_BYTES`` together or one; for threads."""

    def __init__(self) -> None:
        self._tensors: OrderedDict[tuple[ByteRange, Box], torch.Tensor] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()

    def get(self, place: tuple[ByteRange, Box]) -> torch.Tensor | None:
        with self._lock:
            if place in self._tensors:
                self._tensors.move_to_end(place)
            return self._tensors.get(place)

    def put(self, place: tuple[ByteRange, Box], tensor: torch.Tensor) -> None:
        with self._lock:
            if place in self._tensors:
                return
            self._tensors[place] = tensor
            self._nbytes += tensor.untyped_storage().nbytes()
            while self._nbytes > KEPT_BYTES and len(self._tensors) > 1:
                _, oldest = self._tensors.popitem(last=False)
                self._nbytes -= oldest.untyped_storage().nbytes()


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """float8 types have few kernels; float32 holds each of their values."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
