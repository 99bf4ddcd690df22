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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "sixfold-memory-"  # of MemoryTier, before the name of a run


@contextmanager
def snapshots_of(run_dir: Path, folder: Path) -> Iterator[str]:
    """The name by which a MemoryTier of this run knows its snapshots; they are gone at the end."""
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


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink() and place.stat().st_uid == os.geteuid():
        shutil.rmtree(place, ignore_errors=True)
