"""``.metadata`` of a checkpoint that was saved without it: for torch DCP and megatron-core, which read nothing else.

compact manifest --> .metadata --> integrity.json that covers it (this file)

[Note: one file more] No file of a visible checkpoint is written again. One is added, and ``integrity.json`` is
replaced by one that says the same and names the new file too. Each appears whole, by a rename, ``.metadata`` first.
Until the second rename the manifest says that ``.metadata`` is none of the save, so loads of this package do not look
at it. A kill between the two leaves that, and the next call does both again. All of it goes through one descriptor of
the folder: a save that replaces the checkpoint meanwhile replaces it whole. In a store ``.metadata`` lies beside the
save's folder, for torch alone; nobody saves to the place meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.checkpoint.opening import Checkpoint, open_checkpoint
from sixfold.dist_ckpt.errors import MismatchError, StorageError
from sixfold.dist_ckpt.formats import compact_manifest, integrity
from sixfold.dist_ckpt.formats import metadata as schema
from sixfold.dist_ckpt.formats.integrity import FileDigest, Integrity
from sixfold.dist_ckpt.serialization import with_local_view
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.storage.by_pointer import TAIL_BYTES, visible
from sixfold.dist_ckpt.storage.local import store_at
from sixfold.dist_ckpt.storage.store import Save, Store

_HIDDEN = ".metadata.tmp"  # a name that saves of any version know as a checkpoint's


def metadata(path: str | Path | Store) -> dict[str, Any]:
    """Write ``.metadata`` into a checkpoint that was saved without it; one that is there stays.

    At a URL or in a store: while nobody saves to the same place.

    Returns:
        path, written (whether it was not there), nbytes (of the file).
    Raises:
        MismatchError: no checkpoint of this package's folder format. CorruptError: its manifest is damaged.
        StorageError: the system or the store refuses, another process does the same now, or a save has replaced it.
    """
    store = store_at(path)
    return with_local_view(store, lambda folder: _added(store, open_checkpoint(folder)))


def _added(store: Store, checkpoint: Checkpoint) -> dict[str, Any]:
    folder, known = checkpoint.folder, checkpoint.integrity
    name = str(folder) if store.local_folder is not None else store.name
    of_ours = known is not None and checkpoint.manifest.files is not None
    if known is not None and of_ours and store.local_folder is None:
        return {"path": name, **_into_store(store, checkpoint, known)}
    if known is None or not of_ours or ".metadata" in known.files:
        if not (folder / ".metadata").exists():
            raise MismatchError(f"{name} is of a format without .metadata; tools.convert makes one that has it")
        return {"path": name, "written": False, "nbytes": (folder / ".metadata").stat().st_size}
    if (known.algorithm, known.block_bytes) != ("crc32", integrity.BLOCK_BYTES):
        raise MismatchError(f"{name} has digests of another kind than are written here; tools.convert writes it anew")
    return {"path": name, "written": True, "nbytes": _into_folder(checkpoint, known).size}


def _into_folder(checkpoint: Checkpoint, known: Integrity) -> FileDigest:
    index = compact_manifest.index_of(checkpoint.manifest)
    with _locked_folder(checkpoint) as inside, storage.full_disk_told(checkpoint.folder, 0):
        (inside / _HIDDEN).unlink(missing_ok=True)
        try:
            digest = storage.write_file(inside, _HIDDEN, lambda: schema.encode_parts(index))
            checkpoint.check_unchanged()
            (inside / _HIDDEN).rename(inside / ".metadata")
            both = replace(known, files={**known.files, ".metadata": digest})
            storage.write_file(inside, _HIDDEN, both.encode())
            (inside / _HIDDEN).rename(inside / integrity.FILE_NAME)
        finally:
            (inside / _HIDDEN).unlink(missing_ok=True)
        storage.sync_folder(inside)
    return digest


def _into_store(store: Store, checkpoint: Checkpoint, known: Integrity) -> dict[str, Any]:
    found = store.list_files()
    size = found.get(".metadata", 0)
    if size and known.save_id.encode() in store.read(".metadata", max(0, size - TAIL_BYTES), size):
        return {"written": False, "nbytes": size}
    index = compact_manifest.index_of(checkpoint.manifest).within(visible(found))
    _check_still_there(store, known)
    save = Save(save_id=known.save_id, target=store.name)
    digest = store.write(save, ".metadata", lambda: schema.encode_parts(index))
    _check_still_there(store, known)
    return {"written": True, "nbytes": digest.size}


def _check_still_there(store: Store, known: Integrity) -> None:
    if not store.holds(known.save_id):
        raise StorageError(f"{store.name} was replaced while its .metadata was made; try again", errno.ESTALE)


@contextmanager
def _locked_folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """The opened folder itself, whatever its path names later; for one process at a time where there are locks."""
    handle = os.open(checkpoint.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if (status.st_dev, status.st_ino) != checkpoint.identity[:2]:
            raise StorageError(f"{checkpoint.folder} was replaced while it was read; try again", errno.ESTALE)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(f"{checkpoint.folder}: another process writes its .metadata now", errno.EBUSY) from error
        except OSError:
            pass  # a file system without locks has none to give
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
