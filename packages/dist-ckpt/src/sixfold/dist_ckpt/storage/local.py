"""Local folders: staging, writing, commit. The only file that changes what others see on a disk.

    str, PathLike --> located (this file) --> a local Path, or a URL as text --> store_at (this file) --> its store
    frames --> frame_file.py --> staging folder --> commit (this file) --> the checkpoint

[Note: old or new, never both] A checkpoint is written into a folder in the sibling ``.<name>.tmp-<save_id>``. When
every file and the folder are on disk, one rename moves it into place. No file of a visible checkpoint is ever written
again. Peers overwrite in place: a rank killed meanwhile leaves a folder that loads as a mixture of two steps.

[Note: what stays of a folder] A save replaces a folder by another. An administrator may have set something on the old
one: a group that shares it, setgid, an access list, a project id in an extended attribute. It is set on the new one,
as far as this process may.

[Note: one level deeper] Trainers find their steps by names that hold ``step-7`` and a ``.metadata`` within. The sibling
has such a name, so the files lie in a folder inside it until they are moved into place.

[Note: what is no place] A URL that has gone through ``Path`` has lost a slash (``memory:/run``). A ``~`` is the
shell's to expand. ``""`` would be the working folder. Each of them names a local folder that nobody meant. A save
would make ``./memory:`` or ``./~`` and return. A resume would find no checkpoint and begin from zero. So they are
refused before anything is looked at. Who means a local folder of such a name writes it from its root.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.errors import CheckpointError, StorageError, UnsafeError
from sixfold.dist_ckpt.formats.integrity import FILE_NAME, Content, FileDigest, decode, digest_of
from sixfold.dist_ckpt.interpreter import Pool
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.frame_file import FrameFile, libc
from sixfold.dist_ckpt.storage.store import (
    POINTER,
    Part,
    Save,
    Store,
    check_names,
    is_checkpoint_file,
    overtaken,
)
from sixfold.dist_ckpt.storage.url import UrlStore, joined

INNER = "checkpoint"  # see [Note: one level deeper]
ENDS = r"[0-9a-f]{16}(?:(?:-gone)+|[a-z0-9_]{8})?"  # of the names of ``siblings``
_MOUNTS = Path("/proc/self/mountinfo")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_CUT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/")
_LOCAL = ("file://", "local://")


@dataclass(frozen=True)
class LocalStore(Store):
    """A folder of a file system that all ranks share. See [Note: old or new, never both].

    Args:
        path: from the root and without links.
    """

    path: Path

    is_shared = True
    streams = 1

    @classmethod
    def at(cls, place: Path) -> LocalStore:
        """The store of a path as a user wrote it. StorageError: as ``resolved``."""
        return cls(resolved(place))

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def local_folder(self) -> Path:
        return self.path

    def list_files(self) -> dict[str, int]:
        if not self.path.is_dir():
            return {}
        names = [name for name in _files(self.path) if not name.endswith("/")]
        return {name: (self.path / name).stat().st_size for name in names}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        check_regular(self.path / name)
        with (self.path / name).open("rb") as file:
            file.seek(start)
            return file.read() if stop is None else file.read(max(0, stop - start))

    def marks(self) -> Mapping[str, object]:
        return {name: (self.path / name).stat().st_mtime_ns for name in self.list_files()}

    def begin(
        self, save_id: str, nbytes: int, if_exists: str = "replace", owns_file: Callable[[str], bool] | None = None
    ) -> Save:
        owns = owns_file or is_checkpoint_file
        check_target(self.path, if_exists, owns)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_space(self.path.parent, nbytes)
        staging = stage(self.path, save_id)
        return Save(save_id=save_id, target=self.name, staging=str(staging), if_exists=if_exists, owns_file=owns)

    def join(self, save: Save) -> None:
        # The name holds a number that was drawn for this save, so that seeing it proves a shared file system.
        if not Path(save.staging).is_dir():
            raise StorageError(
                f"{save.staging} was made by the first rank and is not visible here; a checkpoint needs one file "
                "system that all ranks share. Save to a path on one, or save one folder per rank with group=None",
                errno.ENOENT,
            )

    def write_part(self, save: Save, part: Part) -> FileDigest:
        folder = Path(save.staging)
        with self.told(save, part.nbytes), FrameFile(folder, part.name, part.nbytes, part.threads, part.moved) as file:
            part.fill(file)
            return file.finish()

    def take_over(self, other: Save, save: Save, name: str) -> None:
        try:
            (Path(other.staging) / name).rename(Path(save.staging) / name)
        except FileNotFoundError as error:
            raise overtaken(self.path) from error

    def prepare(self, save: Save, parts: Mapping[str, FileDigest]) -> None:
        with self.told(save, 0):
            for name, digest in parts.items():
                path = Path(save.staging) / name
                if path.stat().st_size != digest.size:
                    raise CheckpointError(f"{path} is not the file that its rank wrote; it wrote {digest.size} bytes")

    def write(self, save: Save, name: str, data: Content) -> FileDigest:
        with self.told(save, len(data) if isinstance(data, bytes) else 0):
            return write_file(Path(save.staging), name, data, False)

    def commit(
        self,
        save: Save,
        pointer: bytes,
        for_torch: Content | None = None,
        files: Mapping[str, FileDigest] | None = None,
    ) -> None:
        self.write(save, POINTER, pointer)
        self.publish(save, [name for name in os.listdir(save.staging) if not name.endswith(".distcp")])

    def publish(self, save: Save, unsynced: Collection[str] = ()) -> None:
        """Move the staging folder into place, ``metadata.json`` included, when the files ``unsynced`` are on disk."""
        with self.told(save, 0):
            # Again: data took a while to write, and nothing foreign may go.
            check_target(self.path, save.if_exists, save.owns_file)
            commit(Path(save.staging), self.path, save.save_id, unsynced)

    def abandon(self, save: Save) -> None:
        discard(Path(save.staging))

    def holds(self, save_id: str) -> bool:
        try:
            return decode(self.path / FILE_NAME, read_small(self.path / FILE_NAME)).save_id == save_id
        except (OSError, CheckpointError):
            return False

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def told(self, save: Save, nbytes: int) -> Iterator[None]:
        """Errors of a full disk and of another save's commit, told as such; ``nbytes`` are what this rank needs."""
        staging = Path(save.staging)
        try:
            with full_disk_told(self.path.parent, nbytes):
                yield
        except (OSError, StorageError) as error:
            is_gone = error.errno == errno.ENOENT and not staging.exists()
            # Of the last rename, if the system says so.
            if is_gone or (isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)):
                raise overtaken(self.path) from error
            raise


