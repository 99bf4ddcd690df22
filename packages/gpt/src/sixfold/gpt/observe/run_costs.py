"""What failures cost a run that was kept alive, from its metrics.jsonl: the inputs of plan/goodput.py, measured.

    metrics.jsonl --> events_of (this file) --> loss_plot.py: vertical lines
                  `-> measure (this file) --> RunCosts --> sixfold doctor --run

Pure: records in, numbers out. No torch.

[Note: what lines tell] A failure has no line of its own: nobody is there to write one. The line `recovery` of the next
generation says how many seconds ago it was seen. How long it took to see it is what is left of the time since the step
before, without half an update: on the average a failure comes in the middle of one. And a rank that is lost during a
recovery makes no line of its own. So the time between failures is that in which one would have been seen: without
detection and recovery.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from sixfold.gpt.errors import ConfigError

Record = Mapping[str, Any]
EVENT_KINDS = ("failure", "recovery", "resize", "checkpoint", "no snapshot", "copies differ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to a run: one of EVENT_KINDS, the updates that were done, and Unix seconds."""

    kind: str
    step: int
    time: float


def events_of(records: Iterable[Record]) -> list[Event]:
    """What happened, in the order of the lines.

    Failures have the last step that was reported before, recoveries the step that they went back to. Checkpoints are
    whole.
    """
    found, step, worlds = list[Event](), 0, [0, 0]
    for record in records:
        kind = _event_kind(record)
        if record["kind"] == "start":
            worlds = [worlds[1], int(record.get("world", 0))]
        elif kind == "recovery" and _is_resize(record, *worlds):
            step = int(record["step"])
            found.append(Event(kind="resize", step=step, time=float(record["time"])))
        elif kind == "recovery":
            seen = float(record["time"]) - float(record["seconds"])
            back = int(record["step"])
            found.append(Event(kind="failure", step=max(step, back), time=seen))
            found.append(Event(kind="recovery", step=back, time=float(record["time"])))
            step = back
        elif kind is not None:
            found.append(Event(kind=kind, step=int(record["step"]), time=float(record["time"])))
        elif record["kind"] == "step":
            step = int(record["step"])
    return found


def _is_resize(recovery: Record, before: int, world: int) -> bool:
    """The run was asked to go on with another number of ranks: nothing failed."""
    return not recovery.get("lost") and before != world


def _event_kind(record: Record) -> str | None:
    if record["kind"] == "replicas":
        return None if record["result"] == "agree" else "copies differ"
    kinds = {"recovery": "recovery", "save": "checkpoint", "no_snapshot": "no snapshot", "no_replica": "no copy"}
    return kinds.get(record["kind"])


