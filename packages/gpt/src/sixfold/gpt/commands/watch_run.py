"""``sixfold watch RUN`` and ``sixfold report RUN``: a live view of a run, and where its time went.

    RUN/metrics.jsonl --> observe/live_view.py --> watch (this file): a terminal, or a line every 30 s
                      `-> observe/time_spent.py --> report (this file): text or JSON

No torch, no ranks: it may run on another machine that sees the folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from sixfold.gpt.commands.arguments import above_zero
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.live_view import BLOCKS, PLAIN_BLOCKS, LiveView
from sixfold.gpt.observe.metrics import EVALUATIONS, clock, describe, read_all
from sixfold.gpt.observe.time_spent import CAUSES, TimeSpent, spent

DRAW_S = 1.0  # between frames
GRACE_S = 10.0  # after an error, for a restart
# Control sequences of a terminal; CLEAR_LINE and CLEAR_BELOW are from the cursor on.
ALTERNATE_SCREEN, USUAL_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``watch`` and ``report``."""
    verb = verbs.add_parser("watch", help="follow a run in this terminal until it ends; Ctrl-C leaves the run alone")
    verb.add_argument("run_dir", type=Path, metavar="RUN", help="run folder; it may not have begun yet")
    verb.add_argument("--once", action="store_true", help="print one view and end")
    verb.add_argument(
        "--every", type=above_zero, default=30.0, metavar="S", help="seconds between lines, without a terminal (30)"
    )
    verb.set_defaults(run=lambda args: watch(args.run_dir, once=args.once, every_s=args.every))
    verb = verbs.add_parser("report", help="where a run's time went, and its speed by the clock")
    verb.add_argument("run_dir", type=Path, metavar="RUN", help="run folder or metrics.jsonl")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=lambda args: report(args.run_dir, as_object=args.json))


def report(run: Path, *, as_object: bool) -> int:
    """Print where the time of ``run`` went.

    Raises:
        ConfigError: it is no run.
    """
    try:
        found = spent(read_all(run), str(run))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{run} holds no metrics.jsonl; name the run.dir of a run") from error
    print(json.dumps(asdict(found)) if as_object else "\n".join(_rows(found)))
    return 0


def _rows(found: TimeSpent) -> list[str]:
    rows = [
        f"{found.steps:,} updates and {found.tokens:,} tokens stay; starts: {found.starts}, recoveries: "
        f"{found.recoveries}"
    ]
    for cause, seconds in found.seconds.items():
        if seconds:
            share = seconds / found.wall_s if found.wall_s else 0.0
            rows.append(f"{cause:<11}{clock(seconds):>9}  {share:6.1%}  {CAUSES[cause]}")
    rows.append(f"{'in all':<11}{clock(found.wall_s):>9}")
    if found.stopped_s:
        rows[-1] += f"; not counted: {clock(found.stopped_s)} for which it was stopped"
    alone, wall = found.step_tokens_per_second, found.tokens_per_second
    rows.append(f"{'tokens/s':<11}{wall:>9,.0f}  by the clock; {alone:,.0f} in updates and their waits for data")
    if found.mfu is not None and found.step_mfu is not None:
        rows.append(f"{'MFU':<11}{found.mfu:>9.1%}  by the clock; {found.step_mfu:.1%} in updates")
    return rows


def watch(run_dir: Path, *, once: bool, every_s: float, stream: TextIO | None = None) -> int:
    """Show ``run_dir`` until its run ends.

    Returns:
        0, or 1 if the run failed and nothing has started it again.
    Raises:
        ConfigError: a file, or ``once`` where there is no run.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file; name the run.dir of a run")
    view, stream = LiveView(run_dir), stream or sys.stdout
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:  # not the main thread, which alone has signals
        pass
    try:
        if once:
            view.poll()
            if not view.records:
                raise ConfigError(f"{run_dir} holds no metrics.jsonl; name the run.dir of a run")
            stream.write("\n".join(_frame(view, stream)) + "\n")
        elif stream.isatty():
            _draw(view, stream)
        else:
            _tell(view, stream, every_s)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # nobody reads any more
        sys.stderr.close()
        return 0
    return int(view.end is not None and view.end["reason"] == "error")


def _frame(view: LiveView, stream: TextIO) -> list[str]:
    size = shutil.get_terminal_size((80, 24))
    try:
        BLOCKS.encode(stream.encoding or "ascii")
        blocks = BLOCKS
    except (UnicodeEncodeError, LookupError):
        blocks = PLAIN_BLOCKS
    return view.frame(time.time(), max(20, size.columns - 1), max(4, size.lines), blocks=blocks)


def _is_over(view: LiveView, now: float) -> bool:
    """The run has ended, and nobody starts it again."""
    if view.end is None:
        return False
    return view.end["reason"] != "error" or now - float(view.end["time"]) > GRACE_S


def _draw(view: LiveView, stream: TextIO) -> None:
    """Draw each second on the terminal's alternate screen; the last view stays on the usual one."""
    stream.write(ALTERNATE_SCREEN)
    try:
        while True:
            view.poll()
            rows = _frame(view, stream)
            stream.write(HOME + "\n".join(row + CLEAR_LINE for row in rows) + CLEAR_BELOW)
            stream.flush()
            if _is_over(view, time.time()):
                return
            time.sleep(DRAW_S)
    finally:
        stream.write(USUAL_SCREEN + "\n".join(_frame(view, stream)) + "\n")
        stream.flush()


def _tell(view: LiveView, stream: TextIO, every_s: float) -> None:
    """A line each ``every_s`` seconds if there is something new, and events as they come."""
    told_at, said = float("-inf"), ""
    while True:
        new, now = view.poll(), time.time()
        over = _is_over(view, now)
        events = [describe(one) for one in new if one["kind"] in ("recovery", "nonfinite", *EVALUATIONS, "end")]
        if said == "" and len(events) > 5:  # of a run that has been there for long
            events = events[-1:]
        if now - told_at >= every_s or over:
            line = view.line(now)
            if line != said:
                events = [line, *events] if over else [*events, line]  # the end is the last line
            told_at, said = now, line
        if events:
            stream.write("\n".join(events) + "\n")
            stream.flush()
        if over:
            return
        time.sleep(min(DRAW_S, every_s))
