"""A program without end, as this process runs it: a list per batch, and what stays in flight between two of them.

    Endless, stages, links --> a ring of slots, calls of each piece (this file) --> runner

The same wiring as of a program that ends. Batch b has ring b modulo the batches that are ever in flight. The program
has a piece for the first, second, ... and every later step, and a tail. Each piece is bound once per ring in which it
can begin. Between two steps only what is in flight is held: inputs, graphs, gradients that were asked for, versions of
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from sixfold.pipeline.compiler.compile import Compiled, StepResult
from sixfold.pipeline.compiler.wiring import BatchRows, Call, Facts, Goal
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.measured.action_times import ActionTimer
from sixfold.pipeline.microbatches.cut_batch import Values, as_tuple
from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.entry_times import in_turns
from sixfold.pipeline.program.lowering import posted_order
from sixfold.pipeline.program.program import Program, Weights
from sixfold.pipeline.proof.endless import Endless, Rows, moved
from sixfold.pipeline.stage.compute import WholeBackward
from sixfold.pipeline.stage.output_memory import copied
from sixfold.pipeline.stage.random_state import RandomState
from sixfold.pipeline.stage.stage import Stage
from sixfold.pipeline.stage.weight_versions import Versions
from sixfold.pipeline.transport.protocol import Links

__all__ = ["CompiledEndless"]


_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_Piece = tuple[Program, list[tuple[int, Call]], list[Callable[[], object]], ActionTimer | None]


class CompiledEndless(Compiled):
    """A program whose batches follow without end.

    Args:
        versions: of the stages that are here, by index; they outlive this object.
    Attributes:
        batches: steps since nothing was in flight.
        calls, entries, program: of the piece that ``begin`` or ``drain`` chose.
    """

    steps = True

    def __init__(
        self,
        endless: Endless,
        stages: Mapping[int, Stage],
        links: Mapping[int, Links],
        versions: Mapping[int, Versions],
        goal: Goal,
        *,
        lookahead: int,
        dynamic_shapes: bool | Literal["announced"],
        number: int,
        profile: bool = False,
        overlap: str = "order",
    ) -> None:
        if overlap == "streams" and any(action.parts for _, _, action in endless.program.entries()):
            raise ScheduleError(
                f"weights: {endless.program.weights} put older weights into a stage for one part of an overlap at a "
                "time; make the runner with overlap='order'"
            )
        if goal.scale == "token":
            raise ScheduleError(
                f"scale='token' divides a step's gradients, and with weights: {endless.program.weights} a batch ends "
                "in a later step; use 'sum' and divide in the optimizer, or 'mean'"
            )
        self.endless, self.versions = endless, versions
        self._lookahead, self._profile = lookahead, profile
        self._m, self._rings = endless.batch, endless.in_flight
        self._whole = whole = endless.unrolled(len(endless.steps) + 1)
        super().__init__(
            whole,
            stages,
            links,
            goal,
            slots=self._m * self._rings,
            number=number,
            dynamic_shapes=dynamic_shapes,
            stores=WholeBackward,
            versions=versions,
        )
        self.batches = 0
        self._first = 0  # number of the first batch since nothing was in flight
        self._now = 0  # of the batch that runs
        self._bound: dict[tuple[int, bool, int], _Piece] = {}
        self._later, self._draining = 0, False
        self._choose(0, False, 0)

    # ---- steps

    @property
    def batch(self) -> int:
        """Number of the batch to come, since the stages had W(0)."""
        made = [versions.made for versions in self.versions.values()]
        return self._first + self.batches if self.batches else made[0] if made else self._first

    def renew(self) -> None:
        """Refuse it: microbatches of the batch before may be in flight."""
        raise ScheduleError(
            f"new_shapes is for steps that end what they begin; with weights: {self.endless.program.weights} batches "
            "overlap: make the runner with dynamic_shapes=True"
        )

    def begin(
        self, inputs: list[Values], targets: list[Any], kwargs: list[Mapping[str, Any]], keep: bool, rows: BatchRows
    ) -> None:
        """Fill the slots of a batch, and choose its list.

        What backwards in later steps read is copied: the caller may fill its batch again.
        [Note: memory that changes hands] in ``output_memory.py``.
        """
        inputs, targets, kwargs = copied(inputs), copied(targets), copied(kwargs)
        self._now = batch = self.batch
        last = len(self.endless.steps) - 1
        if not self.batches:
            self._first = batch
        for versions in self.versions.values():
            versions.begin(batch)
        piece = min(self.batches, last)
        at = (batch - piece) % self._rings  # the ring of the piece's batch 0
        self._choose(piece, False, at)
        self._later, self._draining = batch - piece - at, False
        self._fill(self._ring(batch), inputs, targets, kwargs, keep, rows)

    def drain(self) -> None:
        """Choose the list of what is left."""
        assert self.batches, "there is nothing in flight"
        for versions in self.versions.values():
            versions.begin(self.batch)
        piece = min(self.batches, len(self.endless.tails))
        at = (self.batch - piece) % self._rings
        self._choose(piece, True, at)
        self._later, self._draining = self.batch - piece - at, True

    def result(self) -> StepResult:
        """What the step made."""
        losses, outputs = [], []
        if (tail := self.tail) is not None and not self._draining:
            ring = self._ring(self._now)
            losses, outputs = tail.losses[ring], tail.outputs[ring] if tail.keep else []
        if self._timer is None:
            return StepResult(losses=losses, outputs=outputs)
        later = self._later  # numbers of the piece's actions become those of the batches that ran
        events = tuple((r, moved((a,), later, self._m)[0], b, e) for r, a, b, e in self._timer.events())
        # The events of one step do not hold the STEPs that made what it reads: versions are counted as they come.
        ranks = len(self._whole.ranks)
        return StepResult(losses=losses, outputs=outputs, events=events, ranks=ranks, weights=Weights.PIPEDREAM)

    def clear(self, *, failed: bool = False) -> None:
        """The list went through, or failed: drop every tensor that is not in flight."""
        if failed:
            self.batches = 0
            for wiring in self._wirings.values():
                wiring.clear()
            for lane in self._lanes.values():
                lane.clear()
            for versions in self.versions.values():
                versions.drop()
            return
        if self._draining:
            self._first, self.batches = self._first + self.batches, 0
        else:
            self.batches += 1
        if self.tail is not None:
            self.tail.clear_results()
        for run in self.runs.values():
            for slot in set(range(run.slots)).difference(self.versions[run.index].reading()):
                run.release(slot)
                if self.tail is not None and run.index == self._whole.stages - 1:
                    self.tail.targets[slot] = None

    # ---- states

    @property
    def order(self) -> str:
        """The text of everything that this runs, whatever number of batches the given program had."""
        return str(self._whole)

    def receive(self) -> None:
        """Wait for what was asked for and is not used yet."""
        batches = min(self.batches, len(self.endless.steps))
        later = self.batch - batches
        for rank, wiring in self._wirings.items():
            rows = [action for t in range(batches) for action in self.endless.step(t)[rank]]
            used = {(a.stage, a.microbatch) for row in rows for a in row.each() if a.kind in (Kind.B, Kind.I)}
            for action in moved(
                [a for a in rows if a.kind is Kind.RECV_B and (a.stage, a.microbatch) not in used], later, self._m
            ):
                assert action.microbatch is not None, f"{action}: a message has a microbatch"
                wait = wiring.receipt(action).wait
                self.runs[action.stage].arrive_gradients(wait, action.microbatch % (self._m * self._rings))

    def go_on_at(self, batch: int, batches: int) -> None:
        """The batch to come is ``batch``, and the last ``batches`` were run since nothing was in flight."""
        self._first, self.batches = batch - batches, batches

    def run_again(self, stage: int, k: int, inputs: Values, began: RandomState, *, graph: bool) -> None:
        """The forward of a slot, with the version of the weights that it reads."""
        run, outputs = self.runs[stage], []
        self.versions[stage].under(lambda k: outputs.append(run.run_again(k, inputs, began, graph)))(k)
        following = stage + 1
        if following < self._whole.stages and following not in self._wirings[self._whole.placement[stage]].runs:
            lane = self._lanes[self._whole.placement[stage]]
            lane.resume(Action(stage, Kind.SEND_F, k), as_tuple(outputs[0], f"the output of stage {stage}"))

    # ---- pieces

    def _ring(self, batch: int) -> slice:
        first = batch % self._rings * self._m
        return slice(first, first + self._m)

    def _choose(self, piece: int, tail: bool, at: int) -> None:
        """The calls of step ``piece``, or of what is left behind ``piece`` steps; their batch 0 is in ring ``at``."""
        key = piece, tail, at
        if key not in self._bound:
            rows = self.endless.tail(piece) if tail else self.endless.step(piece)
            order = self._order(piece if tail else len(self.endless.steps), piece)
            self._bound[key] = self._bind(tuple(moved(row, at, self._m) for row in rows), order, at)
        self.program, self.entries, self.calls, self._timer = self._bound[key]
        if self._timer is not None:
            self._timer.begin(self.recording)

    def _order(self, batches: int, piece: int) -> list[tuple[int, int]]:
        """Rank and position of the entries of a piece, in the order in which ``batches`` of them and a tail run.

        Receives are posted ahead, but not those of a step's end, which are of a later step, and none of the tail, where
        a place may still be in use.
        """
        pieces = [*map(self.endless.step, range(batches)), self.endless.tail(batches)]
        orders: list[list[list[int]]] = []  # by rank and piece
        for rank in range(len(self._whole.ranks)):
            orders.append([])
            for t, rows in enumerate(pieces):
                row, end = rows[rank], len(rows[rank])
                while end and row[end - 1].kind in _RECEIVES:
                    end -= 1
                posted = posted_order(row[:end], self._lookahead if t < batches else 0)
                orders[rank].append([*posted, *range(end, len(row))])
        rows = tuple(
            tuple(pieces[t][rank][position] for t, order in enumerate(mine) for position in order)
            for rank, mine in enumerate(orders)
        )
        whole = replace(self._whole, ranks=rows, microbatches=batches * self._m)
        if len(self._wirings) == 1:
            return [(rank, position) for rank in self._wirings for position in orders[rank][piece]]
        firsts = [sum(map(len, mine[:piece])) for mine in orders]
        return [
            (rank, orders[rank][piece][at - firsts[rank]])
            for rank, at, _ in in_turns(whole)
            if firsts[rank] <= at < firsts[rank] + len(orders[rank][piece])
        ]

    def _bind(self, rows: Rows, order: list[tuple[int, int]], at: int) -> _Piece:
        whole = replace(self._whole, ranks=tuple(moved(row, at, self._m) for row in self._whole.ranks))
        for rank, wiring in self._wirings.items():
            wiring.facts = Facts(whole, rank)
        entries = [
            (rank, call)
            for rank, position in order
            if rank in self._wirings
            for call in self._wirings[rank].bind([(position, rows[rank][position])])
        ]
        timer = ActionTimer() if self._profile else None
        calls = [self._timed(timer, rank, call) for rank, call in entries]
        return replace(self._whole, ranks=rows, microbatches=self._m), entries, calls, timer
