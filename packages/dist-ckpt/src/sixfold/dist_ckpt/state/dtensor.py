"""DTensors: which boxes of the global tensor a rank's local tensor fills, and whose copy is written.

    DTensor --> layout_of (this file) --> records.py, factory.py: ordinary records

Worked out from mesh and placements by plain arithmetic, which ``tests/ranks/test_dtensor_ranks.py`` compares
with what torch itself distributes. No files, no group.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, NamedTuple

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.geometry.box import Box, Ints
from sixfold.dist_ckpt.state.tensor_memory import local_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_KINDS = ("Replicate", "Shard", "_StridedShard")
Runs = list[range]  # places on an axis of the global tensor, in the order of the local one


class Layout(NamedTuple):
    """Where a DTensor's local tensor lies.

    ``pairs`` are boxes of the global tensor with the equal boxes of the local one. There is one pair, or several if
    a strided placement scatters the local rows. A tensor without elements has none. ``replica`` is all zeros on the
    rank that writes.
    ``is_on_slice``: on a slice of a larger mesh, such as ``mesh["tp"]``, so that other slices may hold copies.
    """

    pairs: tuple[tuple[Box, Box], ...]
    replica: tuple[int, ...]
    is_on_slice: bool = False


def layout_of(key: str, dtensor: DTensor) -> Layout | None:
    """The layout of this rank's part; None on a rank outside the mesh.

    Raises:
        ShardingError: a Partial or unknown placement, or a local tensor of another shape than the placements say.
    """
    mesh, placements = dtensor.device_mesh, dtensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    for kind in placements:
        if type(kind).__name__ not in _KINDS:
            raise ShardingError(
                f"{key}: the DTensor has the placement {kind}; Replicate and Shard can be saved and loaded. "
                "Redistribute it first (a Partial holds summands, not values)"
            )
    shape, pairs, replica = _cut(tuple(dtensor.shape), tuple(placements), tuple(mesh.shape), tuple(coordinate))
    if local_of(dtensor).shape != shape:
        cuts = Counter(kind.dim for kind in placements if hasattr(kind, "dim"))
        remedy = (
            "uneven shards of several mesh axes on one dimension cannot be told apart. Use dimensions that the mesh "
        )
        remedy += "divides"
        if max(cuts.values(), default=0) < 2:
            remedy = (
                "shards are cut as torch.chunk does. Describe others by ShardedTensor, whose global_offset says where "
            )
            remedy += "each begins (axis_fragmentations=None)"
        raise ShardingError(
            f"{key}: the local tensor of the DTensor has shape {tuple(local_of(dtensor).shape)}, its placements "
            f"{tuple(placements)} on a mesh {tuple(mesh.shape)} give {shape}; {remedy}"
        )
    find = getattr(mesh, "_get_root_mesh", None)
    return Layout(pairs, replica, find is not None and find().size() > mesh.size())


@lru_cache(maxsize=1024)  # the layers of a model are alike, and so are weights and moments
def _cut(
    shape: Ints, placements: tuple[Any, ...], mesh: Ints, coordinate: Ints
) -> tuple[Ints, tuple[tuple[Box, Box], ...], Ints]:
    """The local shape, and ``pairs`` and ``replica`` of a ``Layout``, on one coordinate of a mesh."""
    places: list[Runs] = [[range(length)] if length else [] for length in shape]
    replica: list[int] = []
    for kind, parts, at in zip(placements, mesh, coordinate, strict=True):
        if type(kind).__name__ == "Replicate":
            replica.append(at)
        else:
            places[kind.dim] = _shard(places[kind.dim], getattr(kind, "split_factor", 1), parts, at)
    starts = [list(zip(runs, accumulate(map(len, runs), initial=0), strict=False)) for runs in places]
    pairs = []
    for block in product(*starts):
        size = tuple(len(run) for run, _ in block)
        pairs.append((Box(tuple(run.start for run, _ in block), size), Box(tuple(at for _, at in block), size)))
    return tuple(map(_length, places)), tuple(pairs), tuple(replica)


def _length(runs: Runs) -> int:
    return sum(map(len, runs))


def _chunk(runs: Runs, parts: int, number: int) -> Runs:
    """What ``torch.chunk`` gives to ``number``: parts of the rounded-up length, the last ones shorter or empty."""
    step = -(-_length(runs) // parts)
    cut, start = [], number * step
    for run in runs:
        cut.append(run[max(0, start) : max(0, start + step)])
        start -= len(run)
    return [run for run in cut if run]


def _shard(runs: Runs, outer: int, parts: int, number: int) -> Runs:
    """Part ``number`` of each of ``outer`` chunks, one after the other, neighbours made one."""
    joined: Runs = []
    for run in (run for chunk in range(outer) for run in _chunk(_chunk(runs, outer, chunk), parts, number)):
        if joined and joined[-1].stop == run.start:
            run = range(joined.pop().start, run.stop)
        joined.append(run)
    return joined
