"""Where the time of a run went, by cause, and its speed by the clock.

    metrics.jsonl --> read_all --> spent (this file) --> TimeSpent --> sixfold report, live_view.py

Pure: records in, numbers out. No torch.

[Note: whose time it is] Time is counted between lines. Between two lines `step` of one start lie the update with its
wait for data, evaluations, saves as far as they held it up, and a rest. Before the first update lies the start: loading
and compiling. (The time in which ranks meet and build has no line.) Between the last line of a start and the next start
no line says how long the ranks ran, so all of that time has one cause. It is "recovery" if the next start has a line
`recovery`, as kept-alive runs write; "recovery" then lasts until its next update. It does not count if the run had
finished or was asked to stop. Else it is "down". Updates that a later start did again are "again".
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What one start adds to the whole. A rank-second is a second of one rank.

    Attributes:
        seconds: by cause, with the time until the next start unless that is ``stopped_s``.
        tokens, steps: that stay.
        peak_rank_s: rank-seconds that the tokens take at the device's peak; None: its peak is not known.
        rank_s: rank-seconds of ``seconds``. step_rank_s: those of updates that stay and their waits for data.
    """

    seconds: dict[str, float]
    stopped_s: float
    tokens: int
    steps: int
    peak_rank_s: float | None
    rank_s: float
    step_rank_s: float


def spent(records: Iterable[Record], name: str = "the run") -> TimeSpent:
    """Where the time of a run went, as far as it has come.

    Args:
        records: from ``read_all``; lines that are written late count where they belong by their time.
        name: of the run, for the error.
    Raises:
        ConfigError: no start has a line yet.
    """
    attempts = _attempts(records)
    if not attempts:
        raise ConfigError(f"{name} has no line of a start; name the folder of a run that has begun")
    tokens_of: dict[int, int] = {0: 0}  # after a step, as the newest line says
    shares: list[_Share] = []
    for number, attempt in enumerate(attempts):
        tokens_of |= {int(line["step"]): int(line["tokens"]) for line in attempt.steps}
        shares.append(_share_of(attempt, attempts[number + 1 :], tokens_of))
    seconds = {cause: sum(share.seconds[cause] for share in shares) for cause in CAUSES}
    wall, in_steps = sum(seconds.values()), seconds["steps"] + seconds["data"]
    tokens = sum(share.tokens for share in shares)
    peaks = [share.peak_rank_s for share in shares if share.peak_rank_s is not None]
    rank_s, step_rank_s = sum(share.rank_s for share in shares), sum(share.step_rank_s for share in shares)
    return TimeSpent(
        seconds=seconds,
        wall_s=wall,
        stopped_s=sum(share.stopped_s for share in shares),
        starts=len(attempts),
        recoveries=sum(attempt.has("recovery") for attempt in attempts),
        step=max(int(line["step"]) for line in attempts[-1].lines),
        steps=sum(share.steps for share in shares),
        tokens=tokens,
        tokens_per_second=tokens / wall if wall else 0.0,
        step_tokens_per_second=tokens / in_steps if in_steps else 0.0,
        mfu=sum(peaks) / rank_s if peaks and rank_s else None,
        step_mfu=sum(peaks) / step_rank_s if peaks and step_rank_s else None,
    )


def _attempts(records: Iterable[Record]) -> list[_Attempt]:
    found: list[_Attempt] = []
    for record in sorted(records, key=lambda one: float(one["time"])):
        if record["kind"] == "start":
            found.append(_Attempt())
        if found:
            found[-1].lines.append(record)
    return found


