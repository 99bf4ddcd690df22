"""Local files: staging, writing, commit. The only file that changes what others can see.

    frames --> FrameFile (this file) --> staging folder --> commit --> the checkpoint

[Note: old or new, never both] A checkpoint is written into the sibling ``.<name>.tmp-<save_id>`` and moved
into place by one rename, after every file and the folder are on disk. No file of a visible
checkpoint is ever written again. Peers overwrite in place: a rank killed meanwhile leaves a folder
that loads as a mixture of two steps.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from sixfold.dist_ckpt.errors import StorageError, UnsafeError
from sixfold.dist_ckpt.files.crc import Piece, crc32, join_pieces
from sixfold.dist_ckpt.files.frame import Frame
from sixfold.dist_ckpt.files.integrity import BlockHasher, FileDigest, cut_at_blocks, digest_of
from sixfold.dist_ckpt.stores.attributes import copy_attributes, is_mount_point

_OWN_FILES = frozenset(["metadata.json", "common.pt", ".metadata", ".metadata.tmp", "integrity.json"])
_GATHER_BYTES = 1 << 20
_RESERVE_BYTES = 1 << 22  # files below are written without threads and without asking for space first
_SYNC_BYTES = 1 << 26  # of a file that are waited for at once
_SYNC_FILE_RANGE_WRITE, _SYNC_FILE_RANGE_ALL = 2, 7
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class FrameFile:
    """A file of frames, written once from start to end, hashed in the same pass.

    Small parts are gathered and written a megabyte at a time; large ones are written from where they are, piece by
    piece right after each was hashed, by threads: at most ``4 * threads`` pieces of 4 MiB wait for them, and what owns
    the memory of a piece is held until it is written, no longer. The kernel is asked for the whole length before the
    first byte, and to start with each piece at once, so that the last fsync has little left to do. (O_DIRECT was no
    faster on the disks that we measured, and leaves the page cache cold for the load that follows.)

    Args:
        nbytes: an upper bound of what will come; 0 if that is not known.
        threads: how many write at once, >= 1; small files are written without.
        moved: told of each part that is written, by its bytes, and with 0 while the disk takes what was written; from
            any thread.
    """

    def __init__(
        self, folder: Path, name: str, nbytes: int = 0, threads: int = 1, moved: Callable[[int], None] | None = None
    ) -> None:
        self.name = name
        self._moved = moved or (lambda nbytes: None)
        self._hasher = BlockHasher()
        self._position = 0  # of what was added; the hasher is behind by what is gathered
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._writing: deque[Future[None]] = deque()
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._handle = os.open(folder / name, flags, 0o666)
        except FileNotFoundError as error:
            raise StorageError(
                f"{folder} was made by the first rank and is not visible here; a checkpoint needs one file "
                "system that all ranks share",
                errno.ENOENT,
            ) from error
        self._reserved = nbytes >= _RESERVE_BYTES and _reserve(self._handle, nbytes)

    @property
    def position(self) -> int:
        """Bytes so far."""
        return self._position

    def add(self, parts: Sequence[bytes], nbytes: int) -> None:
        """Add small parts of ``nbytes`` together."""
        self._gathered += parts
        self._gathered_bytes += nbytes
        self._position += nbytes
        if self._gathered_bytes >= _GATHER_BYTES:
            self._flush()

    def add_large(
        self, head_bytes: int, parts: Iterable[tuple[memoryview, object]], frame: Callable[[int], Frame]
    ) -> None:
        """Add a frame around raw bytes that lie elsewhere.

        Args:
            parts: the bytes in their order, each with the owner of its memory; taken one by one as the writing goes on.
                They are neither copied nor may they change until ``finish``.
            frame: makes head, of ``head_bytes``, and tail from the CRC-32 of the raw bytes.
        """
        self._flush()
        start = self._position
        at, pieces = start + head_bytes, list[Piece]()
        for raw, owner in parts:
            for piece in cut_at_blocks(raw, at):
                pieces.append(Piece(crc32(piece), len(piece)))
                self._write(piece, at, owner)
                at += len(piece)
        head, tail = frame(join_pieces(pieces))
        self._hasher.update(head)
        self._hasher.add(pieces)
        self._write(head, start)
        self._position = at
        self.add((tail,), len(tail))

    def append(self, data: bytes) -> None:
        """Add bytes."""
        self.add((data,), len(data))

    def _flush(self) -> None:
        if self._gathered:
            data, start = b"".join(self._gathered), self._hasher.size
            self._gathered, self._gathered_bytes = [], 0
            self._hasher.update(data)
            self._write(data, start)

    def _write(self, data: bytes | memoryview, at: int, owner: object = None) -> None:
        if self._pool is None and at + len(data) < _RESERVE_BYTES:
            return self._write_now(data, at, owner)
        self._pool = self._pool or ThreadPoolExecutor(self._threads)
        while len(self._writing) >= 4 * self._threads:
            self._writing.popleft().result()
        self._writing.append(self._pool.submit(self._write_now, data, at, owner))
        return None

    def _write_now(self, data: bytes | memoryview, at: int, _owner: object) -> None:
        """``_owner`` keeps the memory of ``data`` as long as this call waits or runs."""
        _write_at(self._handle, data, at)
        self._moved(len(data))

    def finish(self) -> FileDigest:
        """Put the bytes on disk and return size and digests."""
        self._flush()
        while self._writing:
            self._writing.popleft().result()
        if self._reserved:
            os.ftruncate(self._handle, self._position)
        # Part by part: a disk that is slow but takes bytes is told from one that hangs.
        for at in range(0, self._position, _SYNC_BYTES):
            _on_disk(self._handle, at, _SYNC_BYTES)
            self._moved(0)
        os.fsync(self._handle)
        return self._hasher.finish()

    def __enter__(self) -> FrameFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        os.close(self._handle)


def _write_at(handle: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count
    if len(data) >= _GATHER_BYTES and (start_writing := _libc("sync_file_range")) is not None:
        start_writing(handle, ctypes.c_int64(at - len(data)), ctypes.c_int64(len(data)), _SYNC_FILE_RANGE_WRITE)


def _on_disk(handle: int, at: int, nbytes: int) -> None:
    """Wait for the data of a range, where the system can; the kernel tells an error of the disk once, here or there."""
    wait = _libc("sync_file_range")
    if wait is None or wait(handle, ctypes.c_int64(at), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_ALL) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
        raise OSError(code, os.strerror(code))


def _reserve(handle: int, nbytes: int) -> bool:
    """Ask for ``nbytes`` on disk; False where the file system cannot say. A full disk is told here already."""
    fallocate = _libc("fallocate")  # not posix_fallocate, which writes zeros where it is not supported
    if fallocate is None or fallocate(handle, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
        return fallocate is not None
    code = ctypes.get_errno()
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(code, os.strerror(code))
    return False


def write_file(folder: Path, name: str, data: bytes) -> FileDigest:
    """Write a small file whole and put it on disk."""
    with (folder / name).open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest_of(data)


def read_small(path: Path) -> bytes:
    """The content of a file that is read whole. UnsafeError: as ``check_regular``."""
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """UnsafeError for a pipe or a device, which would give bytes for ever or never any."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder the system says itself what is wrong
        raise UnsafeError(f"{path} is {stat.filemode(mode)[0]!r} and no file; nothing of it was read")