def store_at(place: Any, timeout_s: float | None = None) -> Store:
    """The store of a checkpoint.

    Args:
        place: a str, a Path, or a Store, which is returned as it is.
        timeout_s: how long a store behind a URL is asked again after an error that passes; None: 10 s.
    Raises:
        CheckpointError: none of these, or a form of [Note: what is no place].
        StorageError: a path whose links lead in a circle.
    """
    if isinstance(place, type) and issubclass(place, ByPointer | LocalStore):
        raise CheckpointError(f"checkpoint_dir is the class {place.__name__}; make a store of it")
    if isinstance(place, Store):
        return place
    found = located(place)
    return UrlStore(found, timeout_s) if isinstance(found, str) else LocalStore.at(found)


def located(place: Any, name: str = "checkpoint_dir") -> Path | str:
    """A local path as a Path, ``file://`` taken off; any other URL as text without slashes at its end.

    Args:
        name: what the caller calls it.
    Raises:
        CheckpointError: neither a str nor a path, or a form of [Note: what is no place].
    """
    text = os.fspath(place) if isinstance(place, str | os.PathLike) else place
    if not isinstance(text, str):
        raise CheckpointError(f"{name} is {place!r}; it is a str or a Path{_or_a_store(place)}")
    if "\0" in text:
        raise CheckpointError(f"{text!r} is no path: it holds a zero byte")
    if text.startswith(_LOCAL):
        text = text.partition("://")[2]
        if not text.startswith("/"):
            raise CheckpointError(f"{name} is {place!r}; behind file:// stands a path from the root: file:///data/run")
    elif _URL.match(text):
        return text if text.endswith("://") else text.rstrip("/")
    if _CUT_URL.match(text):
        raise CheckpointError(
            f"{name} is {place!r}: a URL with one slash, as Path('s3://bucket/run') makes it; pass URLs as str with "
            "'://', and a local folder of this name by its path from the root"
        )
    if text.partition("/")[0].startswith("~"):
        raise CheckpointError(f"{name} is {place!r}; '~' is not expanded here: pass os.path.expanduser({text!r})")
    if not text:
        raise CheckpointError(f"{name} is {place!r}; name a folder, '.' for the working one")
    return Path(text)


