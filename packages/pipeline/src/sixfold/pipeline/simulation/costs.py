"""Costs: what each action of each stage takes.

    measured (fit.py) or assumed times --> Costs (this file) --> simulate, verify

Torch-free. Any one unit of time and any one unit of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from sixfold.pipeline.errors import ScheduleError, number
from sixfold.pipeline.fit import Measured, fit
from sixfold.pipeline.program.program import Program, program_given
from sixfold.pipeline.simulation.memory import activation_share

__all__ = ["Costs", "Hop"]

Hop = float | Sequence[Sequence[float]] | Callable[[int, int], float]
_OPTIONAL = ("activation", "input", "step", "unshard", "reduce", "deferred")


@dataclass(frozen=True)
class Costs:
    """Times and sizes per stage of one microbatch; index s is stage s.

    Any sequences of numbers are taken, numpy's too, and held as tuples of floats.

    Attributes:
        forward, backward_input, backward_weight: time of F, I and W; B takes I + W.
        hop: time of one message between different ranks: a number, a table ``[from rank][to rank]``, or a pure
            function of the two. Within a rank there is none. Costs with functions are equal if they hold the same one.
        activation: what F makes the stage hold; None means 1/v of a rank with v stages.
        input: size of the stage's input, which is what RECOMPUTE keeps; None means 0.
        input_share: part of ``activation`` that I frees already; W frees the rest.
        overlap: factor on the summed times of an OVERLAP_F_B. At 1 its parts run in order, each with its own inputs and
            its own end. Else it is one block: it begins when all inputs are there and gives all results at its end.
        step, unshard, reduce: time for which STEP, UNSHARD and REDUCE_GRAD keep the rank; None means 0.
        deferred: what I adds to a stage's ``activation`` until W: gradients of layers' outputs; None means 0.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    hop: Hop = 0.0
    activation: Sequence[float] | None = None
    input: Sequence[float] | None = None
    input_share: float = 0.0
    overlap: float = 1.0
    step: Sequence[float] | None = None
    unshard: Sequence[float] | None = None
    reduce: Sequence[float] | None = None
    deferred: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", *_OPTIONAL):
            values = getattr(self, name)
            if values is None and name in _OPTIONAL:
                continue
            if isinstance(values, str) or not hasattr(values, "__len__"):
                raise ScheduleError(f"Costs.{name} is {values!r}; it has one value per stage")
            row = tuple(_amount(f"Costs.{name} of stage {stage}", value) for stage, value in enumerate(values))
            object.__setattr__(self, name, row)
            if not row:
                raise ScheduleError(f"Costs.{name} has no values; it has one per stage")
            if len(row) != len(self.forward):
                raise ScheduleError(
                    f"Costs.{name} has {len(row)} values, forward has {len(self.forward)}; one per stage"
                )
        object.__setattr__(self, "hop", _hop(self.hop))
        for name in ("input_share", "overlap"):
            object.__setattr__(self, name, number(f"Costs.{name}", getattr(self, name)))
        if not 0 <= self.input_share <= 1:
            raise ScheduleError(f"Costs.input_share is {self.input_share}; it is in 0..1")
        if not (math.isfinite(self.overlap) and self.overlap > 0):
            raise ScheduleError(f"Costs.overlap is {self.overlap}; it is finite and > 0")

    def deferring(self, shares: Mapping[int, float]) -> Costs:
        """These costs if W makes only a part of a stage's weight gradients; I takes the rest of W's time.

        Args:
            shares: the part of each stage, 0 to 1, as in ``PipelineRunner.deferred``. A stage that is left out has 1.
        Raises:
            ScheduleError: there is no such stage, or a share is not in 0..1.
        """
        inputs, weights = list(self.backward_input), list(self.backward_weight)
        for stage, share in shares.items():
            if not 0 <= stage < len(inputs) or not 0 <= share <= 1:
                raise ScheduleError(f"shares[{stage}] is {share}; stages are 0..{len(inputs) - 1}, shares 0..1")
            inputs[stage] += weights[stage] * (1 - share)
            weights[stage] *= share
        return replace(self, backward_input=inputs, backward_weight=weights)

    def between(self, source: int, destination: int) -> float:
        """Time of a message from one rank to another; 0 within a rank.

        Raises:
            ScheduleError: the table has no such rank, or the function gives no time.
        """
        if source == destination:
            return 0.0
        if isinstance(self.hop, float):
            return self.hop
        if callable(self.hop):
            return _amount(f"Costs.hop from rank {source} to rank {destination}", self.hop(source, destination))
        if max(source, destination) >= len(self.hop):
            raise ScheduleError(
                f"Costs.hop is a table of {len(self.hop)} ranks; rank {max(source, destination)} sends or receives"
            )
        return self.hop[source][destination]

    def hops(self, ranks: int) -> tuple[tuple[float, ...], ...]:
        """Time of a message from each of ``ranks`` ranks to each other, as a table; errors as ``between``."""
        return tuple(tuple(self.between(a, b) for b in range(ranks)) for a in range(ranks))

    @classmethod
    def per_rank(
        cls,
        program: Program,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        hop: Hop = 0.0,
    ) -> Costs:
        """Costs of a rank's whole share; each of its v stages gets 1/v, activations included."""
        program_given(program)
        share = activation_share(program)
        forward, backward_input = _amount("forward", forward), _amount("backward_input", backward_input)
        backward_weight = _amount("backward_weight", backward_weight)
        return cls(
            [forward * s for s in share],
            [backward_input * s for s in share],
            [backward_weight * s for s in share],
            hop,
            activation=share,
        )

    @classmethod
    def fit(cls, timelines: Measured | Iterable[Measured], assume: Costs | None = None) -> Costs:
        """What measured timelines show: medians of compute and of messages; the inverse of ``simulate``.

        ``fit.fit`` says more: what each time was taken from, and what is not shown.

        Args:
            timelines: one or more of the same stages on the same ranks, such as ``runner.gather_timeline`` gives; times
                of all are pooled. Where one process runs all ranks (``group=None``) they take turns, and hops are
                those turns.
            assume: for what no timeline shows. Of stages of which only B was measured it gives the proportion of I and
                W; and all sizes are its. Without it a hop that no message showed is the usual one.
        Raises:
            ScheduleError: I and W are not known apart and nothing is assumed. ``assume`` is for another number of
                stages. Or a stage lacks its forward or backward.
        """
        found = fit(timelines)
        stages = len(found.placement)
        if assume is not None and len(assume.forward) != stages:
            raise ScheduleError(f"assume is for {len(assume.forward)} stages; the timelines have {stages}")
        known = None if assume is None else list(zip(assume.backward_input, assume.backward_weight, strict=True))
        pairs = found.split(known)
        hop: Hop = 0.0 if assume is None else assume.hop
        if max(found.placement):  # of one rank no message could show it
            hop = found.hop(None if assume is None else assume.between)
        fitted = cls(found.forward, [i for i, _ in pairs], [w for _, w in pairs], hop)
        if assume is not None:
            sizes = ("activation", "input", "input_share", "overlap", "deferred")
            fitted = replace(fitted, **{name: getattr(assume, name) for name in sizes})
        fitted = replace(
            fitted,
            step=_filled(found.step, None if assume is None else assume.step),
            unshard=_filled(found.unshard, None if assume is None else assume.unshard),
            reduce=_filled(found.reduce, None if assume is None else assume.reduce),
        )
        return fitted if found.overlap is None else replace(fitted, overlap=found.overlap)


def _filled(seen: Sequence[float | None], instead: Sequence[float] | None) -> Sequence[float] | None:
    """Times of an action that costs nothing where it was not seen, unless another is given."""
    others = [0.0] * len(seen) if instead is None else instead
    times = [others[stage] if time is None else time for stage, time in enumerate(seen)]
    return times if instead is not None or any(times) else None


def _amount(name: str, value: object) -> float:
    if not (math.isfinite(amount := number(name, value)) and amount >= 0):
        raise ScheduleError(f"{name} is {amount}; it is finite and >= 0")
    return amount


def _hop(value: Any) -> Hop:
    """A number as a float, a table as tuples of floats, a function as it is."""
    if callable(value):
        return cast(Hop, value)
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return _amount("Costs.hop", value)
    rows = list(value)
    if not rows or any(isinstance(row, str) or not hasattr(row, "__len__") or len(row) != len(rows) for row in rows):
        raise ScheduleError(f"Costs.hop is {value!r}; as a table it has a row per rank, with a time to each rank")
    return tuple(
        tuple(_amount(f"Costs.hop from rank {a} to rank {b}", time) for b, time in enumerate(row))
        for a, row in enumerate(rows)
    )
