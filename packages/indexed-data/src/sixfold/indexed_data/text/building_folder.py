"""The folder where a build's finished parts wait.

    plan --> PREFIX.building/ (this file) --> workers.py, build.py

[Note: finished parts wait] Everything before the final renames lies in PREFIX.building. A killed build leaves that
folder, and nothing under the final names. A build with the same plan resumes from the finished parts. A build with
another plan starts over.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sixfold.indexed_data.atomic_files import files_of
from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.text.finished_part import ENDINGS, read_report

_OURS = re.compile(r"(plan\.json|lock|part-\d+\.|whole\.)")  # names of files that a build makes
_PLAN, _LOCK, _PART = "plan.json", "lock", "part-"


class BadInput(IndexedDataError):
    """The input itself is wrong: parts made from it are of no use once it is mended."""


@contextmanager
def building_folder(
    prefix: str, plan: dict[str, Any], overwrite: bool, alike: Callable[[int, str], bool]
) -> Iterator[tuple[str, list[str]]]:
    """The folder, locked, holding only the plan and its finished parts; and notes on parts that were dropped.

    ``alike(number, folder)`` says whether a finished part of the same plan is what would be made now.

    Removed on success, after ``BadInput`` and when no part is finished; kept after every other error.

    Raises:
        IndexedDataError: a pair is there and may not be replaced. Or the folder cannot be made, is in use, or was not
            made by a build.
    """
    folder = prefix + ".building"
    earlier = _read_plan(folder)
    resumed = not _differing(earlier, plan)
    there = files_of(prefix)
    if there and not overwrite and not (resumed and len(there) == 1):  # one: a build was killed between two renames
        raise IndexedDataError(f"{there[0]} is there already; pass overwrite (--overwrite) to replace the pair")
    lock = _make_locked(folder)
    try:
        try:
            differing = _differing(earlier, plan)
            if not differing and not all(alike(int(name.removeprefix(_PART)), folder) for name in _finished(folder)):
                differing = ["ids of the same documents"]
            dropped = _dropped(folder, differing)
            _sweep(folder, keeps_parts=not differing)
            _write_plan(folder, plan)
        except OSError as error:
            raise IndexedDataError(
                f"{error.filename or folder}: {error.strerror}; the build needs this path: move it away"
            ) from error
        try:
            yield folder, dropped
        except BaseException as error:
            if isinstance(error, Exception) and not os.path.isdir(folder):
                raise IndexedDataError(
                    f"{folder} was removed while the build wrote into it; build again, and leave that folder alone"
                ) from error
            if isinstance(error, BadInput) or not _finished(folder):
                _remove(folder)
            raise
        _remove(folder)
    finally:
        os.close(lock)


def part_prefix(folder: str, number: int) -> str:
    """Path prefix of the pair of one part."""
    return os.path.join(folder, f"{_PART}{number:05d}")


def _make_locked(folder: str) -> int:
    try:
        with suppress(FileExistsError):
            os.mkdir(folder)
        names = os.listdir(folder)
        foreign = sorted(name for name in names if not _OURS.match(name))
        if _PLAN not in names and set(names) - {_LOCK}:
            foreign = foreign or sorted(names)
        if foreign:
            raise IndexedDataError(
                f"{folder} holds {foreign[0]} beside what a build makes: it was not made by a build, and a build "
                "would empty it. Move it away, or choose another output"
            )
        # A file in the folder, not the folder itself: writers of parts lock that one while they rename.
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise IndexedDataError(f"{folder}: cannot be made: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise IndexedDataError(f"{folder}: another build of the same output is running; wait for it") from None
    except OSError:
        pass  # a file system without locks: two builds of one output at once are then the caller's to avoid
    return lock


def _finished(folder: str) -> set[str]:
    """Names (without extension) of the finished parts."""
    names = {name.removesuffix(".json") for name in _names_in(folder) if name.startswith(_PART)}
    return {name for name in names if read_report(os.path.join(folder, name)) is not None}


def _differing(earlier: Any, plan: dict[str, Any]) -> list[str]:
    """What of the plan is not as it was."""
    old = _flat(earlier if isinstance(earlier, dict) else {})
    return [name for name, value in _flat(plan).items() if old.get(name) != value]


def _dropped(folder: str, differing: list[str]) -> list[str]:
    """A note that finished parts are not used, and what differs."""
    count = len(_finished(folder))
    if not count or not differing:
        return []
    return [
        f"{folder}: {count} finished parts were made with other {', '.join(differing)}; they are dropped, and the "
        "build starts over"
    ]


def _flat(plan: dict[str, Any]) -> dict[str, Any]:
    """Nested names as ``encoding.files``."""
    flat: dict[str, Any] = {}
    for name, value in plan.items():
        inner = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        flat.update(inner)
    return flat


def _sweep(folder: str, keeps_parts: bool) -> None:
    """Remove all that an earlier build left, but for the finished parts of the same plan."""
    keep = {name + end for name in _finished(folder) for end in ENDINGS} if keeps_parts else set()
    for name in os.listdir(folder):
        if name not in keep and name not in (_LOCK, _PLAN):
            os.unlink(os.path.join(folder, name))


def _remove(folder: str) -> None:
    """Remove the folder; what somebody has removed meanwhile is gone."""
    for name in sorted(_names_in(folder), key=(_PLAN, _LOCK).__contains__):  # the plan tells whose folder it is
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    with suppress(FileNotFoundError):
        os.rmdir(folder)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _read_plan(folder: str) -> Any:
    import json  # only here: reading pairs should not load it

    try:
        with open(os.path.join(folder, _PLAN), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _write_plan(folder: str, plan: dict[str, Any]) -> None:
    import json  # only here: reading pairs should not load it

    with open(os.path.join(folder, _PLAN), "w", encoding="utf-8") as file:
        json.dump(plan, file)
