"""What a run has recorded of itself, attempt by attempt, for a comparison with another run.

    config.toml, metrics.jsonl, digests.jsonl --> read_run (this file) --> run_comparison.py

An attempt is what one start did: a run that was killed and went on has two. Steps that a later attempt did again are
in both; ``RunRecord.counted`` has each step once, as the run's plots do. No torch here.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe import digest_file
from sixfold.gpt.observe.metrics import EVALUATIONS, of_evaluation, parse_lines

Scalars = dict[str, float | None]  # by name; None: not finite
SCALARS = ("lr", "batch_size", "samples", "tokens", "loss", "grad_norm")
EVALUATION = "validation "  # begins the names of an evaluation's numbers


@dataclass(kw_only=True, slots=True)
class Attempt:
    """What one start did, by step.

    Attributes:
        start: updates done when it began.
        resumed: it went on from a checkpoint.
        digests: of all weights together; ``tensors``: of each.
    """

    start: int
    world: int | None = None
    layout: dict[str, int] = field(default_factory=dict)
    sharding: str | None = None
    schedule: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    resumed: bool = False
    scalars: dict[int, Scalars] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    tensors: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def steps(self) -> set[int]:
        """Steps of which it wrote anything that can be compared."""
        return self.scalars.keys() | self.digests.keys()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run: its folder, its configuration as keys ``table.key``, its attempts.

    Attributes:
        config: None where there is no config.toml that can be read.
        unreadable: lines that are no records; a kill leaves one.
    """

    folder: Path
    config: dict[str, Any] | None
    attempts: tuple[Attempt, ...]
    unreadable: int

    @property
    def counted(self) -> Attempt:
        """All attempts as one: a later one replaces what it did again, and takes back what lies behind its start."""
        last = self.attempts[-1]
        whole = Attempt(
            start=self.attempts[0].start,
            world=last.world,
            layout=last.layout,
            sharding=last.sharding,
            schedule=last.schedule,
            versions=last.versions,
            resumed=last.resumed,
        )
        for attempt in self.attempts:
            for name in ("scalars", "digests", "tensors"):
                kept = {step: value for step, value in getattr(whole, name).items() if step <= attempt.start}
                setattr(whole, name, kept | getattr(attempt, name))
        return whole


def read_run(path: str | Path) -> RunRecord:
    """Read a run that is over, or as far as it has come.

    Args:
        path: its folder, or the metrics.jsonl in it.
    Raises:
        ConfigError: there is no metrics.jsonl, or no run wrote it.
    """
    path = Path(path)
    metrics = path / "metrics.jsonl" if path.is_dir() else path
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{metrics} cannot be read ({error.strerror}); name two folders of runs, each with its metrics.jsonl"
        ) from error
    records = parse_lines(lines)
    attempts = _attempts(records)
    if not attempts:
        raise ConfigError(f"{metrics} has no line of a start; name the folder of a run that has begun")
    tensors = {
        (one.step, one.whole): one.tensors for one in digest_file.read_digests(metrics.parent / digest_file.NAME)
    }
    for attempt in attempts:
        for step, whole in attempt.digests.items():
            if (step, whole) in tensors:
                attempt.tensors[step] = tensors[step, whole]
    unreadable = sum(bool(line.strip()) for line in lines) - len(records)
    return RunRecord(
        folder=metrics.parent,
        config=config_keys(metrics.parent) or None,
        attempts=tuple(attempts),
        unreadable=unreadable,
    )


def _attempts(records: list[dict[str, Any]]) -> list[Attempt]:
    found: list[Attempt] = []
    for record in records:
        kind, step = record["kind"], record.get("step")
        if not isinstance(step, int):
            continue
        if kind == "start":
            attempt = Attempt(start=step, layout=record.get("layout") or {}, versions=record.get("versions") or {})
            attempt.world, attempt.sharding = record.get("world"), record.get("sharding")
            attempt.schedule = record.get("schedule")
            found.append(attempt)
        if not found:
            continue
        now = found[-1]
        if kind == "resume":
            now.start, now.resumed = step, True
        elif kind == "step":
            now.scalars.setdefault(step, {}).update(_scalars(record))
        elif kind in EVALUATIONS:
            of = of_evaluation(record)
            named = {f"{EVALUATION}{name}{of}": record[name] for name in ("loss", "tokens") if name in record}
            now.scalars.setdefault(step, {}).update(named)
        elif kind == "digest" and isinstance(record.get("digest"), str):
            now.digests[step] = record["digest"]
    return found


def _scalars(record: dict[str, Any]) -> Scalars:
    found: Scalars = {name: record[name] for name in SCALARS if name in record}
    by_dataset = record.get("loss_by_dataset") or {}
    return found | {f"loss of {name}": value for name, value in by_dataset.items()}


def config_keys(folder: Path) -> dict[str, Any]:
    """The keys ``table.key`` of the last start: config.resolved.toml where config.toml is the user's own; {}: none."""
    for name in ("config.resolved.toml", "config.toml"):
        try:
            tables = tomllib.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return {
            f"{table}.{key}": value
            for table, keys in tables.items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        }
    return {}
