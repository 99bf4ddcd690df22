"""Control of a background save: how trainers and workers of several hosts agree without a group.

    worker's share --> record --> first rank's worker --> outcome (this file) --> every rank

A worker cannot use the trainer's group: its messages would meet the trainer's own, and both would hang. So they meet
in a hidden folder ``.<name>.job-<save_id>`` beside the checkpoint: each rank's worker puts a record there, the first
rank's worker waits for all, commits, and puts the outcome. Files appear by rename, whole. Each is signed with a key
that travelled over the group, so that nothing is unpickled that a rank of this very save did not write.

[Note: who is dead] Each trainer holds a POSIX lock on its ``alive-<rank>``, which the system frees when it dies, and
writes a counter there each second. A rank whose lock is free is dead. Where locks do not work between the hosts
(tried before each save) its counter must stand still for ``STALE_S`` besides. A trainer speaks for
its worker: it puts the record or the outcome that a dead worker cannot put.

[Note: what moves] A deadline is of standing still: timeout_s since anything was last seen to move. A worker counts what
it writes in its gauge, which its trainer sees, and the trainer shows the count beside its sign of life. Until a worker
counts, its processor time is the count: it may take a minute to import torch on a busy machine. The first
rank's worker counts what it sees move in the ranks that it waits for, so that its own count moves as long as the
save does: that one number is what all others look at.

[Note: who gives up when] Before timeout_s of standing still, in steps of 5 s or a quarter of it: two steps
before, the first rank's worker stops waiting for a record; one step before, a trainer kills its own worker if that has
not put its record, or is the first rank's; then a worker stops waiting for the outcome, and at the end a trainer
waits for its worker no longer. In this order the first rank's verdict reaches all while they still listen. A first
rank's worker whose trainer has been silent as long commits no more.

[Note: one verdict] Whoever was stopped may go on at any later instant, so no order of waits keeps a first rank from
committing what another has just given up. Before it commits, and before another rank gives up, each asks for the
verdict, a symbolic link: the system lets one of them make it, and that one holds for all.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.background.arena import Place
from sixfold.dist_ckpt.background.channel import Gauge
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError, typed
from sixfold.dist_ckpt.files import integrity
from sixfold.dist_ckpt.ranks.exchange import Outcome
from sixfold.dist_ckpt.road import saving
from sixfold.dist_ckpt.stores import local as storage
from sixfold.dist_ckpt.stores.store import overtaken

COMMIT, GIVE_UP = "commit", "give-up"  # verdicts
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS, errno.EINVAL, errno.EACCES}
_BEAT_S = 1.0
STALE_S = 8.0
# Steps before the end, see [Note: who gives up when].
RECORDS, OWN_WORKER, OUTCOME, UNKNOWN, END = 2.0, 1.0, 0.25, 0.1, 0.0
_STEP_S = 5.0
_ACKNOWLEDGED_S = 2.0
_ORPHANED_S = 4.0  # a worker that lives ends with its trainer and takes the folder away; one that does not is dead too
_SHORTEST_S, _LONGEST_S = 0.001, 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank's share of one save, as its worker gets it.

    ``content`` has records without data; ``places`` says where the data of record i lies in the arena of
    ``arena_bytes``.
    """

    rank: int
    ranks: int
    content: saving.Content
    ticket: saving.Ticket
    check_finite: bool
    places: dict[int, Place]
    arena_bytes: int
    key: bytes
    locks_work: bool
    timeout_s: float
    stale_s: float

    def patience_s(self, steps: float) -> float:
        """Seconds of standing still that a wait bears. See [Note: who gives up when]."""
        return self.timeout_s - steps * min(_STEP_S, self.timeout_s / 4)

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life."""
        return min(_BEAT_S, self.timeout_s / 20)


class Stillness:
    """For how long a value has been what it is, as far as this process has looked."""

    def __init__(self) -> None:
        self._last: object = self
        self._since = 0.0

    def of(self, value: object) -> float:
        """Seconds; 0.0 if the value has changed since the last look."""
        if value != self._last:
            self._last, self._since = value, time.monotonic()
        return time.monotonic() - self._since


class ControlFolder:
    """The files of one save's control folder.

    Args:
        target: the checkpoint folder. save_id: of the save. key: signs each file.
    """

    def __init__(self, target: Path, save_id: str, key: bytes) -> None:
        self.path = target.with_name(f".{target.name}.job-{save_id}")
        self._key = key

    def put(self, name: str, outcome: Outcome) -> None:
        """Make file ``name`` appear, whole and signed."""
        data = outcome.encode()
        hidden = self.path / f"{name}.part-{os.getpid()}"
        hidden.write_bytes(hmac.digest(self._key, data, "sha256") + data)
        hidden.rename(self.path / name)

    def get(self, name: str) -> Outcome | None:
        """What was put under ``name``; None if nothing was.

        Raises:
            CheckpointError: somebody else wrote the file.
        """
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        if not hmac.compare_digest(hmac.digest(self._key, data[32:], "sha256"), data[:32]):
            raise CheckpointError(f"{self.path / name} was not written by this save; nothing of it was read")
        return Outcome.decode(data[32:])

    def verdict(self, wanted: str) -> str:
        """The one that holds for this save: ``wanted``, or what was made before. See [Note: one verdict].

        Raises:
            FileNotFoundError: the folder is gone.
        """
        link = self.path / "verdict"
        with suppress(FileExistsError):
            try:
                link.symlink_to(wanted)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return wanted  # no links on this file system: the order of the waits has to do
        return os.readlink(link)

    def names(self) -> set[str] | None:
        """The files; None if the folder is gone. Listing asks the server where a look-up may be cached (NFS)."""
        try:
            return set(os.listdir(self.path))
        except FileNotFoundError:
            return None


class Alive:
    """A trainer's sign of life in a control folder: a lock and a counter, until ``close``."""

    def __init__(self, folder: ControlFolder, rank: int) -> None:
        self._path = folder.path / f"alive-{rank}"
        self._file = self._path.open("x+")
        with suppress(OSError):  # no locks on this file system: the counter will do
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._beats = 0

    def beat(self, moves: int) -> None:
        """Count on, and show what the worker has counted. The file is never opened a second time by this process:
        that would free the lock."""
        self._beats += 1
        with suppress(OSError):
            os.pwrite(self._file.fileno(), f"{self._beats:>12}{moves:>20}".encode(), 0)
            os.utime(self._file.fileno())  # sent at once, also where data waits in a client's cache

    def close(self) -> None:
        """Acknowledge the outcome: the sign goes."""
        with suppress(OSError):
            self._path.unlink()
        self._file.close()

    def remove_folder(self) -> None:
        """Remove the control folder of a save that comes to nothing in the call."""
        shutil.rmtree(self._path.parent, ignore_errors=True)


