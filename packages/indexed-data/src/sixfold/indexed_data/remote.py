"""Objects of a store, read in ranges that are fetched ahead: s3://, gs://, http(s):// and every URL of fsspec.

    token ranges --> coalesced --> requests in parallel --> pieces in a bounded cache (this file) --> storage.py

``prefetch`` begins to fetch ranges and returns at once; ``read`` takes what is there, waits for what is under way, and
fetches the rest. A piece is what one request gave. With a folder, pieces are files that later runs find again.

[Note: one object] An object has a size and, in most stores, a tag that changes with its content: an ETag, else a date.
Both are asked when it is opened. Each answer of http(s) carries them, and of other stores they are asked again every
``check_s``. An object that changed is an error: its other half would belong to other documents.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.fetching import Fetch, Gone, Refused, fetch_of
from sixfold.indexed_data.piece_files import PieceFiles

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_OF_PARENTS: list[Fetch] = []  # kept in a fork: a client that is collected closes connections that its parent still has
WASTE = 0.05  # of what is fetched, at most: what lies between ranges that one request fetches
I64 = npt.NDArray[np.int64]
_T = TypeVar("_T")


class StoreError(IndexedDataError):
    """A store did not answer, or its object is not what it was; the message names URL, bytes and attempts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """How objects are read."""

    connections: int = 16  # requests at a time, of one object
    request_bytes: int = 8 << 20  # at most, of one request
    timeout_s: float = 30.0  # of one attempt
    retries: int = 5  # after the first attempt, with pauses of 0.1 s, 0.2 s, 0.4 s, ...
    check_s: float = 60.0  # how often size and tag are asked again, where answers do not carry them
    cache_bytes: int = 1 << 30  # of pieces of all objects, in the folder or in the memory of each process
    cache_folder: str | None = None  # None: in memory
    storage_options: dict[str, Any] = field(default_factory=dict)  # of fsspec, such as key, secret, endpoint_url

    def __post_init__(self) -> None:
        counts = (self.connections, self.request_bytes, self.cache_bytes)
        times = (self.timeout_s, self.check_s)
        if min(counts) < 1 or self.retries < 0 or not all(value > 0 for value in times):
            raise IndexedDataError(f"{self}; connections, sizes and times are > 0, and retries >= 0")


class RemoteStore:
    """Opens objects by URL: what ``IndexedDataset(open_bytes=...)`` takes, and uses by itself for a URL."""

    def __init__(self, options: RemoteOptions | None = None) -> None:
        self.options = options or RemoteOptions()

    def __call__(self, url: str) -> RemoteObject:
        return RemoteObject(url, self.options)


