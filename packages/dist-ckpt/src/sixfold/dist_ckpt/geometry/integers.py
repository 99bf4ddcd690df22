"""Integers of records: whatever counts as an integer becomes an int, and nothing else does.

    caller's shapes, offsets, replica ids --> integers.py (this file) --> records.py

numpy's and torch's integers are common there. A float or a truth value is a mistake that would be found later, in words
about something else. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index, mul
from typing import Any

from sixfold.dist_ckpt.errors import ShardingError

ReplicaId = int | tuple[int, ...]
_INTS = frozenset({int})


def integer(key: str, name: str, value: Any) -> int:
    """Any integer, numpy's and torch's too, as an int.

    Raises:
        ShardingError: a float, a truth value, anything else.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or type(value).__name__.startswith("bool"):
            raise TypeError
        return index(value)
    except (TypeError, ValueError, RuntimeError):
        raise ShardingError(
            f"{key}: {name} is or holds {value!r}, a {type(value).__name__}; it is an integer"
        ) from None


def int_tuple(key: str, name: str, values: Any) -> tuple[int, ...]:
    """The same for each of several."""
    if type(values) is tuple and _INTS.issuperset(map(type, values)):  # as records of this package have them
        return values
    try:
        parts = tuple(values)
    except TypeError:
        raise ShardingError(f"{key}: {name} is {values!r}; it is a tuple of integers") from None
    return tuple(integer(key, name, part) for part in parts)


def replica(key: str, value: Any) -> ReplicaId:
    """An int or a tuple of ints."""
    if isinstance(value, tuple | list):
        return int_tuple(key, "replica_id", value)
    return integer(key, "replica_id", value)


def flat_range(key: str, value: slice | None) -> slice | None:
    """A slice of two ints, as ints; None stays None."""
    if value is None:
        return None
    if not isinstance(value, slice) or value.step is not None or value.start is None or value.stop is None:
        raise ShardingError(f"{key}: flattened_range is {value!r}; it is a slice with a start, a stop and no step")
    return slice(*(integer(key, "flattened_range", end) for end in (value.start, value.stop)))


def on_grid(
    key: str, local_box: Sequence[Any], rank_offsets: Iterable[Any]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Global shape, offset and fragmentations of a box that is one of equal parts per axis.

    Args:
        rank_offsets: as of ``ShardedTensor.from_rank_offsets``.
    Raises:
        ShardingError: a negative or unknown axis, a rank outside its fragments, an axis named twice.
    """
    local_box, places = int_tuple(key, "local_shape", local_box), dict[int, tuple[int, int]]()
    for given in rank_offsets:
        try:
            axis, rank, fragments = (integer(key, "rank_offsets", part) for part in given)
        except (TypeError, ValueError, ShardingError):
            raise ShardingError(f"{key}: {given!r} is no tuple (axis, rank, fragments) of integers") from None
        if not 0 <= axis < len(local_box):
            raise ShardingError(f"{key}: axis {axis} of {(axis, rank, fragments)} is not in [0, {len(local_box)})")
        if not 0 <= rank < fragments:
            raise ShardingError(f"{key}: rank {rank} of {(axis, rank, fragments)} is not in [0, {fragments})")
        if axis in places:
            raise ShardingError(f"{key}: axis {axis} is named twice in {rank_offsets}; once is enough")
        places[axis] = rank, fragments
    found = [places.get(axis, (0, 1)) for axis in range(len(local_box))]
    ranks, fragmentations = tuple(rank for rank, _ in found), tuple(fragments for _, fragments in found)
    return tuple(map(mul, fragmentations, local_box)), tuple(map(mul, ranks, local_box)), fragmentations
