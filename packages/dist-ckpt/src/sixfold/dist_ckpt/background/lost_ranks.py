"""What ranks of a background save make of lost ones: how trainers and workers of several hosts agree without a group.

    worker's share --> record --> first rank's worker --> outcome (this file) --> every rank

A worker cannot use the trainer's group: its messages would meet the trainer's own, and both would hang. So workers
and trainers write into a shared status (status_and_heartbeats.py). Each rank's worker puts a record there. The first
rank's worker waits for all records, commits, and puts the outcome. A trainer reports its dead worker.

[Note: quiet waiting] A process that waits looks once a turn of ``look_s``, at names that it knows: at the outcome and
at one other rank. The first rank also looks at the next record that it needs. No rank looks at all others. Each looks
at the one before it, and now and then at the first one. It skips a rank that is lost but has put its record. Of any
ranks that die together the last one has a living rank behind it, which sees that and ends the save for all. What
happens on this host wakes a watch, and costs no look.

[Note: what moves] A deadline counts standing still: timeout_s since anything was last seen to move. A worker counts
what it writes, and its turns while it waits, in its counter. Its trainer sees that, and shows the count in its
heartbeat. Until a worker counts, its processor time is the count: on a busy machine it may take a minute to import
torch.

[Note: who gives up when] All act before timeout_s of standing still is over. A step is 5 s, or a quarter of timeout_s
if that is less. Two steps before the end, a rank that looks at another one without a record gives the save up. One
step before, a trainer kills its own worker if that has put no record, or is the first rank's. A quarter step before,
a rank that looks at the first rank gives up. At the end a trainer waits for its worker no longer.

[Note: one verdict] A stopped process may go on at any later instant. So no order of waits keeps a first rank from
committing what another has just given up. Therefore both ask for the verdict: the first rank before it commits,
another rank before it gives up. The status lets one of them make it, and that verdict holds for all. Whoever has made
it puts the outcome, and nobody else does, so that all get the same.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from sixfold.dist_ckpt.background.arena import MappedArena, Place, ProgressCounter
from sixfold.dist_ckpt.background.status_and_heartbeats import FolderStatus, RankState, SaveStatus, StallTimer
from sixfold.dist_ckpt.collectives.exchange import Outcome
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError, typed
from sixfold.dist_ckpt.save_load import saving, writer
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.store import overtaken

COMMIT, GIVE_UP = "commit", "give-up"  # verdicts; behind the second stands which rank made it
OUTCOME_NAME = "outcome"
# At most 2 operations of the file system a second, and a death told within 10: a turn takes 4.5 in the mean, a beat 2.
_LOOK_S, _BEAT_S = 3.2, 4.0
_ROUND = 4  # of so many turns one is of the first rank, and two show what has moved
# Steps before the end, see [Note: who gives up when].
RECORDS, OWN_WORKER, OUTCOME, END = 2.0, 1.0, 0.25, 0.0
_STEP_S = 5.0
_ACKNOWLEDGED_S = 2.0  # and two turns
_WORD_S = 4.0  # from a verdict to the outcome of who made it, besides two turns
_ORPHANED_S = 4.0  # a worker ends with its trainer, and may have committed just before
_ADVICE = "the older checkpoint, if there was one, stays until the newer one is visible"
_HERE = (RankState.LIVES, RankState.UNSEEN)
_SILENT = "rank 0 died, or gave no outcome in time"


def own_umask() -> int:
    """That of this process. To ask the system is to set it, for all threads; so the kernel's word comes first."""
    with suppress(OSError, StopIteration, ValueError):  # before Linux 4.7, or without /proc
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    found = os.umask(0o077)
    os.umask(found)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank's share of one save, as its worker gets it.

    ``content`` has records without data; ``places`` says where the data of record i lies in the arena.
    """

    outlives_trainer: ClassVar[bool] = False  # whether it ends in its own time when its trainer has died

    rank: int
    ranks: int
    content: writer.RankContent
    ticket: saving.Ticket
    check_finite: bool
    places: dict[int, Place] = field(default_factory=dict)
    key: bytes
    locks_work: bool = True
    timeout_s: float
    stale_s: float
    umask: int = field(default_factory=own_umask)  # of the trainer at the call, for the files of its worker

    def patience_s(self, steps: float) -> float:
        """Seconds of standing still that a wait bears. See [Note: who gives up when]."""
        return self.timeout_s - steps * min(_STEP_S, self.timeout_s / 4)

    @property
    def file_rank(self) -> int:
        """The rank that names files and errors."""
        return self.rank

    @property
    def who(self) -> str:
        """It, as errors call it."""
        return f"rank {self.file_rank}"

    def write(self, arena: MappedArena, counter: ProgressCounter) -> writer.Written:
        """Write this rank's share; in its worker."""
        for index, tensor in zip(self.places, arena.tensors(self.places.values()), strict=True):
            self.content.records[index].data = tensor
        return writer.write(self.content, self.ticket.save, self.file_rank, self.check_finite, counter.add)

    def commit(self, shares: list[writer.Written], counter: ProgressCounter) -> Any:
        """What the first rank's worker does when all shares are written; the save's handle keeps what it returns."""
        saving.commit(shares, self.content, self.ticket)

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats."""
        return min(_BEAT_S if self.locks_work else self.stale_s / 3, self.timeout_s / 20)

    @property
    def look_s(self) -> float:
        """Seconds of a turn. See [Note: quiet waiting]."""
        return min(_LOOK_S, self.timeout_s / 40)


class Loss(NamedTuple):
    """A rank that will do its part no more, and why the save fails of it."""

    rank: int
    state: RankState
    error: LostPeerError


class Wait:
    """A worker that waits: the first rank's for the records of all, another, its record put, for the outcome.

    Or the trainer in place of its dead worker. It looks at one rank a turn, see [Note: quiet waiting].

    Args:
        share: the first rank's own record.
    """

    def __init__(self, job: Job, status: SaveStatus, counter: ProgressCounter, share: Any = None) -> None:
        self._job, self._status, self._counter = job, status, counter
        self._shares = [share]
        self._at = (job.rank - 1) % job.ranks
        self._stalls, self._gone = defaultdict[int, StallTimer](StallTimer), StallTimer()
        self._moves: dict[int, bytes] = {}
        self._turn, self._is_first_lost = 0, False

    @property
    def names(self) -> set[str]:
        """What it waits for, and what tells of those it looks at."""
        return {OUTCOME_NAME, f"alive-{self._at}", "alive-0" if self._job.rank else f"rank-{len(self._shares)}"}

    def turn(self, changed: AbstractSet[str] = frozenset()) -> Outcome | None:
        """The outcome, for the first rank the shares of all in rank order or why there are none; None: it goes on.

        Args:
            changed: those of ``names`` that have appeared or gone since the last turn.
        """
        job = self._job
        self._counter.add(0)
        if not self._status.is_there():
            return settle(job, _SILENT) if job.rank else Outcome(error=overtaken(job.ticket.save.target))
        if job.rank == 0 and self._has_all():
            return Outcome(value=self._shares)
        told = self._status.get(OUTCOME_NAME)
        loss = self._look(changed) if told is None else None
        if loss is None:
            return told
        return self._ended_by(loss) if job.rank else Outcome(error=loss.error)

    def _has_all(self) -> bool:
        while len(self._shares) < self._job.ranks:
            record = self._status.get(f"rank-{len(self._shares)}")
            if record is None:
                return False
            self._shares.append(record.value)
            self._counter.add(0)
        return True

    def _look(self, changed: AbstractSet[str]) -> Loss | None:
        """One look at one rank, at those of ``changed`` first."""
        turn, self._turn, rank = self._turn % _ROUND, self._turn + 1, self._job.rank
        if rank == 0 and turn % 2 and not changed & self.names:
            return None  # it looks at records, too
        if rank and (turn == _ROUND - 1 or self._is_first_lost or "alive-0" in changed):
            return self._lost(0, True)
        while self._at != rank:
            loss = self._lost(self._at, turn >= _ROUND / 2)
            if loss is None or loss.rank == 0 or not self._status.has(f"rank-{loss.rank}"):
                return loss
            self._at = (self._at - 1) % self._job.ranks  # it is lost, and its share is not
        return None

    def _lost(self, rank: int, with_moves: bool) -> Loss | None:
        job, found = self._job, self._status.liveness(rank, with_moves)
        self._moves[rank] = moves = found.moves or self._moves.get(rank, b"")
        if found.state in _HERE and self._stalls[rank].seconds(moves) <= job.patience_s(RECORDS if rank else OUTCOME):
            return None
        self._is_first_lost = self._is_first_lost or rank == 0
        text = f"rank {rank} of {job.ranks} {found.state.value} during a background save; {_ADVICE}"
        if rank == 0:
            text = _blame(job, _SILENT)
        elif found.state in _HERE:
            text = (
                f"ranks [{rank}] of {job.ranks} have written nothing within timeout_s={job.timeout_s:g}: stopped, or "
                f"their disk hangs; {_ADVICE}"
            )
        return Loss(rank, found.state, LostPeerError(text))

    def _ended_by(self, loss: Loss) -> Outcome | None:
        job, status = self._job, self._status
        if (told := status.get(OUTCOME_NAME)) is not None:
            return told
        try:
            ended = give_up(job, status, loss.error)
        except OSError:  # such as a full disk: each rank is told by who looks at it
            return Outcome(error=loss.error)
        if ended is not None or loss.rank:
            return ended
        # The first rank was lost when it had begun to commit.
        if settle(job, _SILENT).error is None:
            return publish(status, Outcome())
        if loss.state in _HERE or self._gone.seconds(loss.state) > _ORPHANED_S:
            text = _blame(job, "rank 0 stopped while it moved the checkpoint into place", "it may still do so")
            return publish(status, Outcome(error=LostPeerError(text)))
        return None


def status_of(job: Job) -> SaveStatus:
    """The status of a job of several ranks."""
    save, store = job.ticket.save, job.content.store
    if store.local_folder is not None:
        return FolderStatus(Path(save.target), save.save_id, job.key, locks_work=job.locks_work, stale_s=job.stale_s)
    # Another kind of store was refused by the call.
    return SaveStatus.at(cast(ByPointer, store), save, job.key, timeout_s=job.timeout_s, beat_s=job.beat_s)


def decide(job: Job, share: Any, counter: ProgressCounter) -> Outcome:
    """What the first rank's worker does when its own share is written: wait for all, commit, tell."""

    def committed() -> Any:
        shares = [share]
        if job.ranks > 1:
            outcome = await_outcome(job, counter, share)
            if outcome.error is not None:
                raise outcome.error
            if status_of(job).verdict(COMMIT) != COMMIT:
                raise LostPeerError(f"rank 0 died or was stopped during a background save; {_ADVICE}")
            shares = outcome.value
        return job.commit(shares, counter)

    outcome = Outcome.of(lambda: typed(committed), job.who)
    return _announced(job, outcome.value) if outcome.error is None else fail(job, outcome.error, counter)


