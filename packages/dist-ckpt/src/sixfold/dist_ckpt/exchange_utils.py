"""Who saves or loads which shard, as a value: for looking at, for tests, and for callers of megatron-core's names.

    shards and their holders --> distribute_shards_to_ranks (this file) --> a rank for each shard
    FullyParallel*StrategyWrapper.cached_distribution is a ShardDistribution (this file)

The wrappers themselves share out by ``balance.py``, which cuts large shards; here shards stay whole. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.state.records import ShardedTensor, ShardId

__all__ = ["ShardDistribution", "distribute_shards_to_ranks"]

Shard = TypeVar("Shard", bound=Hashable)


class ShardDistribution(NamedTuple):
    """A distribution among the ranks of one group.

    Attributes:
        main_rank_for_shard: who saves or loads a shard; of a shard that is cut, who has most of it.
        shards_in_this_group: the shards that are shared out in this group.
        shard_to_metadata: this rank's records of them, without data; empty for a load.
        all_ranks_for_shard: who holds or wants a shard.
    """

    main_rank_for_shard: dict[ShardId, int]
    shards_in_this_group: set[ShardId]
    shard_to_metadata: dict[ShardId, ShardedTensor]
    all_ranks_for_shard: dict[ShardId, list[int]]

    def __str__(self) -> str:
        """One line for each shard: ``w at (0, 0): rank 1 of [0, 1]``."""
        lines = []
        for shard, rank in self.main_rank_for_shard.items():
            key, offset, span = shard
            part = "" if span is None else f" {{{span[0]}:{span[1]}}}"
            lines.append(f"{key} at {offset}{part}: rank {rank} of {self.all_ranks_for_shard[shard]}")
        return "\n".join(lines)


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[Shard, Sequence[int]],
    shard_to_size: Mapping[Shard, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[Shard] = (),
) -> dict[Shard, int]:
    """One rank for each shard, so that all ranks have about as many bytes.

    Greedy, and the same on all ranks. First comes what is not in ``cross_parallelization_group_loads``, then what
    fewer ranks hold, then what is larger, then the order of the shards. Each goes to the holder with the least so
    far, the lower rank in a tie.

    Args:
        shard_to_ranks: who holds each shard. shard_to_size: its bytes. num_ranks: of the group.
    Raises:
        ShardingError: a shard that no rank of the group holds.
    """
    filled = [0] * num_ranks
    chosen: dict[Shard, int] = {}

    def turn(shard: Shard) -> tuple[bool, int, int, Shard]:
        holders = shard_to_ranks[shard]
        return shard in cross_parallelization_group_loads, len(holders), -shard_to_size[shard], shard

    for shard in sorted(shard_to_ranks, key=turn):
        holders = {rank for rank in shard_to_ranks[shard] if 0 <= rank < num_ranks}
        if not holders:
            raise ShardingError(f"{shard}: its holders {list(shard_to_ranks[shard])} are none of {num_ranks} ranks")
        chosen[shard] = min(holders, key=lambda rank: (filled[rank], rank))
        filled[chosen[shard]] += shard_to_size[shard]
    return chosen
