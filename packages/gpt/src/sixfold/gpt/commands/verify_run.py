"""``sixfold verify-run A B``: where two runs first differ, and in what.

    cli.py --> verify_run, as_text (this file) --> run_record.py, run_comparison.py; sixfold.dist_ckpt's diff

Exit status: 0 the runs agree in all that both have, 1 they differ or a checkpoint is damaged, 2 nothing is to compare.
Nothing is written. torch is imported only where both runs have a checkpoint of one step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.run_comparison import (
    STATE,
    WEIGHTS,
    Comparison,
    Difference,
    as_object,
    compare,
    config_differences,
    in_order,
    repeats,
    spans,
)
from sixfold.gpt.observe.run_record import EVALUATION, RunRecord, read_run

_SHOWN = 12  # tensors and keys that the text lists; --json has all
_COMMON = ("step", "samples", "tokens", "optimizer.scalars")  # of a checkpoint's common data: what training computed


@dataclass(kw_only=True, slots=True)
class Checkpoints:
    """What the checkpoints say that both runs have.

    Attributes:
        steps: of which both have one; ``compared``: those that were read, up to the first that differs.
        differs: the step of that one; ``entries``: its tensors that differ, as dist_ckpt's diff has them.
        damaged: (step, why) of those that cannot be read.
    """

    steps: list[int] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)
    differs: int | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[tuple[int, str]] = field(default_factory=list)


def verify_run(a: Path, b: Path, *, checkpoints: bool = True) -> dict[str, Any]:
    """Compare two runs; what ``--json`` prints.

    Raises:
        ConfigError: no such run, one run twice, or no step of which both have anything.
    """
    runs = read_run(a), read_run(b)
    if runs[0].folder.resolve() == runs[1].folder.resolve():
        raise ConfigError(f"A and B are one run, {runs[0].folder}; name two")
    found = compare(*(run.counted for run in runs))
    saved = compare_checkpoints(*runs) if checkpoints else Checkpoints()
    if not found.steps and not saved.steps:
        have = " and ".join(f"{run.folder} has steps {spans(run.counted.steps) or 'none'}" for run in runs)
        raise ConfigError(f"{have}; no step is in both. Compare runs that have logged, or saved, a step of one number")
    first = min([*found.firsts, *_of_checkpoints(saved)], key=lambda one: one.order, default=None)
    agreed = [s for s in (*found.steps, *saved.compared) if first is None or s < first.step]
    again = [(name, run, number, one) for name, run in zip("AB", runs, strict=True) for number, one in repeats(run)]
    keys = config_differences(*runs)
    report: dict[str, Any] = {
        "equal": first is None and not saved.damaged,
        "verdict": "",
        "a": _of_run(runs[0]),
        "b": _of_run(runs[1]),
        "steps": {"metrics": found.scalar_steps, "digests": found.digest_steps, "checkpoints": saved.steps},
        "checkpoints_compared": saved.compared,
        "agree_to": max(agreed, default=None),
        "first": None if first is None else asdict(first),
        "firsts": [asdict(one) for one in found.firsts],
        "scalars": as_object(_scalars_at(runs, first)),
        "tensors": _tensors(found, saved, first),
        "tensors_of": found.tensors_of,
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "config": [asdict(one) for one in keys],
        "repeated": [
            {
                "run": name,
                "attempt": number,
                "steps": one.steps,
                "equal": one.first is None,
                "first": None if one.first is None else asdict(one.first),
            }
            for name, _, number, one in again
        ],
        "damaged": [{"step": step, "why": why} for step, why in saved.damaged],
    }
    report["verdict"] = " ".join(_verdict(report, found))
    return report


def compare_checkpoints(a: RunRecord, b: RunRecord) -> Checkpoints:
    """Read the checkpoints of steps that both have, the earliest first, up to one that differs.

    Raises:
        ConfigError: the system does not let us see which there are.
    """
    if not all((run.folder / "checkpoints").is_dir() for run in (a, b)):
        return Checkpoints()
    from sixfold.dist_ckpt import CheckpointError, retention
    from sixfold.dist_ckpt.tools import diff

    roots = [run.folder / "checkpoints" for run in (a, b)]
    try:
        saved = [dict(retention.checkpoints(root)) for root in roots]
    except CheckpointError as error:
        raise ConfigError(f"the checkpoints cannot be listed: {error}; --no-checkpoints compares the rest") from error
    found = Checkpoints(steps=sorted(saved[0].keys() & saved[1].keys()))
    for step in found.steps:
        try:
            told = diff(saved[0][step], saved[1][step])
        except (CheckpointError, OSError) as error:
            found.damaged.append((step, str(error)))
            continue
        found.compared.append(step)
        common = [path for path in told["common_differs"] if path.startswith(_COMMON)]
        alone = [{"key": key, "reason": f"only in {side}"} for side in "AB" for key in told[f"only_in_{side.lower()}"]]
        plain = [{"key": path, "reason": "values"} for path in common]
        found.entries = [*told["different"], *alone, *plain]
        if found.entries:
            found.differs = step
            break
    return found


def _of_checkpoints(saved: Checkpoints) -> list[Difference]:
    if saved.differs is None:
        return []
    weights = any(str(entry["key"]).startswith("model.") for entry in saved.entries)
    return [Difference(step=saved.differs, what=WEIGHTS if weights else STATE)]


def _of_run(run: RunRecord) -> dict[str, Any]:
    whole = run.counted
    return {
        "folder": str(run.folder),
        "metrics": sorted(whole.scalars),
        "digests": sorted(whole.digests),
        "attempts": [
            {
                "start": one.start,
                "resumed": one.resumed,
                "ranks": one.world,
                "layout": one.layout,
                "steps": len(one.steps),
            }
            for one in run.attempts
        ],
        "unreadable_lines": run.unreadable,
        "config": run.config is not None,
    }


def _scalars_at(runs: tuple[RunRecord, RunRecord], first: Difference | None) -> dict[str, Any]:
    if first is None:
        return {}
    x, y = (run.counted.scalars.get(first.step, {}) for run in runs)
    return {name: (x[name], y[name]) for name in x if name in y}


def _tensors(found: Comparison, saved: Checkpoints, first: Difference | None) -> list[dict[str, Any]]:
    """Tensors that differ where weights first do: by digests, by checkpoints, or both where both are of that step."""
    digests = next((one.step for one in found.firsts if one.what == WEIGHTS), None)
    if first is None or (digests is None and saved.differs is None):
        return []
    use_saved = saved.differs is not None and (digests is None or saved.differs <= digests or not found.tensors)
    entries = {str(entry["key"]).removeprefix("model."): entry for entry in saved.entries} if use_saved else {}
    names = found.tensors if digests is not None and (not use_saved or saved.differs == digests) else []
    step = saved.differs if use_saved else digests
    return [
        {
            "step": step,
            "name": name,
            "reason": entries.get(name, {}).get("reason", "digest"),
            "count": entries.get(name, {}).get("count"),
            "max_abs": entries.get(name, {}).get("max_abs"),
        }
        for name in sorted({*names, *entries}, key=in_order)
    ]


def _verdict(report: dict[str, Any], found: Comparison) -> list[str]:
    """Sentences: how far they agree, what differs first, what that means, and what the configurations explain."""
    said = []
    steps, first = report["steps"], report["first"]
    named = {
        "metrics of steps": steps["metrics"],
        "digests of steps": steps["digests"],
        "checkpoints of steps": report["checkpoints_compared"],
    }
    compared = "; ".join(f"{name} {spans(numbers)}" for name, numbers in named.items() if numbers)
    if first is None and compared:
        said.append(f"The runs agree in all that both have: {compared}.")
    elif first is not None:
        to = report["agree_to"]
        said.append("The runs differ from the first step on." if to is None else f"The runs agree to step {to}.")
        said += _what_differs(report, first)
        said += _where_to_look(found, first)
    said += [f"The checkpoint of step {one['step']} cannot be compared: {one['why']}." for one in report["damaged"]]
    return said + (_explained(report) if first is not None else [])


def _what_differs(report: dict[str, Any], first: dict[str, Any]) -> list[str]:
    what, tensors = first["what"], report["tensors"]
    named = ""
    if what in (WEIGHTS, STATE) and tensors and tensors[0]["step"] == first["step"]:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        named = f": {tensors[0]['name']}{more}"
    said = [f"At step {first['step']} {what} first {'differ' if what == WEIGHTS else 'differs'}{named}."]
    later = [f"{one['what']} from step {one['step']}" for one in report["firsts"] if one != first]
    return said + ([f"Then: {', '.join(later)}."] if later else [])


def _where_to_look(found: Comparison, first: dict[str, Any]) -> list[str]:
    """What must have the same bits already, and so where the difference arose."""
    step, what = first["step"], first["what"]
    if what in ("lr", "batch_size", "samples", "tokens"):
        return ["The runs do not do the same: look at the learning rate's schedule and the batches."]
    if what.startswith(EVALUATION):
        return ["Training has the same bits so far: the evaluation differs."]
    if what == WEIGHTS and found.digest_steps[:1] == [step]:
        return ["They begin with different weights."]
    if step - 1 not in found.digest_steps:
        return [f"Weights may differ before: no digest of step {step - 1} is in both (log.digest_every = 1)."]
    if what in (WEIGHTS, STATE) and step in found.scalar_steps:
        return [f"Loss and gradient norm of step {step} have the same bits: gradients or the optimizer's step differ."]
    if what in (WEIGHTS, STATE):
        return [f"Weights of step {step - 1} have the same bits."]
    if what == "grad_norm":
        return ["Weights before it and the loss have the same bits: the backward or the sum of gradients differs."]
    return [f"Weights of step {step - 1} have the same bits: the data or the forward of step {step} differ."]


def _explained(report: dict[str, Any]) -> list[str]:
    order = [one["key"] for one in report["config"] if one["effect"] == "order"]
    values = [one["key"] for one in report["config"] if one["effect"] == "values"]
    said = []
    if values:
        said.append(f"The runs compute other things: {_some(values)}.")
    if order:
        said.append(
            f"The runs add in another order ({_some(order)}): rounding is expected. With parallel.grad_sum = 'tree' "
            "in both "
            "there is none."
        )
    if not all(report[side]["config"] for side in "ab"):
        said.append("A run has no config.toml, so keys cannot be compared.")
    elif not values and not order:
        said.append("No key explains it: look for a fault, another machine or another build.")
    return said


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def as_text(report: dict[str, Any]) -> str:
    """The report for people: the verdict first."""
    lines = [report["verdict"], ""]
    for side in "ab":
        run = report[side]
        attempts = "; ".join(
            f"{one['ranks']} ranks {_layout(one['layout'])}from step {one['start']}" for one in run["attempts"]
        )
        parts = [
            f"metrics of steps {spans(run['metrics']) or 'none'}",
            f"digests of steps {spans(run['digests']) or 'none'}",
        ]
        lines.append(f"{side.upper()}  {run['folder']}: {attempts}; {'; '.join(parts)}")
        if run["unreadable_lines"]:
            cut = run["unreadable_lines"]
            said = "1 line of metrics.jsonl is" if cut == 1 else f"{cut} lines of metrics.jsonl are"
            lines.append(f"   {said} cut short and left out")
    if report["scalars"]:
        lines += ["", f"step {report['first']['step']}", *_scalar_lines(report["scalars"])]
    if report["tensors"]:
        lines += ["", *_tensor_lines(report)]
    for side in "ab":
        if alone := report[f"only_in_{side}"]:
            lines.append(f"tensors only in {side.upper()}: {_some(alone)}")
    shown = [one for one in report["config"] if one["effect"] != "none"]
    if shown:
        lines += ["", "configurations differ in"]
        lines += [f"  {one['key']}: {one['a']!r}, {one['b']!r}" for one in shown[:_SHOWN]]
        lines += [f"  and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    idle = [one["key"] for one in report["config"] if one["effect"] == "none"]
    if idle:
        lines.append(f"and in keys that change no bit: {_some(idle)}")
    for one in report["repeated"]:
        told = (
            "with the same bits" if one["equal"] else f"{one['first']['what']} differs at step {one['first']['step']}"
        )
        lines.append(f"attempt {one['attempt']} of {one['run']} did steps {spans(one['steps'])} again: {told}")
    return "\n".join(lines)


def _layout(layout: dict[str, int]) -> str:
    named = " ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1)
    return f"({named}) " if named else ""


def _scalar_lines(scalars: list[dict[str, Any]]) -> list[str]:
    width = max(len(one["name"]) for one in scalars)
    lines = []
    for one in scalars:
        if one["same"]:
            lines.append(f"  {one['name']:{width}}  {one['a_bits']}  in both")
        else:
            apart = "" if one["relative"] is None else f"  relative {one['relative']:.1e}"
            lines.append(f"  {one['name']:{width}}  {one['a_bits']}  {one['b_bits']}{apart}")
    return lines


def _tensor_lines(report: dict[str, Any]) -> list[str]:
    tensors = report["tensors"]
    of = f" of {report['tensors_of']}" if report["tensors_of"] else ""
    lines = [f"after step {tensors[0]['step']} {len(tensors)}{of} tensors differ"]
    for one in tensors[:_SHOWN]:
        if one["count"] is not None:
            lines.append(f"  {one['name']}: {one['count']:,} elements, by {one['max_abs']:.3e} at most")
        else:
            lines.append(f"  {one['name']}: {one['reason']}")
    return lines + ([f"  and {len(tensors) - _SHOWN} more"] if len(tensors) > _SHOWN else [])
