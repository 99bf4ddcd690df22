"""Retention: which checkpoints a run has, which is the latest, which may go.

    root folder --> checkpoints, latest (this file)
    root folder + rule --> prune (this file) --> deleted folders

A run's checkpoints are ``root/step-%08d``. Nothing here needs a process group; call it on one rank.
"""

from __future__ import annotations

import re
import secrets
import shutil
from functools import partial
from pathlib import Path

from sixfold.dist_ckpt import storage
from sixfold.dist_ckpt.errors import CheckpointError, typed
from sixfold.dist_ckpt.folder import is_complete

_STEP = re.compile(r"step-(\d{8,})")
# ``.old-`` marks a folder whose replacement was cut short: opening the step falls back to it.
_REPLACED = re.compile(r"\.(step-\d{8,})\.old-.+")
_PRUNED = re.compile(r"\.step-\d{8,}\.gone-.+")
_UNFINISHED = re.compile(r"\.step-(\d{8,})\.(tmp|job)-.+")


def step_path(root: str | Path, step: int) -> Path:
    """``root/step-%08d``, the folder of a step."""
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step is {step!r}; it is an integer >= 0")
    return Path(root) / f"step-{step:08d}"


def checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """Complete checkpoints as (step, path), ascending; metadata and sizes are looked at, not digests."""
    return [(step, path) for step, path in _steps(Path(root)) if is_complete(path)]


def latest(root: str | Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next((path for _, path in reversed(_steps(Path(root))) if is_complete(path)), None)


def prune(root: str | Path, *, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Delete complete checkpoints that are neither among the last ``keep_last`` nor a multiple of ``keep_every``.

    Oldest first, each renamed aside before it is deleted, so that a kill leaves no half folder under
    a step's name. What dead saves of steps before the last ``keep_last`` left behind goes too; other
    incomplete folders are left alone.

    Returns:
        The deleted paths.
    Raises:
        CheckpointError: ``keep_last < 0`` or ``keep_every < 1``; its child StorageError: a folder cannot be moved.
    """
    if keep_last < 0 or (keep_every is not None and keep_every < 1):
        raise CheckpointError(f"keep_last is {keep_last}, keep_every {keep_every}; they are >= 0 and >= 1")
    folder = Path(root)
    for leftover in _named(folder, _PRUNED):
        shutil.rmtree(leftover, ignore_errors=True)
    found = checkpoints(folder)
    old = found[: max(0, len(found) - keep_last)]
    deleted = []
    for step, path in old:
        if keep_every is not None and step % keep_every == 0:
            continue
        typed(partial(_delete, path))
        deleted.append(path)
    if kept := found[len(old) :]:
        _delete_unfinished(folder, before=kept[0][0])
    return deleted


def _delete_unfinished(folder: Path, *, before: int) -> None:
    for leftover in _named(folder, _UNFINISHED):
        match = _UNFINISHED.fullmatch(leftover.name)
        if match and int(match.group(1)) < before:
            storage.discard(leftover)


def _delete(path: Path) -> None:
    siblings = [sibling for sibling in _named(path.parent, _REPLACED) if sibling.name.startswith(f".{path.name}.")]
    for folder in (path, *siblings):
        if folder.exists():
            # A name of its own: what cannot be deleted now waits for the next prune.
            aside = path.with_name(f".{path.name}.gone-{secrets.token_hex(4)}")
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def _steps(root: Path) -> list[tuple[int, Path]]:
    names = {path.name for path in _named(root, _STEP)}
    names |= {match.group(1) for path in _named(root, _REPLACED) if (match := _REPLACED.fullmatch(path.name))}
    return sorted((int(name.removeprefix("step-")), root / name) for name in names)


def _named(root: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [path for path in root.iterdir() if pattern.fullmatch(path.name)] if root.is_dir() else []
