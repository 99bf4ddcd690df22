"""Where the time of a run went, by cause, and its speed by the clock.

    metrics.jsonl --> read_all --> spent (this file) --> TimeSpent --> sixfold report, live_view.py

Pure: records in, numbers out. No torch.

[Note: whose time it is] Time is counted between lines. Within a start, what lies between two lines `step` is the
update with its wait for data, evaluations, what saves held up, digests, and a rest. What comes before the first update
is the start: loading and compiling. (Ranks that meet and build have no line yet.) Between the last line of a start and
the next start nobody says how long the ranks still ran: all of it is "down", unless the run had ended as it should;
then nobody wanted it to run, and the time does not count. A kept-alive run says by its line `recovery` that it was
one: then it is "recovery" until the next update. Updates that a later start did again are "done again".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.metrics import EVALUATIONS

Record = Mapping[str, Any]
CAUSES: dict[str, str] = {
    "steps": "updates that stay",
    "data": "waits for data",
    "evaluation": "evaluations",
    "saves": "held up by saves",
    "again": "updates that were done again",
    "start": "starts, until the first update",
    "recovery": "lost ranks, until the next update",
    "down": "between a failure and the next start",
    "other": "between updates: snapshots, digests, lines",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpent:
    """What a run spent, in seconds by the clock.

    Attributes:
        seconds: by cause, in the order of CAUSES; they add up to ``wall_s``.
        wall_s: from the first line to the last, without ``stopped_s``.
        stopped_s: between an end as it should be and the next start.
        steps, tokens: that stay. step: the last one.
        tokens_per_second: by the clock; ``step_tokens_per_second``: within updates and their waits for data.
        mfu, step_mfu: likewise; None on a device without a known peak.
    """

    seconds: dict[str, float]
    wall_s: float
    stopped_s: float
    starts: int
    recoveries: int
    step: int
    steps: int
    tokens: int
    tokens_per_second: float
    step_tokens_per_second: float
    mfu: float | None
    step_mfu: float | None


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """From a line `start` to the next one; ``lines`` by time, the start first."""

    lines: list[Record] = field(default_factory=list)

    @property
    def begun(self) -> float:
        return float(self.lines[0]["time"])

    @property
    def over(self) -> float:
        return max(float(line["time"]) for line in self.lines)

    @property
    def steps(self) -> list[Record]:
        return [line for line in self.lines if line["kind"] == "step"]

    def has(self, kind: str) -> bool:
        return any(line["kind"] == kind for line in self.lines)

    @property
    def ended(self) -> bool:
        """As it should: finished, or asked to stop."""
        return any(line["kind"] == "end" and line["reason"] != "error" for line in self.lines)


def spent(records: Iterable[Record], name: str = "the run") -> TimeSpent:
    """Where the time of a run went, as far as it has come.

    Args:
        records: from ``read_all``; lines that are told late count where they belong by their time.
    Raises:
        ConfigError: no start has a line yet.
    """
    attempts = _attempts(records)
    if not attempts:
        raise ConfigError(f"{name} has no line of a start; name the folder of a run that has begun")
    seconds, stopped = dict.fromkeys(CAUSES, 0.0), 0.0
    tokens_of: dict[int, int] = {0: 0}  # after a step, as the newest line says
    useful = offered = step_offered = 0.0
    has_peak, kept_tokens, kept_steps = False, 0, 0
    for number, one in enumerate(attempts):
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        stays = _first_kept(attempts[number + 1 :])
        mine = _of_attempt(one, stays)
        for cause, value in mine.items():
            seconds[cause] += value
        for line in one.steps:
            tokens_of[int(line["step"])] = int(line["tokens"])
        world = max(1, int(one.lines[0].get("world") or 1))
        kept = [line for line in one.steps if line["step"] <= stays]
        begins = int(one.lines[0]["step"])
        tokens = _tokens(kept, tokens_of.get(begins))
        kept_tokens, kept_steps = kept_tokens + tokens, kept_steps + (int(kept[-1]["step"]) - begins if kept else 0)
        rate = next((line["mfu"] / line["tokens_per_second"] for line in kept if line.get("mfu")), None)
        has_peak = has_peak or rate is not None
        useful += tokens * (rate or 0.0) * world
        gap = 0.0 if following is None else max(0.0, following.begun - one.over)
        if following is not None and following.has("recovery"):
            seconds["recovery"] += gap
        elif one.ended:
            stopped, gap = stopped + gap, 0.0
        else:
            seconds["down"] += gap
        offered += world * (one.over - one.begun + gap)
        step_offered += world * (mine["steps"] + mine["data"])
    wall = sum(seconds.values())
    in_steps = seconds["steps"] + seconds["data"]
    return TimeSpent(
        seconds=seconds,
        wall_s=wall,
        stopped_s=stopped,
        starts=len(attempts),
        recoveries=sum(one.has("recovery") for one in attempts),
        step=max((int(line["step"]) for one in attempts[-1:] for line in one.lines), default=0),
        steps=kept_steps,
        tokens=kept_tokens,
        tokens_per_second=kept_tokens / wall if wall else 0.0,
        step_tokens_per_second=kept_tokens / in_steps if in_steps else 0.0,
        mfu=useful / offered if has_peak and offered else None,
        step_mfu=useful / step_offered if has_peak and step_offered else None,
    )


def _attempts(records: Iterable[Record]) -> list[_Attempt]:
    found: list[_Attempt] = []
    for record in sorted(records, key=lambda one: float(one["time"])):
        if record["kind"] == "start":
            found.append(_Attempt())
        if found:
            found[-1].lines.append(record)
    return found


def _first_kept(later: Sequence[_Attempt]) -> float:
    """The last step that no later start did again."""
    return min((float(one.lines[0]["step"]) for one in later if one.steps), default=float("inf"))


def _tokens(kept: Sequence[Record], before: int | None) -> int:
    """Tokens of the updates that ``kept`` tells of; ``before``: those until then, if a line said so."""
    if not kept:
        return 0
    if before is None:
        before = int(kept[0]["tokens"]) - round(float(kept[0]["tokens_per_second"]) * float(kept[0]["seconds"]))
    return max(0, int(kept[-1]["tokens"]) - before)


def _of_attempt(one: _Attempt, stays: float) -> dict[str, float]:
    """Seconds by cause from the start's line to its last one."""
    found = dict.fromkeys(CAUSES, 0.0)
    begin_cause = "recovery" if one.has("recovery") else "start"
    steps = one.steps
    if not steps:
        evaluation, saves = _beside(one, float("-inf"), float("inf"))
        rest = _share(found, one.over - one.begun, {"evaluation": evaluation, "saves": saves})
        found[begin_cause] += rest
        return found
    first = steps[0]
    count = max(1, int(first["step"]) - int(one.lines[0]["step"]))
    within = min(float(first["seconds"]) * count, max(0.0, float(first["time"]) - one.begun))
    found[begin_cause] += max(0.0, float(first["time"]) - one.begun - within)
    _count_update(found, first, count, within, {}, stays)
    for before, line in pairwise(steps):
        count = max(1, int(line["step"]) - int(before["step"]))
        gap = max(0.0, float(line["time"]) - float(before["time"]))
        evaluation, saves = _beside(one, int(before["step"]), int(line["step"]))
        _count_update(found, line, count, gap, {"evaluation": evaluation, "saves": saves}, stays)
    last = steps[-1]
    evaluation, saves = _beside(one, int(last["step"]), float("inf"), waits=True)
    tail = max(0.0, one.over - float(last["time"]))
    found["other"] += _share(found, tail, {"evaluation": evaluation, "saves": saves})
    return found


