"""Views: a checkpoint of any store as a local folder of one process, for functions that look and for tools.

    path, URL or Store --> viewed (this file) --> a folder: the store's own, or a mirror of it

Loads see a store through save_load/host_view.py, where ranks share a mirror.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sixfold.dist_ckpt.checkpoint import opening
from sixfold.dist_ckpt.storage.local import located, store_at
from sixfold.dist_ckpt.storage.store import Store


@contextmanager
def viewed(place: str | Path | Store, *, whole: bool = False) -> Iterator[Path]:
    """A folder while the context lasts: a local checkpoint's own, or the small files of another, all with ``whole``.

    Raises:
        MismatchError: nothing is there; local folders are not looked at.
    """
    found = place.local_folder or place if isinstance(place, Store) else located(place)
    if isinstance(found, Path):
        yield opening.inner(found) if found.is_dir() else found
        return
    from sixfold.dist_ckpt.mirror.mirror import Mirror

    mirror = Mirror(store_at(found))
    try:
        mirror.create()
        with mirror.errors_named():
            if whole:
                mirror.fetch_all()
            yield mirror.folder
    finally:
        mirror.close()


def is_complete(store: Store) -> bool:
    """Whether a whole checkpoint is there; its small files are read.

    Raises:
        StorageError: the store does not answer, which is not taken for a "no".
    """

    def look() -> None:
        with viewed(store) as place:
            opening.open_checkpoint(place, verify="off")

    return opening.opens(look)
