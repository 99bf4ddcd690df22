"""One error on every rank when a step fails on one.

what a call raised --> Faults (this file) --> the store, the links, one ScheduleError or PipelineTimeout
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from sixfold.pipeline.errors import PipelineTimeout, ScheduleError
from sixfold.pipeline.failures.deadlines import PeerLost
from sixfold.pipeline.failures.records import Record, Records, Store, report

if TYPE_CHECKING:
    from sixfold.pipeline.compiler.compile import Compiled
    from sixfold.pipeline.compiler.compile_endless import CompiledEndless
    from sixfold.pipeline.transport.protocol import Links

__all__ = ["Faults"]

_GRACE_S = 0.5  # for the other ranks to write where they stand


class Faults:
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

    def end(
        self, error: BaseException, compiled: Compiled | CompiledEndless | None, at: int, *, lost: bool = False
    ) -> NoReturn:
        """Turn the failure of one call into one error here and on every other rank.

        What is no Exception, such as Ctrl-C, is told to the others and goes on as it is.

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

    def _time_out(self, compiled: Compiled | CompiledEndless | None, place: str, error: PeerLost) -> NoReturn:
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
                raise PipelineTimeout(said, rank=rank) if theirs.overdue else ScheduleError(said, rank=rank) from error
        line = report(self._rank, self._names, mine, others, self._records.has_store, self._records.deaf)
        self.broken = line
        raise PipelineTimeout(line, rank=self._rank, position=position, action=action) from error
