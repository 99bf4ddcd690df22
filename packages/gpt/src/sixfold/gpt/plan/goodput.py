"""Goodput of a run that loses ranks: the share of time in which steps are done that stay, and how often to save.

    FailureCosts, interval --> goodput (this file) --> Goodput    best_interval (this file) --> steps between saves
    failure_report.py has what `sixfold plan --mtbf-hours` prints of it

A closed formula: no files, no clock, no random numbers, no torch. docs/design/gpt/goodput.md derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from sixfold.gpt.errors import ConfigError

_LEAST = 1e-280  # a chance below it is none: its inverse would leave the range of a float


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCosts:
    """How often a job fails, and what it spends on that. Seconds by the clock.

    A *save* is a checkpoint, a *snapshot* lies in the memory of hosts. Most failures are mended by the snapshot of the
    last step, ``from_checkpoint`` of them need the last checkpoint.

    Attributes:
        mtbf_s: mean time between failures of the whole job; they come independently of each other.
        step_s: an update. snapshot_s: added to each update, for its snapshot and whatever else is no training.
        save_s: a save blocks training for so long. written_s: from its begin until it is whole and counts; if that is
            longer, training goes on meanwhile, and the next save waits for it.
        detect_s: from a failure until it is seen. recover_s: from then until the next update begins.
        restart_s: the same, where the state comes from a checkpoint; None: ``recover_s``.
        from_checkpoint: the share of failures that need a checkpoint; 1 without snapshots.
    """

    mtbf_s: float
    step_s: float
    snapshot_s: float = 0.0
    save_s: float = 0.0
    written_s: float = 0.0
    detect_s: float = 0.0
    recover_s: float = 0.0
    restart_s: float | None = None
    from_checkpoint: float = 1.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            least = math.ulp(0.0) if name in ("mtbf_s", "step_s") else 0.0
            most = 1.0 if name == "from_checkpoint" else math.inf
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                rule = "a share, 0 to 1" if most == 1 else "> 0 and finite" if least else ">= 0 and finite"
                raise ConfigError(f"costs of failures: {name} is {value}; it is {rule}")

    @property
    def update_s(self) -> float:
        """An update and its snapshot."""
        return self.step_s + self.snapshot_s

    @property
    def from_checkpoint_s(self) -> float:
        """From the sight of a failure that needs a checkpoint until the next update begins."""
        return self.recover_s if self.restart_s is None else self.restart_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Where the time goes: shares of it, whose sum is 1.

    Attributes:
        useful: updates that stay. This is the goodput.
        snapshots: added to those updates. saves: training blocked by saves that stay.
        detection, recovery: of all failures. redone: what was begun or done, and lost.
    """

    useful: float
    snapshots: float
    saves: float
    detection: float
    recovery: float
    redone: float

    @property
    def lost(self) -> dict[str, float]:
        """All but ``useful``, by cause."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}


class _Spent(NamedTuple):
    """Expected seconds."""

    work: float
    detection: float
    recovery: float

    def and_(self, other: _Spent, times: float = 1.0) -> _Spent:
        return _Spent(*(a + times * b for a, b in zip(self, other, strict=True)))


class _Stage(NamedTuple):
    """Work that failures repeat until it is done, or until one of them needs a checkpoint.

    Attributes:
        lost: the chance of the latter.
        spent: on it, repeats and their recoveries included.
    """

    lost: float
    spent: _Spent


_NOTHING = _Spent(0.0, 0.0, 0.0)


def goodput(costs: FailureCosts, interval: int) -> Goodput:
    """Where the time goes, with a save after each ``interval`` steps.

    Exact for failures that come independently of each other (exponential times), also during saves and recoveries. But
    of the step in which a save becomes whole, memory is taken to keep the part before.
    """
    assert interval >= 1, f"a save after each {interval} steps"
    update = costs.update_s
    beside_s = max(0.0, costs.written_s - costs.save_s)  # training goes on for so long, and the save does not count
    waits_s = max(0.0, beside_s - interval * update)  # the next save, for this one
    beside = min(interval, int(beside_s / update))  # whole steps, and a part of one
    part_s = min(update, max(0.0, beside_s - waits_s - beside * update))
    step, save = _stage(costs, update), _stage(costs, costs.save_s + waits_s)
    ahead = [(_stage(costs, update - part_s), 1), (step, interval - beside - 1)] if beside < interval else []
    behind = [(save, 1), (step, beside), (_stage(costs, part_s), 1)]
    # From one whole save to the next; and the same again from further back, after a failure that needed the older one.
    kept, first = _chain([*ahead, *behind])
    again, redone = _chain([(step, interval), *behind])
    back = _recoveries(costs)
    if again < _LEAST:
        spent, useful = redone.and_(back), 0.0
    else:
        spent, useful = first.and_(redone.and_(back), times=(1 - kept) / again), 1.0
    total = sum(spent)
    stays = _Spent(interval * costs.step_s, interval * costs.snapshot_s, costs.save_s + waits_s)
    trained, snapshots, saves = (useful * one / total for one in stays)
    return Goodput(
        useful=trained,
        snapshots=snapshots,
        saves=saves,
        detection=spent.detection / total,
        recovery=spent.recovery / total,
        redone=max(0.0, spent.work / total - trained - snapshots - saves),
    )


def _stage(costs: FailureCosts, seconds: float) -> _Stage:
    """Work of ``seconds``; a failure that memory mends repeats it."""
    rate, hard = 1 / costs.mtbf_s, costs.from_checkpoint
    fails = -math.expm1(-rate * seconds)
    attempt = _recovery(costs, costs.recover_s)
    refails = -math.expm1(-rate * (costs.detect_s + costs.recover_s))
    mends = 1 - (1 - hard) * refails  # one over the attempts of a recovery
    once = 1 - fails * (1 - hard) * (1 - refails) / mends  # one over the attempts of the work
    spent = _Spent(fails / rate, 0.0, 0.0).and_(attempt, times=fails * (1 - hard) / mends)
    return _Stage(fails * hard / (mends * once), _NOTHING.and_(spent, times=1 / once))


def _recovery(costs: FailureCosts, recover_s: float) -> _Spent:
    """One attempt, which the next failure may end."""
    detection = -costs.mtbf_s * math.expm1(-costs.detect_s / costs.mtbf_s)
    whole = -costs.mtbf_s * math.expm1(-(costs.detect_s + recover_s) / costs.mtbf_s)
    return _Spent(0.0, detection, whole - detection)


def _recoveries(costs: FailureCosts) -> _Spent:
    """From a failure that needs a checkpoint until training goes on; any failure begins it anew."""
    seconds = costs.detect_s + costs.from_checkpoint_s
    attempts = math.exp(min(seconds / costs.mtbf_s, 600.0))
    return _NOTHING.and_(_recovery(costs, costs.from_checkpoint_s), times=attempts)


def _chain(stages: list[tuple[_Stage, int]]) -> tuple[float, _Spent]:
    """(the chance to come to the end of stages in a row, what is spent until then or until a checkpoint is needed)."""
    log_alive, spent = 0.0, _NOTHING
    for stage, count in stages:
        if stage.lost >= 1:
            return 0.0, spent.and_(stage.spent, times=math.exp(log_alive) * min(count, 1))
        log_each = math.log1p(-stage.lost)
        begun = -math.expm1(count * log_each) / stage.lost if stage.lost > 0 else float(count)
        spent = spent.and_(stage.spent, times=math.exp(log_alive) * begun)
        log_alive += count * log_each
    return math.exp(log_alive), spent


def best_interval(costs: FailureCosts, most: int) -> int:
    """The number of steps between saves, up to ``most``, with the highest goodput.

    Goodput rises with the interval up to the best one and falls behind it, so halving finds it. It is ``most`` where
    no failure needs a checkpoint.
    """
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if goodput(costs, middle + 1).useful > goodput(costs, middle).useful:
            low = middle + 1
        else:
            high = middle
    return low


def young_interval(costs: FailureCosts) -> float:
    """The same in seconds of training, to first order: ``sqrt(2 * save * mean time between needs of a checkpoint)``.

    Source: J. W. Young, CACM 17(9), 1974; J. T. Daly, FGCS 22(3), 2006 has higher orders.
    """
    if costs.from_checkpoint == 0:
        return math.inf
    return math.sqrt(2 * costs.save_s * costs.mtbf_s / costs.from_checkpoint)
