"""The members of one node: their processes, watched and told what the leader says.

    leader.py --> Fork, Kill, Begin, TellOver, Forward --> Processes (this file) --> forkserver --> member.py
    leader.py <-- Said, Died, slots of heartbeats      <--'  ^--- pipes, sentinels, stopped processes

The leader's own node has them in its process. Those of other nodes are reached through nodes.py, by the same words.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from sixfold.gpt.elastic.generation import STUCK, Begin, Died, Event, Generation, Held, Leave, Over, Ready, Said
from sixfold.gpt.elastic.heartbeat import Slot, Slots
from sixfold.gpt.elastic.member import Prepare, Target, member_main
from sixfold.gpt.elastic.next_generation import Fork, Forward, Kill, TellOver
from sixfold.gpt.launch.spawn import Failure, is_stopped, silent_end

END_S = 3.0  # for processes to be gone
Order = Fork | Kill | Begin | TellOver | Forward


class Node(Protocol):
    """The members of one node, as its leader sees them."""

    def carry_out(self, order: Order) -> None: ...

    def events(self, now: float) -> list[Event]: ...

    def beats(self, now: float) -> dict[int, Slot]: ...


@dataclass(kw_only=True, slots=True)
class _Process:
    member: int
    process: BaseProcess
    channel: Connection
    stopped_at: float | None = None
    generation: Generation | None = None  # that it was told of last
    busy: bool = False  # it has not dropped that one

    @property
    def rank(self) -> int:
        return -1 if self.generation is None else self.generation.rank


@dataclass(kw_only=True)
class Processes:
    """What runs on this machine."""

    slots: Slots
    target: Target
    args: tuple[Any, ...]
    prepare: Prepare | None
    hung_after_s: float
    local: bool = True  # all ranks are on this machine
    by_member: dict[int, _Process] = field(default_factory=dict)  # those that live

    def __post_init__(self) -> None:
        self._lifeline, self._end = multiprocessing.Pipe(duplex=False)

    def handles(self) -> list[Any]:
        """What to wait for."""
        return [handle for one in self._living() for handle in (one.channel, one.process.sentinel)]

    def carry_out(self, order: Order) -> None:
        """Do what the leader says; a word to one that has died meanwhile is lost, its death is heard of next."""
        if isinstance(order, Fork):
            self._fork(order.member)
        elif isinstance(order, Kill):
            self._kill(order.member)
        elif (one := self.by_member.get(order.member)) is not None:
            if isinstance(order, Begin):
                one.generation, one.busy = order.generation, True
                _send(one, order.generation)
            elif isinstance(order, TellOver):
                _send(one, Over(generation=order.generation))
            else:
                signal_to(one.process, signal.SIGTERM)

    def events(self, now: float) -> list[Event]:
        """What members say, and which have ended or are stopped."""
        return [event for one in self._living() for event in (*self._heard(one), *self._stopped(one, now))]

    def beats(self, now: float) -> dict[int, Slot]:
        """How far each member is."""
        return {member: self.slots.read(member) for member in self.by_member}

    def held(self) -> list[Held]:
        """What a new leader takes over."""
        return [Held(member=one.member, generation=one.generation, busy=one.busy) for one in self._living()]

    def kill_all(self) -> None:
        """Nothing is left of what this node had."""
        for member in list(self.by_member):
            self._kill(member)

    def close(self, *, at_once: bool) -> None:
        """End every process: in order where the run is done, else at once."""
        if not at_once:
            for one in self._living():
                _send(one, Leave())
            deadline = time.monotonic() + END_S
            for one in self._living():
                one.process.join(max(0.0, deadline - time.monotonic()))
        for one in self._living():
            _kill(one)
        for one in self._living():
            one.process.join(END_S)
            one.channel.close()
        self._lifeline.close()
        self._end.close()

    def _living(self) -> list[_Process]:
        return list(self.by_member.values())

    def _heard(self, one: _Process) -> list[Event]:
        """What a member says; then, whether it still lives."""
        heard: list[Event] = []
        ended = not one.process.is_alive()  # before the pipe is read: a word may come between
        while one.channel.poll():
            try:
                word = one.channel.recv()
            except (EOFError, OSError):
                one.process.join(END_S)  # the pipe closes a moment before the process has ended
                ended = True
                break
            one.busy = one.busy and not (isinstance(word, Ready) and word.generation == _number(one))
            heard.append(Said(member=one.member, word=word))
        if ended:
            del self.by_member[one.member]
            one.channel.close()
            failure = silent_end(one.rank, one.process.exitcode)
            if one.process.exitcode == STUCK:
                failure = replace(failure, text=f"rank {failure.rank} did not come out of a wait for a lost one")
            heard.append(Died(member=one.member, failure=failure))
        return heard

    def _stopped(self, one: _Process, now: float) -> list[Event]:
        if not is_stopped(one.process):
            one.stopped_at = None
        elif one.stopped_at is None:
            one.stopped_at = now
        elif now - one.stopped_at > self.hung_after_s:
            text = f"rank {one.rank} was stopped by a signal for {self.hung_after_s:g} s"
            failure = Failure(rank=one.rank, time=time.time(), text=text)
            return [Died(member=one.member, failure=failure, silent=True)]
        return []

    def _fork(self, member: int) -> None:
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        self.slots.clear(member)
        job = (there, self._lifeline, member, self.slots.path, self.target, self.args, self.prepare, self.local)
        process = context.Process(target=member_main, args=job, name=f"sixfold member {member}")
        process.start()
        there.close()
        self.by_member[member] = _Process(member=member, process=process, channel=here)

    def _kill(self, member: int) -> None:
        """The kernel ends it; its death is no event any more."""
        one = self.by_member.pop(member, None)
        if one is not None:
            _kill(one)
            one.channel.close()


def _number(one: _Process) -> int:
    return 0 if one.generation is None else one.generation.number


def _send(one: _Process, word: Generation | Over | Leave) -> None:
    try:
        one.channel.send(word)
    except OSError:
        pass


def _kill(one: _Process) -> None:
    signal_to(one.process, signal.SIGKILL)


def signal_to(process: BaseProcess, number: signal.Signals) -> None:
    """Signal a process that lives."""
    if process.pid is not None and process.is_alive():
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            pass
