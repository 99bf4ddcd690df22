"""Who is which rank when, and when a run is given up: a state machine without processes and without a clock.

    deaths, failures, ready, done, silence, stop, resized --> Course (this file) --> Fork, Tell over, Kill, Form, End
    nodes that come and go                                          leader.py has the events and gives the commands on

A run is RUNNING in a generation, or GATHERING for the next one: what was lost is known, and survivors drop what they
hold. Then the next generation is formed: survivors keep their ranks, spares and new processes take those that were
lost. A rank that is lost meanwhile is lost too, and nothing begins anew.

[Note: fewer and more ranks] A generation has one of ``sizes``: the largest that is wanted and for which there are
processes. Where ``replaces`` is false a lost process has taken its place with it, as a broken device does, and only
``resized`` brings a place back. Who survives has a rank in the order of before, or waits as a spare. A process keeps
its *place*, the number of its device on its node, for life.

[Note: nodes] A node has room for as many ranks as it was started with (and its spares, where ``replaces`` is false).
One that is lost takes its room with it, and one that comes brings its own. A lost rank is replaced on its node, which
has its device. Where that cannot be, and when the number of ranks changes, ranks of a node are neighbours. If the
leader is lost, another Course takes over what the nodes that live have, as if all others had been lost in one moment.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from sixfold.gpt.elastic.generation import Held, Lost
from sixfold.gpt.launch.spawn import Failure, ended_at_once
from sixfold.gpt.launch.stop_signals import STOPPED

GRACE_S = 0.3
ASKED, JOINED = "it was asked for", " has joined"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Start the process of a member, on a node."""

    member: int
    node: int = 0


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
        members, places, nodes: by rank. wanted: ranks that there are to be, if there are processes for them.
        lost: in the generation before. Where it lost none, in the one before that, if it came to no new step: a rank
            that is lost is then told of, also if a resize comes before its replacement has begun.
        cause: what ended the generation before, where no rank was lost.
    """

    generation: int
    members: tuple[int, ...]
    places: tuple[int, ...]
    nodes: tuple[int, ...]
    wanted: int
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
        ranks: of the first generation. spares: processes of each node that wait to become one.
        per_node: ranks that a node has room for; 0: all of them.
        attempts: recoveries in a row without progress, before the run is given up.
        sizes: numbers of ranks that a generation may have; empty: ``ranks`` alone.
        replaces: whether a new process may take the place of a lost one. See [Note: fewer and more ranks].
    """

    ranks: int
    spares: int = 0
    per_node: int = 0
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
    _untold: list[Lost] = field(default_factory=list)  # of generations that have done no new step
    _lost_at: float = 0.0
    _cause: str = ""
    _waiting: dict[int, int] = field(default_factory=dict)  # survivors, and the generation that they are to drop
    _failed: dict[int, tuple[Failure, bool]] = field(default_factory=dict)
    _accused: dict[int, str] = field(default_factory=dict)  # by rank
    _failed_at: float = 0.0
    _done: dict[int, int] = field(default_factory=dict)
    _step: int = 0  # the furthest that the run has come
    _recoveries: int = 0  # since then
    _stop: bool = False
    _rooms: dict[int, int] = field(default_factory=dict)  # by node: ranks that there may be
    _node: dict[int, int] = field(default_factory=dict)  # by member
    _places: dict[int, int] = field(default_factory=dict)  # by member
    _broken: set[tuple[int, int]] = field(default_factory=set)  # nodes and places

    def begin(self, nodes: Sequence[int] = (0,)) -> list[Command]:
        """The first generation, with the nodes that are there."""
        self._rooms = dict.fromkeys(nodes, self._full())
        return self._formed()

    def take_over(self, held: Mapping[int, Sequence[Held]], now: float, *, stop: bool = False) -> list[Command]:
        """Go on with what nodes have of the generations of a leader that is gone. See [Note: nodes]."""
        self._rooms = dict.fromkeys(sorted(held), self._full())
        found = [(node, one) for node in sorted(held) for one in held[node]]
        newest = max((one.generation for _, one in found if one.generation is not None), key=lambda one: one.number)
        self.generation, self.ranks, self._stop = newest.number, newest.wanted, newest.stop or stop
        self._made = 1 + max(one.member for _, one in found)
        members = [-1 - rank for rank in range(newest.size)]  # numbers of nobody
        for node, one in found:
            self._node[one.member] = node
            if one.generation is not None:
                self._places[one.member] = one.generation.place
            if one.generation is not None and one.generation.number == newest.number:
                members[one.generation.rank] = one.member
            else:
                self.idle.append(one.member)
            if one.busy and one.generation is not None:
                self._waiting[one.member] = one.generation.number
        self.members, self._lost_at = tuple(members), now
        for rank, member in enumerate(members):
            if member < 0:
                self._node[member] = node = newest.nodes[rank]
                text = f"rank {rank} was lost with " + (f"node {node}" if node not in held else "the node that led")
                self._gone.add(member)
                self._lost.append(self._loss(member, text))
        told = [TellOver(member=member, generation=number) for member, number in sorted(self._waiting.items())]
        return [*told, *self._forked(self._allotted(self._size())), *self._formed_if_ready()]

    def progressed(self, step: int) -> None:
        """The run has done ``step`` updates."""
        if step > self._step:
            self._step, self._recoveries, self._untold = step, 0, []

    def died(self, member: int, failure: Failure, now: float) -> list[Command]:
        """The process of a member has ended, or is taken for lost."""
        if self.phase is Phase.ENDED or member in self._gone:
            return []
        return self._died([member], failure, now)

    def node_lost(self, node: int, why: str, now: float) -> list[Command]:
        """A node has ended, or does not answer: so have its members."""
        if self.phase is Phase.ENDED or self._rooms.pop(node, None) is None:
            return []
        self._broken = {one for one in self._broken if one[0] != node}
        return self._died([one for one in self._alive() if self._node[one] == node], why, now)

    def node_joined(self, node: int, now: float) -> list[Command]:
        """A node has come that has no members: more ranks, if the run lacks some."""
        if self.phase is Phase.ENDED:
            return []
        self._rooms[node] = self._full()
        if self.phase is Phase.GATHERING:
            return self._forked(self._allotted(self._size()))
        if self._size() == len(self.members):
            return self._forked(self._allotted(self._size()), self.spares)
        self._cause = f"node {node}{JOINED}"
        return self._gather([], now)

    def _died(self, members: Sequence[int], failure: Failure | str, now: float) -> list[Command]:
        ranks = [member for member in members if member in self.members]
        for member in members:
            self._lose(member)
            self._waiting.pop(member, None)
            if member in self.idle:
                self.idle.remove(member)  # the next generation brings its number up again
        lost = [self._loss(member, failure) for member in ranks]
        if self.phase is Phase.RUNNING:
            return self._recover(lost, now) if lost else []
        self._lost += lost
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
        if self.phase is not Phase.GATHERING or self._waiting.get(member) != generation:
            return []
        del self._waiting[member]
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
        if not self.per_node:  # the only node has room for what is asked of it
            self._rooms = {node: max(room, ranks) for node, room in self._rooms.items()}
        elif self._broken:
            self._rooms = dict.fromkeys(self._rooms, self._full())
        self.ranks = ranks
        self._broken.clear()
        if self.phase is Phase.GATHERING or self._size() == len(self.members):
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
            text = f"rank {{rank}} did not drop the generation within {patience_s:.1f} s"
            return [*(Kill(member=member) for member in late), *self._died(late, text, now)]
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
        self._waiting = dict.fromkeys(sorted(set(self.members) - self._gone), self.generation)
        survivors = [TellOver(member=member, generation=self.generation) for member in self._waiting]
        return [*survivors, *self._forked(self._allotted(self._size())), *self._formed_if_ready()]

    def _formed_if_ready(self) -> list[Command]:
        return [] if self._waiting else self._formed()

    def _formed(self) -> list[Command]:
        """The next generation, and then as many spares as there are to be."""
        size = self._size()
        if not size:
            rule = "" if self.replaces else " (elastic.replace is false)"
            text = f"no size of {sorted(self._sizes())} ranks has a process for each{rule}"
            failure = self._lost[-1].failure if self._lost else Failure(rank=0, time=time.time(), text="")
            text = "; ".join(filter(None, (failure.text, text)))
            return self._end(End(failure=replace(failure, text=text), at_once=True))
        allotted = self._allotted(size)
        forked = self._forked(allotted)
        ranks = (self._in_place() if size == len(self.members) else None) or self._neighbours(allotted)
        self.idle = [one for one in (*self.members, *self.idle) if one not in self._gone and one not in ranks]
        surplus = [one for node in self._rooms for one in self._idle_on(node)[self.spares :]] if self.replaces else []
        for member in surplus:
            self.idle.remove(member)
            self._places.pop(member, None)
            self._gone.add(member)
        self.members = tuple(ranks)
        self.generation += 1
        self._untold = self._lost or self._untold
        form = Form(
            generation=self.generation,
            members=self.members,
            places=self._placed(),
            nodes=tuple(self._node[member] for member in self.members),
            wanted=self.ranks,
            lost=tuple(self._untold),
            lost_at=self._lost_at,
            stop=self._stop,
            cause=self._cause,
        )
        self.phase = Phase.RUNNING
        self._lost, self._failed, self._accused, self._done = [], {}, {}, {}
        spares = self._forked(allotted, self.spares)
        return [*forked, *(Kill(member=member) for member in surplus), form, *spares]

    def _in_place(self) -> list[int] | None:
        """By rank: who survives is it again, who comes is of the node of who was lost; None if not all can be."""
        ranks, idle = list(self.members), list(self.idle)
        for rank, gone in enumerate(self.members):
            if gone in self._gone:
                here = next((one for one in idle if self._node[one] == self._node[gone]), None)
                if here is None:
                    return None
                idle.remove(here)
                ranks[rank] = here
        return ranks

    def _neighbours(self, allotted: Mapping[int, int]) -> list[int]:
        """By rank: those of a node follow each other, survivors in their order, then who waits."""
        found = [member for member in (*self.members, *self.idle) if member not in self._gone]
        return [
            member
            for node, count in allotted.items()
            for member in [one for one in found if self._node[one] == node][:count]
        ]

    def _sizes(self) -> tuple[int, ...]:
        return self.sizes or (self.ranks,)

    def _size(self) -> int:
        """Of the next generation; 0 if there is none for which there are processes."""
        most = min(self.ranks, sum(self._rooms.values()))
        return max((size for size in self._sizes() if size <= most), default=0)

    def _full(self) -> int:
        """What a node has room for that has lost nothing."""
        return (self.per_node or self.ranks) + (0 if self.replaces else self.spares)

    def _allotted(self, size: int) -> dict[int, int]:
        """How many of ``size`` ranks each node has: as many as it was started for, and then more, in their order."""
        most, rooms = self.per_node or self.ranks, sorted(self._rooms.items())
        allotted = {node: 0 for node, _ in rooms}
        for limit in (most, max(self._rooms.values(), default=0)):
            for node, room in rooms:
                allotted[node] += max(0, min(min(room, limit) - allotted[node], size - sum(allotted.values())))
        return allotted

    def _placed(self) -> tuple[int, ...]:
        """By rank; who is new gets the first that is free on its node."""
        for member in self.members:
            if member not in self._places:
                node = self._node[member]
                taken = {place for one, place in self._places.items() if self._node[one] == node}
                taken |= {place for broken, place in self._broken if broken == node}
                self._places[member] = next(place for place in itertools.count() if place not in taken)
        return tuple(self._places[member] for member in self.members)

    def _lose(self, member: int) -> None:
        self._gone.add(member)
        place, node = self._places.pop(member, None), self._node[member]
        if not self.replaces and node in self._rooms:
            self._rooms[node] -= 1
            if place is not None:
                self._broken.add((node, place))

    def _forked(self, allotted: Mapping[int, int], spares: int = 0) -> list[Command]:
        """New processes, until each node has its ranks, and spares; no more than there is room for."""
        commands: list[Command] = []
        for node, count in allotted.items():
            alive = sum(self._node[one] == node for one in self._alive())
            most = count + spares if self.replaces else min(count + spares, self._rooms[node])
            for _ in range(alive, most):
                self.idle.append(self._made)
                self._node[self._made] = node
                commands.append(Fork(member=self._made, node=node))
                self._made += 1
        return commands

    def _idle_on(self, node: int) -> list[int]:
        return [member for member in self.idle if self._node[member] == node]

    def _loss(self, member: int, failure: Failure | str) -> Lost:
        rank = self.members.index(member)
        if isinstance(failure, str):
            failure = Failure(rank=rank, time=time.time(), text=failure.replace("{rank}", str(rank)))
        return Lost(rank=rank, member=member, failure=failure)

    def _alive(self) -> list[int]:
        return [member for member in (*self.members, *self.idle) if member not in self._gone]

    def _end(self, end: End) -> list[Command]:
        self.phase = Phase.ENDED
        return [end]
