"""Pictures of programs and timelines.

    Program, Timeline --> text (this file) --> tests, logs, a reader's eye

Torch-free.
"""

from __future__ import annotations

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program import Program
from sixfold.pipeline.simulate import Timeline

__all__ = ["draw"]


def draw(program_or_timeline: Program | Timeline, *, format: str = "text") -> str:
    """One line per rank: a program's actions in order, or a timeline's actions to scale.

    In a timeline the shortest action is as wide as the longest name, and a dot
    stands for idle time.

    Raises:
        ScheduleError: a format other than "text"; "svg" and "trace" come with the drawing issue.
    """
    if format != "text":
        raise ScheduleError(f"format is {format!r}; this version draws 'text' (svg and trace come later)")
    if isinstance(program_or_timeline, Program):
        return str(program_or_timeline)
    return _to_scale(program_or_timeline)


def _to_scale(timeline: Timeline) -> str:
    durations = [end - start for _, _, start, end in timeline.events if end > start]
    if not durations:
        raise ScheduleError("the timeline has no action that takes time; there is nothing to draw to scale")
    widest = max(len(str(action)) for _, action, _, _ in timeline.events)
    columns = (widest + 1) / min(durations)  # per unit of time
    lines = []
    for rank in range(len(timeline.peak_activations)):
        line = ""
        for _, action, start, end in (event for event in timeline.events if event[0] == rank):
            line += "." * (round(start * columns) - len(line))
            line += str(action).ljust(round(end * columns) - len(line))
        line += "." * (round(timeline.makespan * columns) - len(line))
        lines.append(f"{rank}: {line}".rstrip() + "\n")
    return "".join(lines)
