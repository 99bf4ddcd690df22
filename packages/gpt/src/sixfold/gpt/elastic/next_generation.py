"""Who is which rank when, and when a run is given up: a state machine without processes and without a clock.

    deaths, failures, ready, done, silence, stop, resized --> Course (this file) --> Fork, Tell over, Kill, Form, End
                                          supervisor.py has the events and carries the commands out

A run is RUNNING in a generation, or GATHERING for the next one: what was lost is known, and survivors drop what they
hold. Then the next generation is formed: survivors keep their ranks, spares and new processes take those that were
lost. A rank that is lost meanwhile is lost too, and nothing begins anew.

[Note: fewer and more ranks] A generation has one of ``sizes``: the largest that is wanted and for which there are
processes. Where ``replaces`` is false a lost process has taken its place with it, as a broken device does, and only
``resized`` brings a place back. Who survives has a rank in the order of before, or waits as a spare. A process keeps
its *place*, the number of its device, for life.

[Note: who is to blame] A death is the cause of all errors that come with it, as those of its peers. So an error waits
``GRACE_S`` for a death. Without one the earliest error that blames no peer is the cause, and its process is replaced.
If every rank blames a peer, all are asked to drop the generation; who does not answer is replaced. Ranks that an error
accuses by their numbers are all replaced, whoever tells it.

[Note: giving up] An error that would come again (`spawn.is_final`) ends the run, as without a supervisor. So do more
than ``attempts`` recoveries in a row without a step that was not done before.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from sixfold.gpt.elastic.generation import Lost
from sixfold.gpt.launch.spawn import Failure, ended_at_once
from sixfold.gpt.launch.stop_signals import STOPPED

GRACE_S = 0.3
ASKED = "it was asked for"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Start the process of a member."""

    member: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TellOver:
    """Close the generation's meeting place, and tell a survivor that it is over."""

    member: int
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """End the process of a member at once, so that its connections close."""

    member: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Begin a generation.

    Attributes:
        members, places: by rank. cause: what ended the generation before, where no rank was lost.
    """

    generation: int
    members: tuple[int, ...]
    places: tuple[int, ...]
    lost: tuple[Lost, ...]
    lost_at: float
    stop: bool
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Ask a member to stop after the step at hand, by SIGTERM."""

    member: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The run has ended: with the status that all ranks came to, or at once, with a status or by a failure."""

    status: int = 0
    failure: Failure | None = None
    at_once: bool = False


Command = Fork | TellOver | Kill | Form | Forward | End


class Phase(enum.Enum):
    RUNNING = "running"
    GATHERING = "gathering"
    ENDED = "ended"


@dataclass(kw_only=True)
class Course:
    """The course of a run through its generations. Each method is an event; it returns what to do.

    Args:
        ranks: of the first generation. spares: processes that wait to become one.
        attempts: recoveries in a row without progress, before the run is given up.
        sizes: numbers of ranks that a generation may have; empty: ``ranks`` alone.
        replaces: whether a new process may take the place of a lost one. See [Note: fewer and more ranks].
    """

    ranks: int
    spares: int = 0
    attempts: int = 3
    sizes: tuple[int, ...] = ()
    replaces: bool = True
    phase: Phase = Phase.GATHERING
    generation: int = 0
    members: tuple[int, ...] = ()  # by rank
    idle: list[int] = field(default_factory=list)  # spares, the longest waiting first
    _made: int = 0
    _gone: set[int] = field(default_factory=set)
    _lost: list[Lost] = field(default_factory=list)
    _lost_at: float = 0.0
    _cause: str = ""
    _waiting: set[int] = field(default_factory=set)  # survivors that are not ready yet
    _failed: dict[int, tuple[Failure, bool]] = field(default_factory=dict)
    _accused: dict[int, str] = field(default_factory=dict)  # by rank
    _failed_at: float = 0.0
    _done: dict[int, int] = field(default_factory=dict)
    _step: int = 0  # the furthest that the run has come
    _recoveries: int = 0  # since then
    _stop: bool = False
    _room: int = 0  # processes that there may be, where lost ones are not replaced
    _places: dict[int, int] = field(default_factory=dict)  # by member
    _broken: set[int] = field(default_factory=set)  # places

    def begin(self) -> list[Command]:
        """The first generation."""
        self._room = self.ranks + self.spares
        return self._formed()

    def progressed(self, step: int) -> None:
        """The run has done ``step`` updates."""
        if step > self._step:
            self._step, self._recoveries = step, 0

    def died(self, member: int, failure: Failure, now: float) -> list[Command]:
        """The process of a member has ended, or is taken for lost."""
        if self.phase is Phase.ENDED or member in self._gone:
            return []
        self._lose(member)
        if member in self.idle:
            self.idle.remove(member)  # the next generation brings its number up again
            return []
        if self.phase is Phase.RUNNING:
            return self._recover([self._loss(member, failure)], now)
        self._lost.append(self._loss(member, failure))
        self._waiting.discard(member)
        return self._formed_if_ready()

    def silent(self, member: int, failure: Failure, now: float) -> list[Command]:
        """A member is stopped, or hangs."""
        if self.phase is Phase.ENDED or member in self._gone:
            return []
        return [Kill(member=member), *self.died(member, failure, now)]

    def stalled(self, failure: Failure, now: float) -> list[Command]:
        """No rank has ended a step in time; nobody knows which one is the cause."""
        return self._recover([], now, failure) if self.phase is Phase.RUNNING else []

    def failed(
        self,
        member: int,
        generation: int,
        failure: Failure,
        blames_peer: bool,
        now: float,
        *,
        accused: Mapping[int, str] = MappingProxyType({}),
    ) -> list[Command]:
        """A rank raised an error; see [Note: who is to blame]."""
        if self.phase is not Phase.RUNNING or generation != self.generation or member not in self.members:
            return []
        if not self._failed:
            self._failed_at = now
        self._failed[member] = failure, blames_peer
        self._accused |= accused
        return []

    def ready(self, member: int, generation: int) -> list[Command]:
        """A survivor has dropped the generation."""
        if self.phase is not Phase.GATHERING or generation != self.generation:
            return []
        self._waiting.discard(member)
        return self._formed_if_ready()

    def done(self, member: int, generation: int, status: int) -> list[Command]:
        """A rank has come to the end of the run."""
        if self.phase is not Phase.RUNNING or generation != self.generation or member not in self.members:
            return []
        self._done[member] = status
        if len(self._done) < len(self.members):
            return []
        return self._end(End(status=max(self._done.values())))

    def resized(self, ranks: int, now: float) -> list[Command]:
        """The run was asked to go on with so many ranks, one of ``sizes``."""
        if self.phase is Phase.ENDED:
            return []
        self.ranks, self._room = ranks, max(self._room, ranks)
        self._broken.clear()
        if self.phase is Phase.GATHERING or ranks == len(self.members):
            return []
        self._cause = ASKED
        return self._gather([], now)

    def stop(self, *, begun: bool) -> list[Command]:
        """The run was asked to stop; ``begun``: there is a step to save."""
        if self.phase is Phase.ENDED:
            return []
        if not begun:
            return self._end(End(status=STOPPED, at_once=True))
        self._stop = True
        return [Forward(member=member) for member in self._alive()]

    def stop_at_once(self) -> list[Command]:
        """The run was asked a second time."""
        if self.phase is Phase.ENDED:
            return []
        return self._end(End(failure=ended_at_once(0), at_once=True))

    def tick(self, now: float, patience_s: float) -> list[Command]:
        """Time has passed; survivors have ``patience_s`` to become ready."""
        if self.phase is Phase.RUNNING and self._failed:
            over = now - self._failed_at >= GRACE_S or len(self._failed) + len(self._done) == len(self.members)
            return self._judge(now) if over else []
        if self.phase is Phase.GATHERING and self._waiting and now - self._lost_at > patience_s:
            late = sorted(self._waiting)
            self._waiting.clear()
            for member in late:
                self._lose(member)
                rank = self.members.index(member)
                text = f"rank {rank} did not drop the generation within {patience_s:.1f} s"
                self._lost.append(self._loss(member, Failure(rank=rank, time=time.time(), text=text)))
            return [*(Kill(member=member) for member in late), *self._formed_if_ready()]
        return []

    def _judge(self, now: float) -> list[Command]:
        own = {m: failure for m, (failure, blames_peer) in self._failed.items() if not blames_peer}
        final = [failure for failure in own.values() if failure.final]
        if final:
            return self._end(End(failure=min(final, key=lambda failure: failure.time), at_once=True))
        first = min((failure for failure, _ in self._failed.values()), key=lambda failure: failure.time)
        if self._accused:
            lost = [
                self._loss(self.members[rank], replace(first, rank=rank, text=why))
                for rank, why in sorted(self._accused.items())
            ]
            for one in lost:
                self._lose(one.member)
            return [*(Kill(member=one.member) for one in lost), *self._recover(lost, now)]
        if not own:
            return self._recover([], now, first)
        culprit = min(own, key=lambda member: own[member].time)
        self._lose(culprit)
        return [Kill(member=culprit), *self._recover([self._loss(culprit, own[culprit])], now)]

    def _recover(self, lost: list[Lost], now: float, cause: Failure | None = None) -> list[Command]:
        self._recoveries += 1
        if self._recoveries > self.attempts:
            failure = cause or lost[0].failure
            text = (
                f"{failure.text}; the run was recovered {self.attempts} times and did no step beyond {self._step} "
                f"(elastic.attempts)"
            )
            return self._end(End(failure=replace(failure, text=text), at_once=True))
        self._cause = "" if cause is None else cause.text.splitlines()[-1]
        return self._gather(lost, now)

    def _gather(self, lost: list[Lost], now: float) -> list[Command]:
        self.phase = Phase.GATHERING
        self._lost, self._lost_at = lost, now
        self._waiting = set(self.members) - self._gone
        survivors = [TellOver(member=member, generation=self.generation) for member in sorted(self._waiting)]
        return [*survivors, *self._forked(self._size() - len(self._waiting)), *self._formed_if_ready()]

    def _formed_if_ready(self) -> list[Command]:
        return [] if self._waiting else self._formed()

    def _formed(self) -> list[Command]:
        """The next generation, and then as many spares as there are to be."""
        size = self._size()
        if not size:
            text = f"no size of {sorted(self._sizes())} ranks has a process for each (elastic.replace is false)"
            failure = self._lost[-1].failure
            return self._end(End(failure=replace(failure, text=f"{failure.text}; {text}"), at_once=True))
        forked = self._forked(size - len(set(self.members) - self._gone))
        if size == len(self.members):
            ranks = [self.idle.pop(0) if member in self._gone else member for member in self.members]
        else:
            survivors = [member for member in self.members if member not in self._gone]
            ranks, self.idle = [*survivors, *self.idle][:size], [*survivors, *self.idle][size:]
        surplus = self.idle[self.spares :] if self.replaces else []
        for member in surplus:
            self.idle.remove(member)
            self._places.pop(member, None)
            self._gone.add(member)
        self.members = tuple(ranks)
        self.generation += 1
        form = Form(
            generation=self.generation,
            members=self.members,
            places=self._placed(),
            lost=tuple(self._lost),
            lost_at=self._lost_at,
            stop=self._stop,
            cause=self._cause,
        )
        self.phase = Phase.RUNNING
        self._lost, self._failed, self._accused, self._done = [], {}, {}, {}
        return [*forked, *(Kill(member=member) for member in surplus), form, *self._forked(self.spares)]

    def _sizes(self) -> tuple[int, ...]:
        return self.sizes or (self.ranks,)

    def _size(self) -> int:
        """Of the next generation; 0 if there is none for which there are processes."""
        most = self.ranks if self.replaces else min(self.ranks, self._room)
        return max((size for size in self._sizes() if size <= most), default=0)

    def _placed(self) -> tuple[int, ...]:
        """By rank; who is new gets the first that is free."""
        for member in self.members:
            if member not in self._places:
                taken = {*self._places.values(), *self._broken}
                self._places[member] = next(place for place in itertools.count() if place not in taken)
        return tuple(self._places[member] for member in self.members)

    def _lose(self, member: int) -> None:
        self._gone.add(member)
        self._room -= 1
        if (place := self._places.pop(member, None)) is not None and not self.replaces:
            self._broken.add(place)

    def _forked(self, wanted: int) -> list[Command]:
        """New processes, until ``wanted`` are idle; no more than there is room for."""
        commands: list[Command] = []
        alive = len(self._alive())
        while len(self.idle) < wanted and (self.replaces or alive + len(commands) < self._room):
            self.idle.append(self._made)
            commands.append(Fork(member=self._made))
            self._made += 1
        return commands

    def _loss(self, member: int, failure: Failure) -> Lost:
        return Lost(rank=self.members.index(member), member=member, failure=failure)

    def _alive(self) -> list[int]:
        return [member for member in (*self.members, *self.idle) if member not in self._gone]

    def _end(self, end: End) -> list[Command]:
        self.phase = Phase.ENDED
        return [end]
