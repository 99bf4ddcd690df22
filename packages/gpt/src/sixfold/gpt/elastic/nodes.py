"""Several machines that keep one run alive: a supervisor on each, and one of them leads.

    train.py --> keep_alive_on (this file) --> seek --> knock --> follow: orders to Processes, events to the leader
                                                `--> take a term --> gather the others --> lead, as on one machine
    terms.py: who leads    connection.py: words between two

All know the list of nodes, and all see ``run.dir``. A node without a leader reads who led last, and knocks there. If
nobody answers as a leader, the nodes try to make the file of the next term, in the order of the list. One of them does.

[Note: a leader is lost] Members live on when the node that led ends. Each other node tells the new leader what it has:
members, the generation that they are in, their ranks. The new leader takes them over, tells them that this generation
is over, and forms the next one.

[Note: a node that was away] If a leader has formed a generation without a node, it tells that node to end its members:
they are of an older one. The node then is as one that has just been started. So is a leader that finds a newer term.

[Note: silence] Both ends of a connection say something each ``BEAT_S``. Who says nothing for ``hung_after_s`` is lost.
Time in which this process was stopped itself counts for nobody.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from sixfold.gpt.elastic.connection import Link
from sixfold.gpt.elastic.generation import Begin, Died, Event, Held, Said
from sixfold.gpt.elastic.heartbeat import Slot, Slots
from sixfold.gpt.elastic.leader import Leader
from sixfold.gpt.elastic.meeting import Servers
from sixfold.gpt.elastic.member import Prepare, Target
from sixfold.gpt.elastic.next_generation import Course, End, Kill
from sixfold.gpt.elastic.processes import END_S, Order, Processes
from sixfold.gpt.elastic.terms import FOLDER, DeposedError, Term, Terms
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.files.run_dir import check_free
from sixfold.gpt.launch.interfaces import interface_of
from sixfold.gpt.launch.rendezvous import NODE_HOST
from sixfold.gpt.launch.spawn import Failure, RankError, StopRequests, stop_requests, warm_up
from sixfold.gpt.launch.stop_signals import STOPPED

POLL_S = 0.1
BEAT_S = 0.2
TURN_S = 0.3  # between the tries of two nodes to lead
CONNECT_S = 1.0
PAUSE_S = 1.0  # longer than any turn of the loop: this process was stopped
TELL_S = 5.0  # of waiting for other nodes, before that is told


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """From a node that wants to follow; ``run``: a digest of how it was started."""

    node: int
    run: str
    held: tuple[Held, ...]
    asked: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """From the leader. keep: the node's members may be ranks again; see [Note: a node that was away]."""

    term: Term
    keep: bool


class NotLeading:
    """From a node that does not lead."""


