"""Stores behind a URL that fsspec opens (extra ``fsspec``): object stores, archives, other machines' folders.

    frames --> StreamFile --> multi-part upload (this file) --> objects; metadata.json last commits (store.py)
    objects --> ranges, many at once (this file) --> local mirror of a load

``file://`` is a local path, with the stronger promise of local.py.

[Note: what passes] Some errors pass: those of the network, and of a store that is busy or asks to slow down. The
request is then repeated, after pauses that grow to 5 s, until ``timeout_s`` after the first error. Then one
StorageError says what was asked, how often and for how long. An upload that breaks is begun anew from the tensors.
The client of a store (s3fs) repeats before that by itself, request by request.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

from sixfold.dist_ckpt.errors import CheckpointError, StorageError
from sixfold.dist_ckpt.formats.integrity import FileDigest
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.frame_file import PartFile, Sink
from sixfold.dist_ckpt.storage.range_reads import AT_ONCE, in_flight, stall_s

PATIENCE_S = 10.0
BLOCK_BYTES = 8 << 20  # of an upload that are sent as one part
_MOST_PARTS = 9_000  # an object store takes 10,000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_PASSING_CODES = frozenset([
    errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.EPIPE, errno.ETIMEDOUT, errno.ECONNRESET,
    errno.ECONNABORTED, errno.ECONNREFUSED, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTUNREACH,
    errno.EREMOTEIO,
])  # fmt: skip
# Of clients that this package does not import: botocore, aiohttp, urllib3, requests.
_PASSING_NAMES = frozenset([
    "ConnectionError", "ClientConnectionError", "ClientPayloadError", "HTTPClientError", "IncompleteRead",
    "IncompleteReadError", "ProtocolError", "ResponseParserError", "TimeoutError",
])  # fmt: skip
# What stores tell of a file, and change when it is written anew.
_MARKS = (
    "size", "ETag", "etag", "md5Hash", "generation", "VersionId", "LastModified", "last_modified", "mtime", "created",
)  # fmt: skip
_PASSING_STATUSES = frozenset([408, 429, 500, 502, 503, 504])
_Value = TypeVar("_Value")


def is_known(url: str) -> bool:
    """Whether fsspec is installed and knows the protocol of a URL, and of each part of a chained one."""
    try:
        import fsspec
    except ImportError:
        return False
    known = set(fsspec.available_protocols())
    return all(part.partition("://")[0] in known for part in url.split("::"))


def joined(url: str, name: str) -> str:
    """A URL of what lies below another."""
    return f"{url}{name}" if url.endswith("/") else f"{url}/{name}"


class UrlStore(ByPointer, tells=True):
    """A checkpoint behind a URL. It is pickled as its URL: each process makes a connection of its own.

    A rank uploads up to ``streams`` files at once, from copies of 4 MiB of its tensors. Parts have 8 MiB, and more
    for a file of over 70 GiB. The client holds a part while it is sent, and the next one beside it. That is at most
    some ``streams * 3 * 8 MiB`` = 192 MiB of a rank, whatever is saved. Uploads that a killed rank leaves open are
    no
    objects; a rule of the bucket removes them.

    Args:
        url: as the user wrote it.
        timeout_s: see [Note: what passes]; None: 10 s, for functions that have no deadline of their own.
        options: for fsspec, such as ``{"anon": True}``; what the URL and the environment do not say.
    """

    streams = 8

    def __init__(self, url: str, timeout_s: float | None = None, options: dict[str, Any] | None = None) -> None:
        self._url, self._options = url, options or {}
        self._timeout_s = PATIENCE_S if timeout_s is None else timeout_s
        self._opened: tuple[Any, str] | None = None
        self.is_shared = not url.rpartition("::")[2].startswith("memory://")  # which is of one process

    def __reduce__(self) -> tuple[Any, ...]:
        return UrlStore, (self._url, self._timeout_s, self._options)

    @property
    def name(self) -> str:
        return self._url

    def list_files(self) -> dict[str, int]:
        return {name: info["size"] for name, info in self._infos().items()}

    def marks(self) -> Mapping[str, object]:
        return {name: tuple(str(info.get(key)) for key in _MARKS) for name, info in self._infos().items()}

    def _infos(self) -> dict[str, Any]:
        fs, root = self._connection()
        prefix = self._prefix()

        def found() -> dict[str, Any]:
            fs.invalidate_cache()
            try:
                return dict(fs.find(root, detail=True, **_within(fs, self._timeout_s / 2)))
            except FileNotFoundError:
                return {}

        files = self._asked(found, "listing it")
        return {name.removeprefix(prefix): info for name, info in files.items() if name.startswith(prefix)}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        fs, _ = self._connection()
        limit = _within(fs, stall_s(self._timeout_s))
        span = {"start": start or None, "end": stop}  # a range of the whole would be another kind of request
        return bytes(self._asked(lambda: fs.cat_file(self._path(name), **span, **limit), f"reading {name}"))

    def read_ranges(self, ranges: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, bytes]]:
        if not _is_async(self._connection()[0]):  # others may bear one call at a time
            return super().read_ranges(ranges)
        return in_flight(lambda part: self.read(part.file, part.offset, part.offset + part.length), ranges)

    def create(self, name: str, nbytes: int) -> Sink:
        block_bytes = max(BLOCK_BYTES, -(-nbytes // _MOST_PARTS))
        return self._in_folder(name, lambda fs, path: _Upload(fs.open(path, "wb", block_size=block_bytes)))

    def _streamed(
        self, name: str, fill: Callable[[PartFile], None], nbytes: int, moved: Callable[[int], None] | None = None
    ) -> FileDigest:
        # What is told of an upload that is begun anew is told twice: a progress grows for a while before its bytes do.
        what = f"uploading {name.rpartition('/')[2]}"
        return self._put(lambda: super(UrlStore, self)._streamed(name, fill, nbytes, moved), what)

    def _copy(self, there: str, here: str) -> None:
        copied = self._path(there)
        self._asked(lambda: self._in_folder(here, lambda fs, path: fs.cp_file(copied, path)), f"copying {there}")

    def replace(self, name: str, data: bytes) -> None:
        self._put(lambda: self._in_folder(name, lambda fs, path: fs.pipe_file(path, data)), f"writing {name}")

    def delete(self, name: str) -> None:
        fs, _ = self._connection()
        with suppress(FileNotFoundError):
            self._asked(lambda: fs.rm_file(self._path(name)), f"deleting {name}")

    def _put(self, action: Callable[[], _Value], what: str) -> _Value:
        try:
            return self._asked(action, what)
        except FileNotFoundError as error:  # of the bucket
            raise self._error(error, what, 1, 0.0) from error

    def patient(self, timeout_s: float) -> Self:
        return type(self)(self._url, timeout_s, self._options)

    def child(self, folder: str) -> ByPointer:
        if "::" in self._url:
            return super().child(folder)
        return UrlStore(joined(self._url, folder), self._timeout_s, self._options)

    def create_new(self, name: str, data: bytes) -> bool:
        """In one act where the client has it (S3, Google Cloud Storage); else by looking first."""

        def create(fs: Any, path: str) -> bool:
            try:
                fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            return True

        return self._asked(lambda: self._in_folder(name, create), f"writing {name}")

    def _in_folder(self, name: str, action: Callable[[Any, str], _Value]) -> _Value:
        """``action`` with the connection and the path of a file, whose folder is made if the store has folders."""
        fs, path = self._connection()[0], self._path(name)
        try:
            return action(fs, path)
        except FileNotFoundError:
            if _is_async(fs):  # an object store has none: what is missing is the bucket
                raise
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return action(fs, path)

    def _path(self, name: str) -> str:
        return self._prefix() + name

    def _prefix(self) -> str:
        """What the paths of all files begin with; those of a folder as a file system begin there, not at a root."""
        return "" if self._url.startswith("dir::") else self._connection()[1].rstrip("/") + "/"

    def _connection(self) -> tuple[Any, str]:
        """The file system of fsspec and the checkpoint's path in it."""
        if self._opened is None:
            try:
                import fsspec
            except ImportError as error:
                raise StorageError(
                    f"{self._url}: URLs need the fsspec library: pip install 'sixfold-dist-ckpt[fsspec]'", errno.ENOSYS
                ) from error
            options = {**_pool_options(self._url, fsspec.config.conf), **self._options}
            fs, root = self._asked(lambda: fsspec.core.url_to_fs(self._url, **options), "opening it")
            if self._url.startswith("dir::"):  # a folder as a file system: its paths begin there, and not at the root
                root = ""
            self._opened = fs, root
        return self._opened

    def _asked(self, action: Callable[[], _Value], what: str) -> _Value:
        """What ``action`` gives; asked again as [Note: what passes] says. FileNotFoundError is left as it is."""
        first, times, pause_s = 0.0, 0, _FIRST_PAUSE_S
        while True:
            try:
                return action()
            except (CheckpointError, FileNotFoundError):
                raise
            except Exception as error:  # stores raise whatever their clients raise
                now, times = time.monotonic(), times + 1
                first = first or now
                if not _passes(error) or now - first + pause_s > self._timeout_s:
                    raise self._error(error, what, times, now - first) from error
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _error(self, error: Exception, what: str, times: int, seconds: float) -> StorageError:
        text = f"{self._url}: {type(error).__name__}: {error}"
        if times > 1:
            text += f" ({what} failed {times} times in {seconds:.1f} s; timeout_s={self._timeout_s:g})"
        return StorageError(text, getattr(error, "errno", None))


