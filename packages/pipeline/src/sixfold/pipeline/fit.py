"""Times of stages and messages from measured timelines: the inverse of ``simulate``.

    timelines --> samples per (stage, kind) and pair of ranks --> Fit (this file) --> Costs.fit --> plan, replan

Torch-free. A time is the median of its samples, so that a first microbatch or a burst of other load moves
nothing. What a timeline does not show is not guessed: ``Fit.unknown`` says it, in sentences.

[Note: when a message shows its time] The k-th input of a stage arrives one hop after its maker ended. An action that
found its rank idle began at that moment, so the time between is the hop. Any other action only shows that the message
took no longer. A rank is also idle between two actions for the interpreter's sake, longer in front of one that takes a
message. Idle time is no wait if it is below a tenth of a usual action. Nor is it if it is below twice what is usual in
front of actions whose inputs are all the rank's own. A rank's first action counts only where nothing else shows the
hop: the rank may have come late to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from statistics import median
from typing import Protocol

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import MESSAGES, WORK, Action, Kind

__all__ = ["Fit", "Measured", "fit"]

Event = tuple[int, Action, float, float]  # rank, action, start, end
Times = tuple[float | None, ...]  # per stage; None: not shown
_SHORT = 0.1  # of a usual action: what is idle for less did not wait
_TINY = 1e-9  # of a timeline's length: the rounding of its sums


class Measured(Protocol):
    """What is read of a ``Timeline``."""

    @property
    def events(self) -> tuple[Event, ...]:
        """Rank, action, start and end of each event."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What timelines show; times are in their unit, index s is stage s.

    Attributes:
        placement: rank of each stage.
        forward: of F.
        backward: of B, or of I and W together.
        backward_input, backward_weight: None where only B was seen.
        step, unshard, reduce: None where there was none.
        hops: (from rank, to rank) -> time of a message.
        at_most: the same for pairs whose messages never kept a rank waiting: the hop is no longer than this.
        overlap: what the time of an OVERLAP_F_B is to the sum of its parts; None where there was none of known parts.
        unknown: what is not shown, a sentence each.
    """

    placement: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: Times
    backward_weight: Times
    step: Times
    unshard: Times
    reduce: Times
    hops: Mapping[tuple[int, int], float]
    at_most: Mapping[tuple[int, int], float]
    overlap: float | None
    unknown: tuple[str, ...]

    def split(self, assumed: Sequence[tuple[float, float]] | None) -> list[tuple[float, float]]:
        """I and W of each stage; where only B is known, in the proportion of the assumed ones.

        Raises:
            ScheduleError: it is known of B alone, and nothing (or twice 0) is assumed.
        """
        pairs = []
        for stage, known in enumerate(zip(self.backward, self.backward_input, self.backward_weight, strict=True)):
            whole, i, w = known
            if i is None or w is None:
                i, w = (0.0, 0.0) if assumed is None else assumed[stage]
                if i + w <= 0:
                    raise ScheduleError(
                        f"stage {stage}: only B was measured ({whole:.3g}), so I and W are not known apart; measure a "
                        "step of a program with I and W, or give assume=Costs(...), whose proportion is taken"
                    )
                i, w = whole * i / (i + w), whole * w / (i + w)
            pairs.append((i, w))
        return pairs

    def hop(self, assumed: Callable[[int, int], float] | None) -> tuple[tuple[float, ...], ...]:
        """Time of a message from each rank to each other; what no message showed is ``assumed``, else the usual one.

        The usual one is the median of those that were shown. A bound holds for both.
        """
        usual = median(self.hops.values()) if self.hops else 0.0

        def of(a: int, b: int) -> float:
            if (a, b) in self.hops or a == b:
                return self.hops.get((a, b), 0.0)
            return min(usual if assumed is None else assumed(a, b), self.at_most.get((a, b), inf))

        ranks = range(max(self.placement) + 1)
        return tuple(tuple(of(a, b) for b in ranks) for a in ranks)


def fit(timelines: Measured | Iterable[Measured]) -> Fit:
    """Medians of what one or more timelines of the same stages show.

    Args:
        timelines: of any programs, as long as a stage is on one rank in all of them.
    Raises:
        ScheduleError: no timeline, a stage on two ranks, or a stage without a forward or a backward.
    Cost: O(events log events).
    """
    rows = [sorted(timeline.events, key=lambda event: event[2:]) for timeline in _each(timelines)]
    placement = _placement(event for row in rows for event in row)
    durations: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for row in rows:
        for _, action, start, end in row:
            durations[action.stage, action.kind].append(end - start)
    typical = {key: median(values) for key, values in durations.items()}

    def of(kind: Kind) -> Times:
        return tuple(typical.get((stage, kind)) for stage in range(len(placement)))

    forward, (backward, inputs, weights) = of(Kind.F), _backwards(of(Kind.B), of(Kind.I), of(Kind.W))
    shown, bounds = _hops(rows, placement)
    return Fit(
        placement=placement,
        forward=_there("forward (F)", forward),
        backward=_there("backward (B, or I and W)", backward),
        backward_input=inputs,
        backward_weight=weights,
        step=of(Kind.STEP),
        unshard=of(Kind.UNSHARD),
        reduce=of(Kind.REDUCE_GRAD),
        hops=shown,
        at_most=bounds,
        overlap=_overlap(rows, typical),
        unknown=(*_unsplit(inputs), *_unmeasured(max(placement) + 1, shown, bounds)),
    )


def _each(timelines: Measured | Iterable[Measured]) -> list[Measured]:
    several = list(timelines) if isinstance(timelines, Iterable) else [timelines]
    if not several:
        raise ScheduleError("fit was given no timeline; it takes one or more")
    return several


def _placement(events: Iterable[Event]) -> tuple[int, ...]:
    found: dict[int, int] = {}
    for rank, action, *_ in events:
        for part in action.each():
            if found.setdefault(part.stage, rank) != rank:
                rule = "fit takes timelines in which each stage is on one rank"
                raise ScheduleError(f"stage {part.stage} is on rank {found[part.stage]} and on rank {rank}; {rule}")
    if sorted(found) != list(range(len(found))):
        raise ScheduleError(f"the timelines have events of stages {sorted(found)}; stages are 0, 1, ... without a gap")
    return tuple(found[stage] for stage in range(len(found)))


def _there(what: str, times: Times) -> tuple[float, ...]:
    for stage, time in enumerate(times):
        if time is None:
            raise ScheduleError(f"stage {stage} has no {what} outside an OVERLAP_F_B; measure a step that has one")
    return tuple(time for time in times if time is not None)


# ---- backwards


def _backwards(fused: Times, inputs: Times, weights: Times) -> tuple[Times, Times, Times]:
    """B, I and W of each stage, each from the two others where it was not seen."""
    rows = []
    for b, i, w in zip(fused, inputs, weights, strict=True):
        if i is None and b is not None and w is not None:
            i = max(b - w, 0.0)
        if w is None and b is not None and i is not None:
            w = max(b - i, 0.0)
        rows.append((i + w if i is not None and w is not None else b, i, w))
    b_all, i_all, w_all = zip(*rows, strict=True)
    return b_all, i_all, w_all


def _unsplit(inputs: Times) -> list[str]:
    stages = [str(stage) for stage, time in enumerate(inputs) if time is None]
    if not stages:
        return []
    return [f"only B was measured on stage{'s' * (len(stages) > 1)} {', '.join(stages)}, not I and W apart"]


# ---- messages


def _hops(
    rows: Sequence[Sequence[Event]], placement: Sequence[int]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Times of messages that kept a rank waiting, and bounds of the others. [Note: when a message shows its time]"""
    shown: dict[tuple[int, int], list[float]] = defaultdict(list)
    first: dict[tuple[int, int], list[float]] = defaultdict(list)
    bound: dict[tuple[int, int], float] = {}
    for row in rows:
        made = _made(row)
        slack = _slack(row, placement)
        for idle, begins, (rank, action, start, _) in _idle(row):
            source = _source(action, placement)
            if source is None or source[0] == rank or (source[1] not in made):
                continue
            pair, taken = (source[0], rank), max(start - made[source[1]], 0.0)
            bound[pair] = min(taken, bound.get(pair, taken))
            if begins:
                first[pair].append(taken)
            elif idle > slack:
                shown[pair].append(taken)
    hops = {pair: median(samples) for pair, samples in (first | shown).items()}
    return hops, {pair: limit for pair, limit in bound.items() if pair not in hops}


