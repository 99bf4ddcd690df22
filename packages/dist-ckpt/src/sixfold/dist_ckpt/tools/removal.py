"""Removal: a checkpoint without some of its tensors, in the place of the whole one.

folder --> records that map its files --> save over it (this file)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.road.request import read_config
from sixfold.dist_ckpt.stores import paths
from sixfold.dist_ckpt.tools import conversion, probe


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str, *, safe_globals: Sequence[Any] = ()) -> None:
    """Remove the tensors whose key begins with ``key_prefix`` from a checkpoint; one process alone calls it.

    The rest is written anew, every byte checked, and takes the place of the folder in one step, so that it needs room
    for both meanwhile: objects, common data and the cut of the tensors stay. Warns if no key begins so.

    Args:
        checkpoint_dir: a local folder of this package, of DCP, of megatron-core, or of zarr.
        safe_globals: as in ``load``, for common data and objects.
    Raises:
        CheckpointError: as ``load`` and ``save``; then the folder is as it was.
    """
    folder = paths.local(checkpoint_dir, "tensors are removed in a local folder; download and upload it")
    with probe.opened(folder) as source:
        tensors, objects = conversion.listed(source)
        kept = {key: record for key, record in tensors.items() if not key.startswith(key_prefix)}
        if len(kept) == len(tensors):
            warnings.warn(f"no tensor of {source} has a key that begins with {key_prefix!r}", stacklevel=2)
            return
        config = read_config(source)
        backend = config[0][0] if config else "torch_dist"
        if backend not in ("torch_dist", "zarr"):
            raise CheckpointError(f"{source} is of the backend {backend!r}; torch_dist and zarr are written here")
        conversion.to_checkpoint(source, folder, kept, objects, backend, Meter(None), safe_globals, in_place=True)
