"""The compiled programs of one runner.

Program, call --> all ranks have the same? --> Compiled, once (this file) --> runner
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from sixfold.pipeline.compiler.compile import Compiled, CompiledBatch
from sixfold.pipeline.compiler.compile_endless import CompiledEndless
from sixfold.pipeline.compiler.cuda_graphs import check_graphed
from sixfold.pipeline.compiler.wiring import Goal
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.executor.arguments import check_program, complete
from sixfold.pipeline.program.program import Program, Weights
from sixfold.pipeline.proof.endless import Endless, endless
from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore
from sixfold.pipeline.stage.stage import Stage
from sixfold.pipeline.stage.weight_versions import Versions
from sixfold.pipeline.transport.agreement import all_know
from sixfold.pipeline.transport.back_ends import one_thread
from sixfold.pipeline.transport.protocol import Links

__all__ = ["ProgramCache", "one_process"]

_REMEMBERED = 64  # program objects looked up by identity
_EDGES = (None, "groups", "one", "host", "a function")  # what options may be, to send them as numbers
_SHAPES = (False, True, "announced")


class ProgramCache:
    """Programs by what they are run for; equal ones share their calls and what was agreed about their shapes.

    Args:
        stages: that are here, by index.
        here: this rank; None where all are in this process.
        ranks: of the group.
        links: of this rank, there before the first ``get``; empty where all are in this process.
        one: all edges are one communicator.
        options: of every ``CompiledBatch``.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        here: int | None,
        ranks: int,
        links: Mapping[int, Links],
        *,
        one: bool = False,
        **options: Any,
    ) -> None:
        self._stages, self._here, self._ranks = stages, here, ranks
        self._links, self._options, self._one = links, options, one
        self._checked: set[Program] = set()
        self._compiled: dict[tuple[Program, str, Goal], Compiled] = {}
        self._by_identity: dict[tuple[int, str, Goal], tuple[Program, Compiled]] = {}
        self._endless: dict[Program, Endless | None] = {}
        self._versions: dict[Weights, dict[int, Versions]] = {}
        self._stores: dict[int, WeightGradientStore] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def check(self, program: Program) -> None:
        """It is right, and the stages can run it.

        Raises:
            ScheduleError: one of these does not hold.
        """
        if program not in self._checked:
            check_program(program, self._stages, self._here, self._ranks, one=self._one)
            check_graphed(program, self._stages, self._options)
            self._checked.add(program)

    def prepare(self, program: Program) -> None:
        """It keeps weights as those before it did, and can be continued where it has no end.

        Raises:
            ScheduleError: one of these does not hold.
        """
        if self._continued(program) is not None:
            self._versions_of(program.weights)

    def get(self, program: Program, mode: str, goal: Goal) -> Compiled:
        """The bound calls of ``program``; when it is new, all ranks must come with the same.

        Raises:
            ScheduleError: it cannot run here, or another rank has another one.
            PeerLost: another rank did not come before the deadline.
        """
        known = self._by_identity.get((id(program), mode, goal))
        if known is not None:
            return known[1]
        compiled = self._compiled.get((program, mode, goal))
        if compiled is None:
            self.check(program)
            self.prepare(program)
            compiled = self._compiled[program, mode, goal] = self._make(program, mode, goal)
        if len(self._by_identity) >= _REMEMBERED:
            self._by_identity.clear()
        self._by_identity[id(program), mode, goal] = (program, compiled)  # the reference keeps the id from being reused
        return compiled

    def _make(self, program: Program, mode: str, goal: Goal) -> Compiled:
        told = mode if self._options["dynamic_shapes"] != "announced" else f"{mode} announced"
        number = _number_of(program, told, goal.scale)
        if self._here is not None:
            here = f": here it is {program.name or 'unnamed'} with m={program.microbatches} and scale={goal.scale!r}"
            self._agree_on(number, f"was given another program to {mode} than", here)
        links = one_process(program) if self._here is None else self._links
        found = self._continued(program)
        if found is not None and mode == "step":
            versions = self._versions_of(program.weights)
            return CompiledEndless(found, self._stages, links, versions, goal, number=number, **self._options)
        whole = complete(program) if found is None else found.forward
        return CompiledBatch(whole, self._stages, links, goal, number=number, stores=self._store, **self._options)

    def agree_on_options(self, edges: Any) -> None:
        """All ranks have the options that say how messages go between them; asked before the first edge is made.

        Raises:
            ScheduleError: a rank has others.
            PeerLost: one did not come before the deadline.
        """
        if self._here is None:
            return
        shapes = self._options["dynamic_shapes"]
        mine = _EDGES.index(edges if edges in _EDGES else "a function"), _SHAPES.index(shapes)
        known = (("edges", _EDGES), ("dynamic_shapes", _SHAPES))
        control = self._links[self._here].control
        for rank, number in enumerate(control.gather(mine[0] * len(_SHAPES) + mine[1])):
            theirs = divmod(number, len(_SHAPES))
            for (name, words), here, there in zip(known, mine, theirs, strict=True):
                if here != there:
                    all_know(control)
                    raise ScheduleError(
                        f"rank {self._here} made its runner with {name}={words[here]!r}, rank {rank} with "
                        f"{name}={words[there]!r}; give all ranks the same",
                        rank=self._here,
                    )

    def meet(self, what: str) -> None:
        """All ranks are about to make the call ``what``, which is not one of a program.

        Raises:
            ScheduleError: a rank makes another call.
            PeerLost: one did not come before the deadline.
        """
        if self._here is not None:
            self._agree_on(_hash(what), f"calls {what}; another call runs on", "")

    def _agree_on(self, number: int, differs: str, here: str) -> None:
        """All ranks are about to do the same for the first time; the texts are of the error where one is not."""
        assert self._here is not None, "one process agrees with itself"
        links = self._links[self._here]
        meet = getattr(links, "meet", links.control.gather)
        for rank, theirs in enumerate(meet(number)):
            if theirs != number:
                all_know(links.control)
                raise ScheduleError(
                    f"rank {self._here} {differs} rank {rank}{here}; all ranks make the same calls",
                    rank=self._here,
                )

    def _continued(self, program: Program) -> Endless | None:
        if program not in self._endless:
            self._endless[program] = None if program.weights is Weights.FLUSHED else endless(program)
        return self._endless[program]

    def _versions_of(self, weights: Weights) -> dict[int, Versions]:
        """Of the stages that are here; they go on when another program with such weights is given."""
        if weights not in self._versions:
            if self._versions:
                raise ScheduleError(f"this runner ran weights: {next(iter(self._versions))}; make one for {weights}")
            self._versions = {weights: {index: Versions(stage, weights) for index, stage in self._stages.items()}}
        return self._versions[weights]

    def _store(self, stage: Stage) -> WeightGradientStore:
        """One per stage, whichever programs it runs in: a store learns which parameters others use too."""
        if stage.index not in self._stores:
            self._stores[stage.index] = WeightGradientStore(stage)
        return self._stores[stage.index]


def one_process(program: Program) -> dict[int, Links]:
    """Links of all ranks, which one thread runs."""
    return {t.rank: t.join(torch.device("cpu"), 0.0) for t in one_thread(len(program.ranks))}


def _number_of(program: Program, mode: str, scale: str) -> int:
    """Equal on ranks that run the same program for the same call; below 2**56."""
    return _hash(f"{mode} {scale} {program.microbatches} {program}")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