def await_outcome(job: Job, counter: ProgressCounter, share: Any = None) -> Outcome:
    """What one of its turns gives, a turn whenever the watch tells or ``look_s`` are over. See ``Wait``."""
    status = status_of(job)
    wait, changed = Wait(job, status, counter, share), set[str]()
    with closing(status.watch()) as watch:
        while (found := wait.turn(changed)) is None:
            changed = watch.wait(job.look_s, wait.names)
    return found


def fail(job: Job, error: CheckpointError, counter: ProgressCounter) -> Outcome:
    """A rank has met an error: it ends the save for all, unless another rank has done so."""
    if job.rank == 0:
        with suppress(OSError):  # first: who finds its files gone must not take that for the work of another save
            if job.ranks > 1:
                status_of(job).verdict(f"{GIVE_UP}-0")
        job.content.store.abandon(job.ticket.save)  # which also frees the disk for what is put now
    if job.ranks == 1:
        return Outcome(error=error)
    status = status_of(job)
    try:
        ended = give_up(job, status, error)
        return ended or (await_outcome(job, counter) if job.rank else publish(status, Outcome(error=error)))
    except OSError:
        return Outcome(error=error)


def _announced(job: Job, value: Any = None) -> Outcome:
    """The first rank's save is committed; if the others do not hear it, they look at the target."""
    if job.ranks > 1:
        with suppress(OSError):
            publish(status_of(job), Outcome())
    return Outcome(value)