def _made(row: Iterable[Event]) -> dict[tuple[bool, int, int | None], float]:
    """When each tensor was there: (of a forward?, stage, microbatch) -> end of its maker."""
    return {
        (action.kind is Kind.F, action.stage, action.microbatch): end
        for _, action, _, end in row
        if action.kind in (Kind.F, Kind.B, Kind.I)
    }


def _idle(row: Iterable[Event]) -> Iterable[tuple[float, bool, Event]]:
    """How long its rank did nothing before each action, whether it is the rank's first, and the action."""
    until: dict[int, float] = {}
    for event in row:
        rank, action, start, end = event
        if action.kind in MESSAGES:
            continue
        if action.kind in WORK:
            yield start - until.get(rank, 0.0), rank not in until, event
        until[rank] = max(end, until.get(rank, end))


def _slack(row: Sequence[Event], placement: Sequence[int]) -> float:
    """Idle time that is no wait. [Note: when a message shows its time]"""
    own = [idle for idle, begins, event in _idle(row) if not begins and _is_own(event, placement)]
    usual = median([end - start for _, action, start, end in row if action.kind in WORK] or [0.0])
    length = max((end for *_, end in row), default=0.0)
    return max(2 * median(own or [0.0]), _SHORT * usual) + _TINY * length


def _is_own(event: Event, placement: Sequence[int]) -> bool:
    source = _source(event[1], placement)
    return not event[1].parts and (source is None or source[0] == event[0])


