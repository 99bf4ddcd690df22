"""The one who leads: it hears what happens on all nodes, and has them do what next_generation.py says.

    supervisor.py, nodes.py --> Leader (this file) --> Course --> commands --> Node.carry_out, the store of a generation
                                 ^--- Node.events, heartbeats, requests to stop and to resize

A node is the leader's own (processes.py) or another one behind a connection (nodes.py). There is no other difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sixfold.gpt.elastic.generation import Begin, Died, Event, Failed, Generation, Held, Ready
from sixfold.gpt.elastic.heartbeat import Slot, overdue_s, patience_s
from sixfold.gpt.elastic.meeting import Meetings
from sixfold.gpt.elastic.next_generation import ASKED, JOINED, Command, Course, End, Fork, Form, Phase, TellOver
from sixfold.gpt.elastic.processes import Node
from sixfold.gpt.elastic.terms import Term
from sixfold.gpt.launch.spawn import Failure


@dataclass(kw_only=True)
class Leader:
    """Carries a course out, on nodes.

    Attributes:
        term: in which it leads; None where there is one node. end: how the run has ended.
    """

    course: Course
    nodes: dict[int, Node]
    meetings: Meetings
    hung_after_s: float
    asked_ranks: Callable[[], int | None]
    tell: Callable[[str], None]
    term: Term | None = None
    end: End | None = None
    _on: dict[int, int] = field(default_factory=dict)  # node, by member
    _asked: int = 0
    _size: int = 0

    def begin(self) -> None:
        """The first generation."""
        self._carry_out(self.course.begin(sorted(self.nodes)))

    def take_over(self, held: Mapping[int, Sequence[Held]], now: float, asked: int) -> None:
        """Go on where another leader has ended; ``asked``: how often the run was asked to stop."""
        self._asked = asked  # ranks were told; twice would end them at once
        self._on |= {one.member: node for node, members in held.items() for one in members}
        self._carry_out(self.course.take_over(held, now, stop=asked > 0))

    def joined(self, number: int, node: Node, now: float) -> None:
        """A node has come, without members."""
        self.nodes[number] = node
        self._carry_out(self.course.node_joined(number, now))

    def lost(self, number: int, why: str, now: float) -> None:
        """A node does not answer any more."""
        del self.nodes[number]
        self._carry_out(self.course.node_lost(number, f"rank {{rank}} was lost with node {number}: {why}", now))

    def look(self, now: float, asked: int) -> None:
        """What has happened on all nodes; ``asked``: how often the run was asked to stop."""
        course, beats = self.course, self._beats(now)
        slots = [beats.get(member, _NO_WORD) for member in course.members]
        course.progressed(max((slot.step for slot in slots), default=0))
        for node in list(self.nodes.values()):
            for event in node.events(now):
                self._carry_out(self._answer(event, now))
        if asked > self._asked:
            self._stop(asked, slots)
        if (ranks := self.asked_ranks()) is not None:
            self._carry_out(course.resized(ranks, now))
        self._carry_out(course.tick(now, patience_s(slots, self.hung_after_s)))
        if overdue_s(slots, now, self.hung_after_s) > 0 and course.phase is Phase.RUNNING:
            limit = patience_s(slots, self.hung_after_s)
            text = f"step {max(slot.step for slot in slots) + 1} did not end within {limit:.1f} s"
            self._carry_out(course.stalled(Failure(rank=0, time=time.time(), text=text), now))

    def _beats(self, now: float) -> dict[int, Slot]:
        return {member: slot for node in self.nodes.values() for member, slot in node.beats(now).items()}

    def _stop(self, asked: int, slots: list[Slot]) -> None:
        self._asked = asked
        if asked > 1:
            self._carry_out(self.course.stop_at_once())
            return
        begun = any(slot.begun for slot in slots) or self.course.generation > 1
        if begun:
            self.tell("asked to stop: finishing this step and saving it. A second signal ends the run without a save")
        self._carry_out(self.course.stop(begun=begun))

    def _answer(self, event: Event, now: float) -> list[Command]:
        course, member = self.course, event.member
        if isinstance(event, Died):
            return (course.silent if event.silent else course.died)(member, event.failure, now)
        word = event.word
        if isinstance(word, Ready):
            return course.ready(member, word.generation)
        if isinstance(word, Failed):
            return course.failed(member, word.generation, word.failure, word.blames_peer, now, accused=word.accused)
        return course.done(member, word.generation, word.status)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, End):
                self.end = command
            elif isinstance(command, Form):
                self._form(command)
            else:
                if isinstance(command, TellOver):
                    self.meetings.close(command.generation)
                if isinstance(command, Fork):
                    self._on[command.member] = command.node
                if (node := self.nodes.get(self._on[command.member])) is not None:
                    node.carry_out(command)

    def _form(self, form: Form) -> None:
        if self.term is not None:
            self.term.check()
        if form.lost_at:
            self.meetings.close(form.generation - 1)  # also where nobody had to be told
            self._say(form)
        self._size, store = len(form.members), self.meetings.open(form.generation)
        if self.term is not None:
            self.term.check()  # once more: that may have taken long
        for rank, member in enumerate(form.members):
            generation = Generation(
                number=form.generation,
                rank=rank,
                place=form.places[rank],
                size=len(form.members),
                store=store,
                lost=form.lost,
                lost_at=form.lost_at,
                stop=form.stop,
                nodes=form.nodes,
                present=tuple(self.nodes),
                wanted=form.wanted,
                term=self.term,
            )
            self.nodes[form.nodes[rank]].carry_out(Begin(member=member, generation=generation))

    def _say(self, form: Form) -> None:
        wished = form.cause == ASKED or form.cause.endswith(JOINED)
        nobody = form.cause if wished else f"no rank could be blamed: {form.cause}"
        lost, size = "; ".join(one.why for one in form.lost) or nobody, len(form.members)
        ranks = "" if size == self._size else f" with {size} rank{'s' * (size > 1)}"
        self.tell(f"{lost}; generation {form.generation} goes on{ranks}")


_NO_WORD = Slot(step=0, begun=0, began_at=0.0, longest_s=0.0)
