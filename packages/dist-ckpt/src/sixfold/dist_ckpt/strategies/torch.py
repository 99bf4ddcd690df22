"""The strategies of the torch_dist format: the recommended one, and the default.

    save(..., sharded_strategy) --> TorchDistSaveShardedStrategy (this file) --> engine: saving.py
    load(..., sharded_strategy) --> TorchDistLoadShardedStrategy (this file) --> engine: loading.py

``save`` and ``load`` of the package hand these strategies to the engine, which does the work. Their own
``save`` and ``load`` are for strategies of users that wrap them: they write into, and read from, a folder as it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.collectives.exchange import Exchange, Group
from sixfold.dist_ckpt.dict_utils import dict_list_map_outplace
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.save_load import loading, saving
from sixfold.dist_ckpt.save_load.loading import LoadRequest
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.records import ShardedObject, ShardedTensor
from sixfold.dist_ckpt.storage.local import local_path, store_at
from sixfold.dist_ckpt.storage.store import is_checkpoint_file
from sixfold.dist_ckpt.strategies import base
from sixfold.dist_ckpt.strategies.async_utils import AsyncRequest
from sixfold.dist_ckpt.strategies.base import LoadEngine, SaveEngine

__all__ = ["TorchDistLoadShardedStrategy", "TorchDistSaveShardedStrategy"]

BACKEND, VERSION = "torch_dist", 1


class TorchDistSaveShardedStrategy(base.AsyncSaveShardedStrategy):
    """Saves the folder that torch DCP and megatron-core read.

    Args:
        backend, version: "torch_dist" and 1.
        keep_only_main_replica: accepted for the guide's sake; replicas are never written twice.
        thread_count: threads that write, >= 1.
        cached_metadata: keep the last plan: a save of records that have not changed exchanges none.
        separation_hint: accepted for the peer's sake, which puts keys with this prefix into files of their own.
        group, timeout_s: for a direct call of ``save`` only; ``dist_ckpt.save`` has its own.
    """

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = True,
        separation_hint: str | None = None,
        *,
        group: Group = "world",
        timeout_s: float = 600.0,
    ) -> None:
        if (backend, version) != (BACKEND, VERSION):
            raise MismatchError(f"this strategy writes {(BACKEND, VERSION)}, not {(backend, version)}")
        if thread_count < 1:
            raise CheckpointError(f"thread_count is {thread_count}; it is >= 1")
        super().__init__(backend, version)
        self.keep_only_main_replica, self.separation_hint = keep_only_main_replica, separation_hint
        self._built_in = SaveEngine(thread_count=thread_count, memory={} if cached_metadata else None)
        self._group, self._timeout_s = group, timeout_s

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def owns_file(self, name: str) -> bool:
        return is_checkpoint_file(name)

    def save(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> None:
        """Write frames, ``.metadata`` and ``integrity.json`` into a folder; the folder is not a checkpoint yet."""
        self._share(sharded_state_dict, checkpoint_dir).index()

    def async_save(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> AsyncRequest:
        """The same in steps: copies of the tensors are written when the request is scheduled, its last function
        writes the index. ``dist_ckpt.save(..., async_sharded_save=True)`` saves by a worker process instead."""
        share = self._share(dict_list_map_outplace(_copied, sharded_state_dict), checkpoint_dir)
        return AsyncRequest(share.write, (), [share.index])

    def _share(self, state: dict[Any, Any], checkpoint_dir: Path) -> saving.Share:
        folder = local_path(checkpoint_dir, "a strategy writes into a folder; dist_ckpt.save takes URLs")
        return saving.share_of_records(state, folder, Exchange(self._group, self._timeout_s))


def _copied(leaf: Any) -> Any:
    """A record with a tensor of its own."""
    if not isinstance(leaf, ShardedTensor) or leaf.data is None:
        return leaf
    return replace(leaf, data=leaf.data.detach().clone())


class TorchDistLoadShardedStrategy(base.ReadsOneFormat, base.LoadShardedStrategy):
    """Loads folders of this package, of torch DCP and of megatron-core.

    Args:
        group, timeout_s: for a direct call of ``load`` only; ``dist_ckpt.load`` has its own.
    """

    _built_in = LoadEngine()

    def __init__(self, *, group: Group = "world", timeout_s: float = 600.0) -> None:
        self._group, self._timeout_s = group, timeout_s

    def load(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> dict[Any, Any]:
        request = LoadRequest(
            state=sharded_state_dict,
            store=store_at(checkpoint_dir),
            validate_access_integrity=False,
            group=self._group,
            timeout_s=self._timeout_s,
        )
        loaded = loading.load(request, LoadEngine(with_common=False))  # common data is another strategy's
        wanted = {path: tree.get(loaded, path) for path, _ in tree.leaves(sharded_state_dict) if path}
        return tree.nest(wanted)

    def load_tensors_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedTensor]:
        return loading.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedTensor | ShardedObject]:
        return loading.load_sharded_metadata(checkpoint_dir)
