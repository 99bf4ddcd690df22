"""Programs of a configuration: searched for, and run on paper.

    Layout, Costs --> Simulated (this file) --> plan.py
    TrainConfig, measured Costs, memory cap --> schedule_for (this file) --> plan.py, report.py

No torch. [Note: large programs] A step of very many actions is not simulated whole. Time, ideal and peaks of a schedule
are linear in the number of microbatches once there are some per rank: they are simulated for two smaller numbers and
continued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sixfold.pipeline as pipeline
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.plan.layout import Layout, batches_of, compute_costs, program_of

_SEARCH_S = 0.5  # for a schedule that is searched
_MOST_ACTIONS = 12_000  # of a program that is simulated whole


def plan_program(
    config: TrainConfig,
    costs: pipeline.Costs | None = None,
    memory_cap: float | None = None,
    *,
    microbatches: int | None = None,
    placement: Sequence[int] | None = None,
    time_limit_s: float = 5.0,
) -> pipeline.Plan:
    """Search the order of a step: ``sixfold.pipeline.plan`` over the stages of ``config``.

    Args:
        costs: of each stage, as ``Costs.fit`` of a measured timeline gives; sizes it lacks are those of this model.
            None: shares of floating point operations.
        memory_cap: most bytes of activations on a rank; None: what ``pipeline.memory_cap`` says, else as many as the
            schedule holds that a plan begins with (``ParallelConfig.entry``).
        microbatches: of a step; None: those of ``train.global_batch_size``.
        placement: rank of each stage; None: searched. Steps of a batch ramp need the placement of the first.
        time_limit_s: of the search, whose result depends on it: one rank searches and the others take its program.
    Raises:
        ScheduleError: a cap that no order keeps; it says the least that one can.
    """
    parallel = replace(config.parallel, dp=max(config.parallel.dp, 1))
    layout = Layout(config, parallel, "cpu" if config.run.device == "cpu" else "cuda")
    count = layout.microbatches if microbatches is None else microbatches
    known = compute_costs(layout)
    if costs is None:
        costs = known
    elif costs.activation is None:
        costs = replace(costs, activation=known.activation)
    if memory_cap is None and config.pipeline.memory_cap:  # in even shares of a microbatch
        memory_cap = config.pipeline.memory_cap * sum(costs.activation or ()) / parallel.pp
    if memory_cap is None:
        base = program_of(config, parallel, count)
        memory_cap = max(pipeline.simulate(base, replace(known, activation=costs.activation)).peak_activations)
    return pipeline.plan(
        costs,
        ranks=parallel.pp,
        microbatches=count,
        memory_cap=memory_cap,
        placement=placement,
        time_limit_s=time_limit_s,
    )


def schedule_for(
    config: TrainConfig, costs: pipeline.Costs | None = None, memory_cap: float | None = None, **search: Any
) -> pipeline.Program:
    """The program of ``plan_program``, arguments alike, of compute actions: ``passes.lower`` makes it ready to run."""
    return plan_program(config, costs, memory_cap, **search).program


def say_plan(found: pipeline.Plan) -> str:
    """What a search found, in one line."""
    bubble, gap = found.timeline.bubble_over_ideal, found.gap
    proof = "no order is shorter" if gap is not None and gap < 1e-9 else f"within {gap:.1%} of a bound"
    peak = max(found.timeline.peak_activations)
    split = "split" if any(a.kind is pipeline.Kind.W for row in found.program.ranks for a in row) else "whole"
    return (
        f"planned schedule: bubble {bubble:.1%} of ideal, {proof}; {split} backwards; stages on ranks "
        f"{list(found.program.placement)}; activations at most {peak / 1e9:.3f} GB on a rank"
    )


# ---- on paper


@dataclass(frozen=True, kw_only=True)
class Simulated:
    makespan: float
    bubble: float
    peaks: tuple[float, ...]
    outputs: tuple[float, ...]
    held: tuple[float, ...]  # by stage
    messages: tuple[float, ...]  # sent by each rank
    versions: tuple[int, ...]  # of weights, on each rank


def simulated(layout: Layout, costs: pipeline.Costs) -> Simulated:
    """The program of a step on paper. [Note: large programs]"""
    parallel, count = layout.parallel, layout.microbatches
    each = 2 * parallel.stages * (2 if layout.split else 1)
    if count * each <= _MOST_ACTIONS or count <= 3 * parallel.pp:
        return _simulate(layout, costs, count)
    large = max(2 * parallel.pp, _MOST_ACTIONS // 2 // each // parallel.pp * parallel.pp) + count % parallel.pp
    small = large - parallel.pp
    one, two = _simulate(layout, costs, small), _simulate(layout, costs, large)
    times = (count - large) / (large - small)

    def further(a: float, b: float) -> float:
        return b + times * (b - a)

    def rows(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
        return tuple(further(x, y) for x, y in zip(a, b, strict=True))

    ideals = [found.makespan / (1 + found.bubble) for found in (one, two)]
    makespan = further(one.makespan, two.makespan)
    return Simulated(
        makespan=makespan,
        bubble=max(makespan / further(*ideals) - 1, 0.0),
        peaks=rows(one.peaks, two.peaks),
        outputs=rows(one.outputs, two.outputs),
        held=rows(one.held, two.held),
        messages=rows(one.messages, two.messages),
        versions=two.versions,
    )


def _simulate(layout: Layout, costs: pipeline.Costs, count: int) -> Simulated:
    if layout.parallel.schedule == "plan":
        program = schedule_for(
            layout.config, costs, microbatches=count, placement=layout.placement, time_limit_s=_SEARCH_S
        )
    else:
        program = program_of(layout.config, layout.parallel, count)
    found = pipeline.simulate(program, costs)
    batches = batches_of(program)
    return Simulated(
        makespan=found.makespan / batches,
        bubble=found.bubble_over_ideal,
        peaks=found.peak_activations,
        outputs=found.peak_outputs,
        held=held_microbatches(program),
        messages=tuple(sent / batches for sent in _messages(program)),
        versions=found.weight_versions,
    )


def held_microbatches(program: pipeline.Program) -> tuple[float, ...]:
    """Most microbatches of each stage between forward and the end of backward."""
    kinds = {pipeline.Kind.F: 1, pipeline.Kind.B: -1, pipeline.Kind.W: -1}
    now, most = [0] * program.stages, [0] * program.stages
    for actions in program.ranks:
        for entry in actions:
            for action in entry.each():
                now[action.stage] += kinds.get(action.kind, 0)
                most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(map(float, most))


def _messages(program: pipeline.Program) -> tuple[float, ...]:
    """Tensors that each rank sends in a step."""
    sent = [0.0] * len(program.ranks)
    for stage, (here, there) in enumerate(zip(program.placement, program.placement[1:], strict=False)):
        if here != there:
            assert stage + 1 < program.stages, f"stage {stage} sends on"
            sent[here] += program.microbatches
            sent[there] += program.microbatches
    return tuple(sent)