def _source(action: Action, placement: Sequence[int]) -> tuple[int, tuple[bool, int, int | None]] | None:
    """Rank and key of the tensor that ``action`` takes from another stage; None if it takes none, or is an overlap."""
    if action.kind is Kind.F and action.stage > 0:
        stage = action.stage - 1
    elif action.kind in (Kind.B, Kind.I) and action.stage < len(placement) - 1:
        stage = action.stage + 1
    else:
        return None
    return placement[stage], (action.kind is Kind.F, stage, action.microbatch)


def _unmeasured(
    ranks: int, shown: Mapping[tuple[int, int], float], bounds: Mapping[tuple[int, int], float]
) -> list[str]:
    sentences = []
    for a, b in product(range(ranks), repeat=2):
        if a == b or (a, b) in shown:
            continue
        if (a, b) in bounds:
            sentences.append(
                f"no rank waited for a message from rank {a} to {b}, which took at most {bounds[a, b]:.3g}"
            )
        else:
            sentences.append(f"no message went from rank {a} to {b}")
    return sentences


# ---- overlaps


def _overlap(rows: Iterable[Iterable[Event]], typical: Mapping[tuple[int, Kind], float]) -> float | None:
    """Median of an overlap's time over that of its parts; 1 where it is longer, since it then waited inside."""
    ratios = []
    for row in rows:
        for _, action, start, end in row:
            parts = [typical.get((part.stage, part.kind)) for part in action.parts]
            total = sum(part for part in parts if part is not None)
            if parts and None not in parts and total > 0:
                ratios.append((end - start) / total)
    return min(1.0, median(ratios)) if ratios else None
