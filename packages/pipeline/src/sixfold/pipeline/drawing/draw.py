"""Pictures of programs and timelines.

    Program, Timeline --> text (this file)            --> tests, logs, a reader's eye
                      --> picture.py, trace.py        --> SVG, PNG, Perfetto

Torch-free.
"""

from __future__ import annotations

from pathlib import Path

from sixfold.pipeline.drawing.picture import save_png, write_svg
from sixfold.pipeline.drawing.trace import write_trace
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import WORK
from sixfold.pipeline.program.program import Program, Weights, program_given
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.simulate import Timeline, simulate

__all__ = ["draw", "draw_png"]

_COLUMNS = 400  # of a text picture; actions that are then too narrow for their names lose letters


def draw(
    program_or_timeline: Program | Timeline,
    *,
    format: str = "text",
    beside: Program | Timeline | None = None,
    unit: str = "",
) -> str:
    """A program or a timeline, alone or with a second one at the same scale, such as measured beside simulated.

    Args:
        format: "text": a line per rank. A timeline is drawn to scale, with a dot for idle time. "svg": a picture to
            scale of what keeps a rank busy. "trace": one event per action in microseconds, for Perfetto. For svg and
            trace a program is simulated with F, I and W of 1 per rank.
        beside: drawn below the first. The first is then called simulated, this one measured.
        unit: of the times, such as "s": an SVG then has an axis with it.
    Raises:
        ScheduleError: another format, or a timeline in which nothing takes time.
    """
    if format not in ("text", "svg", "trace"):
        raise ScheduleError(f"format is {format!r}; it is text, svg or trace (draw_png writes PNG)")
    if format == "text":
        if beside is None:
            return _text(program_or_timeline)
        columns = _columns([_timeline(program_or_timeline), _timeline(beside)])
        both = _named(program_or_timeline, beside)
        return "".join(f"{name}\n{_to_scale(timeline, columns)}" for name, timeline in both.items())
    named = _named(program_or_timeline, beside)
    return write_svg(named, unit) if format == "svg" else write_trace(named)


def draw_png(
    program_or_timeline: Program | Timeline,
    path: str | Path,
    *,
    beside: Program | Timeline | None = None,
    unit: str = "",
) -> None:
    """Write the picture of ``draw(..., format="svg")`` as a PNG file. Needs the extra ``plot`` (matplotlib)."""
    save_png(_named(program_or_timeline, beside), path, unit)


def _named(first: Program | Timeline, second: Program | Timeline | None) -> dict[str, Timeline]:
    if second is None:
        return {first.name if isinstance(first, Program) else "": _timeline(first)}
    return {"simulated": _timeline(first), "measured": _timeline(second)}


def _timeline(program_or_timeline: Program | Timeline) -> Timeline:
    if isinstance(program_or_timeline, Timeline):
        return program_or_timeline
    program_given(program_or_timeline)
    return simulate(program_or_timeline, Costs.per_rank(program_or_timeline))


def _text(program_or_timeline: Program | Timeline) -> str:
    if isinstance(program_or_timeline, Program):
        return str(program_or_timeline)
    if not isinstance(program_or_timeline, Timeline):
        program_given(program_or_timeline)
    return _to_scale(program_or_timeline, _columns([program_or_timeline]))


def _columns(timelines: list[Timeline]) -> float:
    """Columns per unit of time: the shortest action is as wide as the longest name, if that is not too wide."""
    seen = [
        event for timeline in timelines for event in timeline.events if event[3] > event[2] and event[1].kind in WORK
    ]
    if not seen:
        raise ScheduleError("the timeline has no action that takes time; there is nothing to draw to scale")
    widest = max(len(str(action)) for _, action, _, _ in seen)
    shortest = min(end - start for _, _, start, end in seen)
    return min((widest + 1) / shortest, _COLUMNS / max(timeline.makespan for timeline in timelines))


def _to_scale(timeline: Timeline, columns: float) -> str:
    lines = [""] * len(timeline.peak_activations)
    for rank, action, start, end in (event for event in timeline.events if event[1].kind in WORK):
        idle = "." * (round(start * columns) - len(lines[rank]))
        width = round(end * columns) - len(lines[rank]) - len(idle)
        lines[rank] += idle + str(action)[: max(width, 0)].ljust(width)
    full = round(timeline.makespan * columns)
    head = "" if timeline.weights is Weights.FLUSHED else f"weights: {timeline.weights}\n"
    return head + "".join(f"{rank}: {line.ljust(full, '.')}".rstrip() + "\n" for rank, line in enumerate(lines))