def is_locked(folder: ControlFolder, rank: int) -> bool:
    """Whether another process holds the lock of ``rank``, as far as this host can tell."""
    return storage.is_held(folder.path / f"alive-{rank}")


@dataclass(slots=True)
class Watch:
    """Which ranks are dead, asked again and again; see [Note: who is dead]."""

    folder: ControlFolder
    job: Job
    _seen: dict[int, tuple[Any, float]] = field(default_factory=dict)
    _moves: dict[int, tuple[bytes, float]] = field(default_factory=dict)  # and when they were read

    def moves(self, rank: int) -> bytes:
        """What the worker of a rank has counted, as its trainer shows it; read at most once a beat."""
        last, at = self._moves.get(rank, (b"", 0.0))
        if time.monotonic() - at < self.job.beat_s:
            return last
        with suppress(OSError):
            last = (self.folder.path / f"alive-{rank}").read_bytes()[12:] or last
        self._moves[rank] = last, time.monotonic()
        return last

    def dead(self, ranks: set[int], names: set[str]) -> list[int]:
        """Those of ``ranks`` that are dead; a rank that has taken its sign away has acknowledged and is not."""
        return [r for r in sorted(ranks) if f"alive-{r}" in names and self._is_dead(r)]

    def _is_dead(self, rank: int) -> bool:
        if is_locked(self.folder, rank):
            return False
        if self.job.locks_work:
            return (self.folder.path / f"alive-{rank}").exists()  # else it went between listing and looking
        try:
            status = (self.folder.path / f"alive-{rank}").stat()
        except OSError:
            return False
        sign, now = (status.st_mtime_ns, status.st_size), time.monotonic()
        last, since = self._seen.get(rank, (None, now))
        if sign != last:
            self._seen[rank] = sign, now
            return False
        return now - since > self.job.stale_s


def control_of(job: Job) -> ControlFolder:
    """The control folder of a job."""
    return ControlFolder(Path(job.ticket.target), job.ticket.save_id, job.key)


def decide(job: Job, gauge: Gauge, has_trainer: Callable[[], bool]) -> Outcome:
    """What the first rank's worker does when its own record is there: wait for all, commit, tell.

    Without a trainer the worker is ending, and removes what was written: that is then the reason, not what it met.
    """
    folder = control_of(job)

    def gathered() -> list[Any]:
        shares = _gather(job, folder, gauge)
        if gauge.silent_s > job.patience_s(OWN_WORKER) or folder.verdict(COMMIT) != COMMIT:
            raise LostPeerError(f"rank 0 was stopped during a background save; {_ADVICE}")
        return shares

    outcome = Outcome.of(lambda: typed(gathered), "the first rank's worker")
    if outcome.error is None:
        outcome = commit(job, outcome.value)
    if outcome.error is not None and not has_trainer():
        outcome = Outcome(error=LostPeerError(f"rank 0 died during a background save; {_ADVICE}"))
    return tell(job, folder, outcome)


def commit(job: Job, written: list[Any]) -> Outcome:
    """Move the save into place."""
    return Outcome.of(lambda: typed(lambda: saving.commit(written, job.content, job.ticket)), "rank 0")


