"""``sixfold plan``: a plan as text or JSON.

    config file, flags --> run (this file) --> plan.py, search.py --> text or JSON (this file)

Imports no torch and starts no rank; nothing is computed here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.machine.devices import Device, device_named, device_of_machine
from sixfold.gpt.plan import failure_report
from sixfold.gpt.plan.plan import LayoutPlan, PlannedConfig, as_json, bubbles, plan_layout, plan_program, say_plan
from sixfold.gpt.plan.search import Choice, Ranking, search, suggestions

_MOST_STAGES = 16  # rows of the table of ranks


def choose_device(config: TrainConfig, world: int, *, name: str | None, machine: str | None) -> Device:
    """What a plan is for: what is named, doctor's file, or what ``run.device`` means for so many ranks.

    "auto" is the CPU for as many ranks as this machine has cores, if it has no GPU; else the table's h100.
    """
    if machine is not None:
        return device_of_machine(machine)
    if name is not None:
        return device_named(name)
    here = any(Path("/dev").glob("nvidia[0-9]*"))
    on_cpu = config.run.device == "cpu" or (config.run.device == "auto" and not here and world <= (os.cpu_count() or 1))
    return device_named("cpu" if on_cpu else "h100")


def run(
    config: PlannedConfig,
    *,
    world: int | None = None,
    memory_gb: float | None = None,
    tflops: float | None = None,
    gbps: float | None = None,
    device: str | None = None,
    machine: str | None = None,
    failures: failure_report.FailureFlags | None = None,
    look_further: bool = False,
    as_object: bool = False,
) -> str:
    """What ``sixfold plan`` prints.

    Args:
        world: ranks; None: the product of the degrees.
        memory_gb: of a rank, in 10^9 bytes.
        tflops: achieved in matrix products; gbps: Gbit/s of the network for each device.
        device, machine: see ``choose_device``.
        failures: how often the job fails, and what that costs.
        look_further: rank the layouts of this world.
    Raises:
        ConfigError: a configuration that cannot be at this world; with ``look_further`` what can is ranked instead.
    """
    ranks = config.parallel.world if world is None else world
    chosen = choose_device(config, ranks, name=device, machine=machine)
    if tflops is not None:
        chosen = replace(chosen, flops=tflops * 1e12, flops_fp32=tflops * 1e12)
    if gbps is not None:
        chosen = replace(chosen, node_bytes_per_s=gbps * 1e9 / 8 * min(chosen.per_node, 1024))
    memory = None if memory_gb is None else round(memory_gb * 1e9)
    try:
        planned = plan_layout(config, ranks, chosen, memory_bytes=memory)
    except ConfigError as error:
        if not look_further or failures is not None:
            raise
        ranking = search(config, ranks, chosen, memory_bytes=memory)
        if as_object:
            return json.dumps({"world": ranks, "refused": [str(error)], "search": _found(ranking)})
        return "\n".join([f"as given: {error}", *_ranking(ranking, config)])
    near = suggestions(planned)
    found = search(config, ranks, chosen, memory_bytes=memory) if look_further else None
    costly = None if failures is None else failure_report.plan_failures(planned, failures)
    if as_object:
        goodput = {} if costly is None else {"goodput": failure_report.as_json(costly)}
        return json.dumps(_object(planned, near, found) | goodput)
    return "\n".join([_text(planned, near, found), *([] if costly is None else failure_report.as_lines(costly))])


def _object(planned: LayoutPlan, near: Sequence[Choice], ranking: Ranking | None) -> dict[str, Any]:
    found = as_json(planned) | {"bubbles": bubbles(planned), "suggestions": [_choice(one) for one in near]}
    return found if ranking is None else found | {"search": _found(ranking)}


def _found(ranking: Ranking) -> dict[str, Any]:
    return {
        "candidates": ranking.candidates,
        "planned": ranking.planned,
        "complete": ranking.complete,
        "best": [_choice(one) for one in ranking.best],
    }


def _choice(choice: Choice) -> dict[str, Any]:
    planned = choice.planned
    return {
        "overrides": dict(choice.changes),
        "step_seconds": planned.step_s,
        "tokens_per_second": planned.tokens_per_second,
        "mfu": planned.mfu,
        "bubble_over_ideal": planned.bubble_over_ideal,
        "peak_bytes": planned.peak_bytes,
    }


def _text(planned: LayoutPlan, near: Sequence[Choice], ranking: Ranking | None) -> str:
    parallel, config = planned.parallel, planned.config
    degrees = " x ".join(f"{axis} {getattr(parallel, axis)}" for axis in ("pp", "dp", "cp", "tp"))
    degrees += f", experts over {parallel.ep} of dp x cp" if parallel.ep > 1 else ""
    copies = f" in {parallel.dp_replicate} copies" if parallel.dp_replicate > 1 else ""
    float8 = ", float8 products counted as bf16" if config.train.float8_products else ""
    lines = [
        f"{config.model.num_parameters:,} parameters on {planned.world} ranks: {degrees}; {parallel.schedule}, "
        f"{parallel.sharding}{copies}",
        f"a step of {config.train.global_batch_size} samples is {_counted(planned.microbatches, 'microbatch')} of "
        f"{config.train.micro_batch_size} x {config.data.seq_length} on each rank; {config.train.precision}{float8}, "
        f"recompute {config.train.recompute}",
        *_ranks(planned),
        _fit(planned),
        _traffic(planned),
        *_times(planned),
    ]
    lines += [f"a run at this layout is refused: {one}" for one in planned.refused]
    if near:
        lines.append("fits:" if not planned.fits else "faster and fits:")
        lines += [f"  {_short(one)}" for one in near]
    elif not planned.fits:
        lines.append("no change of one or two keys fits; --search looks at all layouts of this world")
    if ranking is not None:
        lines += _ranking(ranking, config)
    return "\n".join(lines)


def _ranks(planned: LayoutPlan) -> list[str]:
    """A row for each pipeline rank, the first and the last of many."""
    unit, name = (1e9, "GB") if planned.peak_bytes >= 1e9 else (1e6, "MB")
    lines = [
        f"rank  stages (layers)            weights gradients optimizer  buffers activations temporary  peak {name}"
    ]
    shown = list(planned.ranks)
    if len(shown) > _MOST_STAGES:
        shown = [*shown[: _MOST_STAGES // 2], *shown[-_MOST_STAGES // 2 :]]
    for one in shown:
        stages = [stage for stage in planned.stages if stage.rank == one.rank]
        layers = " ".join(f"{stage.stage}({_span(stage.layers)})" for stage in stages)
        held = one.stored
        sizes = (held.parameters + one.older, held.gradients, held.optimizer, held.gathered + held.reducing)
        columns = "".join(f"{size / unit:10.3f}" for size in (*sizes, one.activations, one.temporary, one.peak))
        lines.append(f"{one.rank:4d}  {layers:22.22s} {columns}")
    return lines


def _span(layers: Sequence[int]) -> str:
    if not layers:
        return "none"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def _fit(planned: LayoutPlan) -> str:
    if planned.memory_bytes is None:
        return f"peak {_bytes(planned.peak_bytes)}; no bound is known: give --memory-gb"
    verdict = "fits" if planned.fits else "DOES NOT FIT"
    return (
        f"{verdict}: peak {_bytes(planned.peak_bytes)} ({planned.peak_bytes / 2**30:.2f} GiB) of "
        f"{_bytes(planned.memory_bytes)}"
    )


def _traffic(planned: LayoutPlan) -> str:
    sent = planned.traffic
    parts = ", ".join(
        f"{axis} {_bytes(nbytes)}"
        for axis, nbytes in (("dp", sent.dp), ("pp", sent.pp), ("tp", sent.tp), ("cp", sent.cp), ("ep", sent.ep))
        if nbytes
    )
    return f"a rank sends in a step: {parts or 'nothing'}"


def _times(planned: LayoutPlan) -> list[str]:
    lines = [f"bubble {planned.bubble_over_ideal:.3f} of ideal, communication apart"]
    if planned.parallel.pp > 1:
        others = ", ".join(f"{name} {bubble:.3f}" for name, bubble in bubbles(planned).items())
        lines.append(f"  of schedules with {planned.parallel.stages_per_rank} stages on a rank: {others}")
    if planned.parallel.schedule == "plan" and planned.parallel.pp > 1:
        found = plan_program(replace(planned.config, parallel=planned.parallel), time_limit_s=1.0)
        lines.append(say_plan(found))
    if planned.step_s is None or planned.tokens_per_second is None:
        lines.append(
            f"time: not known for {planned.device.name}; give --tflops, --device or --machine FILE of doctor's"
        )
        return lines
    fast, slow = planned.step_s_range or (planned.step_s, planned.step_s)
    low, high = planned.range_of(planned.tokens_per_second) or [0.0, 0.0]
    mfus = planned.range_of(planned.mfu)
    mfu = "" if mfus is None else f", MFU {mfus[0]:.0%} to {mfus[1]:.0%}"
    per_rank = "" if planned.flops_per_rank is None else f", {planned.flops_per_rank / 1e12:.1f} TFLOP/s a rank"
    own_mfu = "" if planned.mfu is None else f", MFU {planned.mfu:.1%}"
    lines += [
        f"time on {planned.device.name}: {_seconds(fast)} to {_seconds(slow)} a step, {low:,.0f} to {high:,.0f} "
        f"tokens/s{mfu}",
        f"  the range is that of {planned.time_range.source} about their plans; this plan's own figure: "
        f"{_seconds(planned.step_s)} a step, {planned.tokens_per_second:,.0f} tokens/s{per_rank}{own_mfu}",
    ]
    return lines


def _short(choice: Choice) -> str:
    planned = choice.planned
    time = "" if planned.step_s is None else f"{_seconds(planned.step_s):>10s}  "
    return f"{time}{_bytes(planned.peak_bytes):>9s}  bubble {planned.bubble_over_ideal:.3f}  {choice.overrides}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _bytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}es"


def _ranking(ranking: Ranking, config: TrainConfig) -> list[str]:
    """The best layouts, each by the keys that it changes in ``config``."""
    whole = "all of them" if ranking.complete else "as far as the time went"
    lines = [f"search: {ranking.candidates} layouts, {ranking.planned} planned whole ({whole}); best that fit:"]
    lines += [f"  {number:2d}. {_short(choice.beside(config))}" for number, choice in enumerate(ranking.best, 1)]
    return lines if ranking.best else [*lines, "  none"]
