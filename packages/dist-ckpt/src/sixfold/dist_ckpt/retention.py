"""Retention: which checkpoints a run has, which is the latest, which may go.

    root folder or URL --> checkpoints, latest (this file)
    root folder or URL + rule --> prune (this file) --> deleted checkpoints

A run's checkpoints are ``root/step-%08d``. Nothing here needs a process group; call it on one rank. For a URL the
places are text, for a local root (``file://`` too) they are Paths, for a store that derives from ``ByPointer`` stores.

[Note: dead or slow] A save may go on while others are committed, and while a run is pruned. ``prune`` deletes the files
of an unfinished save, and the status of a background save,
- never, if a background save of this process wrote them, or a trainer holds its lock in the status;
- after a minute without a change, if this system knows that the trainer of the first rank is dead: it held its lock
  here. Its worker ends with it, and nobody else commits;
- else after an hour, in a folder, for a step before those that are kept, and after a day for any other step. Ranks
  write, and trainers show every few seconds that they live. But a plain save has no lock, and a lock is of one host.
In a store no file has a time. There a prune leaves a mark, ``job-00000000-.../seen-<look>-<time>``, with a checksum of
what it has seen. A later prune that sees the same after a day deletes it. Of a step before those that are kept
unfinished files go at once; a save that is still at work there gets an error: see by_pointer.py.
"""

from __future__ import annotations

import operator
import os
import re
import secrets
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Collection, Sequence, Set
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar, overload

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.background import status_and_heartbeats
from sixfold.dist_ckpt.background.saver import saves_of_this_process
from sixfold.dist_ckpt.background.status_and_heartbeats import RankState
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError, typed
from sixfold.dist_ckpt.formats.integrity import crc32
from sixfold.dist_ckpt.mirror import local_view
from sixfold.dist_ckpt.storage import by_pointer
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.store import is_checkpoint_file
from sixfold.dist_ckpt.storage.url import UrlStore

# ``.old-`` marks a folder whose replacement was cut short: opening the step falls back to it. ``.gone-`` is what a
# prune has moved aside, ``.tmp-`` and ``.job-`` are a save that goes on, or has died. Trainers that take what holds
# ``step-7`` and ``.metadata`` for a step must not find what was moved aside: it is ``.step.00000007.gone-``.
# A name whose end is none that a save or a prune gives is the user's own.
_NAME = re.compile(
    r"(\.)?step(?(1)[-.]|-)(?P<step>\d{8,})"
    rf"(?(1)\.(?P<kind>old|gone|tmp|job)-(?P<save>(?:(?<=gone-)[0-9a-f]{{8}}|{storage.ENDS})))"
)
# See [Note: dead or slow].
_DEAD_S, _EARLIER_S, _ANY_S = 60.0, 3600.0, 86400.0
_SEEN = f"{by_pointer.LOOKS}seen-"  # goes with the next commit there
_SHORT = re.compile(r"step-(\d+)")
_COMMITS = ("metadata.json", ".metadata")
_Place = TypeVar("_Place", Path, ByPointer)


@overload
def step_path(root: _Place, step: int) -> _Place: ...
@overload
def step_path(root: str, step: int) -> Path | str: ...
def step_path(root: str | Path | ByPointer, step: int) -> Path | str | ByPointer:
    """``root/step-%08d``, the place of a step; relative if ``root`` is.

    Raises:
        CheckpointError: ``step`` is no integer >= 0, or ``root`` no place of checkpoints.
    """
    place = root if isinstance(root, ByPointer) else storage.located(root, "root")
    if not is_integer(step, 0):
        raise CheckpointError(f"step is {step!r}; it is an integer >= 0")
    name = _name(operator.index(step))
    return place.child(name) if isinstance(place, ByPointer) else storage.child(place, name)


