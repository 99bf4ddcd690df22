"""One error on every rank when a step fails on one: what ranks tell each other, and what each raises.

    what a call raised --> record in the store, links ended (this file) --> one ScheduleError or PipelineTimeout

The store is touched only here, and only after a failure: a rank writes where it stands, then ends its edges, which
wakes its neighbours; they write, end theirs, and so on, until every rank knows. A rank that writes nothing is reported
as silent. A store that does not answer is reported too: its host may be what stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from sixfold.pipeline.errors import PipelineTimeout, ScheduleError
from sixfold.pipeline.failures.deadlines import PeerLost, within

if TYPE_CHECKING:
    from sixfold.pipeline.compiler.compile import Compiled
    from sixfold.pipeline.transport.protocol import Links

__all__ = ["FailureReport", "MemoryStore", "Record", "Records", "Store"]

_POLL_S = 0.02
_ANSWER_S = 0.25  # of the store
_GRACE_S = 0.5  # for the other ranks to write where they stand


class Store(Protocol):
    """What is used of a ``torch.distributed`` store."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether the keys are there, without waiting."""


@dataclass(frozen=True)
class Record:
    """Where a rank stopped.

    Attributes:
        place: ``[17/48] 0RECV_B3``.
        peer: rank it waited for, None if it did not wait.
        error: what its stage raised, None if it only waited.
        overdue: ``error`` is a time-out, of a wait inside of the stage.
    """

    place: str
    peer: int | None = None
    error: str | None = None
    overdue: bool = False


class MemoryStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """See Store."""
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """See Store."""
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """See Store."""
        return all(key in self._values for key in keys)


class Records:
    """The records of all ranks of one runner, in a store.

    Args:
        store: shared by all ranks; None if there is none: then nothing is known of the others.
        key: equal on the ranks of one runner and unlike any other runner's.
    """

    def __init__(self, store: Store | None, key: str, rank: int, ranks: int) -> None:
        self._store, self._key, self._rank, self._ranks = store, key, rank, ranks
        self.deaf = False  # whether the store was asked and did not answer

    @property
    def has_store(self) -> bool:
        """Whether the records of other ranks can be read."""
        return self._store is not None

    def write(self, record: Record) -> None:
        """Tell the others where this rank stopped."""
        if (store := self._store) is not None:
            try:
                within(_ANSWER_S, lambda: store.set(f"{self._key}/{self._rank}", json.dumps(asdict(record))))
            except (RuntimeError, TimeoutError):
                self.deaf = True

    def others(self, wait_s: float) -> dict[int, Record]:
        """Records of the other ranks, after all have spoken, one has failed, or ``wait_s`` has passed."""
        found: dict[int, Record] = {}
        if (store := self._store) is None or self.deaf:
            return found
        deadline = time.monotonic() + wait_s
        missing = [rank for rank in range(self._ranks) if rank != self._rank]

        def look() -> None:
            for rank in tuple(missing):
                if store.check([f"{self._key}/{rank}"]):
                    found[rank] = Record(**json.loads(store.get(f"{self._key}/{rank}")))
                    missing.remove(rank)

        while missing:
            try:
                within(_ANSWER_S, look)
            except (RuntimeError, TimeoutError):
                self.deaf = True
                return dict(found)
            if time.monotonic() > deadline or any(record.error is not None for record in found.values()):
                break
            time.sleep(_POLL_S)
        return found


class FailureReport:
    """How a runner ends.

    Args:
        rank, ranks: of this runner in its group.
        names: what texts call each rank of the group; None: its number there.
        links: to the others; None where all are in this process.
        store: of the caller, for reports.
    Attributes:
        broken: why the runner cannot go on; None while it can.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        links: Links | None = None,
        store: Store | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        self._rank, self._links = rank, links
        self._names = range(ranks) if names is None else names
        self._records = None if links is None else Records(store or links.store, links.key, rank, ranks)
        self.broken: str | None = None

    def end(self, error: BaseException, compiled: Compiled | None, at: int, *, lost: bool = False) -> NoReturn:
        """Turn the failure of one call into one error here and on every other rank.

        What is no Exception, such as Ctrl-C, is written for the others and raised here as it is.

        Args:
            at: the call that failed; -1 when none had been made.
            lost: microbatches of earlier steps were in flight.
        """
        rank, position, action = self._rank, None, None
        place = "the start of the step" if at < 0 else "the end of the step"
        if compiled is not None and 0 <= at < len(compiled.entries):
            rank, call = compiled.entries[at]
            position, action = call.position, call.entry
            place = f"[{position}/{len(compiled.program.ranks[rank])}] {action}"
        if isinstance(error, PeerLost):
            self._time_out(compiled, place, error)
        words = str(error) if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
        if self._records is not None and self._links is not None:
            self._records.write(Record(place, error=words, overdue=isinstance(error, PipelineTimeout)))
            self._links.close()
        interrupted = not isinstance(error, Exception)
        stepped = compiled is not None and at >= 0 and compiled.steps  # some stages may be a STEP ahead of others
        if self._links is not None or interrupted or stepped or lost:
            self.broken = words
        if interrupted or (isinstance(error, ScheduleError) and action is None):
            raise error
        message = f"rank {self._names[rank]} failed at {place}: {words}"
        kind = PipelineTimeout if isinstance(error, PipelineTimeout) else ScheduleError
        raise kind(message, rank=rank, position=position, action=action) from error

    def _time_out(self, compiled: Compiled | None, place: str, error: PeerLost) -> NoReturn:
        """A message did not come: find out what the other ranks know, and say it."""
        assert self._links is not None and self._records is not None, "only a group has peers"
        peer, position, action = error.peer, None, error.action
        if action is not None:
            place = str(action)
            row = () if compiled is None else compiled.program.ranks[self._rank]
            if compiled is not None and action in row:
                position = row.index(action)
                place = f"[{position}/{len(row)}] {action}"
                peer = compiled.program.placement[action.peer_stage] if peer is None else peer
        mine = Record(place, peer)
        self._records.write(mine)
        self._links.close()
        others = self._records.others(_GRACE_S)
        for rank, theirs in others.items():
            if theirs.error is not None:
                said = self.broken = f"rank {self._names[rank]} failed at {theirs.place}: {theirs.error}"
                kind = PipelineTimeout if theirs.overdue else ScheduleError
                heard = kind(said, rank=rank)
                heard.of_peer = True
                raise heard from error
        line = time_out_line(self._rank, self._names, mine, others, self._records.has_store, self._records.deaf)
        self.broken = line
        raise PipelineTimeout(line, rank=self._rank, position=position, action=action) from error


def time_out_line(
    rank: int, names: Sequence[int], mine: Record, others: dict[int, Record], heard: bool, deaf: bool = False
) -> str:
    """The line of a time-out: this rank, then what is known of the others, and whether the store did not answer.

    Args:
        names: what each rank is called.
    """
    parts = [
        f"rank {names[rank]} waits at {mine.place}" + ("" if mine.peer is None else f" for rank {names[mine.peer]}")
    ]
    for other, name in enumerate(names) if heard else ():
        if other != rank:
            parts.append(f"rank {name} at {others[other].place}" if other in others else f"rank {name} silent")
    if deaf:
        parts.append("the store does not answer")
    if heard and len(others) < len(names) - 1:
        parts[-1] += ". A silent rank ended, hangs or runs other code: read its log first"
    return "; ".join(parts)