def _is_async(fs: Any) -> bool:
    """Whether requests go to a server; of ``dir::`` the file system within says so."""
    return bool((fs.fs if fs.protocol == "dir" else fs).async_impl)


def _within(fs: Any, seconds: float) -> dict[str, float]:
    """A deadline of one call, as far as the file system knows one: without, a client may wait for minutes."""
    return {"timeout": seconds} if _is_async(fs) else {}


def _pool_options(url: str, conf: Mapping[str, Any]) -> dict[str, Any]:
    """As many connections as are used at once: s3fs opens ten if nobody asks for more."""
    protocol = url.partition("://")[0]
    if protocol not in ("s3", "s3a"):
        return {}
    config = conf.get(protocol, {}).get("config_kwargs", {})
    return {"config_kwargs": {"max_pool_connections": 2 * AT_ONCE, **config}}


def _passes(error: BaseException) -> bool:
    """Whether asking again may help. See [Note: what passes]."""
    response = getattr(error.__cause__, "response", None)  # of botocore, beneath what s3fs makes of it
    meta = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    status = meta.get("HTTPStatusCode", getattr(error, "status", getattr(error, "code", None)))
    if isinstance(status, int) and 400 <= status < 600:
        return status in _PASSING_STATUSES
    if isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) in _PASSING_CODES:
        return True
    return any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__)


class _Upload:
    """A file of fsspec that is written. Discarded, it is never closed, which would make the half of it appear."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        with suppress(Exception):
            self._file.discard()  # ends a multi-part upload
        with suppress(Exception):
            if hasattr(self._file, "buffer"):  # AbstractBufferedFile, whose __del__ would close it
                self._file.closed = True
            else:
                self._file.close()
