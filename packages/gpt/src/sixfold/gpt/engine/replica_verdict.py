"""Which ranks hold other bits than the copies of the same shard: a vote over digests.

    replica_digests.py --> digests of each shard by rank --> judge (this file) --> Verdict --> training/replica_check.py

Pure: shards and digests are any values, ranks any numbers.

[Note: who is named] Of the copies of a shard those that more than half of its ranks have are taken for right, and the
other ranks are named. Where no bits have such a majority, ranks that another shard has named do not vote: if the rest
agree, that shard is decided too. Otherwise nobody can tell who is wrong, and all who voted are named together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Shard = TypeVar("Shard", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Verdict(Generic[Shard]):
    """What a comparison found.

    Attributes:
        minority: the shards of which a rank has other bits than the majority, by rank.
        undecided: of each shard without a majority the ranks that may be right, those with the same bits together.
    """

    minority: Mapping[int, tuple[Shard, ...]] = field(default_factory=dict)
    undecided: Mapping[Shard, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def agree(self) -> bool:
        """All copies have the same bits."""
        return not self.minority and not self.undecided


def judge(digests: Mapping[Shard, Mapping[int, Hashable]]) -> Verdict[Shard]:
    """See [Note: who is named].

    Args:
        digests: for each shard the digest of each rank that holds a copy; one copy alone agrees with itself.
    """
    minority: dict[int, list[Shard]] = {}
    open_shards: list[Shard] = []
    for shard, by_rank in digests.items():
        votes = Counter(by_rank.values())
        right, most = votes.most_common(1)[0]
        if 2 * most <= len(by_rank):
            open_shards.append(shard)
            continue
        for rank in sorted(by_rank):
            if by_rank[rank] != right:
                minority.setdefault(rank, []).append(shard)
    named = frozenset(minority)
    undecided = {}
    for shard in open_shards:
        camps: dict[Hashable, list[int]] = {}
        for rank in sorted(digests[shard]):
            if rank not in named:
                camps.setdefault(digests[shard][rank], []).append(rank)
        if len(camps) > 1:
            undecided[shard] = tuple(tuple(ranks) for ranks in camps.values())
            continue
        for rank in sorted(named & digests[shard].keys()):
            if digests[shard][rank] not in camps:
                minority[rank].append(shard)
    return Verdict(minority={rank: tuple(minority[rank]) for rank in sorted(minority)}, undecided=undecided)
