"""When a unit's gradients are reduced: after each backward, after the last one, or when a program says so.

    microbatch(), no_sync(), stage handles --> ReducePolicy (this file) --> engine.py

Knows what was said; starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.errors import FsdpError


class StageState:
    """What the engine knows of a stage of a driven program.

    ``fused``: the program says that its backwards are whole (B); else they are split (I, W), and the gradients that W
    makes come through ``accumulate``.
    """

    def __init__(self, name: str, units: Sequence[Unit], fused: bool) -> None:
        self.name = name
        self.units = tuple(units)
        self.fused = fused
        self.last = False  # its last backward of this step runs
        self.done = False  # its reduce_grad was called in this step


class ReducePolicy:
    """What users and programs said of micro-batches, and what follows for a unit.

    Args:
        grad_reduce: of driven programs, ``"auto"``, ``"last"`` or ``"microbatch"``.
        shards_grads: local sums of the size of a unit do not stay until the last micro-batch.

    Attributes:
        no_sync_depth, last_microbatch: what the user's contexts say.
        stages: of a driven program.
        driven: the forward that runs, or ran last, was called through a stage handle.
        each_microbatch: a driven program reduces in every micro-batch.
    """

    def __init__(self, grad_reduce: str, *, shards_grads: bool) -> None:
        self._grad_reduce = grad_reduce
        self._shards_grads = shards_grads
        self.no_sync_depth = 0
        self.last_microbatch = True
        self.stages: list[StageState] = []
        self.driven = False
        self.each_microbatch = False

    @property
    def alone(self) -> bool:
        """A single stage: the root unit's gradients are its own."""
        return len(self.stages) == 1

    @property
    def final(self) -> bool:
        """A backward that ends now makes main gradients final."""
        return self.last_microbatch and not self.no_sync_depth

    def reducing(self, units: Sequence[Unit]) -> frozenset[int]:
        """Numbers of those of ``units`` whose gradients are to be reduced in the backward that begins now."""
        if not self.driven:
            now = not self.no_sync_depth and (self._shards_grads or self.last_microbatch)
            return frozenset(unit.index for unit in units if now)
        if self.each_microbatch:
            return frozenset(unit.index for unit in units if unit.index or self.alone)
        stages = {unit.index: unit.stage for unit in units}
        return frozenset(at for at, one in stages.items() if isinstance(one, StageState) and one.last and one.fused)

    def left_over(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Those of ``units`` that a backward reduces at its end, if it reduces them and did not see them done."""
        if self.each_microbatch or not self.driven:
            return units
        return units[:1] if self.alone else ()

    # ---- driven programs (seams: "The program drives the sharding")

    def add_stage(self, stage: StageState) -> None:
        """A stage handle was made; a second one of a stage takes the place of the first.

        Raises:
            FsdpError: its backwards are split, and ``grad_reduce`` is ``"microbatch"``.
        """
        if self._grad_reduce == "microbatch" and not stage.fused:
            raise FsdpError(
                f"stage {stage.name!r} has split backwards (fused=False), and grad_reduce is 'microbatch', which "
                "reduces at the end of whole ones; use grad_reduce='auto' or 'last'",
                op="reduce",
            )
        self.stages = [*(one for one in self.stages if one.name != stage.name), stage]
        for unit in stage.units:
            unit.stage = stage
        whole = self.alone and stage.fused and self._shards_grads
        self.each_microbatch = self._grad_reduce == "microbatch" or (self._grad_reduce == "auto" and whole)

    @property
    def all_done(self) -> bool:
        """Every stage reduced what it has: the root unit makes no more gradients either."""
        return all(one.done for one in self.stages)

    def end_step(self) -> None:
        """What stages said of this step is over, also where it was given up before their last backward."""
        for stage in self.stages:
            stage.last = stage.done = False
