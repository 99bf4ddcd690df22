"""Costs: what each action of each stage takes.

    measured or assumed times --> Costs (this file) --> simulate, verify

Torch-free. Any one unit of time and any one unit of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.memory import activation_share
from sixfold.pipeline.program import Program

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """Times and sizes per stage of one microbatch; index s is stage s.

    Attributes:
        forward, backward_input, backward_weight: time of F, I and W; B takes I + W.
        hop: time of one message between different ranks.
        activation: what F makes the stage hold; None means 1/v of a rank with v stages.
        input: size of the stage's input, which is what RECOMPUTE keeps; None means 0.
        input_share: part of ``activation`` that I frees already; W frees the rest.
        overlap: factor on the summed times of an OVERLAP_F_B.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    hop: float = 0.0
    activation: Sequence[float] | None = None
    input: Sequence[float] | None = None
    input_share: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name in ("forward", "backward_input", "backward_weight", "activation", "input"):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != stages:
                raise ScheduleError(f"Costs.{name} has {len(values)} values, forward has {stages}; one per stage")
            for stage, value in enumerate(values):
                if not (math.isfinite(value) and value >= 0):
                    raise ScheduleError(f"Costs.{name} of stage {stage} is {value}; it is finite and >= 0")
        if not (math.isfinite(self.hop) and self.hop >= 0):
            raise ScheduleError(f"Costs.hop is {self.hop}; it is finite and >= 0")
        if not 0 <= self.input_share <= 1:
            raise ScheduleError(f"Costs.input_share is {self.input_share}; it is in 0..1")
        if not (math.isfinite(self.overlap) and self.overlap > 0):
            raise ScheduleError(f"Costs.overlap is {self.overlap}; it is finite and > 0")

    @classmethod
    def per_rank(
        cls,
        program: Program,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        hop: float = 0.0,
    ) -> Costs:
        """Costs of a rank's whole share; each of its v stages gets 1/v, activations included."""
        share = activation_share(program)
        return cls(
            [forward * s for s in share],
            [backward_input * s for s in share],
            [backward_weight * s for s in share],
            hop,
            activation=share,
        )
