"""The deprecated zarr format: what megatron-core 0.12 wrote, read and written.

    records --> ZarrSaveShardedStrategy (this file) --> <key>/.zarray and <key>/i.j.k, bare values
    folder --> zarr_folder.py --> Manifest --> the engine; ZarrLoadShardedStrategy (this file) is its name

It has no checksums and no flattened shards. A save commits like any other; it warns, and
``sixfold-ckpt convert SRC DST --to torch_dist`` makes a checkpoint of the recommended format.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from sixfold.dist_ckpt.checkpoint import zarr_folder
from sixfold.dist_ckpt.errors import MismatchError, ShardingError
from sixfold.dist_ckpt.geometry.box import Ints
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.records import ShardedTensor, is_main_replica
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes
from sixfold.dist_ckpt.strategies.base import SaveShardedStrategy
from sixfold.dist_ckpt.strategies.common import inside
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy

__all__ = ["ZarrLoadShardedStrategy", "ZarrSaveShardedStrategy"]

_FILE = re.compile(r".+/(\d+(\.\d+)*|\.z(array|attrs|group))")


class ZarrSaveShardedStrategy(SaveShardedStrategy):
    """Saves regular grids of whole shards, each as one chunk file."""

    def __init__(self, backend: str = "zarr", version: int = 1) -> None:
        if (backend, version) != zarr_folder.BACKEND:
            raise MismatchError(f"this strategy writes {zarr_folder.BACKEND}, not {(backend, version)}")
        super().__init__(backend, version)

    def owns_file(self, name: str) -> bool:
        return _FILE.fullmatch(name) is not None

    def save(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> None:
        warnings.warn("the zarr format is deprecated: no checksums, no flattened shards; use torch_dist", stacklevel=5)
        for _, record in tree.leaves(sharded_state_dict):
            if isinstance(record, ShardedTensor):
                at = _grid_place(record)
                if is_main_replica(record.replica_id):
                    _write_chunk(record, at, Path(checkpoint_dir))

    def check_written(self, checkpoint_dir: Path) -> None:
        """Ranks that cut a tensor differently have written chunks of differing sizes: refused here."""
        zarr_folder.read_manifest(Path(checkpoint_dir))


class ZarrLoadShardedStrategy(TorchDistLoadShardedStrategy):
    """Loads them; resharding, flattened requests and every option of ``load`` work as for torch_dist."""

    _reads = ("sharded", *zarr_folder.BACKEND)


def _grid_place(record: ShardedTensor) -> Ints:
    """Which chunk of the grid a shard is.

    Raises:
        ShardingError: a flattened shard, or one that is not one of equal parts.
    """
    if record.flattened_range is not None:
        raise ShardingError(f"{record}: zarr holds no flattened shards; save it as torch_dist")
    box = record.box
    fragments = record.axis_fragmentations
    equal = fragments is not None and all(
        length * count == total for length, count, total in zip(box.size, fragments, record.global_shape, strict=True)
    )
    if not equal:
        raise ShardingError(f"{record}: zarr holds equal parts only, not an irregular cut; save it as torch_dist")
    return tuple(at // max(1, length) for at, length in zip(box.offset, box.size, strict=True))


def _write_chunk(record: ShardedTensor, at: Ints, folder: Path) -> None:
    array = inside(folder, record.key)
    array.mkdir(parents=True, exist_ok=True)
    header = zarr_folder.array_header(record.key, record.dtype, record.global_shape, record.box.size)
    if not any(at):
        (array / zarr_folder.HEADER_NAME).write_bytes(header)
    for piece in record.pieces():
        tensor: torch.Tensor = record.view(piece).resolve_conj().resolve_neg().cpu().contiguous()
        with (array / zarr_folder.chunk_name(at)).open("xb") as file:
            file.write(tensor_bytes(tensor))
