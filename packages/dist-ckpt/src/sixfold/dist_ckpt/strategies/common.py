"""The strategies for common data, ``("torch", 1)``: ``common.pt``, and objects as files of their own.

    common dict --> TorchCommonSaveStrategy (this file) --> common.pt, <key>/shard_<at>_<grid>.pt

The torch_dist format keeps objects among its frames; zarr and strategies of users leave them to these.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.errors import CorruptError, ShardingError, UnsafeError
from sixfold.dist_ckpt.formats import weights_only
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.records import ShardedObject, is_main_replica
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.strategies.base import LoadCommonStrategy, ReadsOneFormat, SaveCommonStrategy

COMMON_NAME = "common.pt"


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Writes with ``torch.save`` what torch's weights-only rules read back."""

    is_built_in = True

    def __init__(self, backend: str = "torch", version: int = 1) -> None:
        super().__init__(backend, version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save_common(self, common_state_dict: dict[Any, Any], checkpoint_dir: Path) -> None:
        data = weights_only.dump(common_state_dict, "common data")
        storage.write_file(Path(checkpoint_dir), COMMON_NAME, data)

    def save_sharded_objects(self, sharded_objects_state_dict: dict[Any, Any], checkpoint_dir: Path) -> None:
        for _, record in tree.leaves(sharded_objects_state_dict):
            if isinstance(record, ShardedObject) and is_main_replica(record.replica_id):
                path = inside(Path(checkpoint_dir), f"{record.unique_key}.pt")
                path.parent.mkdir(parents=True, exist_ok=True)
                storage.write_file(path.parent, path.name, weights_only.dump(record.data, f"the object {record}"))


class TorchCommonLoadStrategy(ReadsOneFormat, LoadCommonStrategy):
    """Reads them under torch's weights-only rules and ``safe_globals``."""

    is_built_in = True

    _reads = ("common", "torch", 1)

    def __init__(self, safe_globals: Sequence[Any] = ()) -> None:
        self._safe_globals = safe_globals

    def load_common(self, checkpoint_dir: Path) -> dict[Any, Any]:
        common = self._load(Path(checkpoint_dir) / COMMON_NAME)
        if not isinstance(common, dict):
            raise CorruptError(f"{Path(checkpoint_dir) / COMMON_NAME} holds a {type(common).__name__}, not a dict")
        return common

    def load_sharded_objects(self, sharded_objects_state_dict: dict[Any, Any], checkpoint_dir: Path) -> dict[Any, Any]:
        values = {
            path: self._load(inside(Path(checkpoint_dir), f"{record.unique_key}.pt"))
            for path, record in tree.leaves(sharded_objects_state_dict)
            if isinstance(record, ShardedObject)
        }
        return tree.nest(values)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedObject]:
        found: dict[str, ShardedObject] = {}
        for path in storage.below(Path(checkpoint_dir)):
            if path.match("shard_*.pt"):
                name = path.relative_to(checkpoint_dir).as_posix().removesuffix(".pt")
                with suppress(ShardingError):  # another file
                    found[name] = ShardedObject.empty_from_unique_key(name)
        return dict(sorted(found.items()))

    def _load(self, path: Path) -> Any:
        try:
            data = storage.read_small(path)
        except FileNotFoundError:
            raise CorruptError(f"{path} is missing; the checkpoint that it belongs to has one") from None
        return weights_only.load(data, str(path), self._safe_globals)


def inside(folder: Path, name: str) -> Path:
    """``folder / name``, for a name made of a key.

    Raises:
        UnsafeError: the name leaves the folder, or is none.
    """
    if {"", ".", ".."} & set(name.split("/")) or "\0" in name:
        raise UnsafeError(f"the key {name!r} leaves the folder as a file name")
    return folder / name