def _share_of(attempt: _Attempt, later: Sequence[_Attempt], tokens_of: Mapping[int, int]) -> _Share:
    """What ``attempt`` and the time until the next start add. ``tokens_of``: tokens after a step."""
    last_kept = min((float(one.lines[0]["step"]) for one in later if one.steps), default=float("inf"))
    seconds, stopped = _of_attempt(attempt, last_kept), 0.0
    in_steps = seconds["steps"] + seconds["data"]
    gap = max(0.0, later[0].begun - attempt.over) if later else 0.0
    if later and later[0].has("recovery"):
        seconds["recovery"] += gap
    elif attempt.ended:
        stopped, gap = gap, 0.0
    else:
        seconds["down"] += gap
    start, kept = attempt.lines[0], [line for line in attempt.steps if line["step"] <= last_kept]
    world, begins = max(1, int(start.get("world") or 1)), int(start["step"])
    tokens = _tokens(kept, tokens_of.get(begins))
    token_s = next((line["mfu"] / line["tokens_per_second"] for line in kept if line.get("mfu")), None)
    return _Share(
        seconds=seconds,
        stopped_s=stopped,
        tokens=tokens,
        steps=int(kept[-1]["step"]) - begins if kept else 0,
        peak_rank_s=None if token_s is None else tokens * token_s * world,
        rank_s=world * (attempt.over - attempt.begun + gap),
        step_rank_s=world * in_steps,
    )


def _tokens(kept: Sequence[Record], before: int | None) -> int:
    """Tokens of the updates whose lines are ``kept``; ``before``: those until then, None if no line says so."""
    if not kept:
        return 0
    if before is None:
        before = int(kept[0]["tokens"]) - round(float(kept[0]["tokens_per_second"]) * float(kept[0]["seconds"]))
    return max(0, int(kept[-1]["tokens"]) - before)


def _of_attempt(attempt: _Attempt, last_kept: float) -> dict[str, float]:
    """Seconds by cause from the line of a start to its last line.

    Args:
        last_kept: the last step that no later start did again.
    """
    found = dict.fromkeys(CAUSES, 0.0)
    begin_cause, steps = "recovery" if attempt.has("recovery") else "start", attempt.steps
    if not steps:
        known = _beside_updates(attempt, float("-inf"), float("inf"))
        found[begin_cause] += _share_out(found, attempt.over - attempt.begun, known)
        return found
    first = steps[0]
    count = max(1, int(first["step"]) - int(attempt.lines[0]["step"]))
    until_first = max(0.0, float(first["time"]) - attempt.begun)
    within = min(float(first["seconds"]) * count, until_first)
    found[begin_cause] += until_first - within
    _count_updates(found, first, count, within, last_kept)
    for before, line in pairwise(steps):
        count = max(1, int(line["step"]) - int(before["step"]))
        gap = max(0.0, float(line["time"]) - float(before["time"]))
        known = _beside_updates(attempt, int(before["step"]), int(line["step"]))
        _count_updates(found, line, count, _share_out(found, gap, known), last_kept)
    last = steps[-1]
    known = _beside_updates(attempt, int(last["step"]), float("inf"), waits=True)
    found["other"] += _share_out(found, max(0.0, attempt.over - float(last["time"])), known)
    return found


def _beside_updates(attempt: _Attempt, first: float, behind: float, *, waits: bool = False) -> dict[str, float]:
    """Seconds of evaluations and of saves after the updates from ``first`` to before ``behind``, by cause.

    Args:
        waits: the run waits until such a save, its last, is whole.
    """
    found = {"evaluation": 0.0, "saves": 0.0}
    for line in attempt.lines:
        if line["kind"] in EVALUATIONS and first <= line["step"] < behind:
            found["evaluation"] += float(line.get("seconds") or 0.0)  # 0.1.0 has none
        elif line["kind"] == "save" and first <= line["step"] < behind:
            found["saves"] += float(line["seconds" if waits else "blocked_seconds"])
    return found


def _share_out(found: dict[str, float], gap: float, known: Mapping[str, float]) -> float:
    """Add to each cause its ``known`` seconds, but no more than ``gap`` in all. Returns what is left of it."""
    for cause, value in known.items():
        part = min(gap, value)
        found[cause] += part
        gap -= part
    return gap


def _count_updates(found: dict[str, float], line: Record, count: int, gap: float, last_kept: float) -> None:
    """Add ``gap``, in which ``count`` updates up to that of ``line`` were done, to its causes."""
    own = gap if count > 1 else min(gap, float(line["seconds"]))
    found["other"] += gap - own
    if line["step"] > last_kept:
        found["again"] += own
        return
    data = min(own, float(line.get("data_seconds") or 0.0) * count)
    found["data"] += data
    found["steps"] += own - data
