"""The command ``sixfold-pipeline``: draw, simulate, verify, plan and export schedules.

    arguments --> Program --> draw, simulate, verify, plan, export (this file) --> text, JSON or a file

Torch-free. A schedule is named, or read from a file (.csv in PyTorch's form, anything else in ours) or from ``-``.
Ends with 0, with 1 for a program or plan that cannot be, with 2 for arguments that make no sense.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sixfold.pipeline import passes, schedules
from sixfold.pipeline.drawing.draw import draw, draw_png
from sixfold.pipeline.drawing.trace import read_trace
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.plan.search import plan_over
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.proof.verify import verify
from sixfold.pipeline.schedules import Schedule
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.simulate import Timeline, simulate

__all__ = ["main"]

_FORMAT_OF = {".svg": "svg", ".png": "png", ".json": "trace"}  # by the ending of a drawing's file


class UsageError(Exception):
    """Arguments that make no sense together."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UsageError as error:
        print(f"sixfold-pipeline: {error}", file=sys.stderr)
        return 2
    except ScheduleError as error:
        print(f"sixfold-pipeline: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"sixfold-pipeline: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 2


# ---- verbs


def _simulate(options: argparse.Namespace) -> int:
    program = _program(options)
    costs = _costs(program, options)
    report = verify(program)  # first, since its counter-example says more than a clock that stands still
    timeline = simulate(program, costs)
    numbers = {
        "schedule": program.name or options.schedule,
        "ranks": len(program.ranks),
        "microbatches": program.microbatches,
        "chunks": program.stages // len(program.ranks),
        **_bubbles(timeline),
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(timeline.weight_versions),
        "messages": report.messages,
    }
    _print(numbers, options)
    return 0


def _verify(options: argparse.Namespace) -> int:
    try:
        report = verify(_program(options), memory_cap=options.memory_cap)
    except ScheduleError as error:
        if not options.json:
            raise
        refusal = {
            "valid": False,
            "error": str(error),
            "rank": error.rank,
            "position": error.position,
            "action": None if error.action is None else str(error.action),
            "cycle": [[rank, position, str(action)] for rank, position, action in error.cycle],
        }
        _say(json.dumps(refusal))
        return 1
    numbers = {"valid": True, "messages": report.messages, "peak_activations": list(report.peak_activations)}
    _print(numbers, options)
    return 0


def _plan(options: argparse.Namespace) -> int:
    if options.ranks is None or options.microbatches is None:
        raise UsageError("plan needs --ranks and --microbatches")
    _takes_no("plan", options, "waves", "steps")
    each = (1, 2) if options.chunks is None else (options.chunks,)
    _positive(ranks=options.ranks, microbatches=options.microbatches, chunks=min(each))
    found = plan_over(
        [(options.microbatches, _share_costs(options, chunks)) for chunks in each],
        ranks=options.ranks,
        memory_cap=options.memory_cap,
        time_limit_s=options.time_limit,
    )
    numbers = {
        "makespan": found.timeline.makespan,
        "bubble_over_ideal": found.timeline.bubble_over_ideal,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "placement": list(found.program.placement),
        "peak_activations": list(found.timeline.peak_activations),
        "program": str(found.program),
    }
    _print(numbers, options)
    return 0


def _export(options: argparse.Namespace) -> int:
    program = _program(options)
    if options.unshard is not None:
        program = passes.unshard(program, max_active=options.unshard)
    if options.lowered:
        program = passes.lower(program)
    text = program.to_csv() if options.format == "csv" else str(program)
    summary = {
        "schedule": program.name or options.schedule,
        "format": options.format,
        "actions": sum(len(row) for row in program.ranks),
    }
    _deliver(text, options, summary)
    return 0


def _draw(options: argparse.Namespace) -> int:
    if options.format is None:
        options.format = _FORMAT_OF.get(Path(options.output or "").suffix.lower(), "text")
    program = _program(options)
    measured = read_trace(_text(options.measured), program.weights) if options.measured else None
    summary = {"schedule": program.name or options.schedule, "format": options.format}
    costs = _costs(program, options)
    if measured is not None and not _costs_given(options):
        costs = Costs.fit(measured, assume=costs)
    # Text of a program alone is its lists, also of one that hangs; costs or a measurement ask for a picture to scale.
    if options.format == "text" and measured is None and not _costs_given(options):
        _deliver(draw(program), options, summary)
        return 0
    timeline = simulate(program, costs)
    if options.format == "png":
        if options.output is None:
            raise UsageError("draw --format png needs -o FILE")
        draw_png(timeline, options.output, beside=measured)
        _print_written(options, summary)
        return 0
    _deliver(draw(timeline, format=options.format, beside=measured), options, summary)
    return 0


# ---- programs and costs


def _program(options: argparse.Namespace) -> Program:
    """The named schedule, or the program in the file."""
    if (schedule := schedules.find(options.schedule)) is not None:
        return _generated(schedule, options)
    if options.schedule != "-" and not Path(options.schedule).exists():
        raise UsageError(f"{options.schedule!r} is neither a file nor one of {', '.join(schedules.__all__)}")
    _takes_no("a program in a file", options, "chunks", "waves", "steps")
    text = _text(options.schedule)
    # Only our text has colons: after each rank.
    csv = ":" not in text if options.schedule == "-" and text else options.schedule.lower().endswith(".csv")
    program = Program.from_csv(text) if csv else Program.parse(text)
    if options.ranks not in (None, len(program.ranks)):
        raise UsageError(f"--ranks is {options.ranks}; the program in {options.schedule!r} has {len(program.ranks)}")
    return program if options.microbatches is None else replace(program, microbatches=options.microbatches)


def _text(source: str) -> str:
    """Content of a file, or of standard input for "-"."""
    if source == "-" and sys.stdin is None:
        raise UsageError("standard input is closed; give a file")
    content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{source!r} is no text: byte {error.start} is not UTF-8") from None


def _takes_no(what: str, options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise UsageError(f"{what} takes no --{name}")


def _generated(schedule: Schedule, options: argparse.Namespace) -> Program:
    if options.ranks is None or options.microbatches is None:
        raise UsageError(f"{schedule.name} needs --ranks and --microbatches")
    arguments = {"ranks": options.ranks, "microbatches": options.microbatches}
    for extra in ("chunks", "waves", "steps"):
        if extra not in schedule.arguments:
            _takes_no(schedule.name, options, extra)
        elif (value := getattr(options, extra)) is not None:
            arguments[extra] = value
    try:
        return schedule.make(**arguments)
    except ScheduleError as error:
        raise UsageError(str(error)) from None


def _costs(program: Program, options: argparse.Namespace) -> Costs:
    try:
        return Costs.per_rank(program, options.forward, options.backward_input, options.backward_weight, options.hop)
    except ScheduleError as error:
        raise UsageError(str(error)) from None


def _share_costs(options: argparse.Namespace, chunks: int) -> Costs:
    """Costs of ``ranks * chunks`` equal stages, of which each rank has ``chunks``."""
    stages = options.ranks * chunks
    try:
        return Costs(
            [options.forward / chunks] * stages,
            [options.backward_input / chunks] * stages,
            [options.backward_weight / chunks] * stages,
            options.hop,
            activation=[1.0 / chunks] * stages,
        )
    except ScheduleError as error:
        raise UsageError(str(error)) from None


def _costs_given(options: argparse.Namespace) -> bool:
    given = (options.forward, options.backward_input, options.backward_weight, options.hop)
    return given != (1.0, 1.0, 1.0, 0.0)


def _positive(**arguments: int) -> None:
    for name, value in arguments.items():
        if value < 1:
            raise UsageError(f"{name} is {value}; it is >= 1")


# ---- output


def _bubbles(timeline: Timeline) -> dict[str, float]:
    names = ("makespan", "ideal", "bubble_over_ideal", "bubble_over_total", "span_over_ideal")
    return {name: getattr(timeline, name) for name in names}


def _print(numbers: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        _say(json.dumps(numbers))
        return
    for name, value in numbers.items():
        if isinstance(value, float):
            value = f"{value:.6g}"
        elif isinstance(value, list):
            value = " ".join(f"{item:g}" for item in value)
        elif isinstance(value, str) and "\n" in value:
            value = "\n" + value.rstrip()
        _say(f"{name}: {value}")


def _deliver(text: str, options: argparse.Namespace, summary: dict[str, Any]) -> None:
    """Write ``text`` where it was asked for; with --json say what was done, or give it inside."""
    if options.output is not None:
        Path(options.output).write_bytes(text.encode())
        _print_written(options, summary)
    elif options.json:
        _say(json.dumps({**summary, "text": text}))
    else:
        _say(text, end="")


def _print_written(options: argparse.Namespace, summary: dict[str, Any]) -> None:
    if options.json:
        _say(json.dumps({**summary, "file": options.output}))


def _say(text: str, end: str = "\n") -> None:
    """Print to standard output; a reader that has left, as ``head`` does, is no error."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        # What comes later, and Python's own flush at exit, goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sixfold-pipeline", description="Draw, simulate, prove, plan and export pipeline schedules."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    words = {
        "simulate": (_simulate, "time, bubbles and memory of a schedule"),
        "verify": (_verify, "prove a program free of deadlocks, or show the shortest counter-example"),
        "export": (_export, "write a program as PyTorch's CSV or as text"),
        "draw": (_draw, "draw a schedule as text, SVG, PNG or a trace for Perfetto"),
    }
    for verb, (run, help_text) in words.items():
        sub = verbs.add_parser(verb, help=help_text, description=help_text)
        sub.add_argument("schedule", help=f"a file, - for standard input, or one of: {', '.join(schedules.__all__)}")
        _common(sub, run)
        if verb == "verify":
            sub.add_argument("--memory-cap", type=_amount, help="most activations of a rank, in microbatches")
        if verb == "export":
            sub.add_argument("--lowered", action="store_true", help="add sends and receives")
            sub.add_argument("--unshard", type=int, metavar="N", help="gather at most N stages of a rank at once")
            sub.add_argument("--format", choices=("csv", "text"), required=True, help="of the output")
        if verb == "draw":
            sub.add_argument(
                "--format",
                choices=("text", "svg", "trace", "png"),
                help="of the drawing; default: by the ending of -o (.svg, .png, .json for trace), else text",
            )
            beside = "a measured trace to draw beside the simulation; gives its costs if you give none"
            sub.add_argument("--measured", metavar="FILE", help=beside)
        if verb in ("export", "draw"):
            sub.add_argument("-o", "--output", metavar="FILE", help="write there; default: standard output")
    plan_text = "search a schedule for costs under a memory cap; tries 1 and 2 chunks unless --chunks says more"
    sub = verbs.add_parser("plan", help=plan_text, description=plan_text)
    _common(sub, _plan)
    sub.add_argument("--memory-cap", type=_amount, help="most activations of a rank, in microbatches; default: no cap")
    sub.add_argument("--time-limit", type=_seconds, default=5.0, metavar="S", help="seconds to search (default 5)")
    return parser


def _common(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.set_defaults(run=run)
    sizes = {
        "ranks": "number of ranks",
        "microbatches": "microbatches of a step",
        "chunks": "stages per rank, for schedules with several",
        "waves": "waves of hanayo",
        "steps": "batches that overlap (pipedream, pipedream_2bw)",
    }
    for name, help_text in sizes.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=help_text)
    for name, letter in {"forward": "F", "backward-input": "I", "backward-weight": "W"}.items():
        words = f"time of {letter} on all stages of a rank (1)"
        parser.add_argument(f"--{name}", type=float, default=1.0, metavar="T", help=words)
    parser.add_argument("--hop", type=float, default=0.0, metavar="T", help="time of one message (0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _amount(text: str) -> float:
    if math.isnan(value := float(text)):
        raise argparse.ArgumentTypeError("it is a number, not NaN")
    return value


def _seconds(text: str) -> float:
    if not (math.isfinite(value := float(text)) and value > 0):
        raise argparse.ArgumentTypeError(f"it is {text}; it is finite and > 0")
    return value
