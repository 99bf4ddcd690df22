"""DTensors: which boxes of the global tensor a rank's local tensor fills, and whose copy is written.

    DTensor --> layout_of (this file) --> records.py, factory.py: ordinary records

Worked out from mesh and placements by plain arithmetic, which ``tests/ranks/test_dtensor_ranks.py`` compares
with what torch itself distributes. No files, no group.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.geometry.box import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

AxisRun = tuple[int, int, int]  # start in the global tensor, start in the local one, length


class Layout(NamedTuple):
    """Where a DTensor's local tensor lies.

    ``pairs`` are boxes of the global tensor with the equal boxes of the local one: one, unless a strided placement
    scatters the local rows; none for a tensor without elements. ``replica`` is all zeros on the rank that writes.
    """

    pairs: tuple[tuple[Box, Box], ...]
    replica: tuple[int, ...]


def is_dtensor(leaf: object) -> bool:
    """Whether a leaf is a DTensor; never imports torch.distributed.tensor."""
    return hasattr(leaf, "_local_tensor") and hasattr(leaf, "placements") and hasattr(leaf, "device_mesh")


def local_of(dtensor: DTensor) -> torch.Tensor:
    """The local tensor itself, the same object at each call, not the view that ``to_local`` makes."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def layout_of(key: str, dtensor: DTensor) -> Layout | None:
    """The layout of this rank's part; None on a rank outside the mesh.

    Raises:
        ShardingError: a Partial or unknown placement, or a local tensor of another shape than the placements say.
    """
    mesh, placements = dtensor.device_mesh, dtensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    places: list[list[AxisRun]] = [[(0, 0, length)] for length in dtensor.shape]
    for kind, parts, at in zip(placements, mesh.shape, coordinate, strict=True):
        name, axis = type(kind).__name__, getattr(kind, "dim", 0)
        if name == "Shard":
            places[axis] = _chunk(places[axis], parts, at)
        elif name == "_StridedShard":
            places[axis] = _strided(places[axis], getattr(kind, "split_factor", 1), parts, at)
        elif name != "Replicate":
            raise ShardingError(
                f"{key}: the DTensor has the placement {kind}; Replicate and Shard can be saved and loaded. "
                "Redistribute it first (a Partial holds summands, not values)"
            )
    shape = tuple(_length(runs) for runs in places)
    if tuple(local_of(dtensor).shape) != shape:
        raise ShardingError(
            f"{key}: the local tensor of the DTensor has shape {tuple(local_of(dtensor).shape)}, its placements "
            f"{tuple(placements)} on a mesh {tuple(mesh.shape)} give {shape}; uneven shards of several mesh axes on "
            "one dimension cannot be told apart. Use dimensions that the mesh divides"
        )
    pairs = tuple(
        (
            Box(tuple(run[0] for run in runs), tuple(run[2] for run in runs)),
            Box(tuple(run[1] for run in runs), tuple(run[2] for run in runs)),
        )
        for runs in product(*map(_joined, places))
    )
    replica = tuple(at for at, kind in zip(coordinate, placements, strict=True) if type(kind).__name__ == "Replicate")
    return Layout(pairs, replica)


def _length(runs: list[AxisRun]) -> int:
    return sum(length for _, _, length in runs)


def _cut(runs: list[AxisRun], start: int, stop: int) -> list[AxisRun]:
    """Elements [start, stop) of a sequence of runs, numbered anew."""
    cut: list[AxisRun] = []
    for place, at, length in runs:
        low, high = max(start, at), min(stop, at + length)
        if low < high:
            cut.append((place + low - at, low - start, high - low))
    return cut


def _chunk(runs: list[AxisRun], parts: int, number: int) -> list[AxisRun]:
    """What ``torch.chunk`` gives to ``number``: parts of the rounded-up length, the last ones shorter or empty."""
    total = _length(runs)
    step = -(-total // parts)
    return _cut(runs, min(total, number * step), min(total, (number + 1) * step))


def _strided(runs: list[AxisRun], outer: int, parts: int, number: int) -> list[AxisRun]:
    """Part ``number`` of each of ``outer`` chunks, one after the other."""
    found: list[AxisRun] = []
    for chunk in range(outer):
        at = _length(found)
        part = _chunk(_chunk(runs, outer, chunk), parts, number)
        found += [(place, at + start, length) for place, start, length in part]
    return found


def _joined(runs: list[AxisRun]) -> list[AxisRun]:
    """The same with neighbours made one."""
    joined: list[AxisRun] = []
    for place, at, length in runs:
        if joined and joined[-1][0] + joined[-1][2] == place and joined[-1][1] + joined[-1][2] == at:
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + length)
        else:
            joined.append((place, at, length))
    return joined