@dataclass(frozen=True, slots=True)
class Refused:
    """From the leader, to a node that was started otherwise."""

    why: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Each ``BEAT_S``: how far members are, with the age of a step in place of its begin; how often asked to stop."""

    slots: dict[int, Slot] = field(default_factory=dict)
    asked: int = 0


@dataclass(frozen=True, slots=True)
class RunEnds:
    """From the leader: the run has ended so."""

    end: End


@dataclass(slots=True)
class _Remote:
    """The members of another node, behind its connection."""

    link: Link
    asked: int
    _beat: Beat = field(default_factory=Beat)
    _beat_at: float = 0.0
    _events: list[Event] = field(default_factory=list)

    def take(self, words: list[Any], now: float) -> None:
        for word in words:
            if isinstance(word, Beat):
                self._beat, self._beat_at, self.asked = word, now, max(self.asked, word.asked)
            elif isinstance(word, Said | Died):
                self._events.append(word)

    def carry_out(self, order: Order) -> None:
        if isinstance(order, Begin):
            ago = time.monotonic() - order.generation.lost_at  # clocks of two machines have nothing in common
            order = replace(order, generation=replace(order.generation, lost_at=ago))
        self.link.send(order)

    def events(self, now: float) -> list[Event]:
        self.take(self.link.receive(), now)
        events, self._events = self._events, []
        return events

    def beats(self, now: float) -> dict[int, Slot]:
        return {member: _at(slot, self._beat_at) for member, slot in self._beat.slots.items()}


def _at(slot: Slot, time_: float) -> Slot:
    """With the age of the step at hand for its begin, or the reverse."""
    return replace(slot, began_at=time_ - slot.began_at) if slot.began_at > 0 else slot


@dataclass(kw_only=True)
class _Supervisor:
    me: int
    addresses: tuple[tuple[str, int], ...]
    run_digest: str
    terms: Terms
    metrics: Path
    processes: Processes
    course: Callable[[], Course]
    hung_after_s: float
    wait_s: float
    asked_ranks: Callable[[], int | None]
    tell: Callable[[str], None]
    stop: StopRequests
    end: End | None = None
    leader: Leader | None = None

    def __post_init__(self) -> None:
        self._key, self._listener = self.terms.key(), listening(self.addresses[self.me], self.me)
        self._meetings = Servers(self.addresses[self.me][0])
        self._state: Callable[[float], None] = self._seek
        self._newcomers: list[Link] = []
        self._leaving: list[Link] = []
        self._come: dict[int, tuple[_Remote, tuple[Held, ...]]] = {}
        self._link: Link | None = None  # to who leads
        self._term: Term | None = None  # the newest in which this process led or followed
        self._before: int | None = None  # who led in the term before
        self._looked, self._since, self._beat_at, self._told = -1, 0.0, 0.0, False
        self._turn_at: float | None = None

    def run(self, watch: Callable[[], None]) -> End:
        """Follow or lead until the run has ended."""
        last = time.monotonic()
        while self.end is None:
            handles: list[Any] = [self._listener, *self.processes.handles(), *self._links()]
            wait(handles, timeout=POLL_S)
            now = time.monotonic()
            if now - last > PAUSE_S:
                for link in self._links():
                    link.heard_at += now - last
            last = now
            try:
                self._greet_newcomers(now)
                self._state(now)
            except DeposedError as error:
                self._deposed(error)
            watch()
        return self.end

    def close(self) -> None:
        """Everybody hears the end, and nothing is left here."""
        if self.leader is not None and self.end is not None:
            deadline = time.monotonic() + END_S
            while (links := [one for one in self._links() if not one.why]) and time.monotonic() < deadline:
                for link in links:
                    link.receive()
                time.sleep(POLL_S / 10)
        self.processes.close(at_once=self.end is None or self.end.at_once)
        self._meetings.close_all()
        for link in self._links():
            link.close()
        self._listener.close()

    def _links(self) -> list[Link]:
        remotes = [] if self.leader is None else [one for one in self.leader.nodes.values() if isinstance(one, _Remote)]
        remotes += [remote for remote, _ in self._come.values()]
        links = [*self._newcomers, *self._leaving, *(one.link for one in remotes), *filter(None, [self._link])]
        return [one for one in links if not one.why]

    # ---- who comes

    def _greet_newcomers(self, now: float) -> None:
        while True:
            try:
                self._newcomers.append(Link(self._listener.accept()[0], self._key))
            except BlockingIOError:
                break
        for link in list(self._newcomers):
            if (words := link.receive()) and isinstance(words[0], Hello):
                self._newcomers.remove(link)
                self._greet(link, words[0], words[1:], now)
            elif link.why or words or now - link.heard_at > self.hung_after_s:
                self._newcomers.remove(link)
                link.close()
        for link in list(self._leaving):
            link.receive()
            if link.why or now - link.heard_at > self.hung_after_s:
                self._leaving.remove(link)
                link.close()

    def _greet(self, link: Link, hello: Hello, rest: list[Any], now: float) -> None:
        remote = _Remote(link, hello.asked)
        remote.take(rest, now)
        if hello.run != self.run_digest or hello.node == self.me or not 0 <= hello.node < len(self.addresses):
            why = (
                f"node {self.me} at {_name(self.addresses[self.me])} leads the run, and node {hello.node} was started "
                "with another configuration, list of nodes, number of ranks or release; start all nodes by the same "
                "command, each with its own --node"
            )
            link.send(Refused(why))
            self._leaving.append(link)
        elif self.leader is not None:
            if hello.node in self.leader.nodes:
                self._lose(hello.node, "it has come anew", now)
            if self.leader.term is not None and self.leader.end is None:
                link.send(Welcome(term=self.leader.term, keep=False))
                self.tell(f"node {hello.node} at {_name(self.addresses[hello.node])} has joined")
                self.leader.joined(hello.node, remote, now)
        elif self._state == self._gather and self._term is not None:
            if hello.node in self._come:
                self._come.pop(hello.node)[0].link.close()
            self._come[hello.node] = remote, hello.held
            link.send(Welcome(term=self._term, keep=True))
        else:
            link.send(NotLeading())
            self._leaving.append(link)

    # ---- without a leader

    def _seek(self, now: float) -> None:
        """Knock where the newest term says; if nobody leads there, try to lead."""
        self.processes.events(now)  # dropped: whoever leads next is told what there is then
        newest = self.terms.newest()
        if self.stop.asked > (self._term is not None):
            self.end = End(status=STOPPED, at_once=True)
            return
        if newest is not None and newest.ended is not None and self._term is not None:
            failure = Failure(rank=0, time=time.time(), text=newest.why, exit_code=newest.ended)
            self.end = End(status=newest.ended, failure=failure if newest.why else None, at_once=True)
            return
        number = 0 if newest is None else newest.number
        if number != self._looked:
            self._looked, self._since, self._turn_at = number, now, None
        if newest is not None and newest.node != self.me and self._turn_at is None:
            if self._connected(newest.node, now):
                return
            if self._turn_at is None:
                return
        others = [node for node in range(len(self.addresses)) if newest is None or node != newest.node]
        if self._turn_at is None:  # nobody has led, or this node, before it was started anew
            self._turn_at = now + TURN_S * (others.index(self.me) if self.me in others else len(others))
        if now >= self._turn_at:
            term = self.terms.take(number + 1, self.me)
            if term is not None:
                self._term, self._before = term, None if newest is None else newest.node
                self._since, self._told, self._state = now, False, self._gather

    def _connected(self, node: int, now: float) -> bool:
        """Knock at a node; if it is gone, it is somebody's turn to lead."""
        try:
            connection = socket.create_connection(self.addresses[node], timeout=CONNECT_S)
        except ConnectionRefusedError:
            self._nobody_leads(now)
            return False
        except OSError:
            if now - self._since > self.hung_after_s:
                self._nobody_leads(now)
            return False
        self._link, self._state = Link(connection, self._key), self._knock
        held = tuple(self.processes.held())
        self._link.send(Hello(node=self.me, run=self.run_digest, held=held, asked=self.stop.asked))
        return True

    def _nobody_leads(self, now: float) -> None:
        newest = self.terms.newest()
        others = [node for node in range(len(self.addresses)) if newest is None or node != newest.node]
        place = others.index(self.me) if self.me in others else len(others)
        self._turn_at = now + TURN_S * place

    # ---- behind a leader

    def _knock(self, now: float) -> None:
        """Said hello; what members say meanwhile goes behind it."""
        assert self._link is not None, "it was connected"
        words = self._link.receive()
        self._report(now)
        if words and isinstance(words[0], Welcome):
            self._term, self._state = words[0].term, self._follow
            if not words[0].keep:
                self.processes.kill_all()
            self._obey(words[1:])
        elif words and isinstance(words[0], Refused):
            failure = Failure(rank=0, time=time.time(), text=words[0].why, exit_code=2, final=True)
            self.end = End(failure=failure, at_once=True)
        elif words or self._link.why or now - self._link.heard_at > self.hung_after_s:
            gone = bool(words) or not self._link.why or now - self._since > self.hung_after_s
            self._link.close()
            self._link, self._state = None, self._seek
            if gone:
                self._nobody_leads(now)

    def _follow(self, now: float) -> None:
        """Do what the leader says, and tell it what happens here."""
        assert self._link is not None and self._term is not None, "it was welcome"
        self._obey(self._link.receive())
        self._report(now)
        if self.end is None and (self._link.why or now - self._link.heard_at > self.hung_after_s):
            why = self._link.why or f"it has said nothing for {self.hung_after_s:g} s"
            self.tell(f"node {self._term.node} at {_name(self.addresses[self._term.node])} led and is lost: {why}")
            self._link.close()
            self._link, self._state, self._looked = None, self._seek, -1

    def _obey(self, words: list[Any]) -> None:
        for word in words:
            if isinstance(word, RunEnds):
                self.end = word.end
            elif isinstance(word, Begin):
                at = time.monotonic() - word.generation.lost_at
                self.processes.carry_out(replace(word, generation=replace(word.generation, lost_at=at)))
            elif not isinstance(word, Beat):
                self.processes.carry_out(word)

    def _report(self, now: float) -> None:
        assert self._link is not None, "it was connected"
        for event in self.processes.events(now):
            self._link.send(event)
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            slots = {member: _at(slot, now) for member, slot in self.processes.beats(now).items()}
            self._link.send(Beat(slots, self.stop.asked))

    # ---- in the lead

    def _gather(self, now: float) -> None:
        """Wait for the others: at a start for all; in a run for those that were there in the newest generation."""
        assert self._term is not None, "it was taken"
        self._term.check()
        self.processes.events(now)  # dropped: what is held is looked at below
        for node, (remote, _) in list(self._come.items()):
            remote.take(remote.link.receive(), now)
            if remote.link.why or now - remote.link.heard_at > self.hung_after_s:
                del self._come[node]
                remote.link.close()
        self._say_beat(now)
        held = {node: tuple(held) for node, (_, held) in self._come.items()} | {self.me: tuple(self.processes.held())}
        known = [one.generation for members in held.values() for one in members if one.generation is not None]
        asked = max(self.stop.asked, *(remote.asked for remote, _ in self._come.values()), 0)
        if asked > bool(known):
            self._finish(End(status=STOPPED, at_once=True))
            return
        wanted = set(range(len(self.addresses)))
        if known:
            wanted = {*max(known, key=lambda one: one.number).present} - {self._before}
        missing, limit = sorted(wanted - held.keys()), self.hung_after_s if known else self.wait_s
        names = ", ".join(f"node {node} at {_name(self.addresses[node])}" for node in missing)
        if missing and now - self._since > TELL_S and not self._told:
            self._told = True
            self.tell(f"waiting for {names}")
        if missing and now - self._since < limit:
            return
        if not known and not self._is_free(now):
            return
        if missing:
            self.tell(f"{names} did not come within {limit:g} s; the run begins without")
        self._lead_with(held, known=bool(known), asked=asked, now=now)

    def _is_free(self, now: float) -> bool:
        """Whether no other run is at work in the folder; ranks of a start before may need a moment to end."""
        try:
            check_free(self.metrics)
        except ConfigError as error:
            if now - self._since > self.hung_after_s:
                self._finish(End(failure=_failure(error), at_once=True))
            return False
        return True

    def _lead_with(self, held: dict[int, tuple[Held, ...]], *, known: bool, asked: int, now: float) -> None:
        leader = self.leader = Leader(
            course=self.course(),
            nodes={self.me: self.processes, **{node: remote for node, (remote, _) in self._come.items()}},
            meetings=self._meetings,
            hung_after_s=self.hung_after_s,
            asked_ranks=self.asked_ranks,
            tell=self.tell,
            term=self._term,
        )
        self._come, self._state = {}, self._lead
        if known:
            leader.take_over(held, now, asked)
            return
        for node, members in held.items():
            for one in members:
                leader.nodes[node].carry_out(Kill(member=one.member))
        self.asked_ranks()  # of a run before
        leader.begin()

    def _lead(self, now: float) -> None:
        leader = self.leader
        assert leader is not None and leader.term is not None, "it has begun"
        leader.term.check()
        self._say_beat(now)
        remotes = {number: one for number, one in leader.nodes.items() if isinstance(one, _Remote)}
        for number, remote in remotes.items():
            remote.take(remote.link.receive(), now)
            if remote.link.why or now - remote.link.heard_at > self.hung_after_s:
                self._lose(number, remote.link.why or f"it has said nothing for {self.hung_after_s:g} s", now)
        if leader.end is None:
            leader.look(now, max(self.stop.asked, *(remote.asked for remote in remotes.values()), 0))
        if leader.end is not None:
            self._finish(leader.end)

    def _lose(self, number: int, why: str, now: float) -> None:
        assert self.leader is not None, "it leads"
        remote = self.leader.nodes[number]
        assert isinstance(remote, _Remote), "this node is not lost to itself"
        remote.link.close()
        self.leader.lost(number, why, now)

    def _say_beat(self, now: float) -> None:
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            for link in self._links():
                if link not in self._newcomers and link not in self._leaving:
                    link.send(Beat())

    def _finish(self, end: End) -> None:
        assert self._term is not None, "it leads"
        status, why = (end.status, "") if end.failure is None else (end.failure.exit_code, end.failure.text)
        self.terms.end(self._term, status, why)
        for link in self._links():
            if link not in self._newcomers and link not in self._leaving:
                link.send(RunEnds(end))
        self.end = end

    def _deposed(self, error: DeposedError) -> None:
        """See [Note: a node that was away]."""
        self.tell(f"{error}")
        self.processes.kill_all()
        self._meetings.close_all()
        for link in self._links():
            link.close()
        self.leader, self._come, self._newcomers, self._leaving, self._link = None, {}, [], [], None
        self._state, self._looked = self._seek, -1


