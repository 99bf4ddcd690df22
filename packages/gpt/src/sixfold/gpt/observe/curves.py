"""Curves of a run in other programs: TensorBoard, W&B.

    metrics.jsonl --> MetricsTail --> scalars --> CurveFeed (this file), a thread per sink --> tensorboard.py
                                                                                          `-> wandb_sink.py

A sink gets what metrics.jsonl says and nothing else, so a curve shows what was logged. Its folder in the run keeps how
many bytes it has read. If a process is killed, the next start hands over the lines from there on. If a sink is switched
on in the middle of a run, it gets all lines.

[Note: a sink ends no run] It may hang (a network), fail (a full disk, no login) or be slow. So it has a thread of its
own, which says once what went wrong. Training waits for it at the end of the run alone, for ``CLOSE_S`` at most.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sixfold.gpt.observe.metrics import EVALUATIONS, MetricsTail, last_of_each_step
from sixfold.gpt.observe.tensorboard import TensorBoardSink, check_tensorboard
from sixfold.gpt.observe.wandb_sink import WandbSink, check_wandb

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import LogConfig, TrainConfig

# The fields of a step line that have a curve of their own.
CURVES = (
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "batch_size",
    "seconds",
    "data_seconds",
    "tokens_per_second",
    "wall_tokens_per_second",
    "mfu",
    "memory_bytes",
)
READ = "read.json"  # in a sink's folder: how many bytes of which metrics.jsonl it has
POLL_S = 1.0
CLOSE_S = 30.0  # for the last lines to be taken


class CurveSink(Protocol):
    """Where curves are drawn."""

    def take_back(self, step: int) -> None:
        """Hide what was drawn of updates behind ``step``, which are done again."""

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """The next values of some curves, at Unix seconds ``at``."""

    def flush(self) -> None:
        """What was added is not lost with this process from now on."""

    def close(self, failed: bool) -> None:
        """The run has ended here, well or not."""


def check_sinks(log: LogConfig) -> None:
    """Refuse sinks that are not installed.

    Raises:
        ConfigError: with what to install.
    """
    check_tensorboard(log.tensorboard)
    check_wandb(log.wandb)


def feeds_of(config: TrainConfig) -> list[CurveFeed]:
    """Start a feed for each sink that ``config.log`` asks for; on one rank of a run."""
    sinks: dict[str, Callable[[Path], CurveSink]] = {}
    if config.log.tensorboard:
        sinks["tensorboard"] = TensorBoardSink
    if config.log.wandb:
        sinks["wandb"] = partial(WandbSink, project=config.log.wandb, config=asdict(config))
    return [CurveFeed(config.run.dir, name, sink) for name, sink in sinks.items()]


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The next value of each curve that a line of metrics.jsonl has, by the curve's name; nulls are left out."""
    found: dict[str, float | None] = {}
    if record["kind"] == "step":
        found |= {f"train/{name}": record.get(name) for name in CURVES}
        found |= {"train/wall_mfu": wall_mfu(record)}
        found |= {f"loss by dataset/{name}": loss for name, loss in record.get("loss_by_dataset", {}).items()}
    elif record["kind"] in EVALUATIONS:
        name, ema = record.get("name"), record["kind"] == "eval_ema"
        of_set = f"loss by validation set{', ema' if ema else ''}/{name}"
        found[of_set if name else f"valid/loss{' ema' if ema else ''}"] = record["loss"]
    elif record["kind"] == "timeline":
        found |= {"pipeline/bubble": record["bubble"], "pipeline/bubble on paper": record["bubble_on_paper"]}
    elif record["kind"] == "save":
        found |= {"save/seconds": record["seconds"], "save/blocked_seconds": record["blocked_seconds"]}
    return {name: float(value) for name, value in found.items() if value is not None}


def wall_mfu(step: Mapping[str, Any]) -> float | None:
    """MFU by the clock since the line before, evaluations and saves included; ``mfu`` is that of the step alone."""
    alone, wall, mfu = (step.get(name) for name in ("tokens_per_second", "wall_tokens_per_second", "mfu"))
    return mfu * wall / alone if mfu is not None and wall is not None and alone else None


class CurveFeed:
    """Hands the lines of a run's metrics.jsonl to one sink, on a thread. See [Note: a sink ends no run].

    Args:
        name: of the sink, and of its folder in the run's.
        sink: opens it, given that folder.
    """

    def __init__(self, run_dir: str | Path, name: str, sink: Callable[[Path], CurveSink]) -> None:
        self._folder, self._name, self._sink = Path(run_dir) / name, name, sink
        self._ends, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._follow, name=f"sixfold-{name}", daemon=True)
        self._thread.start()

    def close(self, *, failed: bool, waits: bool = True) -> None:
        """Hand over the last lines and close the sink.

        Args:
            failed: the run ended with an error.
            waits: until that is done, ``CLOSE_S`` at most. False: at once, since the run goes on in another generation.
        """
        self._failed = failed
        self._ends.set()
        if not waits:
            return
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._tell(f"has not taken the last lines within {CLOSE_S:g} s; the next start of the run hands them over")

    def _follow(self) -> None:
        for one in threading.enumerate():  # of the generation before, in this process: two would write one folder
            if one.name == self._thread.name and one is not self._thread:
                one.join(CLOSE_S)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            metrics = self._folder.parent / "metrics.jsonl"
            tail, sink = MetricsTail(metrics, offset=self._read_before(metrics)), self._sink(self._folder)
            ends = False
            while not ends:
                ends = self._ends.wait(POLL_S)
                if self._take(tail, sink) and not ends:
                    sink.flush()
                    self._keep(metrics, tail.offset)
            sink.close(self._failed)
            self._keep(metrics, tail.offset)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            self._tell(f"gets no more of this run ({why}); the run goes on, and the next start hands over what lacks")

    def _take(self, tail: MetricsTail, sink: CurveSink) -> bool:
        """Hand over the new lines; whether there were any."""
        records = last_of_each_step(tail.read())
        for record in records:
            if record["kind"] in ("start", "resume"):
                sink.take_back(record["step"])
            values = scalars(record)
            if values:
                sink.add(record["step"], record["time"], values)
        return bool(records)

    def _read_before(self, metrics: Path) -> int:
        """Bytes of ``metrics`` that the sink has read, by its file ``READ``; 0 if that is of another metrics.jsonl."""
        try:
            kept = json.loads((self._folder / READ).read_bytes())
            if kept["first"] == _first_line(metrics) and kept["bytes"] <= metrics.stat().st_size:
                return int(kept["bytes"])
        except (OSError, ValueError, LookupError, TypeError):
            pass
        return 0

    def _keep(self, metrics: Path, offset: int) -> None:
        draft = self._folder / f".{READ}.{os.getpid()}"
        draft.write_text(json.dumps({"bytes": offset, "first": _first_line(metrics)}), encoding="utf-8")
        draft.replace(self._folder / READ)

    def _tell(self, text: str) -> None:
        print(f"sixfold: log.{self._name} {text}", file=sys.stderr, flush=True)


def _first_line(metrics: Path) -> str:
    """The beginning of the first line. Its time tells one metrics.jsonl from another."""
    with metrics.open("rb") as file:
        return file.readline(256).decode(errors="replace")
