"""The run's record: metrics.jsonl, one JSON object per line.

    loop.py --> MetricsWriter --> metrics.jsonl   (this file)   --> read_metrics --> plots, demo.py
                                                                 `-> MetricsTail --> stderr, curves elsewhere

One rank writes; everything that shows a run reads this file and nothing else. Every line is flushed when written,
floats are in shortest round-trip form, what is not finite is null. A kill may cut the last line: readers skip it, and
the next writer begins on a new line. No torch here.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from sixfold.gpt.errors import ConfigError, FinalError, TrainError
from sixfold.gpt.files.run_dir import hold

FIELDS: dict[str, tuple[str, ...]] = {
    "start": ("step", "world", "layout", "schedule", "sharding", "order", "epochs", "ranks", "parameters", "versions"),
    "resume": ("step", "checkpoint", "layout", "changed"),
    "damaged": ("step", "checkpoint", "why"),
    "recovery": ("step", "generation", "lost", "source", "seconds"),
    "no_snapshot": ("step", "why"),
    "no_replica": ("step", "why"),
    "plan": ("step", "source", "microbatches", "bubble_over_ideal", "gap", "memory_cap", "peak_activations"),
    "step": (
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "samples",
        "batch_size",
        "seconds",
        "data_seconds",
        "tokens_per_second",
        "wall_tokens_per_second",
        "mfu",
        "memory_bytes",
        "loss_by_dataset",
        "expert_load",
    ),
    "timeline": ("step", "trace", "seconds", "bubble", "bubble_on_paper"),
    "eval": ("step", "name", "loss", "tokens", "seconds"),  # name: of the validation set, or ""
    "eval_ema": ("step", "name", "loss", "tokens", "seconds"),  # with the average of the weights
    "digest": ("step", "digest", "seconds"),
    "replicas": ("step", "result", "ranks", "tensor", "shards", "seconds"),
    "save": ("step", "checkpoint", "blocked_seconds", "seconds"),
    "straggler": ("step", "steps", "factor", "parts", "slow"),
    "nonfinite": ("step", "rank", "where", "what"),
    "end": ("step", "reason"),
}

EVALUATIONS = ("eval", "eval_ema")
_OF_STEPS = frozenset({"step", "digest", "timeline", "straggler"})  # what `MetricsWriter.holds` holds
_LAST = frozenset({"nonfinite", "end"})  # nothing waits behind them


def _finite(value: Any) -> Any:
    """``value`` with every NaN and infinity replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


class LineWriter:
    """Appends to one file of lines; opened by one rank of a run, and held: a second writer is refused (ConfigError).

    Where ``fence`` is given, it is called before each line, and raises for a writer that is of an older term. The lock
    of such a writer, which may not have ended yet, keeps nobody out.
    """

    def __init__(self, path: str | Path, fence: Callable[[], None] | None = None) -> None:
        self.path, self._fence = Path(path), fence
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            hold(self._file, self.path)
        except ConfigError:
            if fence is None:
                os.close(self._file)
                raise
            fence()
        if _is_cut(self.path):
            os.write(self._file, b"\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """One line.

        Raises:
            FinalError: the line does not fit on the disk. TrainError: the system refused it otherwise.
        """
        # One write call per line: a kill cuts a line at most, it never mixes two.
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        if self._fence is not None:
            self._fence()
        try:
            written, why, full = os.write(self._file, line), "the disk is full", True
        except OSError as error:
            written, why, full = 0, str(error.strerror), error.errno in (errno.ENOSPC, errno.EDQUOT)
        if written < len(line):
            said = f"{self.path}: {written} of the {len(line)} bytes of a line were written: {why}"
            raise FinalError(said) if full else TrainError(said)

    def close(self) -> None:
        """Close the file; further writes are errors."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


class MetricsWriter(LineWriter):
    """Appends to one metrics.jsonl.

    [Note: what is told stays] A run that is kept alive may lose its newest step: the snapshot of it was not whole yet.
    So it tells of a step when its snapshot is. Until then lines of the step wait. They are in the snapshot too, since
    the process that holds them may be lost as well.

    Attributes:
        holds: lines of steps wait for `tell`. untold: those that do, by growing step.
    """

    def __init__(self, path: str | Path, fence: Callable[[], None] | None = None) -> None:
        super().__init__(path, fence)
        self.holds = False
        self.untold: list[dict[str, Any]] = []

    def tell(self, step: float = math.inf) -> None:
        """Write the lines that wait, of steps up to ``step``.

        Raises:
            FinalError, TrainError: as ``append``.
        """
        while self.untold and self.untold[0]["step"] <= step:
            self.append(self.untold.pop(0))

    def tell_again(self, records: Sequence[dict[str, Any]]) -> None:
        """Write the lines that waited in another process, unless it has written them."""
        written = {_identity(record) for record in read_all(self.path)} if records else set()
        for record in records:
            if _identity(record) not in written:
                self.append(record)

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append one line.

        Args:
            kind: a key of FIELDS.
            fields: exactly the fields of that kind; numbers may be NaN and become null.
        Returns:
            The record.
        Raises:
            FinalError, TrainError: as ``append``.
        """
        wanted = FIELDS[kind]
        assert set(fields) == set(wanted), f"a {kind} line has fields {wanted}, not {tuple(fields)}"
        record = {"kind": kind, "time": time.time()} | {name: _finite(fields[name]) for name in wanted}
        if self.holds and kind in _OF_STEPS:
            self.untold.append(record)
            return record
        if kind in _LAST:
            self.tell()
        self.append(record)
        return record


def _identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["kind"], record.get("step"), record.get("time")


def _is_cut(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def parse_lines(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Records of whole lines, in order; lines that a kill cut are skipped."""
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "kind" in record:
            records.append(record)
    return records


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Records of a run, each step once: when a resumed run repeats a step, the last line of that step counts.

    Args:
        path: a metrics.jsonl or the run folder that holds it.
    Returns:
        Records in the order in which they were written; lines of steps, evaluations and digests that were repeated
        are left out.
    Raises:
        FileNotFoundError: there is none.
    """
    return last_of_each_step(read_all(path))


def read_all(path: str | Path) -> list[dict[str, Any]]:
    """Every record of a run folder or metrics.jsonl, repeated steps included, as they were written."""
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    return parse_lines(path.read_bytes().splitlines())


def last_of_each_step(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``records`` without lines of steps, evaluations and digests that do not count.

    A later line of the same step replaces them; and a start or a resume takes back what was done behind its step.
    """
    repeatable = {"step", *EVALUATIONS, "digest"}
    found: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] in ("start", "resume"):
            found = [r for r in found if r["kind"] not in repeatable or r["step"] <= record["step"]]
        found.append(record)
    last = {_of_what(r): i for i, r in enumerate(found) if r["kind"] in repeatable}
    return [r for i, r in enumerate(found) if r["kind"] not in repeatable or last[_of_what(r)] == i]