def check_target(target: Path, if_exists: str, owns_file: Callable[[str], bool] | None = None) -> None:
    """Refuse a target that this save must not touch; see ``commit`` for what is left.

    ``owns_file`` says of a relative path whether another format's checkpoint may hold it.
    """
    if target.exists() and not target.is_dir():
        raise StorageError(f"{target} is a file; a checkpoint is a folder", errno.ENOTDIR)
    if target.exists() and is_mount_point(target):
        raise StorageError(
            f"{target} is a mount point, which no other folder can replace; nothing was written. Save into a folder "
            f"in it, such as {target / 'checkpoint'}",
            errno.EBUSY,
        )
    names = sorted(_files(target)) if target.exists() else []
    if names and if_exists == "error":
        raise StorageError(f"{target} is not empty ({_first(names)}) and if_exists is 'error'", errno.EEXIST)
    foreign = [name for name in names if not (is_checkpoint_file(name) or (owns_file is not None and owns_file(name)))]
    if foreign:
        raise StorageError(
            f"{target} holds files that are no part of a checkpoint ({_first(foreign)}); nothing was touched. "
            "Save into a folder of its own",
            errno.EEXIST,
        )


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name may lie in a checkpoint of the torch_dist format."""
    return name in _OWN_FILES or (name.endswith(".distcp") and "/" not in name)


def _files(folder: Path) -> Iterator[str]:
    """Relative paths of all files below, and of what is no file, such as an empty folder, with a ``/`` behind."""
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            yield path.name
        elif path.is_dir() and not path.is_symlink() and any(path.iterdir()):
            yield from (f"{path.name}/{name}" for name in _files(path))
        else:
            yield f"{path.name}/"


@contextmanager
def full_disk_told(folder: Path, needed_bytes: int) -> Iterator[None]:
    """A disk that fills inside becomes a StorageError with this rank's bytes and the free ones."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # disk, quota, limit on a file's size
            raise
        raise StorageError(
            f"{errno.errorcode[error.errno]}: {error.strerror}: this rank needs {needed_bytes} bytes, "
            f"{shutil.disk_usage(folder.parent).free} are free now in {folder.parent}; an older checkpoint is whole",
            error.errno,
        ) from error


