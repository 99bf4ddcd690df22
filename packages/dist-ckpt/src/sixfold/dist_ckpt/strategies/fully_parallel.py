"""Fully parallel wrappers: replicas share the work of saving and of loading; the format stays the same.

records of a group --> balance.py --> FullyParallelSaveStrategyWrapper (this file): who writes what
records of a group --> balance.py --> FullyParallelLoadStrategyWrapper (this file) --> relay.py: who reads what,
                                                                                   and whom it is sent to
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sixfold.dist_ckpt.errors import CheckpointError, ShardingError
from sixfold.dist_ckpt.exchange_utils import ShardDistribution
from sixfold.dist_ckpt.plans.balance import Part, Shared, share_out
from sixfold.dist_ckpt.ranks.exchange import Exchange
from sixfold.dist_ckpt.ranks.relay import (
    EXCHANGE_ALGORITHMS,
    Held,
    Identity,
    Passage,
    held,
    identity,
    part_of,
    relay_through,
)
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedObject, ShardedTensor, ShardId
from sixfold.dist_ckpt.strategies.async_utils import AsyncRequest
from sixfold.dist_ckpt.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadEngine,
    LoadShardedStrategy,
    Records,
    SaveEngine,
    SaveShardedStrategy,
)

__all__ = ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"]

_REPLICA = 1  # any replica id but the main one


Shares = dict[Identity, list[Part]]


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Each replicated shard is written by its holders in turn, so that all write about as many bytes.

    Only who holds what is exchanged, no data. The fullest rank writes at most one percent more than it must;
    for that, shards too large for one rank are cut and written in parts.

    Args:
        strategy: what saves.
        parallelization_group: among whose ranks shards are shared out; None for all ranks of the save. It should
            hold the replicas, such as a data-parallel group.
        do_cache_distribution: keep the first distribution and exchange nothing later; for state dicts whose
            structure never changes. ShardingError if it does.
    Attributes:
        cached_distribution: who writes which shard; None until the first save, and without do_cache_distribution.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: dist.ProcessGroup | None = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.cached_distribution: ShardDistribution | None = None
        self._cached: tuple[list[Held], Shares] | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        return self.base_strategy.can_handle_sharded_objects

    def check_written(self, checkpoint_dir: Path) -> None:
        self.base_strategy.check_written(checkpoint_dir)

    def owns_file(self, name: str) -> bool:
        return self.base_strategy.owns_file(name)

    def engine(self) -> SaveEngine | None:
        engine = self.base_strategy.engine()
        return None if engine is None else replace(engine, arrange=self._arrange)

    def save(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> None:
        """For strategies of users: share out, then let the wrapped strategy write this rank's part."""
        self.base_strategy.save(self._shared_out(sharded_state_dict), checkpoint_dir)

    def async_save(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> AsyncRequest:
        """The same by the wrapped strategy's ``async_save``."""
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise CheckpointError(f"{self.base_strategy} is no AsyncSaveShardedStrategy; only a plain save can let it")
        return self.base_strategy.async_save(self._shared_out(sharded_state_dict), checkpoint_dir)

    def _shared_out(self, sharded_state_dict: dict[Any, Any]) -> dict[Any, Any]:
        leaves = [(path, leaf) for path, leaf in tree.leaves(sharded_state_dict) if isinstance(leaf, ShardedBase)]
        arranged = self._arrange_each(lambda: [leaf for _, leaf in leaves], Exchange("world", 600.0))
        return tree.nest(
            {
                (*path, number): new
                for (path, _), news in zip(leaves, arranged, strict=True)
                for number, new in enumerate(news)
            }
        )

    def _arrange(self, make: Callable[[], Records], exchange: Exchange) -> Records:
        return [record for records in self._arrange_each(make, exchange) for record in records]

    def _arrange_each(self, make: Callable[[], Records], exchange: Exchange) -> list[Records]:
        """This rank's records, each replaced by what this rank writes of it, or by a replica."""
        group = self.parallelization_group
        within = exchange if group is None else Exchange(group, exchange.timeout_s)
        whole = self.base_strategy.engine() is None  # a user's strategy may know no flattened shards
        if self._cached is not None:
            known, shares = self._cached
            records = make()
            if [held(record, whole) for record in _tensors(records)] != known:
                raise ShardingError(
                    "the state dict is another than at the first save, and do_cache_distribution is set; "
                    "make a new strategy for it"
                )
        else:
            records, (shares, names) = within.together(lambda: _make_and_tell(make, whole), _distribute)
            if self.do_cache_distribution:
                self._cached = [held(record, whole) for record in _tensors(records)], shares
                self.cached_distribution = _as_distribution(shares, names, _tensors(records))
        return _apply(records, shares, within.rank)


def _tensors(records: Records) -> list[ShardedTensor]:
    return [record for record in records if isinstance(record, ShardedTensor)]


def _make_and_tell(make: Callable[[], Records], whole: bool) -> tuple[Records, list[Held]]:
    records = make()
    return records, [held(record, whole) for record in _tensors(records)]


def _distribute(by_rank: list[list[Held]]) -> tuple[Shares, dict[ShardId, tuple[Identity, tuple[int, ...]]]]:
    """Who writes what, for shards with one main replica in the group; others stay as they are. And who holds it."""
    found: dict[Identity, list[tuple[int, Held]]] = {}
    for rank, shards in enumerate(by_rank):
        for shard in shards:
            found.setdefault(shard.identity, []).append((rank, shard))
    shared: dict[Identity, Shared] = {}
    for key, holders in found.items():
        if sum(shard.is_main for _, shard in holders) == 1:
            ranks = tuple(sorted({rank for rank, shard in holders if shard.device}))
            if ranks:
                unit = max(shard.unit for _, shard in holders)
                shared[key] = Shared(key.elements, key.dtype.itemsize, ranks, unit)
    names = {holders[0][1].shard: (key, shared[key].holders) for key, holders in found.items() if key in shared}
    return dict(zip(shared, share_out(list(shared.values()), len(by_rank)), strict=True)), names


def _as_distribution(
    shares: Shares, names: dict[ShardId, tuple[Identity, tuple[int, ...]]], mine: Sequence[ShardedTensor]
) -> ShardDistribution:
    """The same for looking at: a rank for each shard, the one with most of its elements."""
    return ShardDistribution(
        {shard: _most([(p.rank, p.stop - p.start) for p in shares[key]]) for shard, (key, _) in names.items()},
        set(names),
        {record.shard_id: record.without_data() for record in mine if record.shard_id in names},
        {shard: list(ranks) for shard, (_, ranks) in names.items()},
    )


def _most(parts: Sequence[tuple[int, int]]) -> int:
    """The rank with most elements, the lower one in a tie."""
    total = Counter[int]()
    for rank, elements in parts:
        total[rank] += elements
    return min(total, key=lambda rank: (-total[rank], rank))


def _apply(records: Records, shares: Shares, rank: int) -> list[Records]:
    """The replicas of a shared-out shard, or the parts of it that this rank writes."""
    done: set[Identity] = set()
    arranged: list[Records] = []
    for record in records:
        if not isinstance(record, ShardedTensor) or identity(record) not in shares:
            arranged.append([record])
            continue
        key = identity(record)
        mine = [part for part in shares[key] if part.rank == rank]
        if not mine or key in done or record.data is None:
            arranged.append([replace(record, replica_id=_REPLICA)])
        else:
            done.add(key)
            arranged.append([replace(part_of(record, part.start, part.stop), replica_id=0) for part in mine])
    return arranged


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Each range that several ranks want is read by one of them and sent on while the next is read.

    It pays where the network between the ranks is faster than their storage. On one node it does not: there the
    plain strategy reads each byte once too, and the others take it from the page cache.

    Args:
        strategy: what loads.
        parallelization_group: the ranks that read for each other; None for all ranks of the load.
        do_cache_distribution: keep the first distribution and exchange none later; for state dicts and
            checkpoints whose structure never changes. ShardingError if it does.
        exchange_algo: "broadcast", "gather_rounds" or "gather_object", megatron-core's names. It chooses nothing
            here: CPU tensors go point to point to those that want them, others by broadcasts over the group.
            Besides its tensors a rank needs 32 MiB for what passes through it, and for strided CPU tensors 64.
    Attributes:
        cached_distribution: who reads which shard; None until the first load, and without do_cache_distribution.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: dist.ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        if exchange_algo not in EXCHANGE_ALGORITHMS:
            raise CheckpointError(f"exchange_algo is {exchange_algo!r}; it is one of {EXCHANGE_ALGORITHMS}")
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self._memory: dict[str, Any] | None = {} if do_cache_distribution else None

    @property
    def cached_distribution(self) -> ShardDistribution | None:
        return _reading(self._memory["passages"]) if self._memory else None

    @property
    def can_handle_sharded_objects(self) -> bool:
        return self.base_strategy.can_handle_sharded_objects

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        self.base_strategy.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self.base_strategy.check_version_compatibility(loaded_version)

    def engine(self) -> LoadEngine | None:
        if self.base_strategy.engine() is None:
            return None
        return LoadEngine(parallel=True, group=self.parallelization_group, memory=self._memory)

    def load(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> dict[Any, Any]:
        """For strategies of users: the wrapped strategy reads this rank's share, the rest comes from its peers."""
        leaves = [(path, leaf) for path, leaf in tree.leaves(sharded_state_dict) if isinstance(leaf, ShardedBase)]
        tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, ShardedTensor)}
        objects = {path: leaf for path, leaf in leaves if isinstance(leaf, ShardedObject)}
        group = self.parallelization_group
        within = Exchange("world" if group is None else group, 600.0)
        for record in tensors.values():
            record.init_data("cpu")
        relay = relay_through(lambda: (list(tensors.values()), {}), within, self._memory, whole_shards=True)
        asked = {("tensors", number): record for number, record in enumerate(relay.mine)}
        asked |= {("objects", *path): record for path, record in objects.items()}
        try:
            loaded = self.base_strategy.load(tree.nest(dict(asked)), checkpoint_dir)
            for number, record in enumerate(relay.mine):
                value = tree.get(loaded, ("tensors", number))
                assert record.data is not None, f"{record} has no data after init_data"
                if value.data_ptr() != record.data.data_ptr():
                    record.data.detach().copy_(value.view(record.data.shape))
                relay.on_complete(number)
        finally:
            relay.finish()
        values: dict[tree.KeyPath, Any] = {path: record.data for path, record in tensors.items()}
        values |= {path: tree.get(loaded, ("objects", *path)) for path in objects}
        return tree.nest(values)

    def load_tensors_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedTensor]:
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedTensor | ShardedObject]:
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)


def _reading(passages: Sequence[Passage]) -> ShardDistribution:
    """Who reads what and who wants it, of the passages of a load."""
    parts: dict[ShardId, list[tuple[int, int]]] = {}
    wanted: dict[ShardId, set[int]] = {}
    for passage in passages:
        parts.setdefault(passage.shard, []).append((passage.sender, passage.stop - passage.start))
        wanted.setdefault(passage.shard, set()).update((passage.sender, *passage.receivers))
    main = {shard: _most(found) for shard, found in parts.items()}
    return ShardDistribution(main, set(parts), {}, {shard: sorted(ranks) for shard, ranks in wanted.items()})
