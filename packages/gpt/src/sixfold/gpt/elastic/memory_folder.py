"""Where a run that is kept alive has its snapshots in memory, and that they end with it.

    run.dir, elastic.memory_folder --> snapshots_of (this file) --> a name --> training/kept_alive.py --> MemoryTier

A snapshot outlives the ranks, but not the supervisor: the next start goes on from a checkpoint. What a supervisor that
was killed has left is removed by the next one of the same run.dir.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sixfold.gpt.errors import ConfigError

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
PREFIX = "sixfold-memory-"  # of MemoryTier, before the name of a run


@contextmanager
def snapshots_of(run_dir: Path, folder: Path) -> Iterator[str]:
    """The name by which a MemoryTier of this run knows its snapshots; they are gone at the end.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"elastic.memory_folder is {str(folder)!r} and no folder; name one in a tmpfs, as /dev/shm")
    if (kind := file_system_of(folder)) not in (*IN_MEMORY, None):
        print(
            f"sixfold: elastic.memory_folder is {str(folder)!r}, in a file system of kind {kind} and no memory: each "
            "snapshot is written there. Name a folder in a tmpfs, as /dev/shm, or set elastic.memory_every = 0",
            file=sys.stderr,
            flush=True,
        )
    key = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]
    for left in folder.glob(f"{PREFIX}gpt-{key}-*"):
        match = re.fullmatch(rf"{PREFIX}gpt-{key}-(\d+)", left.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(left)
    name = f"gpt-{key}-{os.getpid()}"
    _remove(folder / f"{PREFIX}{name}")  # of a process that had this number
    try:
        yield name
    finally:
        _remove(folder / f"{PREFIX}{name}")


def file_system_of(folder: Path) -> str | None:
    """The kind of the file system that a folder is in, as the kernel names it; None if it does not say."""
    found, place = (-1, ""), str(folder.resolve())
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:  # proc(5): ... mount point ... - kind ...
        before, _, behind = line.partition(" - ")
        point = before.split()[4]
        if place == point or place.startswith(f"{point.rstrip('/')}/"):
            found = max(found, (len(point), behind.split()[0]), key=lambda one: one[0])
    return found[1] or None


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink() and place.stat().st_uid == os.geteuid():
        shutil.rmtree(place, ignore_errors=True)
