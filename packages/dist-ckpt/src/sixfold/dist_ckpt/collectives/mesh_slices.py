"""Copies of one shard on several slices of a mesh: which rank writes it.

    records of all ranks that overlap --> copies (this file) --> first rank: owners --> settle on each rank

[Note: slices of a mesh] A DTensor on ``mesh["tp"]`` of a mesh ("dp", "tp") is held once by each slice. With DDP and
TP that is every weight. With FSDP and TP it is the norms, which are on ``mesh["dp"]``. The mesh cannot tell copies
from the stages of a pipeline, which share no names. So ranks send digests of all such shards, but only where records
overlap. The first rank that holds a shard writes it. Unlike values under one name are an error: stages whose names
collide are no copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sixfold.dist_ckpt.collectives.consistency import Samples, digest_of_sample, holders_that_differ
from sixfold.dist_ckpt.state.records import ShardedTensor, ShardId, is_main_replica
from sixfold.dist_ckpt.state.tensor_memory import has_values


def on_slices(records: Sequence[ShardedTensor]) -> Samples:
    """Digests of samples of the shards that this rank would write and other slices may hold."""
    return {
        (record.shard_id, record.local_shape): digest_of_sample(record.data)
        for record in records
        if record.is_on_slice
        and is_main_replica(record.replica_id)
        and record.data is not None
        and has_values(record.data)
    }


def owners(by_rank: Sequence[Samples]) -> dict[ShardId, int]:
    """The first holder of each shard that several ranks would write."""
    first: dict[ShardId, int] = {}
    several: dict[ShardId, int] = {}
    for rank, found in enumerate(by_rank):
        for shard, _ in found:
            if first.setdefault(shard, rank) != rank:
                several[shard] = first[shard]
    return several


def slice_problems(by_rank: Sequence[Samples]) -> list[str]:
    """One line for each shard of which slices hold different values."""
    return [
        f"{key} from {offset}: ranks {ranks} of different slices of a mesh hold different values under this name, and "
        "one of them would be lost. Other tensors, such as stages of a pipeline have: give each a name of its own. "
        "Copies: broadcast one of them"
        for (key, offset, _), ranks in holders_that_differ(by_rank)
    ]


def settle(records: Sequence[ShardedTensor], owner_of: Mapping[ShardId, int], rank: int) -> None:
    """Make replicas of what another rank writes. The records are those that were made of DTensors for this save."""
    for record in records:
        if record.is_on_slice and is_main_replica(record.replica_id) and owner_of.get(record.shard_id, rank) != rank:
            record.replica_id = 1
