"""Files of a run in one domain: a folder in a tmpfs with a folder for each generation.

    frames, record --> DomainStore.write_part, write_record (this file) --> attempt-..-step-..-<save id>/
    DomainFolder.listing (this file) --> generations.py;  DomainFolder.keep (this file) --> others are gone

    <folder>/sixfold-memory-<run>/                   of this user alone (0700)
      lock                                           held by the first rank of the domain
      attempt-000001-step-00000007-<save id>/
        __3_0.distcp, rank-3                         frames and record of rank 3; its own or a copy
        whole                                        all ranks have agreed that this generation is whole
      sixfold-mirror-...                             while a load goes on

What is removed has one of these names. Files of other names stay, and so does the folder around them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, StorageError, UnsafeError, typed
from sixfold.dist_ckpt.formats.integrity import BLOCK_BYTES, FileDigest, crc32
from sixfold.dist_ckpt.memory_tier.generations import Generation, Held, Part
from sixfold.dist_ckpt.memory_tier.record import Record
from sixfold.dist_ckpt.mirror.leases import mirror_name
from sixfold.dist_ckpt.storage import store as stores
from sixfold.dist_ckpt.storage.frame_file import FrameFile
from sixfold.dist_ckpt.storage.local import full_disk_told

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FRAMES, _RECORD = re.compile(r"__(\d+)_\d+\.distcp"), re.compile(r"rank-(\d+)")
_WHOLE, _LOCK, PUT = "whole", "lock", ".put-"


def check_run(run: object) -> None:
    """CheckpointError for what is no name of a run."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise CheckpointError(
            f"run is {run!r}; it names a folder: at most 100 letters, digits and '._-', a letter or digit first"
        )


def is_own_name(name: str) -> bool:
    """Whether a generation may have a file of this name, which another rank sends or asks for."""
    return bool(_FRAMES.fullmatch(name) or _RECORD.fullmatch(name))


def record_name(rank: int) -> str:
    """The file of a rank's record."""
    return f"rank-{rank}"


