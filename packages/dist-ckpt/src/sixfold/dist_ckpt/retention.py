"""Retention: which checkpoints a run has, which is the latest, which may go.

    root folder or URL --> checkpoints, latest (this file)
    root folder or URL + rule --> prune (this file) --> deleted checkpoints

A run's checkpoints are ``root/step-%08d``, or what ``name`` makes of the step: ``"checkpoint-{step}"``,
``"iter_{step:07d}"``, or a function (storage/step_names.py). Folders of other names are nobody's steps. Nothing here
needs a process group; call it on one rank. For a URL the places are text, for a local root (``file://`` too) they are
Paths, for a store that derives from ``ByPointer`` stores.

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

import logging
import operator
import os
import secrets
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar, overload

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.background import status_and_heartbeats
from sixfold.dist_ckpt.background.saver import saves_of_this_process
from sixfold.dist_ckpt.background.status_and_heartbeats import RankState
from sixfold.dist_ckpt.checkpoint.opening import open_checkpoint
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, MismatchError, typed
from sixfold.dist_ckpt.formats.integrity import FILE_NAME, crc32
from sixfold.dist_ckpt.mirror import local_view
from sixfold.dist_ckpt.storage import by_pointer
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.step_names import NAMING, Naming, Read, StepNames
from sixfold.dist_ckpt.storage.store import is_checkpoint_file
from sixfold.dist_ckpt.storage.url import UrlStore

# See [Note: dead or slow].
_DEAD_S, _EARLIER_S, _ANY_S = 60.0, 3600.0, 86400.0
_SEEN = f"{by_pointer.LOOKS}seen-"  # goes with the next commit there
_LOG = logging.getLogger(__name__)
_COMMITS = ("metadata.json", ".metadata")
_Place = TypeVar("_Place", Path, ByPointer)


@overload
def step_path(root: _Place, step: int, *, name: Naming = NAMING) -> _Place: ...
@overload
def step_path(root: str, step: int, *, name: Naming = NAMING) -> Path | str: ...
def step_path(root: str | Path | ByPointer, step: int, *, name: Naming = NAMING) -> Path | str | ByPointer:
    """``root/step-%08d``, the place of a step; relative if ``root`` is.

    Args:
        name: what its folder is named, if not so; the other functions then take the same.
    Raises:
        CheckpointError: ``step`` is no integer >= 0, ``root`` no place of checkpoints, or no step can be read from
            what ``name`` makes.
    """
    place = root if isinstance(root, ByPointer) else storage.located(root, "root")
    if not is_integer(step, 0):
        raise CheckpointError(f"step is {step!r}; it is an integer >= 0")
    folder = StepNames(name).of(operator.index(step))
    return place.child(folder) if isinstance(place, ByPointer) else storage.child(place, folder)


def is_integer(value: Any, least: int) -> bool:
    """Whether this is an integer of any kind, and no truth value, of at least so much."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


@overload
def checkpoints(root: _Place, *, after: int = -1, name: Naming = NAMING) -> list[tuple[int, _Place]]: ...
@overload
def checkpoints(root: str, *, after: int = -1, name: Naming = NAMING) -> list[tuple[int, Path | str]]: ...
def checkpoints(
    root: str | Path | ByPointer, *, after: int = -1, name: Naming = NAMING
) -> Sequence[tuple[int, Path | str | ByPointer]]:
    """Complete checkpoints as (step, place), ascending; metadata and sizes are looked at, not digests.

    Args:
        after: those of later steps alone; the others are not opened.
    Raises:
        StorageError: the system or the store does not let us see.
        MismatchError: two folders stand for one step, such as ``step-00000007`` and ``step-7``; so in all of these.
    """
    run = _run_at(root, name)
    return [(step, step_path(root, step, name=name)) for step in run.steps() if step > after and run.is_complete(step)]


@overload
def latest(root: _Place, *, name: Naming = NAMING) -> _Place | None: ...
@overload
def latest(root: str, *, name: Naming = NAMING) -> Path | str | None: ...
def latest(root: str | Path | ByPointer, *, name: Naming = NAMING) -> Path | str | ByPointer | None:
    """The complete checkpoint of the highest step; None if there is none, also where there is no such root.

    Raises:
        StorageError: the system or the store does not let us see; a run that took that for a None would begin anew.
        MismatchError: a step above it is of a strategy that is not registered here: nobody knows whether it is whole.
            Or a checkpoint above it has another name, such as ``step-7``: a run that did not see it would begin anew.
        CorruptError: there is no whole one, and one was.
    """
    run = _run_at(root, name)
    for step in reversed(run.steps()):
        if run.is_complete(step):
            run.check_names(step)
            return step_path(root, step, name=name)
        _LOG.warning("%s: step %d is no whole checkpoint, and is passed over", root, step)
        if isinstance(run, _LocalRun):
            serialization.check_is_registered(run.path(step))
    run.check_names(-1)
    if (damaged := next(filter(run.was_committed, reversed(run.steps())), None)) is not None:
        raise CorruptError(
            f"{root} has no whole checkpoint, and step {damaged} was one: files of it are missing or damaged, and "
            "`sixfold-ckpt verify` says which. Bring them back; or move the folder away, and the run begins anew"
        )
    if other := next(filter(run.is_checkpoint, run.others()), None):
        warnings.warn(
            f"{root} has no checkpoint of a name that {run.names.naming!r} gives, but "
            f"{'the folder itself' if other == '.' else other} is one. If it is of this run, give the run's folder and "
            "its names, such as name='checkpoint-{step}'",
            stacklevel=2,
        )
    return None