def _or_a_store(place: Any) -> str:
    """What an object lacks that seems to be meant as a store."""
    methods = ("name", "list_files", "read", "create", "delete")
    lacking = [method for method in methods if not hasattr(place, method)]
    if len(lacking) == len(methods):
        return ", or a store (stores.ByPointer)"
    text = f"has no {', '.join(lacking)}" if lacking else "does not derive from it"
    return f", or a store, which derives from stores.ByPointer; {type(place).__name__} {text}"


def local_path(place: Any, what: str, name: str = "checkpoint_dir") -> Path:
    """A local path. ``name``: as of ``located``.

    Raises:
        CheckpointError: as ``located``; or a URL or a store, with ``what`` as the remedy.
    """
    is_store = hasattr(place, "list_files") and hasattr(place, "commit")
    found: Path | str = place.local_folder or place.name if is_store else located(place, name)
    if isinstance(found, str):
        raise CheckpointError(f"{found}: {what}")
    return found


def resolved(place: Path) -> Path:
    """From the root and without links.

    Raises:
        StorageError: links that lead in a circle; the working folder of this process is gone.
    """
    try:
        return place.resolve()
    except FileNotFoundError as error:
        raise StorageError(
            f"{place}: the working folder of this process was removed; give the whole path, from /", errno.ENOENT
        ) from error
    except (OSError, RuntimeError) as error:
        raise StorageError(f"{place}: {error}", getattr(error, "errno", None)) from error


def child(root: Path | str, name: str) -> Path | str:
    """``root/name`` for what ``located`` gave."""
    return root / name if isinstance(root, Path) else joined(root, name)


def write_file(folder: Path, name: str, data: Content, is_synced: bool = True) -> FileDigest:
    """Write a file besides the parts, whole or piece by piece, and put it on disk unless ``commit`` does that."""
    with (folder / name).open("xb") as file:
        digest = digest_of(data, file.write)
        file.flush()
        if is_synced:
            os.fsync(file.fileno())
    return digest


def link_from(folder: int, name: str, staging: Path) -> None:
    """Have a file of an open folder in a staging folder too, without its bytes. OSError where there are no links."""
    try:
        os.link(name, staging / name, src_dir_fd=folder)
    except FileExistsError:  # by another rank
        if os.stat(name, dir_fd=folder).st_ino != os.stat(staging / name).st_ino:
            raise


def read_small(path: Path) -> bytes:
    """The content of a file that is read whole. UnsafeError: as ``check_regular``."""
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """UnsafeError for a pipe or a device, which would give bytes for ever or never any."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder the system says itself what is wrong
        raise UnsafeError(f"{path} is {stat.filemode(mode)[0]!r} and no file; nothing of it was read")


def walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The folder and all below, in order, with the names of their files.

    Raises:
        OSError: one may not be looked into, which is not taken for a folder without files.
    """

    def refused(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=refused):
        folders.sort()
        yield Path(place), sorted(names)


def below(folder: Path) -> Iterator[Path]:
    """All files of ``walk``."""
    return (at / name for at, names in walk(folder) for name in names)


def check_target(target: Path, if_exists: str, owns_file: Callable[[str], bool]) -> None:
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
    check_names(target, names, if_exists, owns_file, partial(_head, target))