class RemoteObject:
    """One object of a store.

    Raises:
        FileNotFoundError: there is none.
        StoreError: the store refuses, or does not answer.
    """

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self.url, self._options = url, options
        self._fetch = self._client()
        self._size, self._tag = self._tried("its size", self._fetch.facts)
        self._checked = time.monotonic()
        self._key = self._tag or f"untold {os.urandom(8).hex()}"
        if self._size and not self._tag:
            warnings.warn(
                f"{url}: the store gives neither ETag nor a date of change: that it was replaced by an object of the "
                "same size is not noticed, and later runs use nothing of it in cache_folder",
                stacklevel=2,
            )
        self._begin()
        self.fetched_bytes = 0  # by requests of this object, for whoever measures

    def _begin(self) -> None:
        memory = _memory(self._options)
        self._pieces = _Pieces(self.url, self._size, self._key, self._options, memory)
        self._lock = memory.lock
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def _client(self) -> Fetch:
        options = self._options
        return self._tried("opening it", lambda: fetch_of(self.url, options.timeout_s, options.storage_options))

    def _after_fork(self) -> None:
        """A fork has none of its parent's threads: what they would bring never comes, and their client is stuck."""
        if self._process != os.getpid():
            with _memory(self._options).lock:  # the parent's may be held by one of them
                if self._process != os.getpid():
                    _OF_PARENTS.append(self._fetch)
                    self._fetch = self._client()
                    self._begin()

    def size(self) -> int:
        return self._size

    def prefetch(self, begin_R: I64, end_R: I64) -> None:
        """Begin to fetch the bytes ``begin_R`` to ``end_R`` that are not here and not under way.

        Raises:
            StoreError: together they are more than the cache holds.
        """
        self._after_fork()
        wanted = coalesced(begin_R, end_R)
        total = sum(end - begin for begin, end in wanted)
        if total > self._options.cache_bytes:
            raise StoreError(
                f"{self.url}: {total} bytes are to be fetched ahead, and the cache holds {self._options.cache_bytes}; "
                "look ahead less far, or give a larger cache_bytes"
            )
        with self._lock:
            for begin, end in wanted:
                self._begin_missing(begin, end)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes; StoreError if the store does not give them."""
        if nbytes == 0:
            return b""
        self._after_fork()
        with self._lock:
            self._begin_missing(offset, offset + nbytes)
            pieces = self._pieces.within(offset, offset + nbytes)
        found = []
        for begin, end, future in pieces:
            data = self._result(begin, end, future)
            found.append(data[max(0, offset - begin) : offset + nbytes - begin])
            with self._lock:
                self._pieces.used(begin)
        return found[0] if len(found) == 1 else b"".join(found)

    def _result(self, begin: int, end: int, future: Future[bytes]) -> bytes:
        limit = self._options.timeout_s * (self._options.retries + 1) + 0.1 * 2**self._options.retries
        try:
            return future.result(limit)
        except TimeoutError as error:
            with self._lock:
                self._pieces.forget(begin)
            raise StoreError(
                f"{self.url}: bytes {begin} to {end} did not come within {limit:g} s; the store does not answer. Read "
                "again, or give a longer timeout_s"
            ) from error
        except BaseException:
            with self._lock:
                self._pieces.forget(begin)  # the next read asks again
            raise

    def _begin_missing(self, begin: int, end: int) -> None:
        """Requests for what of the range is not here. The lock is held."""
        for first, last in self._pieces.missing(begin, end):
            for at in range(first, last, self._options.request_bytes):
                until = min(last, at + self._options.request_bytes)
                future = self._threads().submit(self._fetched, at, until)
                self._pieces.add(at, until, future, needed=(begin, end))

    def _threads(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor  # only here: reading local pairs should not load it

        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._options.connections)
        return self._pool

    def _fetched(self, begin: int, end: int) -> bytes:
        if not self._fetch.tells_change and time.monotonic() - self._checked > self._options.check_s:
            self._refuse_changed(*self._tried("its size", self._fetch.facts))
            self._checked = time.monotonic()
        data = b""
        while len(data) < end - begin:  # a server may give less of a range than it was asked for
            at = begin + len(data)
            piece, size, tag = self._tried(f"bytes {at} to {end}", partial(self._fetch.get, at, end))
            self._refuse_changed(size if size is not None else self._size, tag if tag is not None else self._tag)
            data += piece
            if not piece or len(data) > end - begin:
                raise StoreError(f"{self.url}: bytes {at} to {end}: {len(piece)} came; the object was cut")
        self.fetched_bytes += len(data)
        self._pieces.keep(begin, end, data)
        return data

    def _refuse_changed(self, size: int, tag: str) -> None:
        if (size, tag) != (self._size, self._tag):
            raise StoreError(
                f"{self.url}: has {size} bytes and the tag {tag!r}, and had {self._size} and {self._tag!r} when it was "
                "opened: the object was replaced. Open the dataset again"
            )

    def _tried(self, what: str, ask: Callable[[], _T]) -> _T:
        """What ``ask`` gives, at the first attempt that succeeds."""
        for attempt in range(self._options.retries + 1):
            try:
                return ask()
            except IndexedDataError:
                raise
            except Gone as error:
                raise FileNotFoundError(f"{self.url}: {error}") from error
            except Refused as error:
                raise StoreError(
                    f"{self.url}: {what}: the store refuses: {error}. Look at the URL and the rights"
                ) from error
            except Exception as error:  # of whatever client
                failed = error
                if attempt < self._options.retries:
                    time.sleep(0.1 * 2**attempt)
        kind = f"{type(failed).__name__}: {failed}"
        raise StoreError(
            f"{self.url}: {what}: {self._options.retries + 1} attempts failed, the last with {kind}. The store does "
            "not answer; try again"
        ) from failed

    def __getstate__(self) -> tuple[str, RemoteOptions]:
        return self.url, self._options

    def __setstate__(self, state: tuple[str, RemoteOptions]) -> None:
        self.__init__(*state)  # type: ignore[misc]


def coalesced(begin_R: I64, end_R: I64) -> list[tuple[int, int]]:
    """Disjoint ranges in order that hold the given ones, with at most ``WASTE`` of their bytes beside them.

    Two ranges become one if what lies between them is at most ``WASTE`` of the second.
    """
    order = np.argsort(begin_R, kind="stable")
    found: list[tuple[int, int]] = []
    for begin, end in zip(begin_R[order].tolist(), end_R[order].tolist(), strict=True):
        if found and begin - found[-1][1] <= WASTE * (end - begin):
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


class _Memory:
    """The pieces of all objects of this process that were opened with one ``cache_bytes``, and the lock of them all."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: WeakSet[_Pieces] = WeakSet()
        self.clock = count()

    def keep_to(self, limit: int, asking: _Pieces, needed: tuple[int, int]) -> None:
        """Let the least recently used pieces go, but for those of the range that is ``needed`` now of one object."""
        while sum(each.held for each in self.objects) > limit:
            oldest = [
                (found, each) for each in self.objects if (found := each.oldest(needed if each is asking else None))
            ]
            if not oldest:
                return
            (_, begin), pieces = min(oldest, key=lambda each: each[0])
            pieces.forget(begin)


