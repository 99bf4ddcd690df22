"""Timelines as Chrome traces: what Perfetto and chrome://tracing open, written and read.

    Timeline --> trace text (this file) --> Perfetto
    measured trace --> read_trace (this file) --> Timeline --> draw(beside=...)

Torch-free. One complete ("X") event per action: its name is the action's text, its thread the rank; ``ts``
and ``dur`` are microseconds, where a timeline has seconds. With two timelines each is a process of its own.
"""

from __future__ import annotations

import json
from typing import Any

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.program.program import Weights
from sixfold.pipeline.simulation.simulate import Event, Timeline, measured

__all__ = ["read_trace", "write_trace"]

_LATEST = 1e300  # microseconds; JSON has no limit


def write_trace(timelines: dict[str, Timeline]) -> str:
    """The trace of one or more named timelines."""
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        if len(timelines) > 1:
            events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        for rank, action, start, end in timeline.events:
            times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            events.append(
                {"name": str(action), "ph": "X", "pid": process, "tid": rank, "cat": action.kind.value, **times}
            )
    trace: dict[str, Any] = {"traceEvents": events}
    weights = {timeline.weights for timeline in timelines.values()}
    if len(weights) == 1 and Weights.FLUSHED not in weights:
        trace["otherData"] = {"weights": weights.pop().value}
    return json.dumps(trace)


def read_trace(text: str, weights: Weights = Weights.FLUSHED) -> Timeline:
    """A measured timeline from a trace that ``write_trace`` made, or any tool with the same names.

    Events whose name is not an action, and those that are not complete ("X"), are left out. Time counts from the
    first action.

    Args:
        weights: of the program that ran, where the trace's ``otherData`` does not say them, as ``write_trace`` does.
    Raises:
        ScheduleError: no JSON, no action in it, an event whose thread or times are not numbers; or as ``measured``.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"the trace is not JSON: {error}") from None
    listed = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise ScheduleError('the trace has no list "traceEvents"')
    events: list[Event] = []
    for entry in listed:
        if not isinstance(entry, dict) or entry.get("ph") != "X" or (action := _action(entry.get("name"))) is None:
            continue
        rank, begin, duration = entry.get("tid"), _time(entry.get("ts")), _time(entry.get("dur"))
        if not isinstance(rank, int) or rank < 0 or begin is None or duration is None:
            given = {name: entry.get(name) for name in ("tid", "ts", "dur")}
            raise ScheduleError(f"event {entry['name']!r} has {given}; tid is a rank, ts and dur are microseconds >= 0")
        events.append((rank, action, begin * 1e-6, (begin + duration) * 1e-6))
    if not events:
        raise ScheduleError("the trace has no event whose name is an action, such as 3F0")
    first = min(start for _, _, start, _ in events)
    other = document.get("otherData") if isinstance(document, dict) else None
    said = other.get("weights", weights) if isinstance(other, dict) else weights
    return measured([(rank, action, start - first, end - first) for rank, action, start, end in events], said)


def _action(name: object) -> Action | None:
    try:
        return Action.parse(name) if isinstance(name, str) else None
    except ScheduleError:
        return None


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value <= _LATEST else None