def overtaken(target: Path | str) -> StorageError:
    """The error of a save whose files others have removed."""
    return StorageError(
        f"the files of this save to {target} were removed while it went on: another save to the same folder has ended "
        "meanwhile (or a prune took this one for dead). Two saves to one folder at a time are one too many; "
        "this one is lost, the folder is whole",
        errno.ESTALE,
    )


@contextmanager
def overtaken_told(staging: Path, target: Path) -> Iterator[None]:
    """An error that comes of another save's commit to the same target is told as such."""
    try:
        yield
    except (OSError, StorageError) as error:
        if error.errno == errno.ENOENT and not staging.exists():
            raise overtaken(target) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # of the last rename
            raise overtaken(target) from error
        raise


def check_space(folder: Path, needed_bytes: int) -> None:
    """StorageError if the file system has less free than the plan needs."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise StorageError(
            f"ENOSPC: the checkpoint needs {needed_bytes} bytes, {free_bytes} are free in {folder}; "
            "nothing was written",
            errno.ENOSPC,
        )


def stage(target: Path, save_id: str) -> Path:
    """Make the empty staging folder of a save, beside the target; what is written into it inherits as there.

    Raises:
        StorageError: the target is the working folder of this process, which would be left without one.
    """
    if target.exists() and os.path.samefile(target, os.curdir):
        raise StorageError(
            f"{target} is the working folder of this process, and a save puts another folder in its place; nothing "
            f"was written. Save into a folder in it, such as {target / 'checkpoint'}",
            errno.EBUSY,
        )
    staging = target.with_name(f".{target.name}.tmp-{save_id}")
    staging.mkdir(parents=True)
    if target.exists():
        copy_attributes(target, staging, writable=True)
    return staging


def commit(staging: Path, target: Path, save_id: str) -> None:
    """Move a complete staging folder into place, replacing what is there. See [Note: old or new, never both]."""
    if target.exists():
        copy_attributes(target, staging)
    sync_folder(staging)
    old: Path | None = None
    if not target.exists() or not any(target.iterdir()):
        staging.rename(target)
    elif exchange(staging, target):
        old = staging
    else:
        # Between these two renames the target is missing: opening it then falls back to a sibling.
        old = target.with_name(f".{target.name}.old-{save_id}")
        target.rename(old)
        try:
            staging.rename(target)
        except OSError:
            old.rename(target)
            raise
    sync_folder(target.parent)
    if old is not None:
        with suppress(OSError):
            old.chmod(0o700)  # of a folder that is read-only nothing can be removed
        shutil.rmtree(old, ignore_errors=True)
    jobs = [path for path in siblings(target, "job") if not (path.name.endswith(save_id) or is_held(path / "alive-0"))]
    for leftover in (*siblings(target, "tmp"), *siblings(target, "old"), *jobs):
        discard(leftover)


def is_held(lock: Path) -> bool:
    """Whether another process holds the lock file of a rank of a background save, as far as this host can tell."""
    try:
        with lock.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False if this system cannot (older NFS, Lustre)."""
    renameat2 = _libc("renameat2")
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(a))


@cache
def _libc(name: str) -> ctypes._NamedFuncPointer | None:
    """A function of the C library; None if it has none of this name (renameat2 before glibc 2.28, musl)."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    return found  # type: ignore[no-any-return]


def siblings(target: Path, kind: str) -> list[Path]:
    """Hidden siblings ``.<name>.<kind>-*`` of a target, newest first."""
    pattern = re.compile(re.escape(f".{target.name}.{kind}-") + r"[^.]+")  # a further dot: another target's name
    if not target.parent.is_dir():
        return []
    found = [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def discard(staging: Path) -> None:
    """Remove a staging folder, as far as that goes.

    Renamed aside first: another thread or process that is about to move it into place then finds
    it gone, and can never commit a folder of which half is deleted.
    """
    aside = staging.with_name(f"{staging.name}-gone")
    try:
        staging.rename(aside)
    except FileNotFoundError:
        return
    except OSError:
        aside = staging
    shutil.rmtree(aside, ignore_errors=True)


def check_shared(staging: Path) -> None:
    """StorageError unless this rank sees the folder that the first rank has just made.

    Its name holds a number that was drawn for this save, so that seeing it proves a shared file system.
    """
    if not staging.is_dir():
        raise StorageError(
            f"{staging} was made by the first rank and is not visible here; a checkpoint needs one file "
            "system that all ranks share. Save to a path on one, or save one folder per rank with group=None",
            errno.ENOENT,
        )


def _first(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