def _beside(one: _Attempt, first: float, behind: float, *, waits: bool = False) -> tuple[float, float]:
    """Seconds of evaluations and of saves after the updates ``first`` to before ``behind``.

    Args:
        waits: the run waits for the end of such a save, which is its last.
    """
    evaluation = saves = 0.0
    for line in one.lines:
        if line["kind"] in EVALUATIONS and first <= line["step"] < behind:
            evaluation += float(line.get("seconds") or 0.0)  # 0.1.0 has none
        elif line["kind"] == "save" and first <= line["step"] < behind:
            saves += float(line["seconds" if waits else "blocked_seconds"])
    return evaluation, saves


def _share(found: dict[str, float], gap: float, known: Mapping[str, float]) -> float:
    """Give each cause its seconds, but no more than there are; what is left."""
    for cause, value in known.items():
        part = min(gap, value)
        found[cause] += part
        gap -= part
    return gap


def _count_update(
    found: dict[str, float], line: Record, count: int, gap: float, known: Mapping[str, float], stays: float
) -> None:
    """Share out ``gap``, in which ``count`` updates up to that of ``line`` were done."""
    left = _share(found, gap, known)
    own = left if count > 1 else min(left, float(line["seconds"]))
    found["other"] += left - own
    if line["step"] > stays:
        found["again"] += own
        return
    data = min(own, float(line.get("data_seconds") or 0.0) * count)
    found["data"] += data
    found["steps"] += own - data
