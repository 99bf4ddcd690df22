"""Records: what a leaf of a state dict says about its place in the global tensor.

    caller's tensors --> records.py (this file) --> factory.py, tree.py --> plan.py --> writer.py, reader.py

Names and argument order are megatron-core's (``dist_checkpointing/mapping.py``), flat shards
included, which megatron itself dropped after 0.12. No files, no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.geometry.box import Box, cuts, describe, range_boxes
from sixfold.dist_ckpt.geometry.integers import ReplicaId, flat_range, int_tuple, integer, on_grid, replica
from sixfold.dist_ckpt.state.dtensor import layout_of
from sixfold.dist_ckpt.state.tensor_memory import check_readable, local_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


#: What tells a shard from others on any rank: key, global offset, and the flattened range if there is one.
ShardId = tuple[str, tuple[int, ...], tuple[int, int] | None]


class Piece(NamedTuple):
    """One box of a shard: its place in the global tensor, and in row-major ``data`` unless it is all of that."""

    box: Box
    flat: tuple[int, int] | None

    def cut(self, most: int) -> Iterator[Piece]:
        """The same in parts of at most ``most`` elements, each a row-major range of it, in order."""
        at = 0 if self.flat is None else self.flat[0]
        for index in cuts(self.box.size, most):
            axes = [axis.indices(length) for axis, length in zip(index, self.box.size, strict=True)]
            box = Box(tuple(start for start, *_ in axes), tuple(stop - start for start, stop, _ in axes))
            if box.size == self.box.size:
                yield self
                return
            yield Piece(box.shifted(self.box.offset), (at, at + box.volume))
            at += box.volume


class ShardedBase:
    """Base of everything that is not common data: it has a ``key`` and a ``replica_id``."""

    key: str
    data: Any
    replica_id: ReplicaId

    def validate_metadata_integrity(self) -> None:
        """Check the record's own rules; raises ShardingError with the key and the numbers."""

    def without_data(self) -> ShardedBase:
        """A copy with ``data=None``."""
        bare = copy(self)
        bare.data = None
        return bare


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether this copy is the one that is written: 0, or a tuple of zeros."""
    return all(part == 0 for part in replica_id) if isinstance(replica_id, tuple) else replica_id == 0


@dataclass(eq=False)
class ShardedTensor(ShardedBase):
    """A local tensor and the box that it fills in a global tensor.

    The box starts at ``global_offset`` and has shape ``(1,) * prepend_axis_num + local_shape``.

    Args:
        key: name in the checkpoint; the place in the state dict does not matter.
        data: the local tensor: shape ``local_shape``, or 1-D if ``flattened_range`` is given;
            None for metadata and for loads that shall allocate.
        dtype: equals ``data.dtype``.
        local_shape: shape of the local box without prepended axes.
        global_shape: shape of the whole tensor, prepended axes included.
        global_offset: where the box starts, in elements.
        axis_fragmentations: how many equal parts each axis has; None for an irregular cut.
        replica_id: 0 or zeros for the copy that is written, anything else for its replicas.
        prepend_axis_num: leading axes of length 1 that the local tensor does not have.
        allow_shape_mismatch: at load, the stored shape may differ: the overlap from the origin is
            read, the rest is zero.
        flattened_range: ``data`` is elements [start, stop) of the row-major flattened local box.
    Raises:
        ShardingError: the arguments contradict each other.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    is_on_slice = False  # no field: of a DTensor on a slice of a mesh, of which other slices may hold a copy

    def __post_init__(self) -> None:
        _check_key(self.key)
        self.local_shape = int_tuple(self.key, "local_shape", self.local_shape)
        self.global_shape = int_tuple(self.key, "global_shape", self.global_shape)
        self.global_offset = int_tuple(self.key, "global_offset", self.global_offset)
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = int_tuple(self.key, "axis_fragmentations", self.axis_fragmentations)
        self.prepend_axis_num = integer(self.key, "prepend_axis_num", self.prepend_axis_num)
        self.replica_id = replica(self.key, self.replica_id)
        self.flattened_range = flat_range(self.key, self.flattened_range)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Check the rules of the class docstring; raises ShardingError with the key and the numbers."""
        if not len(self.global_shape) == len(self.global_offset) == len(self.local_shape) + self.prepend_axis_num:
            raise ShardingError(
                f"{self.key}: global_shape {self.global_shape}, global_offset {self.global_offset} and local_shape "
                f"{self.local_shape} with {self.prepend_axis_num} prepended axes differ in dimensions; all agree"
            )
        if self.axis_fragmentations is not None:
            own_axes = self.global_offset[self.prepend_axis_num :]
            for axis, (offset, length) in enumerate(zip(own_axes, self.local_shape, strict=True)):
                if length and offset % length:
                    raise ShardingError(
                        f"{self.key}: global_offset {offset} on local axis {axis} is no multiple of the local length "
                        f"{length}, as a regular grid needs; pass axis_fragmentations=None for an irregular cut"
                    )
        flat, elements = self.flattened_range, prod(self.local_shape)
        if flat is not None and not 0 <= flat.start <= flat.stop <= elements:
            raise ShardingError(
                f"{self.key}: flattened_range {flat.start}:{flat.stop} leaves the local box {self.local_shape} "
                f"of {elements} elements"
            )
        if self.data is not None:
            check_data(self, self.data)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        **fields: Any,
    ) -> ShardedTensor:
        """A shard of a regular grid, given as ranks.

        Args:
            key: see the class.
            data: the local tensor; its shape is the local shape.
            rank_offsets: tuples (axis, rank, fragments): on that axis of the global tensor (prepended
                axes counted) there are ``fragments`` equal parts and this is number ``rank``.
            replica_id, prepend_axis_num, fields: see the class.
        Raises:
            ShardingError: a negative or unknown axis, a rank outside its fragments, an axis named
                twice (megatron accepts that silently and uses the last).
        """
        if fields.get("flattened_range") is not None:
            raise ShardingError(f"{key}: flattened_range goes with from_rank_offsets_flat")
        shape = tuple(getattr(data, "shape", ()))
        return cls._on_grid(key, data, shape, rank_offsets, prepend_axis_num, replica_id=replica_id, **fields)

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: tuple[int, ...],
        *rank_offsets: tuple[int, int, int],
        flattened_range: slice,
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        **fields: Any,
    ) -> ShardedTensor:
        """A row-major range of a local box: ``data`` is 1-D, elements [start, stop) of its flattening.

        Args:
            data: (stop - start,) elements.
            non_flat_local_shape: shape of the local box that was flattened.
            flattened_range: ``slice(start, stop)``; may be empty, then nothing is stored.
            key, rank_offsets, replica_id, prepend_axis_num, fields: as in ``from_rank_offsets``.
        Raises:
            ShardingError: as ``from_rank_offsets``; data not 1-D; range outside the box.
        """
        fields |= {"flattened_range": flattened_range, "replica_id": replica_id}
        return cls._on_grid(key, data, tuple(non_flat_local_shape), rank_offsets, prepend_axis_num, **fields)

    @classmethod
    def _on_grid(
        cls, key: str, data: torch.Tensor, local_shape: tuple[int, ...], offsets: Any, prepended: int, **fields: Any
    ) -> ShardedTensor:
        _check_is_tensor(key, data)
        grid = on_grid(key, (1,) * prepended + local_shape, offsets)
        return cls(key, data, data.dtype, local_shape, *grid, prepend_axis_num=prepended, **fields)

    @classmethod
    def from_dtensor(
        cls, key: str, dtensor: DTensor, *, replica_id: ReplicaId | None = None, **fields: Any
    ) -> ShardedTensor:
        """The local tensor of a DTensor, itself and not a copy, so that optimizers find it by identity.

        Args:
            key: name in the checkpoint.
            dtensor: Replicate and Shard placements, even or not.
            replica_id: None takes the coordinates on the mesh axes that replicate it.
            fields: see the class.
        Raises:
            ShardingError: a Partial placement, a rank outside the mesh, or a strided placement that scatters the
                local rows. A DTensor as a leaf of the state dict may have a strided placement.
        """
        records = cls.all_of_dtensor(key, dtensor)
        if len(records) != 1:
            raise ShardingError(
                f"{key}: this rank holds {len(records)} separate blocks of the DTensor (none outside its mesh), one "
                "record describes one; put the DTensor itself into the state dict"
            )
        return replace(records[0], **(fields if replica_id is None else fields | {"replica_id": replica_id}))

    @classmethod
    def all_of_dtensor(cls, key: str, dtensor: DTensor) -> list[ShardedTensor]:
        """One record for each block that this rank holds of a DTensor; none on a rank outside its mesh."""
        layout, whole, shape = layout_of(key, dtensor), local_of(dtensor), tuple(dtensor.shape)
        if layout is None:
            return []
        found: list[ShardedTensor] = []
        for place, local in layout.pairs or [(Box((0,) * len(shape), tuple(whole.shape)),) * 2]:
            data = (
                whole
                if local.size == whole.shape
                else whole[tuple(slice(at, at + n) for at, n in zip(*local, strict=True))]
            )
            record = cls(key, data, data.dtype, place.size, shape, place.offset, None, layout.replica)
            record.is_on_slice = layout.is_on_slice
            found.append(record)
        return found

    @property
    def shard_id(self) -> ShardId:
        """Equal for replicas on different ranks, unlike for different shards of a layout."""
        flat = self.flattened_range
        return self.key, self.global_offset, None if flat is None else (flat.start, flat.stop)

    @property
    def has_regular_grid(self) -> bool:
        """Whether the shard is one of equal parts per axis."""
        return self.axis_fragmentations is not None

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """The place of the shard in the grid of equal parts, in parts per axis; prepended axes in elements.

        Raises:
            ShardingError: there is no regular grid.
        """
        self._check_regular()
        own = zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True)
        return (*self.global_offset[: self.prepend_axis_num], *(at // length if length else 0 for at, length in own))

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Elements of one part of the grid per axis, prepended axes included; the name is megatron-core's.

        Raises:
            ShardingError: there is no regular grid, or its parts are not equal.
        """
        fragments = self._check_regular()
        for axis, (length, parts) in enumerate(zip(self.global_shape, fragments, strict=True)):
            if length % parts and not self.allow_shape_mismatch:
                raise ShardingError(
                    f"{self.key}: axis {axis} has {length} elements, which {parts} equal parts do not share"
                )
        return tuple(length // parts for length, parts in zip(self.global_shape, fragments, strict=True))

    def _check_regular(self) -> tuple[int, ...]:
        if self.axis_fragmentations is None:
            raise ShardingError(f"{self.key}: axis_fragmentations is None; only a regular grid has numbered parts")
        return self.axis_fragmentations

    @property
    def box(self) -> Box:
        """The local box in the global tensor; a flattened shard holds a range of it."""
        return Box(self.global_offset, (1,) * self.prepend_axis_num + self.local_shape)

    def pieces(self) -> Iterator[Piece]:
        """The boxes that ``data`` fills, without empty ones, in the order of the data.

        [Note: flattened ranges are ordinary chunks] A range of a box is at most ``2n - 1`` boxes, each contiguous in
        the flat data. Each is stored with its true offset and size. So any layout, flattened or not, loads from any
        other. The reference guide's remedy, a special global
        shape on disk, was dropped upstream and stranded its users (areal-project/AReaL#1468).
        """
        box = self.box
        if self.flattened_range is None:
            if 0 not in box.size:
                yield Piece(box, None)
            return
        at = 0
        for part in range_boxes(box.size, self.flattened_range.start, self.flattened_range.stop):
            yield Piece(part.shifted(self.global_offset), (at, at + part.volume))
            at += part.volume

    def view(self, piece: Piece) -> torch.Tensor:
        """The elements of ``piece`` as a tensor of the shape of its box, sharing memory with ``data``."""
        if self.data is None:
            raise ShardingError(f"{self}: data is None; a save needs the tensor")
        check_readable(self, self.data)
        data = self.data.detach()
        if piece.flat is not None and self.flattened_range is not None:
            return data[piece.flat[0] : piece.flat[1]].view(piece.box.size)
        if self.prepend_axis_num:
            data = data[(None,) * self.prepend_axis_num]
        places = zip(piece.box.offset, piece.box.size, self.global_offset, strict=True)
        return data if piece.flat is None else data[tuple(slice(at - o, at - o + n) for at, n, o in places)]

    def without_data(self) -> ShardedTensor:
        """A copy with ``data=None``: what travels, and what stays when tensors must be freed."""
        bare = replace(self, data=None)
        bare.is_on_slice = self.is_on_slice
        return bare

    def global_slice(self) -> tuple[int | slice, ...]:
        """Index of the box in the global tensor: an int per prepended axis, a slice per own axis."""
        prepended = self.prepend_axis_num
        own = zip(self.global_offset[prepended:], self.local_shape, strict=True)
        return (*self.global_offset[:prepended], *(slice(offset, offset + length) for offset, length in own))

    def init_data(self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Allocate ``data`` if it is None: 1-D of the range's length if flattened, else ``local_shape``."""
        if self.data is None:
            self.data = init_fn(data_shape(self), dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """``torch.narrow`` of the local tensor on every rank; the global tensor shrinks with it.

        ``dim`` counts own axes only. A flattened shard can be narrowed on axis 0. The result is the common part of
        its range and the kept rows. The list is empty if they share nothing.

        Raises:
            ShardingError: a shard without a regular grid; a flattened one on another axis.
        """
        axis, local = dim + self.prepend_axis_num, self.local_shape[dim]
        if not local or self.global_shape[axis] % local or self.global_offset[axis] % local:
            raise ShardingError(f"{self}: narrow needs equal parts on axis {dim}; global {self.global_shape}")
        if not 0 <= start <= start + length <= local:
            raise ShardingError(f"{self}: narrow({dim}, {start}, {length}) leaves the local length {local}")
        flat = self.flattened_range
        if flat is not None and dim != 0:
            raise ShardingError(f"{self}: a flattened shard can be narrowed on axis 0 only, not {dim}")

        def scaled(place: tuple[int, ...]) -> tuple[int, ...]:
            return (*place[:axis], place[axis] // local * length, *place[axis + 1 :])

        fields: dict[str, Any] = {
            "local_shape": (*self.local_shape[:dim], length, *self.local_shape[dim + 1 :]),
            "global_shape": scaled(self.global_shape),
            "global_offset": scaled(self.global_offset),
        }
        if flat is None:
            data = None if self.data is None else self.data.narrow(dim, start, length)
            return [replace(self, data=data, **fields)]
        row = prod(self.local_shape[1:])
        low, high = max(flat.start, start * row), min(flat.stop, (start + length) * row)
        if low >= high:
            return []
        data = None if self.data is None else self.data[low - flat.start : high - flat.start]
        return [replace(self, data=data, flattened_range=slice(low - start * row, high - start * row), **fields)]

    def __str__(self) -> str:
        flat = self.flattened_range
        return describe(self.key, self.box, self.global_shape, None if flat is None else (flat.start, flat.stop))


@dataclass(eq=False)
class ShardedObject(ShardedBase):
    """One cell of a grid of arbitrary objects. Cells cannot be cut anew at load.

    Args:
        key: name of the grid.
        data: anything that torch's weights-only rules read back; None for metadata.
        global_shape: shape of the grid, in cells.
        global_offset: this cell.
        replica_id: as for tensors.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        _check_key(self.key)
        self.global_shape = int_tuple(self.key, "global_shape", self.global_shape)
        self.global_offset = int_tuple(self.key, "global_offset", self.global_offset)
        self.replica_id = replica(self.key, self.replica_id)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """ShardingError unless the cell lies in the grid."""
        inside = len(self.global_shape) == len(self.global_offset) and all(
            0 <= at < n for at, n in zip(self.global_offset, self.global_shape, strict=True)
        )
        if not inside:
            raise ShardingError(
                f"{self.key}: cell {self.global_offset} is not in the grid {self.global_shape} of the ShardedObject"
            )

    @property
    def unique_key(self) -> str:
        """Stored key: ``<key>/shard_<offsets joined by .>_<shape joined by .>``."""
        offset, shape = ".".join(map(str, self.global_offset)), ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The record of a stored key, without data.

        Parsed from the right: keys may hold ``/``, ``_`` and the word shard (megatron splits from the
        left and breaks on them).

        Raises:
            ShardingError: the key has not this form.
        """
        key, separator, cell = unique_key.rpartition("/shard_")
        offset_text, underscore, shape_text = cell.rpartition("_")
        try:
            offset, shape = (tuple(map(int, text.split("."))) if text else () for text in (offset_text, shape_text))
        except ValueError:
            separator = ""
        if not separator or not underscore:
            raise ShardingError(f"{unique_key!r} is not of the form <key>/shard_<offsets>_<shape>")
        return cls(key, None, shape, offset, replica_id)

    @property
    def payload(self) -> Any:
        """What is written: a list of one, as megatron-core does."""
        return [self.data]

    def without_data(self) -> ShardedObject:
        """A copy with ``data=None``, of no class of a user's: other ranks may not know it."""
        return ShardedObject(self.key, None, self.global_shape, self.global_offset, self.replica_id)

    def __str__(self) -> str:
        return self.unique_key


class LocalNonpersistentObject:
    """Wrapper of something that is not saved: dropped at save, unwrapped at load."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The wrapped object."""
        return self.obj


def check_data(record: ShardedTensor, data: torch.Tensor) -> None:
    """ShardingError unless a tensor is of the record's dtype and shape: ``record.data`` may be another one since."""
    _check_is_tensor(record.key, data)
    if data.dtype != record.dtype:
        raise ShardingError(f"{record.key}: data has dtype {data.dtype}, the record says {record.dtype}")
    if data.shape != (shape := data_shape(record)):
        flat = record.flattened_range
        rule = "local_shape is" if flat is None else f"flattened_range {flat.start}:{flat.stop} needs"
        raise ShardingError(f"{record.key}: data has shape {tuple(data.shape)}, {rule} {shape}")


def data_shape(record: ShardedTensor) -> tuple[int, ...]:
    """The shape of ``data``: 1-D of the range's length if flattened, else ``local_shape``."""
    flat = record.flattened_range
    return record.local_shape if flat is None else (flat.stop - flat.start,)


def _check_key(key: object) -> None:
    if not isinstance(key, str):
        raise ShardingError(f"the key {key!r} is a {type(key).__name__}; keys of records are strings")


def _check_is_tensor(key: str, data: object) -> None:
    if not isinstance(data, torch.Tensor):
        raise ShardingError(f"{key}: data is a {type(data).__name__}; it is a torch.Tensor")