def listening(address: tuple[str, int], node: int) -> socket.socket:
    """Where other nodes reach this one.

    Raises:
        ConfigError: the address is not of this machine, or taken.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family)
    except OSError as error:
        what = {
            errno.EADDRINUSE: "is in use on this machine; choose another port, or end what listens there",
            errno.EADDRNOTAVAIL: "is no address of this machine; is --node right?",
        }.get(error.errno or 0, f"cannot be listened at ({error.strerror or error})")
        raise ConfigError(f"node {node} of --nodes is {_name(address)}, which {what}") from error
    listener.setblocking(False)
    return listener


def _name(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _failure(error: Exception) -> Failure:
    return Failure(rank=0, time=time.time(), text=str(error), exit_code=2, final=True)


def _nothing() -> None:
    """Body of a process that shows that others can be forked."""


def keep_alive_on(
    addresses: tuple[tuple[str, int], ...],
    me: int,
    target: Target,
    ranks: int,
    args: tuple[Any, ...] = (),
    *,
    per_node: int,
    prepare: Prepare | None = None,
    spares: int,
    attempts: int,
    hung_after_s: float,
    wait_s: float,
    run_dir: Path,
    run_digest: str,
    sizes: tuple[int, ...] = (),
    replaces: bool = True,
    asked_ranks: Callable[[], int | None] = lambda: None,
    watch: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda text: None,
) -> int:
    """As `keep_alive`, as node ``me`` of those at ``addresses``; each has spares of its own.

    Args:
        per_node: ranks that each node has room for. A node that is not needed waits to take the place of another.
        wait_s: at a start, for the other nodes. run_dir: which all nodes see.
        run_digest: of how this node was started; all nodes are started alike.
    Raises:
        ConfigError: what `listening` and `Terms.key` say.
        RankError: the run was given up, on all nodes; or this node was started otherwise than the one that leads.
    """
    os.environ[NODE_HOST] = addresses[me][0]
    if name := interface_of(addresses[me][0]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else a store that is closed prints pages in each survivor
    with tempfile.TemporaryDirectory(prefix="sixfold-") as folder, stop_requests() as stop:
        warm_up()
        warm = get_context("forkserver").Process(target=_nothing)
        warm.start()  # returns when torch is loaded: from now on a fork takes no longer than others wait for a word
        warm.join()
        slots = Slots(Path(folder) / "heartbeats")
        processes = Processes(
            slots=slots, target=target, args=args, prepare=prepare, hung_after_s=hung_after_s, local=False
        )
        supervisor = _Supervisor(
            me=me,
            addresses=addresses,
            run_digest=run_digest,
            terms=Terms(run_dir / FOLDER),
            metrics=run_dir / "metrics.jsonl",
            processes=processes,
            course=lambda: Course(
                ranks=ranks,
                spares=spares,
                per_node=per_node,
                attempts=attempts,
                sizes=sizes or (ranks,),
                replaces=replaces,
            ),
            hung_after_s=hung_after_s,
            wait_s=wait_s,
            asked_ranks=asked_ranks,
            tell=tell,
            stop=stop,
        )
        try:
            end = supervisor.run(watch)
        finally:
            supervisor.close()
            slots.close()
        if end.failure is not None:
            raise RankError(end.failure)
        return end.status