def is_integer(value: Any, least: int) -> bool:
    """Whether this is an integer of any kind, and no truth value, of at least so much."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


@overload
def checkpoints(root: _Place, *, after: int = -1) -> list[tuple[int, _Place]]: ...
@overload
def checkpoints(root: str, *, after: int = -1) -> list[tuple[int, Path | str]]: ...
def checkpoints(root: str | Path | ByPointer, *, after: int = -1) -> Sequence[tuple[int, Path | str | ByPointer]]:
    """Complete checkpoints as (step, place), ascending; metadata and sizes are looked at, not digests.

    Args:
        after: those of later steps alone; the others are not opened.
    Raises:
        StorageError: the system or the store does not let us see.
    """
    run = _run_at(root)
    return [(step, step_path(root, step)) for step in run.steps() if step > after and run.is_complete(step)]


@overload
def latest(root: _Place) -> _Place | None: ...
@overload
def latest(root: str) -> Path | str | None: ...
def latest(root: str | Path | ByPointer) -> Path | str | ByPointer | None:
    """The complete checkpoint of the highest step; None if there is none, also where there is no such root.

    Raises:
        StorageError: the system or the store does not let us see; a run that took that for a None would begin anew.
        MismatchError: a step above it is of a strategy that is not registered here: nobody knows whether it is whole.
            Or a checkpoint above it has another name, such as ``step-7``: a run that did not see it would begin anew.
    """
    run = _run_at(root)
    for step in reversed(run.steps()):
        if run.is_complete(step):
            run.check_names(step)
            return step_path(root, step)
        if isinstance(run, _LocalRun):
            serialization.check_is_registered(run.path(step))
    run.check_names(-1)
    return None


@overload
def prune(
    root: _Place, *, keep_last: int, keep_every: int | None = None, keep: Collection[int] = ()
) -> list[_Place]: ...
@overload
def prune(
    root: str, *, keep_last: int, keep_every: int | None = None, keep: Collection[int] = ()
) -> list[Path | str]: ...
def prune(
    root: str | Path | ByPointer, *, keep_last: int, keep_every: int | None = None, keep: Collection[int] = ()
) -> Sequence[Path | str | ByPointer]:
    """Delete complete checkpoints but the last ``keep_last``, multiples of ``keep_every`` and the steps of ``keep``.

    After a run has gone back to an older step, its newest save has not the highest step. In a folder, where the time
    of a save is known, that save stays, with a warning. ``discard_after`` deletes the steps above it.

    The oldest goes first. Each is renamed before it is deleted (at a URL the file that commits it goes first). So a
    kill leaves nothing under a step's name that opens. Files of dead saves are deleted too, after a time that
    [Note: dead or slow] in retention.py gives. Other incomplete folders stay. If a step is a symlink, only the link is
    deleted. In a folder, a step stays if a symlink in ``root`` leads to it (``best -> step-00000001``), unless that
    link is a step that is deleted itself.

    Returns:
        The deleted places.
    Raises:
        CheckpointError: no integers, ``keep_last < 0`` or ``keep_every < 1``; its child StorageError: a folder cannot
            be moved, a store does not answer.
    """
    if not is_integer(keep_last, 0) or not (keep_every is None or is_integer(keep_every, 1)):
        raise CheckpointError(f"keep_last is {keep_last!r}, keep_every {keep_every!r}; integers >= 0 and >= 1, or None")
    if not isinstance(keep, Collection) or not all(is_integer(step, 0) for step in keep):
        raise CheckpointError(f"keep is {keep!r}; it holds steps, integers >= 0")
    run = _run_at(root)
    found = [step for step in run.steps() if run.is_complete(step)]
    deleted = not_kept(found, keep_last, keep_every, keep)
    if keep_last and (newest := run.newest(found)) in deleted:
        warnings.warn(
            f"step {newest} was saved after step {found[-1]}, as by a run that went back; it stays. If steps above it "
            "are no longer wanted, call retention.discard_after(root, step) with the step that the run went back to",
            stacklevel=2,
        )
        deleted.remove(newest)
    linked = typed(partial(run.linked, set(deleted)))
    deleted = [step for step in deleted if step not in linked]
    for step in deleted:
        typed(partial(run.delete, step))
    last = found[max(0, len(found) - keep_last) :]
    typed(partial(run.delete_left, before=last[0] if last else 0))
    return [step_path(root, step) for step in deleted]


def not_kept(steps: Sequence[int], keep_last: int, keep_every: int | None, keep: Collection[int]) -> list[int]:
    """Of ascending ``steps`` those that no rule of ``prune`` keeps."""
    old = steps[: max(0, len(steps) - keep_last)]
    return [step for step in old if step not in keep and (keep_every is None or step % keep_every)]


@overload
def discard_after(root: _Place, step: int) -> list[_Place]: ...
@overload
def discard_after(root: str, step: int) -> list[Path | str]: ...
def discard_after(root: str | Path | ByPointer, step: int) -> Sequence[Path | str | ByPointer]:
    """Delete all complete checkpoints after ``step``: what a run calls that goes back to it, before it trains on.

    Without it ``latest`` is still the highest step, and the next restart goes on from there. The highest goes first, so
    a kill leaves the older ones. ``step`` stays. ``prune`` deletes unfinished folders.

    Returns:
        The deleted places.
    Raises:
        CheckpointError: there is no complete checkpoint of ``step``; as ``prune``.
    """
    kept = step_path(root, step)
    run = _run_at(root)
    found = run.steps()
    if step not in found or not run.is_complete(step):
        raise CheckpointError(f"{kept} is no complete checkpoint, so nothing after it is deleted; name one that is")
    deleted = [other for other in reversed(found) if other > step and run.is_complete(other)]
    for other in deleted:
        typed(partial(run.delete, other))
    return [step_path(root, other) for other in deleted]


def _run_at(root: str | Path | ByPointer) -> _LocalRun | _StoredRun:
    place = root if isinstance(root, ByPointer) else storage.located(root, "root")
    if isinstance(place, Path):
        return _LocalRun(place)
    return _StoredRun(UrlStore(place) if isinstance(place, str) else place)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _read(name: str) -> re.Match[str] | None:
    """Step, kind and save of a name; kind is None for a step itself, else what stands beside it."""
    match = _NAME.fullmatch(name)
    return match if match and _name(int(match["step"])).endswith(f"-{match['step']}") else None  # not with a zero more


class _LocalRun:
    def __init__(self, root: Path) -> None:
        self._root = root

    def steps(self) -> list[int]:
        """Of all that could be a checkpoint, ascending."""
        return sorted({int(found["step"]) for found, _ in self._named(None, "old")})

    def path(self, step: int) -> Path:
        return self._root / _name(step)

    def is_complete(self, step: int) -> bool:
        return serialization.check_is_distributed_checkpoint(self.path(step))

    def newest(self, steps: Sequence[int]) -> int | None:
        """The step that was saved last, if that is not the highest."""

        def saved_at(step: int) -> float:
            found = [0.0]
            for name in _COMMITS:
                with suppress(FileNotFoundError):
                    found.append((self.path(step) / name).stat().st_mtime)
            return max(found)

        times = {step: typed(partial(saved_at, step)) for step in steps}
        return max(times, key=lambda step: (times[step], step), default=None)

    def linked(self, deleted: Set[int]) -> set[int]:
        """Those of ``deleted`` that a symlink beside them leads to which is none of them."""
        steps = {_name(step): step for step in deleted}
        found: set[int] = set()
        ends = [path for path in self._root.iterdir() if path.name not in steps] if self._root.exists() else []
        while ends:
            link = ends.pop()
            if link.is_symlink():
                target = Path(os.path.normpath(link.parent / os.readlink(link)))
                step = steps.get(target.name)
                beside = step is not None and target.parent.exists() and target.parent.samefile(self._root)
                if step is not None and beside and step not in found:
                    found.add(step)
                    ends.append(self.path(step))  # it may be a link too
        return found

    def check_names(self, above: int) -> None:
        """MismatchError for a checkpoint of a higher step under another name."""
        names = typed(lambda: os.listdir(self._root) if self._root.exists() else [])
        for name in sorted(names):
            match = _SHORT.fullmatch(name)
            if match is None or _read(name) or int(match[1]) <= above:
                continue
            if serialization.check_is_distributed_checkpoint(self._root / name):
                raise MismatchError(
                    f"{self._root / name} is a checkpoint whose name has no eight digits, so that retention does not "
                    f"count it. Rename it to {_name(int(match[1]))}, and save to retention.step_path(root, step)"
                )

    def delete(self, step: int) -> None:
        siblings = [path for found, path in self._named("old") if int(found["step"]) == step]
        for folder in (self._root / _name(step), *siblings):
            if folder.is_symlink():
                folder.unlink()
            elif folder.exists():
                # A name of its own: what cannot be deleted now waits for the next prune.
                aside = folder.with_name(f".step.{step:08d}.gone-{secrets.token_hex(4)}")
                folder.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)

    def delete_left(self, *, before: int) -> None:
        """Delete what killed deletions left, and what dead saves did."""
        for _, path in self._named("gone"):
            shutil.rmtree(path, ignore_errors=True)
        cut_short = {found["step"] for found, _ in self._named("old")}
        by_save = defaultdict[tuple[str, str], list[Path]](list)
        for found, path in self._named("tmp", "job"):
            by_save[found["step"], found["save"]].append(path)
        for (step, save_id), folders in by_save.items():
            if step in cut_short and not (self._root / _name(int(step))).exists():
                continue  # what opens under the step's name may be the folder that was to be moved there
            if _are_left(folders, save_id, _EARLIER_S if int(step) < before else _ANY_S):
                for folder in folders:
                    storage.discard(folder)

    def _named(self, *kinds: str | None) -> list[tuple[re.Match[str], Path]]:
        names = typed(lambda: os.listdir(self._root) if self._root.exists() else [])
        return [(found, self._root / name) for name in names if (found := _read(name)) and found["kind"] in kinds]


def _are_left(folders: Sequence[Path], save_id: str, longest_s: float) -> bool:
    """Whether the folders of a save are of a dead one. See [Note: dead or slow]."""
    if save_id in saves_of_this_process():  # asked first: while it goes on no file of it is looked at
        return False
    still_s = time.time() - max(map(_changed_at, folders))
    if still_s < _DEAD_S:
        return False
    lives = {status_and_heartbeats.liveness_at(folder) for folder in folders}
    return RankState.LIVES not in lives and (RankState.DEAD in lives or still_s > longest_s)


def _changed_at(folder: Path) -> float:
    """When anything in a folder was changed last, in seconds of the clock; inf if the system does not let us see."""

    def look(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    found = [0.0]
    try:
        for top, folders, files in os.walk(folder, onerror=look):
            for name in (".", *folders, *files):
                with suppress(FileNotFoundError):  # of a save that goes on
                    found.append(os.stat(os.path.join(top, name)).st_mtime)
    except OSError:
        return inf
    return max(found)


class _StoredRun:
    """[Note: unfinished in a store] A save that died, and a deletion that was cut short, have the step's own name
    there, and no ``metadata.json``: what is left of both is told by that. What stands above a checkpoint that is
    deleted may be a save that goes on, and waits for the next time. See [Note: dead or slow]."""

    def __init__(self, store: ByPointer) -> None:
        self._store = store
        self._deleted = set[int]()

    def steps(self) -> list[int]:
        return sorted(self._by_step())

    def is_complete(self, step: int) -> bool:
        return local_view.is_complete(self._store.child(_name(step)))

    def newest(self, steps: Sequence[int]) -> int | None:
        """No store tells when a file was written."""
        return None

    def linked(self, deleted: Set[int]) -> set[int]:
        """A store has no links."""
        return set()

    def check_names(self, above: int) -> None:
        """Other names are not looked at: each costs a request."""

    def delete(self, step: int) -> None:
        self._store.child(_name(step)).clear()
        self._deleted.add(step)

    def delete_left(self, *, before: int) -> None:
        for step, names in sorted(self._by_step().items()):
            is_left = (
                not by_pointer.visible(names) and "metadata.json" not in names and all(map(is_checkpoint_file, names))
            )
            is_own = not saves_of_this_process().isdisjoint(
                by_pointer.rank_of(folder)[1] for folder in by_pointer.folders(names)
            )
            if step in self._deleted or not is_left or is_own or self.is_complete(step):
                continue
            place = self._store.child(_name(step))
            if not by_pointer.is_of_others(place) and (step < before or _is_still(place)):
                place.clear_unfinished()

    def _by_step(self) -> dict[int, set[str]]:
        """The names of the files in the folder of each step."""
        by_step = defaultdict[int, set[str]](set)
        for name in self._store.list_files():
            folder, slash, rest = name.partition("/")
            if slash and (found := _read(folder)) and found["kind"] is None:
                by_step[int(found["step"])].add(rest)
        return by_step


def _is_still(place: ByPointer) -> bool:
    """Whether a place is as a prune has seen it a day ago; if none has, a mark tells the next one of this look."""
    marks, now = place.marks(), int(time.time())
    seen = sorted(item for item in marks.items() if not item[0].startswith(_SEEN))
    look = f"{_SEEN}{crc32(repr(seen).encode()):08x}-"
    since = [int(at) for name in marks if name.startswith(look) and (at := name.removeprefix(look)).isdigit()]
    for name in marks:
        if name.startswith(_SEEN) and not (seen and name.startswith(look)):
            place.delete(name)
    if seen and not since:
        place.replace(f"{look}{now}", b"")
    return bool(seen and since) and now - min(since) > _ANY_S