@overload
def prune(
    root: _Place,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep: Collection[int] = (),
    name: Naming = NAMING,
) -> list[_Place]: ...
@overload
def prune(
    root: str, *, keep_last: int, keep_every: int | None = None, keep: Collection[int] = (), name: Naming = NAMING
) -> list[Path | str]: ...
def prune(
    root: str | Path | ByPointer,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep: Collection[int] = (),
    name: Naming = NAMING,
) -> Sequence[Path | str | ByPointer]:
    """Delete complete checkpoints but the last ``keep_last``, multiples of ``keep_every`` and the steps of ``keep``.

    After a run has gone back to an older step, its newest save has not the highest step. In a folder, where the time
    of a save is known, that save stays, with a warning. ``discard_after`` deletes the steps above it.

    The oldest goes first. Each is renamed before it is deleted (at a URL the file that commits it goes first). So a
    kill leaves nothing under a step's name that opens. Files of dead saves are deleted too, after a time that
    [Note: dead or slow] in retention.py gives. Other incomplete folders stay, and so does what torch DCP or
    megatron-core wrote under a name of the run. If a step is a symlink, only the link is deleted. In a folder, a step
    stays if a symlink in ``root`` leads to it (``best -> step-00000001``), unless that link is a step that is deleted
    itself. The log (level INFO) says which steps go, before they do.

    Returns:
        The deleted places.
    Raises:
        CheckpointError: no integers, ``keep_last < 0`` or ``keep_every < 1``; its child StorageError: a folder cannot
            be moved, a store does not answer.
    """
    run = _run_at(root, name)
    found, deleted = _found_and_prunable(run, keep_last, keep_every, keep)
    if deleted:
        _LOG.info("%s: removing %s", root, named(deleted))
    for step in deleted:
        typed(partial(run.delete, step))
    last = found[max(0, len(found) - keep_last) :]
    typed(partial(run.delete_left, before=last[0] if last else 0))
    return [step_path(root, step, name=name) for step in deleted]


def prunable(
    root: str | Path | ByPointer,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep: Collection[int] = (),
    name: Naming = NAMING,
) -> list[int]:
    """The steps that ``prune`` with these arguments would delete; nothing is deleted. Errors: as of ``prune``."""
    return _found_and_prunable(_run_at(root, name), keep_last, keep_every, keep)[1]


def _found_and_prunable(
    run: _LocalRun | _StoredRun, keep_last: int, keep_every: int | None, keep: Collection[int]
) -> tuple[list[int], list[int]]:
    """Ascending steps of complete checkpoints, and those of them that no rule of ``prune`` keeps."""
    if not is_integer(keep_last, 0) or not (keep_every is None or is_integer(keep_every, 1)):
        raise CheckpointError(f"keep_last is {keep_last!r}, keep_every {keep_every!r}; integers >= 0 and >= 1, or None")
    if not isinstance(keep, Collection) or not all(is_integer(step, 0) for step in keep):
        raise CheckpointError(f"keep is {keep!r}; it holds steps, integers >= 0")
    found = [step for step in run.steps() if run.is_complete(step)]
    old = found[: max(0, len(found) - keep_last)]
    goes = [step for step in old if step not in keep and (keep_every is None or step % keep_every)]
    if others := [step for step in goes if run.is_of_others(step)]:
        _LOG.warning("%s: %s stays: another library wrote it", run.place, named(others))
        goes = [step for step in goes if step not in others]
    if keep_last and (newest := run.newest(found)) in goes:
        warnings.warn(
            f"step {newest} was saved after step {found[-1]}, as by a run that went back; it stays. If steps above it "
            "are no longer wanted, call retention.discard_after(root, step) with the step that the run went back to",
            stacklevel=3,
        )
        goes.remove(newest)
    linked = typed(partial(run.linked, set(goes)))
    return found, [step for step in goes if step not in linked]


