"""A new folder, whole or not at all.

    files --> .NAME.tmp-* beside the target --> on disk --> one rename (this file) --> target

Whoever is killed on the way leaves the dotted folder, which nothing takes for a result.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sixfold.gpt.errors import ConfigError


@contextmanager
def new_folder(target: Path, what: str) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` when the block ends, and is removed if it raises.

    Args:
        target: must not exist, or be an empty folder; its parents are made.
        what: is written there, for errors.
    Raises:
        ConfigError: something lies at ``target`` already.
    """
    refuse_taken(target, what)
    place = target.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.parent / f".{place.name}.tmp-{secrets.token_hex(6)}"
    draft.mkdir()
    try:
        yield draft
        for folder, _, files in os.walk(draft, topdown=False):
            for path in (*(Path(folder, name) for name in files), Path(folder)):
                _sync(path)
        refuse_taken(target, what)
        os.rename(draft, place)  # onto nothing or an empty folder; a full one it refuses
        _sync(place.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def refuse_taken(target: Path, what: str) -> None:
    """Raises ConfigError if ``target`` is anything but absent or an empty folder."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"{target} is no folder; {what} is written into a new one")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; {what} is written into a new folder, and nothing is replaced")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
