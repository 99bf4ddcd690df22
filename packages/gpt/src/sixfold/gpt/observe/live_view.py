"""A run as a few lines of text that follow it.

    metrics.jsonl --> MetricsTail --> LiveView (this file) --> commands/watch_run.py: the terminal

It reads the run's folder and nothing else, so it works beside a run, before its first line and after its end. No torch.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.curves import wall_mfu
from sixfold.gpt.observe.metrics import MetricsTail, clock, describe, last_of_each_step
from sixfold.gpt.observe.run_record import config_keys
from sixfold.gpt.observe.time_spent import TimeSpent, spent

Record = dict[str, Any]
BLOCKS, PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
NEAR = 20  # lines of steps that "now" is a mean of
SILENT_S = 60.0  # without a line, until the view says so; more if updates take long
_NOT_KEPT = ("loss_by_dataset", "expert_load")  # fields not shown, of which a long run has very many
_EVENT_KINDS = frozenset(
    {"start", "resume", "damaged", "recovery", "no_snapshot", "no_replica", "straggler", "replicas", "nonfinite", "end"}
)


def spark(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """``values`` as a line of at most ``width`` blocks, each the mean of equally many values.

    The lowest block is the least mean, the highest the largest.
    """
    width = min(width, len(values))
    if width < 1:
        return ""
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    top = len(blocks) - 1
    return "".join(blocks[round(top * (mean - low) / (high - low)) if high > low else 0] for mean in means)


class LiveView:
    """What the lines of a run say so far.

    Attributes:
        records: all lines, without fields that are not shown. steps: lines `step` that count, in order.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir)
        self.records: list[Record] = []
        self.steps: list[Record] = []
        self._tail = MetricsTail(self.folder / "metrics.jsonl", offset=0)
        self._spent: tuple[int, float, TimeSpent | None] = (0, 0.0, None)  # of how many lines, its seconds, the result
        self._last_step: int | None = None

    def poll(self) -> list[Record]:
        """Read the lines that are new, and return them."""
        new = [{key: value for key, value in one.items() if key not in _NOT_KEPT} for one in self._tail.read()]
        self.records += new
        if any(one["kind"] in ("start", "resume") for one in new):
            self.steps = [one for one in last_of_each_step(self.records) if one["kind"] == "step"]
            self._last_step = config_keys(self.folder).get("train.steps")
        else:
            self.steps += [one for one in new if one["kind"] == "step"]
        return new

    @property
    def end(self) -> Record | None:
        """The line `end`, unless a start follows it."""
        last = next((one for one in reversed(self.records) if one["kind"] in ("start", "end")), None)
        return last if last is not None and last["kind"] == "end" else None

    def state(self, now: float) -> str:
        """What the run does now, in a few words."""
        if not self.records:
            return f"waiting for {self.folder / 'metrics.jsonl'}"
        if self.end is not None:
            return {"finished": "finished", "sigterm": "stopped, and saved"}.get(self.end["reason"], "failed")
        last = max(float(one["time"]) for one in self.records[-NEAR:])
        longest = max((float(one["seconds"]) for one in self.steps[-NEAR:]), default=0.0)
        if now - last > max(SILENT_S, 10 * longest):
            return f"no line for {clock(now - last)}: it hangs, or was killed"
        return "training" if self.records[-1]["kind"] not in ("start", "resume") else "starting"

    def line(self, now: float) -> str:
        """The newest step in one line, for a stream that is no terminal."""
        if not self.steps:
            return self.state(now)
        left = self._pace_and_left()
        return describe(self.steps[-1], self._last_step, None if left is None else left[0])

    def frame(self, now: float, width: int, height: int = 100, *, blocks: str = BLOCKS) -> list[str]:
        """The whole view, in lines of at most ``width`` characters."""
        step = f"step {self.steps[-1]['step']:,}" if self.steps else ""
        if step and self._last_step:
            share = self.steps[-1]["step"] / self._last_step
            step += f" of {self._last_step:,} ({share:.0%})"
        rows = [f"{self.folder}: {self.state(now)}", *([step] if step else [])]
        if self.steps:
            rows += [*self._losses(width, blocks), *self._speed(), *self._saved(now), *self._time()]
        events = [one for one in self.records if one["kind"] in _EVENT_KINDS and _is_event(one)]
        room = max(0, min(6, height - len(rows) - 2))
        for one in events[len(events) - room :] if room else []:
            text = " ".join(_event(one).split())
            rows.append(f"{time.strftime('%d. %H:%M:%S', time.localtime(float(one['time'])))} {text}")
        return [line for row in rows for line in _wrapped(row, width)][:height]

    def _losses(self, width: int, blocks: str) -> list[str]:
        kept = [one for one in self.steps if one["loss"] is not None]
        losses = [float(one["loss"]) for one in kept]
        last = self.steps[-1]["loss"]
        evals = [one for one in self.records if one["kind"] == "eval" and one["loss"] is not None]
        valid = ""
        if evals:
            latest = {one.get("name", ""): one["loss"] for one in evals if one["step"] == evals[-1]["step"]}
            shown = ", ".join(f"{name!r} {loss:.4f}" if name else f"{loss:.4f}" for name, loss in latest.items())
            valid = f", validation {shown} at step {evals[-1]['step']:,}"
        rows = [f"loss    {'not finite' if last is None else f'{last:.4f}'}{valid}"]
        room = max(4, min(60, width - 30))
        for name, values in (("all", losses), (f"last {NEAR * 5}", losses[-NEAR * 5 :])):
            if len(values) > 1 and (name == "all" or len(losses) > len(values)):
                drawn = spark(values, room, blocks)
                rows.append(f"  {name:<9}{drawn} {min(values):.3f} to {max(values):.3f}")
        return rows

    def _speed(self) -> list[str]:
        last = self.steps[-1]
        found = self._time_spent()
        whole = f", {found.tokens_per_second:,.0f} by the clock" if found is not None and found.tokens else ""
        rows = [f"tokens/s {last['tokens_per_second']:,.0f} in the last update{whole}"]
        if last.get("mfu") is not None:
            now = wall_mfu(last)
            beside = "" if now is None else f", {now:.1%} with what lies between updates"
            of_run = "" if found is None or found.mfu is None else f", {found.mfu:.1%} by the clock"
            rows.append(f"MFU     {last['mfu']:.1%} in the last update{beside}{of_run}")
        near = self.steps[-NEAR:]
        total = sum(float(one["seconds"]) for one in near)
        waited = sum(float(one.get("data_seconds") or 0.0) for one in near)
        parts = [f"data wait {waited / total:.1%}" if total else ""]
        if last.get("memory_bytes"):
            parts.append(f"memory {last['memory_bytes'] / 2**30:.1f} GiB")
        parts.append(f"update {float(last['seconds']):.3g} s")
        rows.append("now     " + ", ".join(part for part in parts if part))
        return rows

    def _saved(self, now: float) -> list[str]:
        saves = [one for one in self.records if one["kind"] == "save"]
        if not saves:
            return ["saved   nothing yet"]
        last = saves[-1]
        ago = clock(max(0.0, now - float(last["time"])))
        took = f"took {float(last['seconds']):.3g} s, held up {float(last['blocked_seconds']):.3g} s"
        return [f"saved   step {last['step']:,}, {ago} ago; {took}"]

    def _pace_and_left(self) -> tuple[float, float] | None:
        """Seconds of an update by the clock in this start, and seconds left; None: not known yet."""
        begun = next((float(one["time"]) for one in reversed(self.records) if one["kind"] == "start"), 0.0)
        mine = [one for one in self.steps if float(one["time"]) >= begun]
        if len(mine) < 2 or not self._last_step:
            return None
        first, last = mine[0], mine[-1]
        pace = (float(last["time"]) - float(first["time"])) / max(1, int(last["step"]) - int(first["step"]))
        return pace, pace * (self._last_step - int(last["step"]))

    def _time(self) -> list[str]:
        found, left = self._time_spent(), self._pace_and_left()
        rows = []
        if found is not None:
            rest = "" if left is None or self.end is not None else f", {clock(left[1])} left"
            rows.append(f"time    {clock(found.wall_s)} gone{rest}")
            shares = [
                f"{cause} {seconds / found.wall_s:.0%}"
                for cause, seconds in sorted(found.seconds.items(), key=lambda pair: -pair[1])
                if found.wall_s and seconds / found.wall_s >= 0.005
            ]
            rows.append("spent   " + ", ".join(shares))
        return rows

    def _time_spent(self) -> TimeSpent | None:
        """``spent`` of all lines, or of nearly all: where it takes long, it waits until a tenth more have come."""
        lines, took, found = self._spent
        if len(self.records) > lines and (found is None or len(self.records) > lines * (1 + min(0.1, took))):
            began = time.monotonic()
            try:
                found = spent(self.records)
            except ConfigError:
                found = None
            self._spent = len(self.records), time.monotonic() - began, found
        return found


def _wrapped(row: str, width: int) -> list[str]:
    """``row`` in lines of ``width``; those that continue it are indented by the width of its name."""
    return textwrap.wrap(row, max(10, width), subsequent_indent=" " * 8) or [""]


def _is_event(record: Record) -> bool:
    if record["kind"] == "replicas":
        return bool(record["result"] != "agree")
    return record["kind"] != "straggler" or bool(record["slow"])


def _event(record: Record) -> str:
    why = f": {record['why']}" if "why" in record else ""
    return describe(record).splitlines()[0] + why
