"""Unchanged frames: what a save need not write, because an older checkpoint in the same file system has it.

    writes of a rank + the folder of ``since`` --> keep (this file) --> links in the staging folder, and what is left
    what is left --> writer.py --> new files

[Note: linked files] A file of the older checkpoint gets a second name in the new one, a hard link. The index names
the frames in it as any others. So each folder is whole for every reader, and the file system counts who needs the
bytes: either folder may be deleted, first or last. No file of a visible checkpoint is ever written again, and so a
link never shows other bytes than those that were compared. Damage to a linked file is damage to all folders that have
it.

[Note: what is unchanged] A frame of the same key, box and dtype whose values have the same digest, 128 bits of a
SHA-256. The digest is one of the stored bytes, so it is right also if the tensor changes meanwhile. It is known from
``integrity.json`` if the frame was linked before. Else its first bytes are compared with the tensor's. Only if they are
equal the frame is read. So tensors that train cost a look, and frozen ones are read once, in the save after the one
that wrote them.

[Note: what is linked] A rank links a file if at least half of it is unchanged frames of its own. It writes unchanged
frames of other files anew, apart from changed ones: the next save links that file whole. So at least half of each
file is used, whatever was saved before, and what is frozen soon lies in files of its own.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

from sixfold.dist_ckpt.checkpoint.opening import Checkpoint, open_checkpoint
from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.formats import frame as frames
from sixfold.dist_ckpt.formats import zstd
from sixfold.dist_ckpt.formats.integrity import BLOCK_BYTES, Contents, FileDigest
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.interpreter import Pool
from sixfold.dist_ckpt.plans.plan import Write
from sixfold.dist_ckpt.storage.local import link_from

_LOG = logging.getLogger(__name__)
_FIRST_BYTES = 1 << 14
_AT_ONCE = 1 << 26  # a save that only compares moves on, too
_MOST_FILES = 64  # that a rank links

Values = Callable[[int], Iterator[memoryview]]


@dataclass(slots=True)
class Kept:
    """What of a rank's share lies in files that are linked now.

    Attributes:
        places: of writes, by their numbers in the plan. objects: of objects, by stored key.
        files: that are linked; compressed: those of them that are. contents: as of ``Integrity``, of ``places``.
        unlinked: numbers of unchanged writes whose files are not linked.
    """

    places: dict[int, ByteRange] = field(default_factory=dict)
    objects: dict[str, ByteRange] = field(default_factory=dict)
    files: dict[str, FileDigest] = field(default_factory=dict)
    contents: Contents = field(default_factory=dict)
    unlinked: set[int] = field(default_factory=set)
    compressed: frozenset[str] = frozenset()


def keep(
    since: Path,
    staging: Path,
    writes: Sequence[Write],
    objects: Sequence[tuple[str, bytes]],
    values: Values,
    threads: int,
    moved: Callable[[int], None],
    compress: bool,
) -> Kept:
    """Find the frames of ``since`` that this rank would write again, and link their files.

    What cannot be opened, read or linked is written, and the log says why: the folder may go while this runs.

    Args:
        values: gives the bytes of a write, part by part, from any thread. moved: as of ``Part``.
        compress: compressed files are linked too; else no reader of the new folder would need zstd for others.
    """
    opened = _opened(since)
    if opened is None:
        return Kept()
    older, folder = opened
    try:
        with Pool(threads) as pool:
            same = [*pool.map(partial(_unchanged, older, writes, values, moved, compress), range(len(writes)))]
        found = {number: entry for number, entry in enumerate(same) if entry is not None}
        equal = dict(_equal_objects(older, objects))
        used = Counter[str]()
        for frame in (*(frame for frame, _ in found.values()), *equal.values()):
            used[frame.file] += frame.length
        kept = Kept()
        for name, nbytes in used.most_common(_MOST_FILES):
            file = _files(older)[name]
            if 2 * nbytes >= file.size and _is_linked(folder, name, staging):
                kept.files[name] = file
                moved(nbytes)
    finally:
        os.close(folder)
    kept.compressed = older.manifest.compressed & kept.files.keys()
    kept.objects = {key: frame for key, frame in equal.items() if frame.file in kept.files}
    for number, (frame, digest) in found.items():
        if frame.file in kept.files:
            kept.places[number] = frame
            kept.contents.setdefault(frame.file, {})[str(frame.offset)] = digest
        else:
            kept.unlinked.add(number)
    return kept


def _opened(since: Path) -> tuple[Checkpoint, int] | None:
    """The older checkpoint, whose files are looked up in the open folder, whatever the path names later.

    None, and a line in the log, if nothing of it can be linked.
    """
    try:
        older = open_checkpoint(since)
        folder = os.open(older.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (CheckpointError, OSError) as error:
        _LOG.warning("nothing of since=%s is linked: %s", since, error)
        return None
    status, known = os.fstat(folder), older.integrity
    is_same = (status.st_dev, status.st_ino, status.st_mtime_ns) == older.identity
    if is_same and known is not None and (known.algorithm, known.block_bytes) == ("crc32", BLOCK_BYTES):
        older.folder = Path(f"/proc/self/fd/{folder}")
        return older, folder
    os.close(folder)
    why = "it lacks the checksums that this package writes" if is_same else "it was replaced while it was opened"
    _LOG.warning("nothing of since=%s is linked: %s", since, why)
    return None


def _files(older: Checkpoint) -> dict[str, FileDigest]:
    return {} if older.integrity is None else older.integrity.files


def _unchanged(
    older: Checkpoint,
    writes: Sequence[Write],
    values: Values,
    moved: Callable[[int], None],
    compress: bool,
    number: int,
) -> tuple[ByteRange, str] | None:
    """The older frame with the values of a write, and their digest. See [Note: what is unchanged]."""
    step = writes[number]
    moved(0)
    try:
        frame = _frame_of(older, step)
        if frame is None or older.integrity is None or not step.nbytes:
            return None
        if frame.file in older.manifest.compressed and not compress:
            return None
        digest = older.integrity.contents.get(frame.file, {}).get(str(frame.offset))
        if digest is None:
            parts = values(number)  # which owns the memory of a part
            first = bytes(next(parts)[:_FIRST_BYTES])
            if frame.file in older.manifest.compressed and not _begins(older, frame, step, first):
                return None
            stored = _data_of(older, frame, step)
            if stored is None or bytes(stored[: len(first)]) != first:
                return None
            digest = _digest([stored], moved)
    except (CheckpointError, OSError) as error:  # damaged, or removed: the new folder gets whole ones
        _LOG.warning("%s is written again: %s", step.key, error)
        return None
    return (frame, digest) if _digest(values(number), moved) == digest else None


def _frame_of(older: Checkpoint, step: Write) -> ByteRange | None:
    stored = older.manifest.tensors.get(step.key)
    if stored is None or stored.dtype != step.dtype or len(stored.shape) != len(step.shape):
        return None
    return next((chunk.frame for chunk in stored.near(step.piece.box) if chunk.box == step.piece.box), None)


def _data_of(older: Checkpoint, frame: ByteRange, step: Write) -> memoryview | None:
    """The stored bytes of the values; None if the frame has another form than one that is written here."""
    whole = older.frame(frame, step.nbytes)
    start = frames.plain_start(whole, step.dtype, step.piece.box.size)
    return None if start is None else whole[start : start + step.nbytes]


def _begins(older: Checkpoint, frame: ByteRange, step: Write, first: bytes) -> bool:
    """Whether a compressed frame of this package holds values that begin so; no more of it is decoded."""
    at = frames.template(step.dtype, step.piece.box.size, 0).head_bytes
    return zstd.begins_with(older.stored(frame), at, first)


def _digest(parts: Iterable[memoryview], moved: Callable[[int], None]) -> str:
    found = sha256()
    for part in parts:
        for at in range(0, len(part), _AT_ONCE):
            found.update(part[at : at + _AT_ONCE])
            moved(0)
    return found.hexdigest()[:32]


def _equal_objects(older: Checkpoint, objects: Sequence[tuple[str, bytes]]) -> Iterator[tuple[str, ByteRange]]:
    for key, data in objects:
        frame = older.manifest.objects.get(key)
        if frame is not None and frame.length == len(data) and bytes(older.frame(frame)) == data:
            yield key, frame


def _is_linked(folder: int, name: str, staging: Path) -> bool:
    try:
        link_from(folder, name, staging)
    except OSError as error:  # another file system, too many links, files of others, a folder that goes
        _LOG.warning("%s is not linked, and its tensors are written: %s", name, error)
        return False
    return True