_MEMORIES: dict[tuple[int, int], _Memory] = {}  # by process, since a fork may copy a lock that is held, and cache_bytes


def _memory(options: RemoteOptions) -> _Memory:
    return _MEMORIES.setdefault((os.getpid(), options.cache_bytes), _Memory())


class _Pieces:
    """What is here of one object, or under way: disjoint ranges, the least recently used forgotten first.

    The lock of ``memory`` is held by whoever calls, but for ``keep``: no piece goes between the look for it and its
    use.
    """

    def __init__(self, url: str, size: int, tag: str, options: RemoteOptions, memory: _Memory) -> None:
        self._limit, self.held, self._memory = options.cache_bytes, 0, memory
        self._begins: list[int] = []
        self._pieces: OrderedDict[int, tuple[int, Future[bytes], int]] = OrderedDict()  # begin: (end, data, last use)
        self._files = (
            None
            if options.cache_folder is None
            else PieceFiles(options.cache_folder, url, size, tag, options.cache_bytes)
        )
        with memory.lock:
            memory.objects.add(self)

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What of the range is neither here nor under way; pieces in the folder are taken up first."""
        if self._files is not None:
            for first, last in self._files.overlapping(begin, end):
                if not self.within(first, last) and (data := self._files.read(first, last)) is not None:
                    self.add(first, last, _done(data), needed=(begin, end))
        found, at = [], begin
        for first, last, _ in self.within(begin, end):
            if first > at:
                found.append((at, first))
            at = last
        return [*found, (at, end)] if at < end else found

    def within(self, begin: int, end: int) -> list[tuple[int, int, Future[bytes]]]:
        """The pieces that share bytes with the range, in order; used just now."""
        at = max(0, bisect_right(self._begins, begin) - 1)
        found = []
        for first in self._begins[at : bisect_left(self._begins, end)]:
            last, future, _ = self._pieces[first]
            if last > begin:
                self._pieces[first] = last, future, next(self._memory.clock)
                self._pieces.move_to_end(first)
                found.append((first, last, future))
        return found

    def add(self, begin: int, end: int, future: Future[bytes], *, needed: tuple[int, int]) -> None:
        """One more piece; others make way, but for those of the range that is ``needed`` now."""
        insort(self._begins, begin)
        self._pieces[begin] = end, future, next(self._memory.clock)
        self.held += end - begin
        self._memory.keep_to(self._limit, self, needed)

    def oldest(self, needed: tuple[int, int] | None) -> tuple[int, int] | None:
        """(last use, begin) of the piece that goes first; None if all that is here is needed, or under way."""
        for first, (last, future, used) in self._pieces.items():
            if future.done() and (needed is None or last <= needed[0] or first >= needed[1]):
                return used, first
        return None

    def keep(self, begin: int, end: int, data: bytes) -> None:
        """A piece has come."""
        if self._files is not None:
            self._files.write(begin, end, data)

    def used(self, begin: int) -> None:
        """A piece was read: one that is a file need not stay in memory."""
        if self._files is not None and begin in self._pieces and self._files.has(begin, self._pieces[begin][0]):
            self.forget(begin)

    def forget(self, begin: int) -> None:
        if begin in self._pieces:
            self._drop(begin, self._pieces[begin][0])

    def _drop(self, begin: int, end: int) -> None:
        del self._pieces[begin]
        del self._begins[bisect_left(self._begins, begin)]
        self.held -= end - begin


def _done(data: bytes) -> Future[bytes]:
    from concurrent.futures import Future  # only here: reading local pairs should not load it

    future: Future[bytes] = Future()
    future.set_result(data)
    return future