class DomainFolder:
    """The folder of a run in this domain.

    Args:
        folder: where it lies, such as ``/dev/shm``. It may hold other things.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.root = folder / f"sixfold-memory-{run}"
        self._lock: int | None = None

    def make(self) -> os.stat_result:
        """Make it, or see that it is this user's.

        Raises:
            UnsafeError: it is another user's, a link, or open to others. StorageError: the system refuses.
        """

        def made() -> os.stat_result:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.root.mkdir(mode=0o700)
            return self.root.lstat()

        status = typed(made)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise UnsafeError(
                f"{self.root} is no folder of this user alone ({stat.filemode(status.st_mode)}, owner "
                f"{status.st_uid}): others could change snapshots in it. Remove it, or give another run or folder"
            )
        return status

    def lock(self) -> None:
        """Hold the folder until ``unlock`` or the end of this process; for the first rank of the domain.

        Raises:
            StorageError: another process holds it.
        """
        if self._lock is not None:
            return
        handle = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a process that is forked does not inherit this one
        except OSError as error:
            os.close(handle)
            raise StorageError(
                f"{self.root} is in use by another process: two jobs of one run would remove each other's snapshots. "
                "End the other one, or give this run another name",
                error.errno,
            ) from error
        self._lock = handle

    def unlock(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def path(self, generation: Generation) -> Path:
        """The folder of a generation."""
        return self.root / generation.name

    def generations(self) -> list[Generation]:
        """Those that have a folder here, the oldest first."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        return sorted(found for name in names if (found := Generation.of_name(name)) is not None)

    def listing(self) -> dict[Generation, Held]:
        """What this domain has, by the names and sizes of its files; contents are not looked at."""
        found = dict[Generation, Held]()
        for generation in self.generations():
            with suppress(FileNotFoundError):  # a worker of before removes it, and lives a moment longer
                found[generation] = self._held(generation)
        return found

    def _held(self, generation: Generation) -> Held:
        folder = self.path(generation)
        names = sorted(os.listdir(folder))
        parts = {int(match.group(1)): Part(0, "was cut short") for name in names if (match := _FRAMES.fullmatch(name))}
        for name in names:
            if match := _RECORD.fullmatch(name):
                rank = int(match.group(1))
                try:
                    parts[rank] = self._part(generation, rank)
                except CheckpointError:
                    parts[rank] = Part(0, "has a damaged record")
        return Held(parts, _WHOLE in names)

    def _part(self, generation: Generation, rank: int) -> Part:
        record = self.record(generation, rank)
        for name, nbytes in record.file_bytes.items():
            try:
                found = (self.path(generation) / name).stat().st_size
            except FileNotFoundError:
                return Part(record.ranks, f"lacks the file {name}")
            if found != nbytes:
                return Part(record.ranks, f"has {found} of {nbytes} bytes of {name}")
        return Part(record.ranks)

    def record(self, generation: Generation, rank: int) -> Record:
        """A rank's record.

        Raises:
            CorruptError: it is damaged, or of another generation or rank. StorageError: it is gone.
        """
        path = self.path(generation) / record_name(rank)
        found = Record.decode(typed(path.read_bytes), path)
        if (found.generation, found.rank) != (generation, rank) or not rank < found.ranks:
            raise CorruptError(f"{path} is of rank {found.rank} of {found.ranks} and of {found.generation.name}")
        return found

    def damage(self, generation: Generation, rank: int) -> str:
        """Why a copy cannot be used, each byte of it looked at; "" if it is as it was written."""
        try:
            record = self.record(generation, rank)
            for name, expected in record.written.files.items():
                if _digest_of(self.path(generation) / name) != expected:
                    return f"{name} does not match its digests"
        except (CheckpointError, OSError) as error:
            return str(error)
        return ""

    def settle(self, generation: Generation) -> None:
        """Note that all ranks have agreed: this generation is whole."""
        with suppress(OSError):  # a full tmpfs: the note serves a better error, no more
            os.close(os.open(self.path(generation) / _WHOLE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def keep(self, wanted: Collection[Generation]) -> None:
        """Remove all other generations."""
        for generation in self.generations():
            if generation not in wanted:
                self.remove(generation)

    def remove(self, generation: Generation, place: int = 0, count: int = 1) -> None:
        """Remove the files of a generation, records first: without them the rest counts for nothing.

        Args:
            place, count: of one that shares this work with others: files of each ``count``-th rank.
        """
        folder = self.path(generation)
        with suppress(FileNotFoundError):
            names = [name for name in os.listdir(folder) if _is_ours(name) and _rank_of(name) % count == place]
            for name in sorted(names, key=lambda name: not _RECORD.fullmatch(name)):
                (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # what others have put there stays, and so does the folder
            folder.rmdir()

    def discard(self) -> None:
        """Remove all files of this run in this domain."""
        self.keep(())
        for mirror in self.root.glob(mirror_name("[0-9a-f]" * 16)):
            shutil.rmtree(mirror, ignore_errors=True)
        self.unlock()
        (self.root / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            self.root.rmdir()


def _rank_of(name: str) -> int:
    match = _FRAMES.fullmatch(name) or _RECORD.fullmatch(name)
    return int(match.group(1)) if match else 0


def _is_ours(name: str) -> bool:
    return is_own_name(name) or name == _WHOLE or name.startswith(PUT)


def _digest_of(path: Path) -> FileDigest:
    size, digests = path.stat().st_size, list[str]()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digests.append(f"{crc32(block):08x}")
    return FileDigest(size, tuple(digests) or (f"{0:08x}",))


@dataclass(frozen=True)
class DomainStore(stores.Store):
    """The place of one rank's part of a generation, in its own domain. Nobody commits: see record.py.

    Args:
        run_folder: of this domain. label: the same on all ranks.
    """

    run_folder: DomainFolder
    attempt: int
    step: int
    rank: int
    label: str

    @property
    def name(self) -> str:
        return self.label

    @property
    def local_folder(self) -> Path:
        return self.run_folder.root

    def generation(self, save: stores.Save) -> Generation:
        """What this save makes."""
        return Generation(self.attempt, self.step, save.save_id)

    def folder(self, save: stores.Save) -> Path:
        """Of the generation."""
        return self.run_folder.path(self.generation(save))

    def list_files(self) -> dict[str, int]:
        return {}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        raise FileNotFoundError(name)

    def delete(self, name: str) -> None:
        raise FileNotFoundError(name)

    def join(self, save: stores.Save) -> None:
        with full_disk_told(self.run_folder.root, 0):
            self.folder(save).mkdir(mode=0o700, exist_ok=True)

    def write_part(self, save: stores.Save, part: stores.Part) -> FileDigest:
        folder = self.folder(save)
        with (
            full_disk_told(self.run_folder.root, part.nbytes),
            FrameFile(folder, part.name, part.nbytes, part.threads, part.moved) as file,
        ):
            (folder / part.name).chmod(0o600)
            part.fill(file)
            return file.finish()

    def write_record(self, save: stores.Save, record: Record) -> bytes:
        """Put the record beside the frames, at once or not at all; its bytes."""
        data, path = record.encode(), self.folder(save) / record_name(self.rank)
        begun = path.with_name(f"{PUT}{path.name}")
        with full_disk_told(self.run_folder.root, len(data)):
            write_private(begun, data)
            begun.rename(path)
        return data

    def abandon(self, save: stores.Save) -> None:
        with suppress(OSError):
            folder = self.folder(save)
            for name in os.listdir(folder):
                frames = _FRAMES.fullmatch(name)
                if (frames and int(frames.group(1)) == self.rank) or name.removeprefix(PUT) == record_name(self.rank):
                    (folder / name).unlink(missing_ok=True)
            # The folder stays: another rank may be about to write in it. The tier removes it.

    def holds(self, save_id: str) -> bool:
        folder = self.run_folder.path(Generation(self.attempt, self.step, save_id))
        return (folder / record_name(self.rank)).exists()


def write_private(path: Path, data: bytes) -> None:
    """A new file that only this user reads."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
    finally:
        os.close(handle)
