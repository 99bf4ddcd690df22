"""Stores behind a URL that fsspec opens (extra ``fsspec``): object stores, memory, archives.

    save: records --> local spool of each rank --> objects of the store, metadata.json last (this file)
    load: objects of the store --> sparse local mirror, filled where the plan reads (this file) --> engine

[Note: commit without rename] A store has no rename to commit by. The files of a save have names of their own, so
that none of an older checkpoint is overwritten; then the old ``metadata.json`` goes, the small files are written, and
the new ``metadata.json``, written last, commits. A kill between the two leaves a folder that is refused as
unfinished, never a mixture. ``file://`` is a local path, with the stronger promise of storage.py.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from sixfold.dist_ckpt.errors import BY_NAME, CheckpointError, MismatchError, StorageError, UnsafeError
from sixfold.dist_ckpt.files import integrity, metadata
from sixfold.dist_ckpt.files.integrity import BLOCK_BYTES, Block
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.ranks import agreement
from sixfold.dist_ckpt.ranks.exchange import Exchange
from sixfold.dist_ckpt.road import loading, saving
from sixfold.dist_ckpt.road.loading import LoadRequest
from sixfold.dist_ckpt.road.saving import SaveRequest
from sixfold.dist_ckpt.stores import folder as folder_of
from sixfold.dist_ckpt.stores import paths
from sixfold.dist_ckpt.stores.store import is_checkpoint_file, overtaken, pieces_of
from sixfold.dist_ckpt.strategies.base import LoadEngine, SaveEngine, owns_file

_MIRROR = "sixfold-mirror-"
_Value = TypeVar("_Value")


class Store:
    """A folder of a store; errors of the store become StorageError with its URL."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise StorageError(
                f"{url}: URLs need the fsspec library: pip install 'sixfold-dist-ckpt[fsspec]'", errno.ENOSYS
            ) from error
        self.url = url
        self._fs, self._root = self._told(lambda: fsspec.core.url_to_fs(url))

    def files(self) -> dict[str, int]:
        """Relative names and sizes of all files."""
        self._told(self._fs.invalidate_cache)
        try:
            found = self._told(lambda: self._fs.find(self._root, detail=True))
        except FileNotFoundError:
            return {}
        prefix = self._root.rstrip("/") + "/"
        return {name.removeprefix(prefix): info["size"] for name, info in found.items() if name.startswith(prefix)}

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file that was listed, or all."""
        try:
            data: bytes = self._told(lambda: self._fs.cat_file(self._path(name), start, stop))
        except FileNotFoundError as error:
            raise StorageError(
                f"{self.url}/{name} was replaced or removed while it was read; load it again", errno.ESTALE
            ) from error
        return data

    def put(self, local: Path, name: str) -> None:
        """Upload a file."""
        self._told(lambda: self._fs.put_file(os.fspath(local), self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file whole."""
        self._told(lambda: self._fs.pipe_file(self._path(name), data))

    def remove(self, name: str) -> None:
        """Delete a file; that others have done so is no error."""
        with suppress(FileNotFoundError):
            self._told(lambda: self._fs.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _told(self, action: Callable[[], _Value]) -> _Value:
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:  # stores raise whatever their clients raise
            code = getattr(error, "errno", None)
            raise StorageError(f"{self.url}: {type(error).__name__}: {error}", code) from error


def save(request: SaveRequest, url: str, engine: SaveEngine | None) -> None:
    """As ``serialization.save``, to a store. See [Note: commit without rename]."""
    if engine is None:
        raise CheckpointError(f"{url}: strategies of users write into local folders; only torch_dist goes to a URL")
    saving.check_if_exists(request.if_exists)
    saving.check_metadata(request.metadata)
    exchange = Exchange(request.group, request.timeout_s)
    store, _ = exchange.together(lambda: (Store(url), None), lambda _: None)

    def agree(reports: list[Any]) -> tuple[str, bool]:
        tables = [report.table for report in reports if report.table is not None]
        saving.check_together(tables, reports, None)
        _check_target(store, request.if_exists)
        return secrets.token_hex(8), len({report.common_digest for report in reports}) > 1

    (content, _), (save_id, differs) = exchange.together(
        lambda: saving.describe(request, exchange, engine, None), agree
    )
    if differs:
        agreement.check(exchange, agreement.digests(content.common, request.preprocess))
    with TemporaryDirectory(prefix="sixfold-spool-") as spool:
        ticket = saving.Ticket(save_id, spool, url, request.if_exists, differs, metadata=request.metadata)

        def write() -> tuple[None, Any]:
            meter = Meter(request.progress, lambda: saving.file_bytes(content))
            told = saving.write(
                content, ticket, exchange.rank, request.check_finite, lambda nbytes: meter.add(nbytes // 2)
            )
            written = _upload(store, told, ticket)
            meter.finish()
            return None, written

        exchange.together(write, lambda written: _commit(store, written, content, ticket))


def _check_target(store: Store, if_exists: str) -> None:
    names = sorted(store.files())
    foreign = [name for name in names if not (is_checkpoint_file(name) or owns_file(name))]
    if names and if_exists == "error":
        raise StorageError(f"{store.url} is not empty ({names[0]}, ...) and if_exists is 'error'", errno.EEXIST)
    if foreign:
        raise StorageError(
            f"{store.url} holds files that are no part of a checkpoint ({', '.join(foreign[:3])}); nothing was touched",
            errno.EEXIST,
        )


def _upload(store: Store, written: Any, ticket: saving.Ticket) -> Any:
    """Put this rank's file into the store under a name of this save."""
    names = {name: f"{name.removesuffix('.distcp')}.{ticket.save_id}.distcp" for name in written.files}
    for local, name in names.items():
        store.put(Path(ticket.staging) / local, name)
    written.files = {names[name]: digest for name, digest in written.files.items()}
    written.objects = [(key, frame._replace(file=names[frame.file])) for key, frame in written.objects]
    return written


def _commit(store: Store, written: list[Any], content: saving.Content, ticket: saving.Ticket) -> None:
    before = store.files()
    files = {name: digest for part in written for name, digest in part.files.items()}
    lost = [name for name, digest in files.items() if before.get(name) != digest.size]
    if lost and lost[0] not in before:
        raise overtaken(store.url)
    if lost:
        raise StorageError(f"{store.url}/{lost[0]} is not the file that its rank wrote", errno.EIO)
    index = saving.index_of(written, ticket.save_id, None, ticket.metadata)
    small = {name: b"".join(pieces_of(data)) for name, data in index.items()} | {"common.pt": content.common_bytes}
    config = metadata.encode_config()
    digests = files | {name: integrity.digest_of(data) for name, data in {**small, "metadata.json": config}.items()}
    small[integrity.FILE_NAME] = integrity.Integrity(save_id=ticket.save_id, files=digests).encode()
    if "metadata.json" in before:
        store.remove("metadata.json")
    for name, data in small.items():
        store.write(name, data)
    store.write("metadata.json", config)
    for name in sorted(before.keys() - digests.keys() - small.keys()):
        store.remove(name)


class Mirror:
    """A local folder that looks like the store's: small files whole, the others sparse until they are fetched."""

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self._sizes = self._store.files()
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
                    file.write(self._store.read(name))
                else:
                    file.truncate(size)

    def fetch(self, frames: Iterable[ByteRange], blocks: Iterable[Block]) -> None:
        """Fill in the blocks that hold ``frames``, and ``blocks``."""
        wanted = {(block.file, block.number) for block in blocks}
        for frame in frames:
            last = (frame.offset + max(frame.length, 1) - 1) // BLOCK_BYTES
            wanted |= {(frame.file, number) for number in range(frame.offset // BLOCK_BYTES, last + 1)}
        for name, number in sorted(wanted - self._fetched):
            start = number * BLOCK_BYTES
            data = self._store.read(name, start, min(start + BLOCK_BYTES, self._sizes[name]))
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
        if path.exists() and self._store.read(".metadata") != path.read_bytes():
            raise StorageError(f"{self._store.url} was replaced while it was read; load it again", errno.ESTALE)
        return True

    def close(self) -> None:
        """Delete the local folder."""
        self._folder.cleanup()


@contextmanager
def local_view(checkpoint_dir: str | Path, *, whole: bool = False) -> Iterator[Path]:
    """A checkpoint's small files in a local folder: the folder itself, or a mirror of a URL while the context lasts.

    With ``whole`` the mirror holds all bytes.
    """
    place = paths.located(checkpoint_dir)
    if isinstance(place, Path):
        yield place
        return
    mirror = Mirror(place)
    try:
        with _named(mirror, place):
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


def is_complete(url: str) -> bool:
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


def load(request: LoadRequest, url: str, engine: LoadEngine | None) -> Any:
    """As ``serialization.load``, from a store: each rank fetches the blocks that it reads."""
    if engine is None:
        raise CheckpointError(f"{url}: strategies of users read local folders; torch_dist and zarr come from a URL")
    exchange = Exchange(request.group, request.timeout_s)
    mirror, _ = exchange.together(lambda: (Mirror(url), None), lambda _: None)
    try:
        with _named(mirror, url):
            local = replace(request, path=mirror.folder)
            result = loading.load(local, replace(engine, before_read=mirror.fetch))
            exchange.together(lambda: (mirror.check_unchanged(), None), lambda _: None)
            return result
    finally:
        mirror.close()
