"""Distributed checkpoints in torch DCP's own format: save at one layout, load at any other.

    from sixfold import dist_ckpt

    state = {"weight": dist_ckpt.ShardedTensor.from_rank_offsets("weight", w, (0, rank, ranks)), "step": 7}
    dist_ckpt.save(state, "run/step-00000007")
    dist_ckpt.load(state, "run/step-00000007")

The names are those of megatron-core's ``dist_checkpointing``. Code of its guide runs with only the import line changed.

The rooms, in the order of the data; each imports only those before it:

    geometry, state, formats, plans, storage, checkpoint, mirror, collectives, strategies/base.py, save_load, background

Callers use serialization.py, manager.py over metrics.py and retention.py, strategies, stores.py, optimizers.py,
hugging_face, tools, and dcp.py over torch_dcp. The modules mapping, validation, core, utils, dict_utils, exchange_utils
and optimizer have the names of megatron-core.

What a plain save or load of a folder does not need is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sixfold.dist_ckpt import strategies, validation
from sixfold.dist_ckpt.errors import (
    CheckpointError,
    CheckpointingException,
    CorruptError,
    LostPeerError,
    MismatchError,
    ShardingError,
    StorageError,
    UnsafeError,
)
from sixfold.dist_ckpt.save_load.requested_keys import StrictHandling
from sixfold.dist_ckpt.serialization import (
    check_is_distributed_checkpoint,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    save,
)
from sixfold.dist_ckpt.state.factory import ShardedTensorFactory
from sixfold.dist_ckpt.state.per_rank import PerRank
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from sixfold.dist_ckpt import optimizer, optimizers, retention
    from sixfold.dist_ckpt.background.saver import AsyncSave, async_save, prepare_async_save
    from sixfold.dist_ckpt.manager import CheckpointManager
    from sixfold.dist_ckpt.memory_tier.tier import MemoryTier
    from sixfold.dist_ckpt.tools.conversion import remove_sharded_tensors

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointingException",
    "CorruptError",
    "LocalNonpersistentObject",
    "LostPeerError",
    "MemoryTier",
    "MismatchError",
    "PerRank",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "ShardingError",
    "StorageError",
    "StrictHandling",
    "UnsafeError",
    "async_save",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "optimizer",
    "optimizers",
    "prepare_async_save",
    "remove_sharded_tensors",
    "retention",
    "save",
    "strategies",
    "validation",
]

_WHERE = dict.fromkeys(["AsyncSave", "async_save", "prepare_async_save"], "background.saver") | {
    "CheckpointManager": "manager",
    "MemoryTier": "memory_tier.tier",
    "remove_sharded_tensors": "tools.conversion",
}
_MODULES = frozenset(["background", "dict_utils", "hugging_face", "manager", "memory_tier", "optimizer", "optimizers"])
_MODULES |= {"retention", "stores", "tools"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