def tell(job: Job, folder: ControlFolder, outcome: Outcome) -> Outcome:
    """Put the outcome for the other ranks; after an error the staging folder goes first, which also frees the disk."""
    if outcome.error is not None:
        storage.discard(Path(job.ticket.staging))
    with suppress(FileNotFoundError):  # the others then look at the target
        folder.put("outcome", outcome)
    return outcome


def _gather(job: Job, folder: ControlFolder, gauge: Gauge) -> list[Any]:
    """The shares of all ranks, in rank order."""
    shares: dict[int, Any] = {}
    watch, pause_s = Watch(folder, job), _SHORTEST_S
    still = [Stillness() for _ in range(job.ranks)]
    last: dict[int, bytes] = {}
    while True:
        names = folder.names()
        if names is None:
            raise overtaken(Path(job.ticket.target))
        for rank in set(range(job.ranks)) - set(shares):
            if f"rank-{rank}" in names and (record := folder.get(f"rank-{rank}")) is not None:
                if record.error is not None:
                    raise record.error
                shares[rank] = record.value
                gauge.add(0)
        missing = set(range(job.ranks)) - set(shares)
        if not missing:
            return [shares[rank] for rank in range(job.ranks)]
        for rank in watch.dead(missing - {0}, names):
            if f"rank-{rank}" not in (folder.names() or ()):  # its record may have come just before its end
                raise LostPeerError(f"rank {rank} of {job.ranks} died during a background save; {_ADVICE}")
        shown = {rank: watch.moves(rank) for rank in sorted(missing)}
        if shown != last:
            gauge.add(0)
            last = shown
        if late := [rank for rank in shown if still[rank].of(shown[rank]) > job.patience_s(RECORDS)]:
            raise LostPeerError(
                f"ranks {late} of {job.ranks} have written nothing within timeout_s={job.timeout_s:g}: stopped, or "
                f"their disk hangs; {_ADVICE}"
            )
        time.sleep(pause_s)
        pause_s = min(_LONGEST_S, 2 * pause_s)


_ADVICE = "the folder holds the older checkpoint, if there was one"


def await_outcome(job: Job, gauge: Gauge) -> Outcome:
    """What ranks other than the first do: wait for the outcome, or find out without it."""
    folder = control_of(job)
    watch, pause_s, still, gone = Watch(folder, job), _SHORTEST_S, Stillness(), Stillness()
    seen, given_up = b"", None
    while True:
        names = folder.names()
        if seen != (seen := watch.moves(0)):
            gauge.add(0)
        dead = names is not None and bool(watch.dead({0}, names))
        dead_s = gone.of(dead) if dead else 0.0
        over = names is None or dead or still.of(seen) > job.patience_s(OUTCOME)
        try:
            outcome = folder.get("outcome")
        except CheckpointError as error:
            return Outcome(error=error)
        if outcome is not None:
            return outcome
        if over and given_up is None:
            given_up = names is None or _given_up(folder)
        if over and (names is None or given_up or is_committed(job)):
            return settle(job, "rank 0 died, or gave no outcome in time")
        if over and (dead_s > _ORPHANED_S or still.of(seen) > job.patience_s(UNKNOWN)):
            return settle(job, "rank 0 stopped while it moved the checkpoint into place", "it may still do so")
        time.sleep(pause_s)
        pause_s = min(_LONGEST_S, 2 * pause_s)


def _given_up(folder: ControlFolder) -> bool:
    """Whether nobody commits any more. Asking decides it, unless the first rank was faster."""
    try:
        return folder.verdict(GIVE_UP) == GIVE_UP
    except FileNotFoundError:
        return True  # it has ended


def settle(job: Job, reason: str, advice: str = _ADVICE) -> Outcome:
    """The outcome of a save whose first rank can commit no more: what the target says."""
    if is_committed(job):
        return Outcome()
    return Outcome(
        error=LostPeerError(
            f"{reason} (background save to {job.ticket.target}, timeout_s={job.timeout_s:g}); {advice}. "
            "The next save starts a fresh worker"
        )
    )


def is_committed(job: Job) -> bool:
    """Whether the target is this very save."""
    path = Path(job.ticket.target) / integrity.FILE_NAME
    try:
        return integrity.decode(path, path.read_bytes()).save_id == job.ticket.save_id
    except (OSError, CheckpointError):
        return False


def remove(job: Job, folder: ControlFolder) -> None:
    """The first rank's last act: when all have acknowledged, or soon, the folder goes."""
    watch, until = Watch(folder, job), time.monotonic() + _ACKNOWLEDGED_S
    while names := folder.names():
        waiting = {rank for rank in range(1, job.ranks) if f"alive-{rank}" in names}
        if waiting <= set(watch.dead(waiting, names)) or time.monotonic() > until:
            break
        time.sleep(_SHORTEST_S)
    shutil.rmtree(folder.path, ignore_errors=True)
