"""``sixfold doctor --run``: what failures cost a run, and the line for ``sixfold plan``.

    RUN/metrics.jsonl --> run_costs.py --> RunCosts --> text or JSON (this file)
                                           `-> goodput.py: what the formula says of these costs

No torch, no ranks.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.metrics import read_all
from sixfold.gpt.observe.run_costs import RunCosts, measure
from sixfold.gpt.plan.goodput import FailureCosts, goodput


def run(folder: Path, *, as_object: bool) -> int:
    """Print what ``folder`` tells.

    Raises:
        ConfigError: it is no run, or one without two steps in a row.
    """
    try:
        records = read_all(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder} holds no metrics.jsonl; name the run.dir of a run") from error
    costs = measure(records, str(folder))
    line = plan_line(costs, folder)
    if as_object:
        said: dict[str, Any] = {"goodput": costs.goodput, "formula": by_formula(costs)}
        print(json.dumps(asdict(costs) | said | {"plan": line}))
    else:
        print("\n".join([*_lines(costs), line]))
    return 0


def by_formula(costs: RunCosts) -> float | None:
    """Goodput of a run with these costs, as `sixfold plan` works it out; None without a failure."""
    if costs.mtbf_s is None:
        return None
    found = FailureCosts(
        mtbf_s=costs.mtbf_s,
        step_s=costs.step_s,
        snapshot_s=costs.snapshot_s,
        save_s=costs.save_s or 0.0,
        written_s=costs.written_s or 0.0,
        detect_s=costs.detect_s or 0.0,
        recover_s=costs.recover_s or 0.0,
        restart_s=costs.restart_s,
        from_checkpoint=costs.from_checkpoint,
    )
    return goodput(found, costs.interval or max(1, costs.steps)).useful


def plan_line(costs: RunCosts, folder: Path) -> str:
    """The command that plans with what was measured; what was not is left out, and the hours are HOURS."""
    hours = "HOURS" if costs.mtbf_s is None else f"{costs.mtbf_s / 3600:.4g}"
    words = ["sixfold", "plan", str(folder / "config.toml"), "--world", str(costs.world), "--mtbf-hours", hours]
    measured = {
        "step": costs.step_s,
        "snapshot": costs.snapshot_s,
        "save": costs.save_s,
        "written": costs.written_s,
        "detect": costs.detect_s,
        "recover": costs.recover_s if costs.recover_s is not None else costs.restart_s,
        "restart": costs.restart_s,
    }
    for name, value in measured.items():
        words += [] if value is None else [f"--{name}-seconds", f"{value:.4g}"]
    if costs.failures:
        words += ["--from-checkpoint", f"{costs.from_checkpoint:.3g}"]
    return shlex.join(words)


def _lines(costs: RunCosts) -> list[str]:
    formula = by_formula(costs)
    beside = "" if formula is None else f"; the formula of `sixfold plan` gives {formula:.1%} for these costs"
    lines = [
        f"{costs.steps:,} steps stay, of {costs.wall_s:,.1f} s: goodput {costs.goodput:.1%}{beside}",
        f"a step          {_seconds(costs.step_s)}",
        f"between steps   {_seconds(costs.snapshot_s)}: snapshots, evaluations, lines of metrics",
        f"a save          {_seconds(costs.save_s)} blocked, whole after {_seconds(costs.written_s)}, each "
        f"{costs.interval or '?'} steps",
    ]
    if not costs.failures:
        return [*lines, "no failure that the run came back from by itself: HOURS, detection and recovery are yours"]
    return [
        *lines,
        f"failures        {costs.failures}, one each {_seconds(costs.mtbf_s)}; {costs.from_checkpoint:.0%} of them "
        "went back to a checkpoint",
        f"detection       {_seconds(costs.detect_s)}",
        f"recovery        {_seconds(costs.recover_s)} from memory, {_seconds(costs.restart_s)} from a checkpoint",
    ]


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g} s"