def named(steps: Sequence[int]) -> str:
    """Steps as a sentence has them: "steps 1, 2"."""
    if not steps:
        return "none"
    shown = ", ".join(map(str, steps[:8])) + (f", ... ({len(steps)})" if len(steps) > 8 else "")
    return f"step {shown}" if len(steps) == 1 else f"steps {shown}"


@overload
def discard_after(root: _Place, step: int, *, name: Naming = NAMING) -> list[_Place]: ...
@overload
def discard_after(root: str, step: int, *, name: Naming = NAMING) -> list[Path | str]: ...
def discard_after(
    root: str | Path | ByPointer, step: int, *, name: Naming = NAMING
) -> Sequence[Path | str | ByPointer]:
    """Delete all complete checkpoints after ``step``: what a run calls that goes back to it, before it trains on.

    Without it ``latest`` is still the highest step, and the next restart goes on from there. The highest goes first, so
    a kill leaves the older ones. ``step`` stays. ``prune`` deletes unfinished folders.

    Returns:
        The deleted places.
    Raises:
        CheckpointError: there is no complete checkpoint of ``step``; as ``prune``.
    """
    kept = step_path(root, step, name=name)
    run = _run_at(root, name)
    found = run.steps()
    if step not in found or not run.is_complete(step):
        raise CheckpointError(f"{kept} is no complete checkpoint, so nothing after it is deleted; name one that is")
    deleted = [other for other in reversed(found) if other > step and run.is_complete(other)]
    if others := [other for other in deleted if run.is_of_others(other)]:
        raise CheckpointError(
            f"{run.place}: {named(sorted(others))} after step {step} was written by another library, and is not "
            "deleted here. Move it away first"
        )
    if deleted:
        _LOG.info("%s: going back to step %d, removing %s", root, step, named(deleted))
    for other in deleted:
        typed(partial(run.delete, other))
    return [step_path(root, other, name=name) for other in deleted]


def _run_at(root: str | Path | ByPointer, name: Naming) -> _LocalRun | _StoredRun:
    place, names = root if isinstance(root, ByPointer) else storage.located(root, "root"), StepNames(name)
    if isinstance(place, Path):
        # ``missing/../run`` is ``run`` for a save, and nothing for the system.
        return _LocalRun(typed(lambda: place if place.exists() else storage.resolved(place)), names)
    return _StoredRun(UrlStore(place) if isinstance(place, str) else place, names)


def _check_once(root: object, names: StepNames, entries: Collection[str], is_other: Callable[[str, int], bool]) -> None:
    """MismatchError for two folders of one step, of which one has other zeros in its name."""
    steps = {found.step for found in map(names.read, entries) if found is not None and found.kind is None}
    for entry in sorted(entries):
        if (step := names.nearly(entry)) is not None and step in steps and is_other(entry, step):
            raise MismatchError(
                f"{root} has step {step} twice, in {names.of(step)} and in {entry}, and which of them is the run's is "
                f"not known. Move one of them to another folder than {root}"
            )