def _of_what(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Lines alike in this tell the same thing; an evaluation has one of each validation set."""
    return record["kind"], record["step"], record.get("name", "")


class MetricsTail:
    """Reads the lines of a growing metrics.jsonl once each.

    Args:
        offset: bytes at the start of the file that are not read; None: all that are there now.
    Attributes:
        offset: bytes of the lines that were read.
    """

    def __init__(self, path: str | Path, *, offset: int | None = None) -> None:
        self.path = Path(path)
        there = self.path.stat().st_size if self.path.exists() else 0
        self.offset = there if offset is None else offset

    def read(self) -> list[dict[str, Any]]:
        """Records appended since the last call; a line still being written waits for the next one."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return parse_lines(whole.splitlines())


class ProgressLine:
    """Shows a run's steps on stderr: one line that updates on a terminal, else a line every few seconds.

    Args:
        path: the run's metrics.jsonl; only lines appended from now on are shown.
        steps: train.steps, for the share done and the time left.
        every_s: seconds between lines where the stream is no terminal.
    """

    def __init__(self, path: str | Path, steps: int, *, stream: TextIO | None = None, every_s: float = 5.0) -> None:
        self._tail = MetricsTail(path)
        self._steps = steps
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every_s = 0.2 if self._terminal else every_s
        self._shown_at = -math.inf
        self._pending: dict[str, Any] | None = None
        self._first: dict[str, Any] | None = None  # the first step line of this start
        self._width = 0

    def poll(self) -> None:
        """Read what is new and show it if it is time to."""
        for record in self._tail.read():
            if record["kind"] == "step":
                self._pending = record
                self._first = self._first or record
            elif record["kind"] == "straggler":
                if record["slow"]:
                    self._flush()
                    self._print(describe(record))
            elif record["kind"] in ("start", "resume", "recovery", *EVALUATIONS, "timeline", "nonfinite", "end"):
                self._flush()
                self._print(describe(record))
        if self._pending and time.monotonic() - self._shown_at >= self._every_s:
            self._flush()

    def tell(self, text: str) -> None:
        """A line of its own, led by the program's name."""
        self._flush()
        self._print(f"sixfold: {text}")

    def close(self) -> None:
        """Show what is left and leave the cursor on a fresh line."""
        self.poll()
        self._flush()
        if self._terminal and self._width:
            self._write("\n")
            self._width = 0

    def _flush(self) -> None:
        if self._pending is None:
            return
        text = describe(self._pending, self._steps, self._pace())
        self._pending, self._shown_at = None, time.monotonic()
        if self._terminal:
            self._write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._write(text + "\n")

    def _pace(self) -> float | None:
        """Seconds of a step by the clock since the first one, evaluations and saves between them included."""
        first, now = self._first, self._pending
        if first is None or now is None or now["step"] <= first["step"]:
            return None
        return max(0.0, float(now["time"]) - float(first["time"])) / (int(now["step"]) - int(first["step"]))

    def _print(self, text: str) -> None:
        lead = "\n" if self._terminal and self._width else ""
        self._write(f"{lead}{text}\n")
        self._width = 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads any more, which is no reason to end the run
            self._stream = io.StringIO()


def describe(record: Mapping[str, Any], steps: int | None = None, pace: float | None = None) -> str:
    """One line of text for one record.

    Args:
        steps: train.steps; pace: seconds of a step by the clock, for the time left. None: this step's own.
    """
    kind, step = record["kind"], record.get("step")
    if kind == "step":
        return _describe_step(record, steps, pace)
    if kind in EVALUATIONS:
        loss = f"validation loss{of_evaluation(record)} {_number(record['loss'])} nats/token"
        return f"step {step}  {loss} over {record['tokens']:,} tokens"
    if kind == "start":
        read = ", ".join(f"{name} {times:.3g}" for name, times in record.get("epochs", {}).items())
        return f"step {step}  {record.get('order', '')} order; epochs of each dataset in the whole run: {read}"
    if kind == "resume":
        layout = " ".join(f"{axis}{size}" for axis, size in record["layout"].items() if size > 1) or "one process"
        return f"step {step}  resumed from {record['checkpoint']} as {layout}"
    if kind == "recovery":
        lost = "; ".join(one["why"] for one in record["lost"]) or "no rank was lost"
        where = f"generation {record['generation']} goes on from {record['source']}"
        return f"step {step}  {where}, {record['seconds']:.2f} s later ({lost})"
    if kind == "timeline":
        paper = record["bubble_on_paper"]
        bubbles = f"bubble {record['bubble']:.3f}, on paper {'unknown' if paper is None else f'{paper:.3f}'}"
        return f"step {step}  {bubbles}; {record['trace']}"
    if kind == "straggler":
        return "\n".join(_describe_slow(step, slow) for slow in record["slow"][:3]) or f"step {step}  no rank is slow"
    if kind == "nonfinite":
        return f"step {step}  {record['what']} is not finite on rank {record['rank']} in {record['where']}"
    if kind == "end":
        return f"step {step}  {record['reason']}"
    return f"step {step}  {kind}"


def _describe_slow(step: int | None, slow: Mapping[str, Any]) -> str:
    """One line of text for one slow rank."""
    return (
        f"step {step}  rank {slow['rank']} on {slow['host']} is slow: {slow['seconds']:.3f} s of its own in a step, "
        f"the others {slow['others_seconds']:.3f} s; most in {slow['part']}: {slow['part_seconds']:.3f} s, the others "
        f"{slow['others_part_seconds']:.3f} s"
    )


def of_evaluation(record: Mapping[str, Any]) -> str:
    """What an evaluation is of: `` of NAME with averaged weights``, or less."""
    of = f" of {record['name']}" if record.get("name") else ""
    return f"{of} with averaged weights" if record["kind"] == "eval_ema" else of


def _describe_step(record: Mapping[str, Any], steps: int | None, pace: float | None) -> str:
    """``step 7/200  loss 2.1234  lr 1.00e-03  12,345 tokens/s  data 2%  1.2 GiB  0:41 left``.

    Tokens per second are by the clock, evaluations and saves included; where steps alone are over a tenth faster, that
    stands behind it: ``1,270 tokens/s (steps alone 3,901)``.
    """
    alone = record.get("tokens_per_second") or 0.0
    wall = record.get("wall_tokens_per_second") or alone  # 0.1.0 has none
    beside = f" (steps alone {alone:,.0f})" if alone > 1.1 * wall else ""
    parts = [
        f"step {record['step']}/{steps}" if steps else f"step {record['step']}",
        f"loss {_number(record['loss'])}",
        f"lr {record['lr']:.2e}",
        f"{wall:,.0f} tokens/s{beside}",
    ]
    seconds, waited, memory = (record.get(name) for name in ("seconds", "data_seconds", "memory_bytes"))
    if seconds and waited is not None:
        parts.append(f"data {waited / seconds:.0%}")
    if memory:
        parts.append(f"{memory / 2**30:.1f} GiB")
    if steps and seconds:
        parts.append(f"{clock((steps - record['step']) * (seconds if pace is None else pace))} left")
    return "  ".join(parts)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def clock(seconds: float) -> str:
    """``41`` -> ``0:41``, ``4833`` -> ``1:20:33``."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