def give_up(job: Job, status: SaveStatus, error: CheckpointError, *, waits: bool = True) -> Outcome | None:
    """End the save for all with ``error``, or with that of who was faster; None if it is being committed.

    Args:
        waits: for the word of another who was faster.
    """
    own = f"{GIVE_UP}-{job.rank}"
    try:
        made = status.verdict(own)
        if made == COMMIT or (made != own and not waits):
            return None
        told = None if made == own else _outcome_of_other(job, status)
        return told or publish(status, Outcome(error=error))  # who was faster has died of it
    except FileNotFoundError:
        return settle(job, _SILENT)


def _outcome_of_other(job: Job, status: SaveStatus) -> Outcome | None:
    """The outcome that another rank is about to put."""
    until = time.monotonic() + _WORD_S + 2 * job.look_s
    with closing(status.watch()) as watch:
        while (told := status.get(OUTCOME_NAME)) is None and time.monotonic() < until:
            watch.wait(job.look_s, {OUTCOME_NAME})
    return told


def publish(status: SaveStatus, outcome: Outcome) -> Outcome:
    """Put the outcome for the other ranks; what was told first holds for them. OSError: the status may be gone."""
    status.put(OUTCOME_NAME, outcome)
    return outcome


def report_dead_worker(
    job: Job, reason: str, counter: ProgressCounter, kind: type[CheckpointError] = LostPeerError
) -> Outcome:
    """The worker of this trainer is dead: say so to the other ranks, and find out what became of the save."""
    if job.rank:
        is_written = status_of(job).has(f"rank-{job.rank}")
        return await_outcome(job, counter) if is_written else fail(job, kind(_blame(job, reason)), counter)
    told = status_of(job).get(OUTCOME_NAME) if job.ranks > 1 else None
    outcome = told or settle(job, reason, kind)
    return _announced(job) if outcome.error is None else fail(job, outcome.error, counter)


