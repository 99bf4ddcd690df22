"""From what a caller names as the place of a checkpoint to its store.

place --> store_at (this file) --> Store (store.py): local.py, url.py, memory.py
"""

from typing import Any

from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.storage import paths
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.local import LocalStore
from sixfold.dist_ckpt.storage.store import Store
from sixfold.dist_ckpt.storage.url import UrlStore


def store_at(place: Any, timeout_s: float | None = None) -> Store:
    """The store of a checkpoint.

    Args:
        place: a str, a Path, or a Store, which is returned as it is.
        timeout_s: how long a store behind a URL is asked again after an error that passes; None: 10 s.
    Raises:
        CheckpointError: none of these, or a form of [Note: what is no place] (paths.py).
        StorageError: a path whose links lead in a circle.
    """
    if isinstance(place, type) and issubclass(place, ByPointer | LocalStore):
        raise CheckpointError(f"checkpoint_dir is the class {place.__name__}; make a store of it")
    if isinstance(place, Store):
        return place
    found = paths.located(place)
    return UrlStore(found, timeout_s) if isinstance(found, str) else LocalStore.at(found)
