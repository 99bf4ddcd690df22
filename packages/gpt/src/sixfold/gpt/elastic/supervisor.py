"""The process that starts members, watches them, and forms generations of ranks: what next_generation.py says.

    train.py --> keep_alive (this file) --> forkserver --> member.py, in each process
                 ^--- deaths, stopped processes, heartbeats, words of the pipes, signals
                 `--> next_generation.py --> commands --> pipes, SIGKILL, the store of each generation

[Note: a closed store] The ranks of a generation meet over a file. When the generation is over, the file becomes a link
to itself: every later use of it fails at once, also in a rank that waits for a key, and in one that wakes up late.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sixfold.gpt.elastic.generation import STUCK, Done, Failed, Generation, Leave, Over, Ready
from sixfold.gpt.elastic.heartbeat import Slot, Slots, overdue_s, patience_s
from sixfold.gpt.elastic.member import Prepare, Target, member_main
from sixfold.gpt.elastic.next_generation import ASKED, Command, Course, End, Fork, Form, Forward, Kill, Phase, TellOver
from sixfold.gpt.launch.spawn import Failure, RankError, StopRequests, is_stopped, silent_end, stop_requests, warm_up

POLL_S = 0.1
END_S = 3.0  # for processes to be gone


@dataclass(kw_only=True, slots=True)
class _Process:
    member: int
    process: BaseProcess
    channel: Connection
    stopped_at: float | None = None


@dataclass(kw_only=True)
class _Supervisor:
    course: Course
    folder: Path
    slots: Slots
    target: Target
    args: tuple[Any, ...]
    prepare: Prepare | None
    hung_after_s: float
    asked_ranks: Callable[[], int | None]
    tell: Callable[[str], None]
    processes: dict[int, _Process] = field(default_factory=dict)  # by member; those that live
    end: End | None = None
    _asked: int = 0
    _size: int = 0

    def run(self, stop: StopRequests, watch: Callable[[], None] | None) -> None:
        """Carry out what the course says until it ends."""
        self._carry_out(self.course.begin())
        while self.end is None:
            handles: list[Any] = [handle for one in self._living() for handle in (one.channel, one.process.sentinel)]
            wait(handles, timeout=POLL_S)
            self._look(stop)
            if watch is not None:
                watch()

    def close(self) -> None:
        """End every process: in order where the run is done, else at once."""
        if self.end is not None and not self.end.at_once:
            for one in self._living():
                self._send(one.member, Leave())
            deadline = time.monotonic() + END_S
            for one in self._living():
                one.process.join(max(0.0, deadline - time.monotonic()))
        for one in self._living():
            _kill(one)
        for one in self._living():
            one.process.join(END_S)
            one.channel.close()

    def _living(self) -> list[_Process]:
        return list(self.processes.values())

    def _look(self, stop: StopRequests) -> None:
        course, now = self.course, time.monotonic()
        slots = [self.slots.read(member) for member in course.members]
        course.progressed(max(slot.step for slot in slots))
        for one in self._living():
            if one.member in self.processes:  # a word of another may have ended it
                self._hear(one, now)
        if stop.asked > self._asked:
            self._stop(stop.asked, slots)
        if (ranks := self.asked_ranks()) is not None:
            self._carry_out(self.course.resized(ranks, now))
        for one in self._living():
            if one.member in self.processes:
                self._see_stopped(one, now)
        self._carry_out(course.tick(now, patience_s(slots, self.hung_after_s)))
        if overdue_s(slots, now, self.hung_after_s) > 0 and course.phase is Phase.RUNNING:
            limit = patience_s(slots, self.hung_after_s)
            text = f"step {max(slot.step for slot in slots) + 1} did not end within {limit:.1f} s"
            self._carry_out(course.stalled(Failure(rank=0, time=time.time(), text=text), now))

    def _stop(self, asked: int, slots: list[Slot]) -> None:
        self._asked = asked
        if asked > 1:
            self._carry_out(self.course.stop_at_once())
            return
        begun = any(slot.begun for slot in slots) or self.course.generation > 1
        if begun:
            self.tell("asked to stop: finishing this step and saving it. A second signal ends the run without a save")
        self._carry_out(self.course.stop(begun=begun))

    def _hear(self, one: _Process, now: float) -> None:
        """Take what a member says; then, whether it still lives."""
        ended = not one.process.is_alive()  # before the pipe is read: a word may come between
        while one.channel.poll():
            try:
                word = one.channel.recv()
            except (EOFError, OSError):
                one.process.join(END_S)  # the pipe closes a moment before the process has ended
                ended = True
                break
            self._carry_out(self._event(one.member, word, now))
            if one.member not in self.processes:
                return
        if ended:
            del self.processes[one.member]
            one.channel.close()
            failure = silent_end(self._rank_of(one.member), one.process.exitcode)
            if one.process.exitcode == STUCK:
                failure = replace(failure, text=f"rank {failure.rank} did not come out of a wait for a lost one")
            self._carry_out(self.course.died(one.member, failure, now))

    def _event(self, member: int, word: object, now: float) -> list[Command]:
        if isinstance(word, Ready):
            return self.course.ready(member, word.generation)
        if isinstance(word, Failed):
            return self.course.failed(
                member, word.generation, word.failure, word.blames_peer, now, accused=word.accused
            )
        assert isinstance(word, Done), f"member {member} says {word!r}"
        return self.course.done(member, word.generation, word.status)

    def _see_stopped(self, one: _Process, now: float) -> None:
        if not is_stopped(one.process):
            one.stopped_at = None
        elif one.stopped_at is None:
            one.stopped_at = now
        elif now - one.stopped_at > self.hung_after_s:
            text = f"rank {self._rank_of(one.member)} was stopped by a signal for {self.hung_after_s:g} s"
            failure = Failure(rank=self._rank_of(one.member), time=time.time(), text=text)
            self._carry_out(self.course.silent(one.member, failure, now))

    def _rank_of(self, member: int) -> int:
        members = self.course.members
        return members.index(member) if member in members else -1

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Fork):
                self._fork(command.member)
            elif isinstance(command, Kill):
                self._kill(command.member)
            elif isinstance(command, TellOver):
                close_store(self._store(command.generation))
                self._send(command.member, Over(generation=command.generation))
            elif isinstance(command, Form):
                self._form(command)
            elif isinstance(command, Forward):
                if (one := self.processes.get(command.member)) is not None:
                    _signal(one, signal.SIGTERM)
            else:
                self.end = command

    def _fork(self, member: int) -> None:
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        job = (there, member, self.slots.path, self.target, self.args, self.prepare)
        process = context.Process(target=member_main, args=job, name=f"sixfold member {member}")
        process.start()
        there.close()
        self.processes[member] = _Process(member=member, process=process, channel=here)

    def _kill(self, member: int) -> None:
        """The kernel ends it; its death is no event any more."""
        one = self.processes.pop(member, None)
        if one is not None:
            _kill(one)
            one.channel.close()

    def _form(self, form: Form) -> None:
        if form.lost_at:
            close_store(self._store(form.generation - 1))  # also where nobody had to be told
            self._say(form)
        self._size = len(form.members)
        for rank, member in enumerate(form.members):
            generation = Generation(
                number=form.generation,
                rank=rank,
                place=form.places[rank],
                size=len(form.members),
                store=str(self._store(form.generation)),
                lost=form.lost,
                lost_at=form.lost_at,
                stop=form.stop,
            )
            self._send(member, generation)

    def _say(self, form: Form) -> None:
        nobody = form.cause if form.cause == ASKED else f"no rank could be blamed: {form.cause}"
        lost, size = "; ".join(one.why for one in form.lost) or nobody, len(form.members)
        ranks = "" if size == self._size else f" with {size} rank{'s' * (size > 1)}"
        self.tell(f"{lost}; generation {form.generation} goes on{ranks}")

    def _send(self, member: int, word: Generation | Over | Leave) -> None:
        """Give a member a word; one that has died meanwhile is heard of next."""
        if (one := self.processes.get(member)) is not None:
            try:
                one.channel.send(word)
            except OSError:
                pass

    def _store(self, generation: int) -> Path:
        return self.folder / f"generation-{generation}"


def close_store(store: Path) -> None:
    """See [Note: a closed store]. May be done again."""
    if not store.is_symlink():
        link = store.with_name(f".{store.name}")
        link.symlink_to(store.name)
        link.replace(store)


def _kill(one: _Process) -> None:
    _signal(one, signal.SIGKILL)


def _signal(one: _Process, number: signal.Signals) -> None:
    if one.process.pid is not None and one.process.is_alive():
        try:
            os.kill(one.process.pid, number)
        except ProcessLookupError:
            pass


def keep_alive(
    target: Target,
    ranks: int,
    args: tuple[Any, ...] = (),
    *,
    prepare: Prepare | None = None,
    spares: int,
    attempts: int,
    hung_after_s: float,
    sizes: tuple[int, ...] = (),
    replaces: bool = True,
    asked_ranks: Callable[[], int | None] = lambda: None,
    watch: Callable[[], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Run ``target(generation, heartbeat, *args)`` in ``ranks`` processes; go on when one is lost.

    A member that is lost is replaced by one of ``spares``, or a new process; all the others drop what they have and
    call ``target`` again, in the same processes. Signals that ask for a stop are forwarded as `start_ranks` does.

    Args:
        target: module-level function; returns 0, or 143 if it was asked to stop and has saved.
        prepare: module-level function; each process calls ``prepare(*args)`` before all else, spares too.
        attempts: recoveries in a row without a step that was not done before.
        hung_after_s: how long a process may be stopped, and a step be behind; see heartbeat.py.
        sizes, replaces: numbers of ranks that a generation may have, and whether lost ones are replaced by new
            processes; see [Note: fewer and more ranks].
        asked_ranks: the one of ``sizes`` that was asked for since the last call, or None.
        watch: called here about ten times a second. tell: is given a line for each event.
    Returns:
        0 if every rank finished, 143 if they were asked to stop and every step that they did is saved.
    Raises:
        RankError: the run was given up; the text is the cause.
    """
    with tempfile.TemporaryDirectory(prefix="sixfold-") as folder, stop_requests() as stop:
        warm_up()
        slots = Slots(Path(folder) / "heartbeats")
        supervisor = _Supervisor(
            course=Course(ranks=ranks, spares=spares, attempts=attempts, sizes=sizes or (ranks,), replaces=replaces),
            folder=Path(folder),
            slots=slots,
            target=target,
            args=args,
            prepare=prepare,
            hung_after_s=hung_after_s,
            asked_ranks=asked_ranks,
            tell=tell or (lambda text: None),
        )
        try:
            supervisor.run(stop, watch)
        finally:
            supervisor.close()
            slots.close()
        end = supervisor.end
        assert end is not None, "the supervisor runs until the course has ended"
        if end.failure is not None:
            raise RankError(end.failure)
        return end.status