class _LocalRun:
    def __init__(self, root: Path, names: StepNames) -> None:
        self._root, self.names = root, names

    def steps(self) -> list[int]:
        """Of all that could be a checkpoint, ascending."""
        entries = self._entries()
        _check_once(self._root, self.names, entries, self._is_other)
        return sorted({found.step for found, _ in self._named(None, "old")})

    def path(self, step: int) -> Path:
        return self._root / self.names.of(step)

    def is_complete(self, step: int) -> bool:
        return self._is_of_a_run(self.path(step))

    def was_committed(self, step: int) -> bool:
        """Whether this package saved it whole once: a folder gets its name when it is."""
        return (self.path(step) / FILE_NAME).is_file()

    @property
    def place(self) -> str:
        return str(self._root)

    def is_of_others(self, step: int) -> bool:
        """Whether torch DCP or megatron-core wrote it: what this package writes has digests."""
        with suppress(MismatchError):  # of a strategy
            checkpoint = open_checkpoint(self.path(step), verify="off")
            return checkpoint.integrity is None and checkpoint.manifest.decoder is None
        return False

    def is_checkpoint(self, folder: str) -> bool:
        """Whether one whose name says nothing is a checkpoint; False too where the system does not let us see."""
        with suppress(CheckpointError):
            return self._is_of_a_run(self._root / folder)
        return False

    def _is_of_a_run(self, folder: Path) -> bool:
        """Whether a save has committed it: a folder of Hugging Face opens as well, and holds what others need."""
        is_foreign = folder.is_dir() and not any((folder / name).exists() for name in _COMMITS)
        return not is_foreign and serialization.check_is_distributed_checkpoint(folder)

    def others(self) -> list[str]:
        """The root itself, and folders in it that have no name of a step."""
        return [".", *(entry for entry in sorted(self._entries()) if entry[0] != "." and not self.names.read(entry))]

    def _is_other(self, entry: str, step: int) -> bool:
        """Whether this is a checkpoint, and no link to that of the step."""
        folder, own = self._root / entry, self.path(step)
        return self.is_checkpoint(entry) and not (own.exists() and folder.samefile(own))

    def _entries(self) -> list[str]:
        return typed(lambda: os.listdir(self._root) if self._root.exists() else [])

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
        steps = {self.names.of(step): step for step in deleted}
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
        for entry in sorted(self._entries()):
            step = self.names.nearly(entry)
            if step is not None and step > above and self._is_of_a_run(self._root / entry):
                raise MismatchError(
                    f"{self._root / entry} is a checkpoint whose name has other zeros than {self.names.of(step)}, so "
                    f"that retention does not count it. Rename it to {self.names.of(step)}; or give name= if all "
                    "checkpoints of the run are named like it, such as name='step-{step}'"
                )

    def delete(self, step: int) -> None:
        siblings = [path for found, path in self._named("old") if found.step == step]
        for folder in (self.path(step), *siblings):
            if folder.is_symlink():
                folder.unlink()
            elif folder.exists():
                # A name of its own: what cannot be deleted now waits for the next prune.
                aside = folder.with_name(self.names.aside(step, secrets.token_hex(4)))
                folder.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)

    def delete_left(self, *, before: int) -> None:
        """Delete what killed deletions left, and what dead saves did."""
        for _, path in self._named("gone"):
            shutil.rmtree(path, ignore_errors=True)
        cut_short = {found.step for found, _ in self._named("old")}
        by_save = defaultdict[tuple[int, str], list[Path]](list)
        for found, path in self._named("tmp", "job"):
            by_save[found.step, found.save].append(path)
        for (step, save_id), folders in by_save.items():
            if step in cut_short and not self.path(step).exists():
                continue  # what opens under the step's name may be the folder that was to be moved there
            if _are_left(folders, save_id, _EARLIER_S if step < before else _ANY_S):
                for folder in folders:
                    storage.discard(folder)

    def _named(self, *kinds: str | None) -> list[tuple[Read, Path]]:
        read = ((self.names.read(entry), self._root / entry) for entry in self._entries())
        return [(found, path) for found, path in read if found is not None and found.kind in kinds]


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

    def __init__(self, store: ByPointer, names: StepNames) -> None:
        self._store, self.names = store, names
        self._listed: Mapping[str, set[str]] = {}  # what was found last, by folder
        self._deleted = set[int]()

    def steps(self) -> list[int]:
        found = self._by_step()
        _check_once(self._store.name, self.names, self._listed, lambda folder, _: self.is_checkpoint(folder))
        return sorted(found)

    def is_complete(self, step: int) -> bool:
        return self.is_checkpoint(self.names.of(step))

    def was_committed(self, step: int) -> bool:
        """Whether the object that is written last is there."""
        return any(name.rpartition("/")[2] in _COMMITS for name in self._listed.get(self.names.of(step), ()))

    @property
    def place(self) -> str:
        return self._store.name

    def is_of_others(self, step: int) -> bool:
        """Whether torch DCP or megatron-core wrote it: what this package writes has digests."""
        names = self._listed.get(self.names.of(step), ())
        return not any(name.rpartition("/")[2] == FILE_NAME for name in names)

    def is_checkpoint(self, folder: str) -> bool:
        names = self._listed.get(folder, ())
        is_committed = any(name.rpartition("/")[2] in _COMMITS for name in names)
        return is_committed and local_view.is_complete(self._store.child(folder))

    def others(self) -> list[str]:
        """Folders that have no name of a step."""
        return [folder for folder in sorted(self._listed) if folder[0] != "." and not self.names.read(folder)]

    def newest(self, steps: Sequence[int]) -> int | None:
        """No store tells when a file was written."""
        return None

    def linked(self, deleted: Set[int]) -> set[int]:
        """A store has no links."""
        return set()

    def check_names(self, above: int) -> None:
        """Other names are not looked at: each costs a request."""

    def delete(self, step: int) -> None:
        self._store.child(self.names.of(step)).clear()
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
            place = self._store.child(self.names.of(step))
            if not by_pointer.is_of_others(place) and (step < before or _is_still(place)):
                place.clear_unfinished()

    def _by_step(self) -> dict[int, set[str]]:
        """The names of the files in the folder of each step, as they are now."""
        listed = defaultdict[str, set[str]](set)
        for name in self._store.list_files():
            folder, slash, rest = name.partition("/")
            if slash and folder:
                listed[folder].add(rest)
        self._listed = dict(listed)
        read = ((self.names.read(folder), names) for folder, names in listed.items())
        return {found.step: names for found, names in read if found is not None and found.kind is None}


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
