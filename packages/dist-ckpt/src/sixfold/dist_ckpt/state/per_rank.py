"""Values that each rank has for itself: positions of data loaders, states of random generators.

PerRank in a state dict --> to_save, to_load (this file) --> ShardedObjects, one for each rank, under the path
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from sixfold.dist_ckpt.errors import MismatchError, ShardingError
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.records import ShardedObject
from sixfold.dist_ckpt.state.stateful import given_state, is_stateful


@dataclass(frozen=True, eq=False)
class PerRank:
    """A value in a state dict that each rank saves for itself and gets back.

    Args:
        value: what torch's weights-only rules read back, or an object with ``state_dict`` and ``load_state_dict``. An
            object whose class has ``per_rank_state = True`` needs no PerRank.
        reshard: at a load by another number of ranks called with the saved values in rank order, this rank, and the
            number of ranks; what it returns is this rank's value. None: such a load is an error.
    """

    value: Any
    reshard: Callable[[list[Any], int, int], Any] | None = None

    def __post_init__(self) -> None:
        if self.reshard is not None and not callable(self.reshard):
            raise ShardingError(f"PerRank: reshard is a {type(self.reshard).__name__}; it is a function, or None")


@dataclass(frozen=True)
class _Owner:
    """Gets what was loaded when no rank has an error."""

    load_state_dict: Callable[[Any], object]


def of(leaf: Any) -> PerRank | None:
    """The leaf, or an object whose class says ``per_rank_state = True``, as PerRank; None for all else."""
    if isinstance(leaf, PerRank):
        return leaf
    return PerRank(leaf) if is_stateful(leaf) and getattr(leaf, "per_rank_state", False) is True else None


def to_save(leaf: PerRank, path: tree.KeyPath, rank: int, ranks: int) -> ShardedObject:
    """This rank's cell."""
    value = given_state(leaf.value, path) if is_stateful(leaf.value) else leaf.value
    return ShardedObject(tree.key_text(path), value, (ranks,), (rank,))


def to_load(
    leaf: PerRank, path: tree.KeyPath, rank: int, ranks: int, stored: Collection[str]
) -> tuple[Any, Callable[[Any], Any], _Owner | None]:
    """What is asked for, what becomes of it in the result, and who gets it, as of ``factory.Merge``.

    Args:
        stored: keys of the objects of the checkpoint.
    Raises:
        MismatchError: another number of ranks saved it, and ``reshard`` is None.
    """
    key = tree.key_text(path)
    asked: Any = ShardedObject(key, None, (ranks,), (rank,))
    start, make = f"{key}/shard_0_", leaf.reshard
    counts = [int(text) for name in stored if name.startswith(start) and (text := name[len(start) :]).isdecimal()]
    if ranks in counts or not counts:  # what is not stored is told like any other record
        make = None
    elif make is None:
        raise MismatchError(
            f"{key}: {counts[0]} ranks saved a value each, and {ranks} load. Pass PerRank(value, reshard=function), "
            "which makes this rank's value of theirs, or leave it out of the state dict"
        )
    else:
        asked = [ShardedObject(key, None, (counts[0],), (number,), rank) for number in range(counts[0])]

    def made(found: Any) -> Any:
        return found if make is None else make(found, rank, ranks)

    if is_stateful(leaf.value):
        return asked, lambda _: leaf.value, _Owner(lambda found: leaf.value.load_state_dict(made(found)))
    return asked, made, None if make is None else _Owner(lambda _: None)  # where functions of users fail, all ranks do
