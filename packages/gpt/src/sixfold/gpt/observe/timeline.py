"""The pipeline's step as it ran, beside the same program on paper.

    runner.gather_timeline --> TimelineWriter (this file) --> RUN/timeline/step-N.json (Chrome trace), step-N.txt
                                                        `-> show (this file) --> .svg, .png, .json for Perfetto, text

Costs are fitted to what was measured and the program is simulated with them: what is left between the two bubbles is
what the schedule does not explain. No torch. ``sixfold-pipeline draw step-N.txt --measured step-N.json`` reads the
same files.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.files.output_files import marked, refuse_foreign
from sixfold.pipeline import Costs, Program, Timeline, draw, simulate
from sixfold.pipeline.drawing.draw import draw_png
from sixfold.pipeline.drawing.trace import read_trace, write_trace
from sixfold.pipeline.errors import ScheduleError

FORMATS = {".svg": "svg", ".json": "trace", ".txt": "text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A measured step and the same program under the costs that it showed.

    Attributes:
        measured, predicted: in seconds, of the ranks of one pipeline.
    """

    program: Program
    measured: Timeline
    predicted: Timeline


def beside_paper(program: Program, measured: Timeline) -> MeasuredStep:
    """``measured`` beside a simulation of ``program`` with the costs fitted to it.

    Raises:
        ScheduleError: a stage's forward or backward was not measured.
    """
    costs = Costs.fit(measured, assume=Costs.per_rank(program))
    return MeasuredStep(program=program, measured=measured, predicted=simulate(program, costs))


def folder(run_dir: str | Path) -> Path:
    """Where a run keeps its timelines."""
    return Path(run_dir) / "timeline"


class TimelineWriter:
    """Writes measured steps under a run's folder. What goes wrong is told once, on stderr; it ends no run."""

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = run_dir
        self._told = False

    def keep(self, step: int, program: Program, measured: Timeline) -> dict[str, Any] | None:
        """The fields of metrics.jsonl's line, ``bubble_on_paper`` None where no costs fit; None: nothing was written.

        Args:
            step: the update that was measured, the first being 1 as in metrics.jsonl.
        """
        trace = folder(self._run_dir) / f"step-{step:08d}.json"
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            trace.with_suffix(".txt").write_text(str(program))
            trace.write_text(write_trace({"measured": measured}))
        except OSError as error:
            self._tell(f"the timeline of step {step} is not kept: {error}")
            return None
        paper: float | None = None
        try:
            paper = beside_paper(program, measured).predicted.bubble_over_ideal
        except ScheduleError as error:
            self._tell(f"the timeline of step {step} has no bubble on paper: {error}")
        bubble = measured.bubble_over_ideal
        return {"trace": str(trace), "seconds": measured.makespan, "bubble": bubble, "bubble_on_paper": paper}

    def _tell(self, text: str) -> None:
        if not self._told:
            print(f"sixfold: {text}", file=sys.stderr, flush=True)
        self._told = True


def read_timeline(run_dir: str | Path, step: int | None = None) -> tuple[int, MeasuredStep]:
    """A timeline of a run, the newest if ``step`` is None, and its step.

    Raises:
        ConfigError: the run has none, or none of that step.
    """
    there = {int(path.stem.removeprefix("step-")): path for path in sorted(folder(run_dir).glob("step-*.json"))}
    if not there:
        raise ConfigError(f"{folder(run_dir)} holds no timeline; train with log.timeline_steps = [10], say")
    found = max(there) if step is None else step
    if found not in there:
        raise ConfigError(f"step {found} of {run_dir} was not timed; timed were {', '.join(map(str, there))}")
    try:
        program = Program.parse(there[found].with_suffix(".txt").read_text())
        return found, beside_paper(program, read_trace(there[found].read_text(), program.weights))
    except (OSError, ScheduleError) as error:
        raise ConfigError(f"the timeline of step {found} in {folder(run_dir)} cannot be read: {error}") from error


def show(run_dir: str | Path, out: str | Path, *, step: int | None = None) -> str:
    """Draw a kept timeline, simulated above measured.

    Args:
        out: .svg, .png (needs matplotlib), .json (for Perfetto), .txt.
    Returns:
        One line that says both bubbles.
    Raises:
        ConfigError: another ending, no such timeline, or a file of another's at ``out``.
        ScheduleError: a .png without matplotlib.
    """
    out = Path(out)
    if out.suffix not in {*FORMATS, ".png"}:
        raise ConfigError(f"--out is {str(out)!r}; a timeline ends in .svg, .png, .json (Perfetto) or .txt")
    refuse_foreign(out)
    step, ran = read_timeline(run_dir, step)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".png":
        draw_png(ran.predicted, out, beside=ran.measured, unit="s")
    else:
        drawn = draw(ran.predicted, format=FORMATS[out.suffix], beside=ran.measured, unit="s")
        out.write_text(marked(drawn, out.suffix))
    return describe(step, ran)


def describe(step: int, ran: MeasuredStep) -> str:
    """``step 7: 0.412 s, bubble 0.310 measured, 0.270 on paper with the same costs; 2 ranks, 8 microbatches``."""
    return (
        f"step {step}: {ran.measured.makespan:.3f} s, bubble {ran.measured.bubble_over_ideal:.3f} measured, "
        f"{ran.predicted.bubble_over_ideal:.3f} on paper with the same costs; "
        f"{len(ran.program.ranks)} ranks, {ran.program.microbatches} microbatches"
    )
