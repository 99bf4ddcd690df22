"""Looking: what a checkpoint holds, without reading a tensor.

path --> opened checkpoint --> common data, listings (this file) --> loading.py, serialization.py, strategies
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.errors import CorruptError, typed
from sixfold.dist_ckpt.files import metadata, weights_only
from sixfold.dist_ckpt.state import by_name
from sixfold.dist_ckpt.state.records import ShardedObject, ShardedTensor
from sixfold.dist_ckpt.stores.folder import Checkpoint, open_checkpoint


def common_data(checkpoint: Checkpoint, safe_globals: Sequence[Any]) -> dict[Any, Any]:
    """What a checkpoint holds besides tensors and objects; {} for a plain DCP folder."""
    config = checkpoint.small_file("metadata.json")
    if config is not None:
        metadata.check_common_config(config)
    data = checkpoint.small_file("common.pt")
    path = checkpoint.folder / "common.pt"
    if data is None:
        if config is not None:
            raise CorruptError(f"{path} is missing; every checkpoint with a metadata.json has one")
        return {}
    common = weights_only.load(data, str(path), safe_globals)
    if not isinstance(common, dict):
        raise CorruptError(f"{path} holds a {type(common).__name__}, not a dict")
    return common


def load_common_state_dict(checkpoint_dir: str | Path, *, safe_globals: Sequence[Any] = ()) -> dict[Any, Any]:
    """The common data alone: what decides on config and version before any tensor is read.

    Raises: as ``load``. {} for a plain DCP folder.
    """
    return typed(lambda: common_data(open_checkpoint(checkpoint_dir), safe_globals))


def load_tensors_metadata(checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
    """Every tensor as one shard without data, with its true dtype and shape: a state dict to load with."""
    found = load_sharded_metadata(checkpoint_dir)
    return {key: record for key, record in found.items() if isinstance(record, ShardedTensor)}


def load_sharded_metadata(checkpoint_dir: str | Path) -> dict[str, ShardedTensor | ShardedObject]:
    """``load_tensors_metadata`` plus the objects by stored key, bytes of plain DCP under their own."""
    manifest = open_checkpoint(checkpoint_dir).manifest
    objects = {key: by_name.record_of(key) for key in manifest.objects}
    return {key: by_name.whole(key, stored) for key, stored in manifest.tensors.items()} | objects