def _head(folder: Path, name: str, most: int) -> bytes:
    """The first bytes of a file; none of what is no file."""
    path = folder / name
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(most)


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
            f"{shutil.disk_usage(folder).free} are free now in {folder}; an older checkpoint is whole",
            error.errno,
        ) from error


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
    staging = target.with_name(f".{target.name}.tmp-{save_id}") / INNER
    try:
        staging.mkdir(parents=True)
    except PermissionError as error:
        raise StorageError(
            f"{target.parent} may not be written to by this user; a save is written beside its place, {target}, and "
            f"moved there. Save into a folder whose parent may be written to, such as {target / 'checkpoint'}",
            error.errno,
        ) from error
    if target.exists():
        copy_attributes(target, staging, writable=True)
    return staging


def commit(staging: Path, target: Path, save_id: str, unsynced: Collection[str] = ()) -> None:
    """Move a complete staging folder into place, replacing what is there. See [Note: old or new, never both].

    Args:
        unsynced: files and folders in it that are put on disk before the move, all at once. On a slow disk that is
            one wait. No less is on disk when the folder moves.
    """
    if target.exists():
        copy_attributes(target, staging)
    with Pool(min(len(unsynced), 64) or 1) as pool:
        synced = [pool.submit(_sync, staging / name, os.O_RDONLY) for name in unsynced]
        sync_folder(staging)
        for file in synced:
            file.result()
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
        with lock.open("rb") as file:
            return is_locked(file.fileno())
    except OSError:
        return False


def is_locked(handle: int) -> bool:
    """Whether another process holds the lock of a file that is open for reading, as far as this host can tell."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno == errno.EACCES  # what some systems say of a lock that is held
    return False


def copy_attributes(source: Path, target: Path, *, writable: bool = False) -> None:
    """Give ``target`` owner, group, mode and extended attributes (access lists are such) of folder ``source``.

    See [Note: what stays of a folder]. What the system does not let this process set stays as it is. Only root sets
    the owner, and only a member sets the group. Attributes of other name spaces than ``user`` and access lists stay
    too.

    Args:
        writable: with all rights for the owner besides.
    """
    status = source.stat()
    if (status.st_uid, status.st_gid) != (target.stat().st_uid, target.stat().st_gid):
        with suppress(OSError):
            os.chown(target, -1, status.st_gid)
        with suppress(OSError):
            os.chown(target, status.st_uid, -1)
    with suppress(OSError):  # a file system without them
        for name in set(os.listxattr(target)) - set(os.listxattr(source)):
            os.removexattr(target, name)
    with suppress(OSError):
        shutil.copystat(source, target)
    os.utime(target)  # which is newer than its source
    os.chmod(target, stat.S_IMODE(status.st_mode) | (stat.S_IRWXU if writable else 0))


def is_mount_point(folder: Path) -> bool:
    """Whether something is mounted on a folder, also a folder of the same file system (bind mount)."""
    if os.path.ismount(folder):
        return True
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    points = (line.split(" ")[4] for line in lines if line.count(" ") > 4)
    return str(folder) in {re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), point) for point in points}


def exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False if this system cannot (older NFS, Lustre)."""
    renameat2 = libc("renameat2")
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(a))


def siblings(target: Path, kind: str) -> list[Path]:
    """Hidden siblings ``.<name>.<kind>-<save id>`` of a target, newest first: no other name is one of ours.

    What ``discard`` has moved aside has an end of its own, and so have the scratch folders of conversions.
    """
    pattern = re.compile(re.escape(f".{target.name}.{kind}-") + ENDS)
    if not target.parent.is_dir():
        return []
    found = [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on disk."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def discard(staging: Path) -> None:
    """Remove a staging folder, given as ``stage`` gives it or as ``siblings`` does, as far as that goes.

    It is renamed aside first. Another thread or process that is about to move it into place then finds it gone. So
    nobody can commit a folder of which half is deleted.
    """
    staging = staging.parent if staging.name == INNER else staging
    aside = staging.with_name(f"{staging.name}-gone")
    try:
        staging.rename(aside)
    except FileNotFoundError:
        return
    except OSError:
        aside = staging
    shutil.rmtree(aside, ignore_errors=True)