@dataclass(kw_only=True, slots=True)
class _Generation:
    """From a line `start` to the next one. ``recovery``: how it follows a failure."""

    world: int
    steps: list[Record] = field(default_factory=list)
    saves: dict[int, Record] = field(default_factory=dict)  # by step
    recovery: Record | None = None

    @property
    def seen_s(self) -> float:
        """When the failure before it was seen."""
        assert self.recovery is not None, "a generation that follows a failure"
        return float(self.recovery["time"]) - float(self.recovery["seconds"])

    @property
    def is_from_memory(self) -> bool:
        """It went on from a snapshot."""
        return self.recovery is not None and self.recovery["source"] == "memory"

    def recovered_in(self, step_s: float, update_s: float) -> float:
        """Seconds from the sight of the failure until an update began, if it took as long as others do."""
        assert self.recovery is not None, "a generation that follows a failure"
        more = int(self.steps[0]["step"]) - int(self.recovery["step"]) - 1
        return max(0.0, float(self.steps[0]["time"]) - self.seen_s - step_s - more * update_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCosts:
    """What a run spent. Times are means, in seconds by the clock; the names are those of `FailureCosts`.

    Attributes:
        steps: updates that stay, from the end of the first one on. wall_s: the time that they took.
        snapshot_s: between two updates, saves apart: snapshots, evaluations, lines of metrics.
        save_s, written_s: None without a save behind which training went on.
        interval: updates between saves, None likewise.
        detect_s, recover_s, restart_s: None without such a failure.
        mtbf_s: mean time between failures of the job; None without one. See [Note: what lines tell].
        failures: each that a later generation mended. from_checkpoint: those that needed a checkpoint, of one.
    """

    world: int
    steps: int
    wall_s: float
    step_s: float
    snapshot_s: float
    interval: int | None
    save_s: float | None
    written_s: float | None
    detect_s: float | None
    recover_s: float | None
    restart_s: float | None
    mtbf_s: float | None
    failures: int
    from_checkpoint: float

    @property
    def goodput(self) -> float:
        """The share of the time that updates took that stay."""
        return self.steps * self.step_s / self.wall_s


def measure(records: Sequence[Record], name: str = "the run") -> RunCosts:
    """What a run spent, whatever ``log.every`` is.

    Raises:
        ConfigError: no two updates in a row have lines.
    """
    generations = _generations(records)
    later = [step for one in generations for step in one.steps[1:]]  # the first of a generation is slower
    if not later:
        raise ConfigError(f"{name} has no two lines `step` in a row; train longer, or with log.every = 1")
    step_s = fmean(float(step["seconds"]) for step in later)
    followed = [save for one in generations for at, save in one.saves.items() if _goes_on(one, at)]
    save_s = fmean(float(save["blocked_seconds"]) for save in followed) if followed else None
    snapshot_s = _between(generations, step_s)
    lives = _lives(generations)
    failed = [
        (before, after)
        for life in lives
        for before, after in pairwise(life)
        if _first_time(life) < after.seen_s < _last_time(life)
    ]
    update_s = step_s + snapshot_s
    recovered: dict[bool, list[float]] = {True: [], False: []}
    for after in (after for _, after in failed if after.steps):
        recovered[after.is_from_memory].append(after.recovered_in(step_s, update_s))
    wall_s = sum(_last_time(life) - _first_time(life) for life in lives)
    gaps = [after.seen_s - float(before.steps[-1]["time"]) for before, after in failed if before.steps]
    detect_s = max(0.0, fmean(gaps) - update_s / 2) if gaps else None
    working_s = wall_s - sum(recovered[True] + recovered[False]) - len(failed) * (detect_s or 0.0)
    return RunCosts(
        world=next((int(record["world"]) for record in reversed(records) if record["kind"] == "start"), 1),
        steps=sum(_stays(life, lives[i + 1 : i + 2]) for i, life in enumerate(lives)),
        wall_s=wall_s,
        step_s=step_s,
        snapshot_s=snapshot_s,
        interval=_interval(generations),
        save_s=save_s,
        written_s=fmean(float(save["seconds"]) for save in followed) if followed else None,
        detect_s=detect_s,
        recover_s=fmean(recovered[True]) if recovered[True] else None,
        restart_s=fmean(recovered[False]) if recovered[False] else None,
        mtbf_s=working_s / len(failed) if failed else None,
        failures=len(failed),
        from_checkpoint=fmean(not after.is_from_memory for _, after in failed) if failed else 1.0,
    )


def _generations(records: Iterable[Record]) -> list[_Generation]:
    found = list[_Generation]()
    for record in records:
        if record["kind"] == "start":
            found.append(_Generation(world=int(record["world"])))
        elif not found:
            continue
        elif record["kind"] == "step":
            back = found[-1].recovery  # a step that was not told of before the failure is of the generation before
            was_before = back is not None and len(found) > 1 and int(record["step"]) <= int(back["step"])
            found[-2 if was_before else -1].steps.append(record)
        elif record["kind"] == "save":
            found[-1].saves[int(record["step"])] = record
        elif record["kind"] == "recovery":
            before = found[-2].world if len(found) > 1 else found[-1].world
            found[-1].recovery = None if _is_resize(record, before, found[-1].world) else record
    return found


def _lives(generations: Sequence[_Generation]) -> list[list[_Generation]]:
    """Generations that follow each other by failures alone, without a start or a resize; those with lines of steps."""
    lives = list[list[_Generation]]()
    for one in generations:
        if one.recovery is None or not lives:
            lives.append([])
        lives[-1].append(one)
    return [life for life in lives if any(one.steps for one in life)]


def _steps_of(life: Sequence[_Generation]) -> list[Record]:
    return [step for one in life for step in one.steps]


def _first_time(life: Sequence[_Generation]) -> float:
    return float(_steps_of(life)[0]["time"])


def _last_time(life: Sequence[_Generation]) -> float:
    return float(_steps_of(life)[-1]["time"])


def _stays(life: Sequence[_Generation], following: Sequence[Sequence[_Generation]]) -> int:
    """Updates of a life that no later one did again."""
    steps = _steps_of(life)
    last = int(steps[-1]["step"])
    for other in following:
        last = min(last, int(_steps_of(other)[0]["step"]) - 1)
    return max(0, last - int(steps[0]["step"]))


def _goes_on(one: _Generation, step: int) -> bool:
    """Training went on behind the save of ``step``; the last save of a run blocks as long as it takes."""
    return any(int(line["step"]) > step for line in one.steps)


def _between(generations: Sequence[_Generation], step_s: float) -> float:
    """Seconds between two updates, without saves."""
    seconds, updates = 0.0, 0
    for one in generations:
        for before, after in pairwise(one.steps):
            count = int(after["step"]) - int(before["step"])
            blocked = sum(
                float(save["blocked_seconds"])
                for at, save in one.saves.items()
                if int(before["step"]) <= at < int(after["step"])
            )
            inside = float(after["seconds"]) + (count - 1) * step_s
            seconds += float(after["time"]) - float(before["time"]) - inside - blocked
            updates += count
    return max(0.0, seconds / updates) if updates else 0.0


def _interval(generations: Sequence[_Generation]) -> int | None:
    """Updates between saves: those that were done, over saves that were."""
    spans = [int(b) - int(a) for one in generations for a, b in pairwise(sorted(one.saves))]
    return max(1, round(fmean(spans))) if spans else None
