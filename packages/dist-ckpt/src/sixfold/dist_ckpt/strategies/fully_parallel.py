"""Fully parallel wrappers: replicas share the work of saving and of loading; the format stays the same.

records of a group --> balance.py --> FullyParallelSaveStrategyWrapper (this file): who writes what
records of a group --> balance.py --> FullyParallelLoadStrategyWrapper (this file) --> relay.py: who reads what,
                                                                                   and whom it is sent to
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sixfold.dist_ckpt.collectives import relay
from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.collectives.relay import Identity, RelayReport, ShardTransfer
from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.exchange_utils import ShardDistribution
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedObject, ShardedTensor, ShardId
from sixfold.dist_ckpt.strategies import base
from sixfold.dist_ckpt.strategies.async_utils import AsyncRequest
from sixfold.dist_ckpt.strategies.base import LoadEngine, LoadShardedStrategy, SaveEngine, SaveShardedStrategy

__all__ = ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"]

_REPLICA = 1  # any replica id but the main one


class FullyParallelSaveStrategyWrapper(base.AsyncSaveShardedStrategy):
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
        self._memory: dict[str, Any] | None = {} if do_cache_distribution else None

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
        if not isinstance(self.base_strategy, base.AsyncSaveShardedStrategy):
            raise CheckpointError(f"{self.base_strategy} is no AsyncSaveShardedStrategy; only a plain save can let it")
        return self.base_strategy.async_save(self._shared_out(sharded_state_dict), checkpoint_dir)

    def _shared_out(self, sharded_state_dict: dict[Any, Any]) -> dict[Any, Any]:
        """The same with one record for each: a user's strategy may know no flattened shards."""
        leaves = {path: leaf for path, leaf in tree.leaves(sharded_state_dict) if isinstance(leaf, ShardedBase)}
        arranged = self._arrange(lambda: list(leaves.values()), Exchange("world", 600.0), whole=True)
        return tree.nest(dict(zip(leaves, arranged, strict=True)))

    def _arrange(self, make: Callable[[], base.Records], exchange: Exchange, *, whole: bool = False) -> base.Records:
        """This rank's records, each replaced by what it writes of it, whole or parts, or by a replica."""
        group = self.parallelization_group
        within = exchange if group is None else Exchange(group, exchange.timeout_s)
        records: base.Records = []

        def tensors() -> tuple[list[ShardedTensor], dict[int, tuple[str, int]]]:
            records.extend(make())
            return [record for record in records if isinstance(record, ShardedTensor)], {}

        mine, transfers = relay.agree(tensors, within, self._memory, _who_writes, whole_shards=whole)
        if self._memory is not None:
            self.cached_distribution = _distribution(transfers, mine)
        return _apply(records, mine, transfers, within.rank)


def _who_writes(by_rank: list[RelayReport]) -> list[ShardTransfer]:
    """Who writes what, for shards with one main replica in the group; others stay as they are."""
    mains = Counter(shard.identity for shards, _ in by_rank for shard in shards.values() if shard.is_main)
    candidates: list[RelayReport] = []
    for shards, _ in by_rank:
        first: dict[Identity, int] = {}  # of several copies on a rank
        for index, shard in shards.items():
            if shard.device and mains[shard.identity] == 1:
                first.setdefault(shard.identity, index)
        alike = {index: shards[index]._replace(device="cpu") for index in first.values()}
        candidates.append((alike, {}))
    return relay.plan_transfers(candidates)


def _apply(
    records: base.Records, mine: Sequence[ShardedTensor], transfers: Sequence[ShardTransfer], rank: int
) -> base.Records:
    """For each record the parts of it that this rank writes, or a replica, or what is not shared out as it is."""
    written: dict[int, base.Records] = {}  # by number in ``mine``
    for transfer in transfers:
        ranks = (transfer.sender, *transfer.receivers)
        if rank in ranks:
            number = transfer.records[ranks.index(rank)]
            parts = written.setdefault(number, [])
            if rank == transfer.sender:
                parts.append(replace(relay.part_of(mine[number], transfer.start, transfer.stop), replica_id=0))
    shared, number, arranged = {transfer.identity for transfer in transfers}, -1, base.Records()
    for record in records:
        if isinstance(record, ShardedTensor):
            number += 1
            if number in written or relay.identity(record) in shared:
                arranged += written.get(number) or [replace(record, replica_id=_REPLICA)]
                continue
        arranged.append(record)
    return arranged


def _distribution(transfers: Sequence[ShardTransfer], mine: Sequence[ShardedTensor] = ()) -> ShardDistribution:
    """The same for looking at: of each shard the rank with most of its elements, and all that have or want it."""
    done: dict[ShardId, Counter[int]] = defaultdict(Counter)
    ranks: dict[ShardId, set[int]] = defaultdict(set)
    for transfer in transfers:
        done[transfer.shard][transfer.sender] += transfer.stop - transfer.start
        ranks[transfer.shard] |= {transfer.sender, *transfer.receivers}
    return ShardDistribution(
        {shard: max(sorted(elements), key=elements.__getitem__) for shard, elements in done.items()},
        set(done),
        {record.shard_id: record.without_data() for record in mine if record.shard_id in done},
        {shard: sorted(found) for shard, found in ranks.items()},
    )


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
            A rank waits for its peers from when it has read its own share.
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
        if exchange_algo not in relay.EXCHANGE_ALGORITHMS:
            raise CheckpointError(f"exchange_algo is {exchange_algo!r}; it is one of {relay.EXCHANGE_ALGORITHMS}")
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self._memory: dict[str, Any] | None = {} if do_cache_distribution else None

    @property
    def cached_distribution(self) -> ShardDistribution | None:
        return _distribution(self._memory["transfers"]) if self._memory else None

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
        passing = relay.Relay(lambda: (list(tensors.values()), {}), within, self._memory, whole_shards=True)
        # What this rank reads for all is its to read: strategies of users may pass over replicas.
        asked: dict[tree.KeyPath, ShardedBase] = {
            ("tensors", number): replace(record, replica_id=0) for number, record in enumerate(passing.mine)
        }
        asked |= {("objects", *path): replace(record, replica_id=0) for path, record in objects.items()}
        with passing.running():
            loaded = self.base_strategy.load(tree.nest(dict(asked)), checkpoint_dir)
            for number, record in enumerate(passing.mine):
                value = tree.get(loaded, ("tensors", number))
                assert record.data is not None, f"{record} has no data after init_data"
                if value.data_ptr() != record.data.data_ptr():
                    record.data.detach().copy_(value.view(record.data.shape))
                passing.on_complete(number)
        values: dict[tree.KeyPath, Any] = {path: record.data for path, record in tensors.items()}
        values |= {path: tree.get(loaded, ("objects", *path)) for path in objects}
        return tree.nest(values)

    def load_tensors_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedTensor]:
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedTensor | ShardedObject]:
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)
