"""Loads from stores that are no local folder: object stores behind a URL, memory, a user's own.

objects of the store --> sparse local mirror, filled where the plan reads (this file) --> engine
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from sixfold.dist_ckpt.errors import BY_NAME, CheckpointError, MismatchError, StorageError, UnsafeError
from sixfold.dist_ckpt.files.integrity import BLOCK_BYTES, Block
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.ranks.exchange import Exchange
from sixfold.dist_ckpt.road import loading
from sixfold.dist_ckpt.road.loading import LoadRequest
from sixfold.dist_ckpt.stores import LocalStore, Store, paths, store_at
from sixfold.dist_ckpt.stores import folder as folder_of
from sixfold.dist_ckpt.stores.store import is_checkpoint_file
from sixfold.dist_ckpt.strategies.base import LoadEngine

_MIRROR = "sixfold-mirror-"
_Value = TypeVar("_Value")


class Mirror:
    """A local folder that looks like the store's: small files whole, the others sparse until they are fetched."""

    def __init__(self, store: Store) -> None:
        self._store, url = store, store.name
        self._sizes = store.list_files()
        if not self._sizes:
            raise MismatchError(f"{url} does not exist")
        self._folder = TemporaryDirectory(prefix=_MIRROR)
        self.folder = Path(self._folder.name) / "checkpoint"
        self._fetched: set[tuple[str, int]] = set()
        for name, size in self._sizes.items():
            # Also an empty part: joined to a path, the name behind "//" would stand for itself, anywhere on this host.
            if "\0" in name or {"", ".", ".."} & set(name.split("/")):
                raise UnsafeError(f"{url}: the name {name!r} leaves the folder; nothing was written")
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                is_index = is_checkpoint_file(name) and not name.endswith(".distcp")
                if is_index or name.endswith((".zarray", ".pt")):
                    file.write(self._read(name))
                else:
                    file.truncate(size)

    def _read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            return self._store.read(name, start, stop)
        except FileNotFoundError as error:
            raise StorageError(
                f"{self._store.name}/{name} was replaced or removed while it was read; load it again", errno.ESTALE
            ) from error

    def fetch(self, frames: Iterable[ByteRange], blocks: Iterable[Block]) -> None:
        """Fill in the blocks that hold ``frames``, and ``blocks``."""
        wanted = {(block.file, block.number) for block in blocks}
        for frame in frames:
            last = (frame.offset + max(frame.length, 1) - 1) // BLOCK_BYTES
            wanted |= {(frame.file, number) for number in range(frame.offset // BLOCK_BYTES, last + 1)}
        for name, number in sorted(wanted - self._fetched):
            start = number * BLOCK_BYTES
            data = self._read(name, start, min(start + BLOCK_BYTES, self._sizes[name]))
            with (self.folder / name).open("r+b") as file:
                file.seek(start)
                file.write(data)
        self._fetched |= wanted

    def fetch_all(self) -> None:
        """Fill in everything."""
        self.fetch(
            [ByteRange(name, at, 1) for name, size in self._sizes.items() for at in range(0, size, BLOCK_BYTES)], []
        )

    def check_unchanged(self) -> bool:
        """True; StorageError if another save has taken the store's folder since it was listed."""
        path = self.folder / ".metadata"
        if path.exists() and self._read(".metadata") != path.read_bytes():
            raise StorageError(f"{self._store.name} was replaced while it was read; load it again", errno.ESTALE)
        return True

    def close(self) -> None:
        """Delete the local folder."""
        self._folder.cleanup()


@contextmanager
def local_view(checkpoint_dir: str | Path | Store, *, whole: bool = False) -> Iterator[Path]:
    """A checkpoint's small files in a local folder: the folder itself, or a mirror of a store while the context lasts.

    With ``whole`` the mirror holds all bytes.
    """
    place = checkpoint_dir if isinstance(checkpoint_dir, Store) else paths.located(checkpoint_dir)
    if isinstance(place, Path | LocalStore):
        yield place if isinstance(place, Path) else place.path
        return
    store = store_at(place)
    mirror = Mirror(store)
    try:
        with _named(mirror, store.name):
            if whole:
                mirror.fetch_all()
            yield mirror.folder
    finally:
        mirror.close()


@contextmanager
def _named(mirror: Mirror, url: str) -> Iterator[None]:
    """Errors inside name the URL, not the mirror of this rank or of another."""
    place = re.compile(re.escape(str(mirror.folder.parent.parent)) + rf"/{_MIRROR}[^/]+/{mirror.folder.name}")
    try:
        yield
    except StorageError as error:
        raise StorageError(place.sub(lambda _: url, str(error)), error.errno) from error
    except CheckpointError as error:
        raise BY_NAME[type(error).__name__](place.sub(lambda _: url, str(error))) from error


def is_complete(url: str | Store) -> bool:
    """Whether a whole checkpoint is there; its small files are read.

    Raises:
        StorageError: the store does not answer, which is not taken for a "no".
    """
    for _ in range(folder_of.LOOKS):
        try:
            with local_view(url) as folder:
                return folder_of.is_complete(folder)
        except MismatchError:
            return False
        except StorageError as error:
            if error.errno != errno.ESTALE:
                raise
    return False


def load(request: LoadRequest, store: Store, engine: LoadEngine | None) -> Any:
    """As ``serialization.load``, from a store: each rank fetches the blocks that it reads."""
    exchange = Exchange(request.group, request.timeout_s)

    def mirrored() -> tuple[tuple[Mirror, LoadEngine], None]:
        if engine is None:
            raise CheckpointError(
                f"{store.name}: strategies of users read local folders; torch_dist and zarr come from a URL"
            )
        if exchange.ranks > 1 and not store.is_shared:
            raise CheckpointError(f"{store.name} is seen by one process alone; load it with group=None")
        return (Mirror(store), engine), None

    (mirror, found), _ = exchange.together(mirrored, lambda _: None)
    try:
        with _named(mirror, store.name):
            local = replace(request, path=mirror.folder)
            result = loading.load(local, replace(found, before_read=mirror.fetch))
            exchange.together(lambda: (mirror.check_unchanged(), None), lambda _: None)
            return result
    finally:
        mirror.close()
