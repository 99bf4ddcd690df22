"""The mirror of a store: a sparse local folder that looks like the store's, shared by the ranks of one host.

    small files of the store --> Mirror.create (this file) --> opening.py opens it
    shares of blocks --> Mirror.start: each rank fetches its own (this file) --> Mirror.arrives --> reader.py

[Note: one fetches, all see] Each block that any rank of a host wants is fetched by one of them, into the folder that
all share. A mapped file has a byte for each block, set when it is there. A rank that needs a block waits for its
byte. The wait ends when the rank that fetches it fails (its own error) or dies (nobody holds its lock any more), or
when nothing arrives for ``timeout_s``. A block that no rank was to fetch is fetched when it is needed.

[Note: blocks in memory] A block that one rank alone wants need not go through a file, whose fresh pages cost more
than all else. Up to ``_MEMORY_BYTES`` of such blocks wait in the memory of the rank that fetched them. That rank
copies them to where it wants them, and forgets them. Somebody may look at the file for such a block all the same: its
rank for a part of it, or another rank that tells which keys are damaged. Then it is written there first, or fetched
again. What is fetched again nobody has hashed. So reader.py takes a block only where one run alone wants it, and
hashes what it has to read again.

[Note: a mirror's end] The folder lies where ``tempfile`` puts files, or where a ``PartlyLocal`` store says. It is
deleted when the load ends, well or not. Each rank holds a lock in it while it lives, which the system takes back when
the rank is killed. The next load on the host removes the folders whose locks nobody holds. Where no exchange says that
all have read, each leaves a mark, and the rank that finds the marks of all deletes the folder. A folder that has been
without a lock for long was left by a process that was killed before it held one. It is deleted too.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from sixfold.dist_ckpt.checkpoint.opening import SMALL_BYTES, Arrives
from sixfold.dist_ckpt.errors import (
    BY_NAME,
    CheckpointError,
    LostPeerError,
    MismatchError,
    StorageError,
    UnsafeError,
    retold,
    typed,
)
from sixfold.dist_ckpt.formats import compact_manifest
from sixfold.dist_ckpt.formats.integrity import BLOCK_BYTES, FILE_NAME, Span
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.mirror.leases import hold, is_held, lock_path, mirror_name, no_room, remove_dead
from sixfold.dist_ckpt.storage.by_pointer import TAIL_BYTES, check_finished, check_for_torch, flat, visible
from sixfold.dist_ckpt.storage.range_reads import MOST_RANGE_BYTES, at_once, begun, cut, ranges_of
from sixfold.dist_ckpt.storage.store import POINTER, PartlyLocal, Store, is_small_file

_READY, _IN_MEMORY = 1, 2  # in the file; arrived, and kept for its rank
_MEMORY_BYTES = 1 << 26
_LEAST_MEMORY_BYTES = 1 << 16  # of a block: reader.py takes none that is shorter
_HEAD_BYTES = 1 << 16  # of a safetensors file, which tells itself how long its header is
_LOOK_S = 0.2  # between two looks at whether a rank lives
_LONGEST_PAUSE_S = 0.005


class Mirror:
    """One rank's part of a mirror.

    Args:
        token: 16 hexadecimal digits, the same on all ranks of a host and of no other mirror.
        rank: of this process among those that share the mirror.
        timeout_s: see [Note: one fetches, all see].

    Attributes:
        folder: looks like the store's; small files are whole, of the others there is what has arrived.
    """

    def __init__(self, store: Store, token: str = "", rank: int = 0, timeout_s: float = 600.0) -> None:
        self.token = token or secrets.token_hex(8)
        self._linked = store.local_files if isinstance(store, PartlyLocal) else dict[str, Path]()
        parent = store.mirrors if isinstance(store, PartlyLocal) else Path(os.path.realpath(tempfile.gettempdir()))
        self._root = parent / mirror_name(self.token)
        self.folder = self._root / "checkpoint"
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._base = ""  # the folder in the store of what is mirrored
        self._marks: Mapping[str, object] = {}  # of files that have no digests
        self._sizes: dict[str, int] = {}
        self._whole: frozenset[str] = frozenset()
        self._first: dict[str, int] = {}  # number of each file's first block among all blocks
        self._owners = array("q")  # by block; -1: nobody's
        self._block_bytes = BLOCK_BYTES
        self._alone = bytearray()  # by block; 1: own, and no other rank of this host wants it
        # By block: what arrived with it, and where in that it begins.
        self._in_memory: dict[int, tuple[bytes, int]] = {}
        self._lock_handle: int | None = None
        self._states: mmap.mmap | None = None
        self._failure: CheckpointError | None = None
        self._gets = 0  # of all threads, as far as they are seen
        self._is_closed, self._one_at_a_time = False, Lock()
        self._locks: dict[int, Path] | None = None  # see ``share``
        self._fetched: Future[None] | None = None
        self._pid = os.getpid()

    def create(self) -> None:
        """First rank of a host: list the store, make the folder, fetch the small files.

        Raises:
            MismatchError: nothing is there. UnsafeError: a name that leaves the folder.
            StorageError: the store fails, or this host's disk.
        """
        with self.errors_named():
            typed(self._create)

    def _create(self) -> None:
        remove_dead(self._root.parent)
        (found,) = self._asked(self._store.list_files)
        if not found:
            raise MismatchError(f"{self._store.name} does not exist")
        for name in found:
            # Also an empty part: joined to a path, the name behind "//" would stand for itself, anywhere on this host.
            if "\0" in name or {"", ".", ".."} & set(name.split("/")):
                raise UnsafeError(f"{self._store.name}: the name {name!r} leaves the folder; nothing was written")
        check_finished(self._store.name, found)
        self._base = visible(found)
        names = [name for name in found if name.startswith(self._base)] if self._base else flat(found)
        sizes = {name.removeprefix(self._base): found[name] for name in names}
        if not {FILE_NAME, POINTER} <= sizes.keys():
            (self._marks,) = self._asked(self._store.marks)
        self._root.mkdir(mode=0o700)
        self._lock_handle = hold(self._root, self._rank)
        for name, size in sizes.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name in self._linked:
                path.hardlink_to(self._linked[name])
                continue
            with path.open("wb") as file:
                file.truncate(size)
        (self._root / "listing").write_text(json.dumps([self._base, sizes]))
        self._list(sizes)
        names = sorted(self._whole - self._linked.keys())
        small = [part for name in names for part in cut(name, 0, sizes[name], MOST_RANGE_BYTES)]
        self._asked(partial(self._fill, small), partial(self._check_for_torch, found))
        self._asked(self._fill_heads)

    def attach(self) -> None:
        """Other ranks of the host, when it is made."""
        self._lock_handle = hold(self._root, self._rank)
        self._base, sizes = json.loads((self._root / "listing").read_text())
        self._list(sizes)

    def share(self, rank: int, tokens: Mapping[int, str]) -> None:
        """Read and fetch for each other with ranks that made mirrors of their own before, each by its token.

        Those keep their own mirrors meanwhile: the locks in them tell who lives. ``close`` then waits until what
        others want is there.
        """
        self._rank, parent = rank, self._root.parent
        self._locks = {mate: lock_path(parent / mirror_name(token), 0) for mate, token in tokens.items()}

    def room(self) -> tuple[str, int]:
        """Where the mirrors of this host lie, and the bytes that are free there for what will be fetched."""
        return str(self._root.parent), shutil.disk_usage(self._root).free

    def start(self, shares: Mapping[int, Sequence[Span]], block_bytes: int) -> None:
        """Fetch this rank's share, in the order given, while the load goes on.

        Args:
            shares: blocks of ``block_bytes`` that each rank of the host fetches; the same on all of them.
        """
        self._block_bytes, blocks = block_bytes, 0
        for name in sorted(self._sizes):
            self._first[name] = blocks
            blocks += -(-self._sizes[name] // block_bytes)
        self._owners, self._alone = array("q", [-1]) * blocks, bytearray(blocks)
        for rank, spans in shares.items():
            for span in spans:
                place = slice(self._first[span.file] + span.first, self._first[span.file] + span.stop)
                self._owners[place] = array("q", [rank]) * (span.stop - span.first)
                alone = span.alone and rank == self._rank and span.file not in self._whole
                self._alone[place] = bytes([alone]) * (span.stop - span.first)
        own = [span for span in shares.get(self._rank, ()) if span.file not in self._whole]
        ranges = ranges_of(own, self._sizes, block_bytes)
        try:
            with (self._root / "ready").open("a+b") as file:  # of zeros; who comes first makes it
                file.truncate(max(1, blocks))
                self._states = mmap.mmap(file.fileno(), max(1, blocks))
            self._fetched = begun(partial(self._fetch, ranges))
        except (OSError, CheckpointError) as error:
            self._fail(error)
            raise

    def nbytes_of(self, share: Sequence[Span], block_bytes: int) -> int:
        """Bytes that are fetched for a share."""
        return sum(
            min(span.stop * block_bytes, self._sizes[span.file]) - span.first * block_bytes
            for span in share
            if span.file not in self._whole
        )

    def check_room(self, needed_bytes: int, place: str, free_bytes: int) -> None:
        """StorageError if so many bytes have no room on a host; see ``room``."""
        if needed_bytes > free_bytes:
            raise no_room(self._store.name, place, needed_bytes, free_bytes)

    def arrives(self, path: Path) -> Arrives:
        """For a file in ``folder``: what waits until bytes of it are there.

        It raises:
            LostPeerError: the rank that was to fetch them is dead or late.
            CheckpointError: what made that rank fail.
        """
        name = path.relative_to(self.folder).as_posix()
        return (lambda start, stop: None) if name in self._whole else partial(self._await, name)

    def take(self, path: Path, start: int, into: memoryview) -> bool:
        """Copy a whole block that is held into memory and forget it, when it is there. See [Note: blocks in memory].

        Raises: as what ``arrives`` gives.
        """
        name, size = path.relative_to(self.folder).as_posix(), self._block_bytes
        if self._states is None or start % size or start >= self._sizes.get(name, 0):
            return False
        index = self._first[name] + start // size
        if not self._alone[index]:
            return False
        self._await_block(index, self._rank)
        found = self._in_memory.get(index)
        if found is None or len(into) != min(size, self._sizes[name] - start):
            return False
        into[:] = memoryview(found[0])[found[1] : found[1] + len(into)]
        self._in_memory.pop(index, None)
        return True

    def fetch_all(self) -> None:
        """Fetch all that is not there yet, by this process alone."""
        shares = [Span(name, 0, -(-size // BLOCK_BYTES)) for name, size in sorted(self._sizes.items()) if size]
        self.check_room(self.nbytes_of(shares, BLOCK_BYTES), *self.room())
        self.start({self._rank: shares}, BLOCK_BYTES)
        for name, size in self._sizes.items():
            if name not in self._whole:
                self._await(name, 0, size)

    def check_unchanged(self) -> None:
        """StorageError if another save has taken the store's place since it was listed.

        Where each save has a folder of its own no name is written again: what was read is of one save.
        """
        if self._base:
            return
        own = (self.folder / FILE_NAME).read_bytes() if FILE_NAME in self._sizes else None
        with self._or_replaced():
            if own is not None and self._asked(partial(self._store.read, FILE_NAME))[0] != own:
                raise FileNotFoundError
            if self._marks and self._asked(self._store.marks)[0] != self._marks:
                raise FileNotFoundError

    def _check_for_torch(self, found: Mapping[str, int]) -> None:
        size = found.get(".metadata") if self._base else None
        if size is not None:
            with self._or_replaced([ByteRange(".metadata", 0, size)]):
                tail = self._store.read(".metadata", max(0, size - TAIL_BYTES), size)
                check_for_torch(self._store.name, found, tail, self._store.list_files)

    def _asked(self, *actions: Callable[[], Any]) -> list[Any]:
        """What the store gives, asked for all at once.

        Raises:
            StorageError: it gives nothing for four fifths of ``timeout_s``, so that ranks which wait so long hear why.
        """
        try:
            return at_once(actions, 0.8 * self._timeout_s, lambda: self._gets)
        except TimeoutError:
            self._is_closed = True
            raise self._gave_nothing(0.8 * self._timeout_s) from None

    def give_up(self, error: BaseException) -> None:
        """Fetch no more, and let those who wait for this rank's blocks know why."""
        if self._pid == os.getpid():
            self._fail(error)
        self._is_closed = True

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """After an error inside fetch no more."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def close(self) -> None:
        """Delete the folder; a shared one when all have left. May be called more than once, by each rank."""
        is_mine = self._pid == os.getpid()  # who was forked lets go of a handle of its own, no more
        if is_mine and (self._locks is None or self._left_by_all(self._locks)):
            shutil.rmtree(self._root, ignore_errors=True)
        self._is_closed = True
        self._in_memory.clear()
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None

    def _left_by_all(self, locks: Mapping[int, Path]) -> bool:
        if self._fetched is not None and not self._is_closed:
            self._fetched.result()
        with suppress(OSError):  # others have deleted it
            (self._root / f"left-{self._rank}").touch()
        return all((self._root / f"left-{mate}").exists() for mate in locks)

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Errors inside call the checkpoint by the store's name, where what opens folders knows only the folder."""
        try:
            yield
        except CheckpointError as error:
            text = str(error).replace(str(self.folder), f"{self._store.name}/{self._base}".rstrip("/"))
            raise retold(error, text) from error

    @contextmanager
    def _or_replaced(self, ranges: Sequence[ByteRange] = ()) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            name = next((f"/{part.file}" for part in ranges if part.file in str(error)), "")
            raise StorageError(
                f"{self._store.name}{name} was replaced or removed while it was read; load it again", errno.ESTALE
            ) from error

    def _list(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes
        # A large .metadata beside the compact manifest is hashed as data is, and otherwise not looked at.
        unread = (
            {".metadata"}
            if sizes.get(".metadata", 0) > SMALL_BYTES and compact_manifest.FILE_NAME in sizes
            else set[str]()
        )
        self._whole = frozenset(name for name in sizes if is_small_file(name) or name in self._linked) - unread

    def _fill_heads(self) -> None:
        """Headers of safetensors files, which are looked at when they are opened."""
        files = [name for name in self._sizes if name.endswith(".safetensors")]
        self._fill([ByteRange(name, 0, min(_HEAD_BYTES, self._sizes[name])) for name in files if self._sizes[name]])
        for name in files:
            with (self.folder / name).open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
            stop = min(8 + length, self._sizes[name]) if length < 10 * BLOCK_BYTES else 0
            self._fill(list(cut(name, _HEAD_BYTES, stop, MOST_RANGE_BYTES)))

    def _fetch(self, ranges: list[ByteRange]) -> None:
        """The thread that fetches."""
        try:
            typed(lambda: self._fill(ranges, self._keep))
        except BaseException as error:
            if not self._is_closed:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Let this rank's other threads, and the other ranks, know why it fetches no more."""
        known = error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
        path = self._error_path(self._rank)
        with suppress(OSError):
            path.with_suffix(".begun").write_text(
                json.dumps([type(known).__name__, str(known), getattr(known, "errno", None)])
            )
            path.with_suffix(".begun").rename(path)
        self._failure = known  # the last step: who reads it deletes the folder

    def _error_path(self, rank: int) -> Path:
        return self._root / f"error-{rank}"

    def _fill(self, ranges: Sequence[ByteRange], keep: Callable[[ByteRange, bytes], None] | None = None) -> None:
        """Fetch ranges and write them where they belong, or ``keep`` them."""
        with self._or_replaced(ranges):
            for stored, data in self._store.read_ranges([r._replace(file=self._base + r.file) for r in ranges]):
                if self._is_closed:
                    return
                part = stored._replace(file=stored.file.removeprefix(self._base))
                self._gets += 1
                if len(data) != part.length:
                    raise FileNotFoundError(part.file)
                (keep or self._write)(part, data)

    def _write(self, part: ByteRange, data: bytes | memoryview) -> None:
        try:
            with (self.folder / part.file).open("r+b", buffering=0) as file:
                done = 0
                while done < len(data):
                    done += os.pwrite(file.fileno(), memoryview(data)[done:], part.offset + done)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                place, free = self.room()
                raise no_room(self._store.name, place, part.length, free) from error
            raise StorageError(f"{self._root.parent}: {error.strerror or error}", error.errno) from error

    def _keep(self, part: ByteRange, data: bytes) -> None:
        """A range of whole blocks has arrived: it is held, or written. See [Note: blocks in memory]."""
        first, stop = self._blocks_of(part)
        if all(self._alone[first:stop]) and self._may_hold(data):
            self._in_memory.update((first + n, (data, n * self._block_bytes)) for n in range(stop - first))
            self._mark(part, _IN_MEMORY)
        else:
            self._put(part, data)

    def _may_hold(self, data: bytes) -> bool:
        """What arrived stays as long as any block of it is held. What is no ``bytes`` the store may use again."""
        arrived = {id(whole): len(whole) for whole, _ in list(self._in_memory.values())}
        fits = sum(arrived.values()) + len(data) <= _MEMORY_BYTES
        return fits and self._block_bytes >= _LEAST_MEMORY_BYTES and isinstance(data, bytes)

    def _put(self, part: ByteRange, data: bytes | memoryview) -> None:
        self._write(part, data)
        self._mark(part, _READY)

    def _mark(self, part: ByteRange, state: int) -> None:
        assert self._states is not None, "started"
        first, stop = self._blocks_of(part)
        self._states[first:stop] = bytes([state]) * (stop - first)

    def _blocks_of(self, part: ByteRange) -> tuple[int, int]:
        """Numbers, among all blocks, of the first one of a range of whole blocks, and behind its last."""
        first = self._first[part.file] + part.offset // self._block_bytes
        return first, first + -(-part.length // self._block_bytes)

    def _await(self, name: str, start: int, stop: int) -> None:
        """Until bytes [start, stop) of a file are there. See [Note: one fetches, all see]."""
        if self._states is None:
            self._fill(list(cut(name, start, min(stop, self._sizes[name]), MOST_RANGE_BYTES)))
            return
        size, first = self._block_bytes, self._first[name]
        wanted = range(first + start // size, first + -(-stop // size))
        for index in wanted:
            if self._owners[index] >= 0:
                self._await_block(index, self._owners[index])
        if any(self._states[index] != _READY for index in wanted):
            with self._one_at_a_time:
                self._bring(name, [index for index in wanted if self._states[index] != _READY])

    def _bring(self, name: str, blocks: Sequence[int]) -> None:
        """Write blocks that are held; fetch those that no rank was to fetch, or that were taken."""
        absent, size = list[ByteRange](), self._block_bytes
        for index in blocks:
            at = (index - self._first[name]) * size
            part = ByteRange(name, at, min(size, self._sizes[name] - at))
            if found := self._in_memory.pop(index, None):
                self._put(part, memoryview(found[0])[found[1] : found[1] + part.length])
            else:
                absent.append(part)
        if absent:
            self._fill(absent, self._put)

    def _await_block(self, at: int, owner: int) -> None:
        states = self._states
        assert states is not None, "started"
        pause_s, seen, look, deadline = 0.0002, -1, 0.0, 0.0
        while not states[at]:
            if (now := time.monotonic()) > look:
                look, arrived = now + _LOOK_S, len(states) - states[:].count(0)
                if arrived != seen:
                    seen, deadline = arrived, now + self._timeout_s
                self._check_fetches(owner, at)
                if now > deadline:
                    self._failure = self._late(owner)  # also of other threads, and of what they would wait for next
                    raise self._failure
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _check_fetches(self, owner: int, at: int) -> None:
        """The error of a rank that fetches no more; LostPeerError if it is dead and has not fetched block ``at``."""
        if self._failure is not None:
            raise self._failure
        if owner != self._rank and self._error_path(owner).exists():
            kind, text, code = json.loads(self._error_path(owner).read_text())
            raise StorageError(text, code) if kind == "StorageError" else BY_NAME.get(kind, CheckpointError)(text)
        lock = lock_path(self._root, owner) if self._locks is None else self._locks[owner]
        assert self._states is not None, "started"
        if owner != self._rank and not is_held(lock) and not self._states[at]:
            raise LostPeerError(
                f"rank {owner} died while it fetched blocks of {self._store.name} that rank {self._rank} waits for. "
                "Restart the job"
            )

    def _late(self, owner: int) -> CheckpointError:
        if owner == self._rank:
            return self._gave_nothing(self._timeout_s)
        return LostPeerError(
            f"rank {owner} has fetched nothing of {self._store.name} for timeout_s={self._timeout_s:g}, and rank "
            f"{self._rank} waits for it. Restart the job"
        )

    def _gave_nothing(self, seconds: float) -> StorageError:
        return StorageError(
            f"{self._store.name} gave nothing for {seconds:g} s of timeout_s={self._timeout_s:g} (rank {self._rank} "
            "reads)",
            errno.ETIMEDOUT,
        )