def report_dead_trainer(job: Job) -> None:
    """The trainer of this worker is dead: say so to the other ranks, unless the share is written and they need nothing.

    What was written stays for the next save to take away, as behind any save that is killed.
    """
    if job.ranks > 1 and not (status := status_of(job)).has(f"rank-{job.rank}"):
        text = f"rank {job.rank} died during a background save; {_ADVICE}"
        give_up(job, status, LostPeerError(text), waits=False)


def settle(job: Job, reason: str, kind: type[CheckpointError] = LostPeerError) -> Outcome:
    """The outcome of a save whose first rank can commit no more: what the target says."""
    try:
        is_there = job.content.store.holds(job.ticket.save.save_id)
    except CheckpointError as error:
        return Outcome(error=kind(_blame(job, reason, f"whether it was committed cannot be seen ({error})")))
    return Outcome() if is_there else Outcome(error=kind(_blame(job, reason)))


def _blame(job: Job, reason: str, advice: str = _ADVICE) -> str:
    return (
        f"{reason} (background save to {job.ticket.save.target}, timeout_s={job.timeout_s:g}); {advice}. "
        "The next save starts a fresh worker"
    )


def remove(job: Job, status: SaveStatus) -> None:
    """The first rank's last act: when all have acknowledged, or soon, the status goes."""
    until, rank = time.monotonic() + _ACKNOWLEDGED_S + 2 * job.look_s, 1
    with closing(status.watch()) as watch:
        while rank < job.ranks and (rest_s := until - time.monotonic()) > 0:
            if status.liveness(rank, False).state in _HERE:
                watch.wait(min(job.look_s, rest_s), {f"alive-{rank}"})
            else:
                rank += 1
    status.remove()
