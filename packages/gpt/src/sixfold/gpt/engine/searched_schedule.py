"""parallel.schedule = "plan": programs searched for what the stages cost, in the place of a known schedule's.

    config --> assumed_costs (this file) ---.
    a few steps of the base schedule --> Costs.fit --> sixfold.pipeline.plan, on rank 0 --> every rank   (this file)
    a checkpoint's plan, if it is of this layout --------------------------------------------^

The base schedule (``ParallelConfig.entry``) has the placement on which the model is built, and split backwards, whose
parts are thereby measured apart. A step measured trains nothing: its gradients are dropped. Orders differ in time
alone: on each stage microbatches come in ascending order in all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sixfold import pipeline
from sixfold.gpt.config.batch_schedule import batch_sizes
from sixfold.gpt.engine.rank_model import make_program
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.metrics import FIELDS
from sixfold.gpt.parallel.agreement import from_rank_0, world_collective
from sixfold.gpt.plan.layout import Layout, compute_costs
from sixfold.pipeline import Costs, Program, ScheduleError, passes, simulate

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig
    from sixfold.gpt.data.token_stream import Microbatch
    from sixfold.gpt.engine.rank_model import RankModel
    from sixfold.gpt.training.loop import Run

Found = dict[str, Any]  # what a plan says of itself: texts and numbers, the same on every rank


def microbatch_counts(config: TrainConfig) -> list[int]:
    """Microbatches of each step and evaluation that the run may have."""
    ranks = config.train.micro_batch_size * config.parallel.dp
    return sorted({batch // ranks for _, batch in batch_sizes(config)})


def assumed_costs(config: TrainConfig, kind: str) -> Costs:
    """Costs of each stage from the model's sizes, as `sixfold plan` has them: operations, and bytes held.

    Activations are in even shares: those of a rank are 1 in the mean.

    Args:
        kind: of device, by which attention is chosen.
    """
    known = compute_costs(Layout(config, config.parallel, kind))
    assert known.activation is not None, "a layout knows what its stages hold"
    share = sum(known.activation) / config.parallel.pp
    return replace(known, activation=[held / share for held in known.activation])


def measured_costs(rank: RankModel, batch: Sequence[Microbatch], steps: int, assumed: Costs) -> Costs | None:
    """Costs of this pipeline's stages from ``steps`` steps, on its first rank; collective over all ranks.

    Weights and optimizer stay as they are. One step more goes before, for what is made once.
    """
    timelines = []
    for _ in range(steps + 1):
        result = rank.run_program(batch, rank.follow(len(batch)), timed=True)
        rank.finish_grad_sync()
        rank.model.zero_grad()
        timelines.append(rank.runner.gather_timeline(result))
    here = [timeline for timeline in timelines[1:] if timeline is not None]
    return Costs.fit(here, assume=assumed) if here else None


def search(config: TrainConfig, costs: Costs, counts: Sequence[int], placement: Sequence[int]) -> Found:
    """A program for each number of microbatches, and what the search says of the largest.

    Raises:
        ConfigError: no program keeps pipeline.memory_cap.
    """
    found: Found = {"programs": {}}
    for microbatches in counts:
        base = make_program(config, microbatches)
        cap = config.pipeline.memory_cap or max(simulate(passes.strip(base), costs).peak_activations)
        try:
            plan = pipeline.plan(
                costs,
                ranks=config.parallel.pp,
                microbatches=microbatches,
                memory_cap=cap,
                placement=placement,
                time_limit_s=config.pipeline.plan_seconds,
            )
        except ScheduleError as error:
            raise ConfigError(f"pipeline.memory_cap is {config.pipeline.memory_cap:g}: {error}") from error
        found["programs"][str(microbatches)] = str(plan.program)
        found |= {
            "microbatches": microbatches,
            "bubble_over_ideal": plan.timeline.bubble_over_ideal,
            "base_bubble_over_ideal": simulate(passes.strip(base), costs).bubble_over_ideal,
            "gap": plan.gap,
            "memory_cap": cap,
            "peak_activations": max(plan.timeline.peak_activations),
        }
    return found


def layout_of(config: TrainConfig) -> Found:
    """What a stored plan is good for."""
    parallel = config.parallel
    return {
        "pp": parallel.pp,
        "stages_per_rank": parallel.stages_per_rank,
        "layers_per_stage": list(parallel.layers_per_stage),
        "memory_cap_key": config.pipeline.memory_cap,
    }


def reusable(config: TrainConfig, stored: Mapping[str, Any] | None) -> bool:
    """A checkpoint's plan is of this layout, and has every number of microbatches."""
    if stored is None or any(stored.get(key) != value for key, value in layout_of(config).items()):
        return False
    return all(str(m) in stored["programs"] for m in microbatch_counts(config))


def settle_schedule(rank: RankModel, batch: Sequence[Microbatch]) -> Found:
    """Give ``rank`` the planned programs: those of the checkpoint that was loaded, or new ones. Collective.

    Returns:
        What the plan says of itself, with ``source``: "checkpoint", "measured" or "model".
    """
    config, mesh = rank.config, rank.mesh
    steps = config.pipeline.plan_steps
    if reusable(config, rank.stored_plan):
        assert rank.stored_plan is not None, "reusable says so"
        found = dict(rank.stored_plan) | {"source": "checkpoint"}
    else:
        costs: Costs | None = assumed_costs(config, rank.device.type)
        if steps:
            assert costs is not None, "assumed"
            costs = measured_costs(rank, batch, steps, costs)

        def decide() -> Found:
            assert costs is not None, "rank 0 is the first of its pipeline"
            return search(config, costs, microbatch_counts(config), rank.placement)

        found = from_rank_0(mesh.control, mesh.rank, mesh.size, decide)
        found |= layout_of(config) | {"source": "measured" if steps else "model"}
    for microbatches, text in found["programs"].items():
        rank.programs[int(microbatches)] = passes.lower(Program.parse(text))
    if rank.plans is not None:
        rank.plans.clear()
    rank.stored_plan = found
    return found


def in_words(found: Mapping[str, Any]) -> str:
    """One line."""
    source = {"checkpoint": "of the checkpoint", "measured": "for measured costs", "model": "for costs of the model"}
    return (
        f"schedule {source[found['source']]}: a bubble of {found['bubble_over_ideal']:.3f} of the work at "
        f"{found['microbatches']} microbatches (the base schedule: {found['base_bubble_over_ideal']:.3f}), at most "
        f"{found['gap']:.3f} above the least there can be; a rank holds {found['peak_activations']:.2f} of "
        f"{found['memory_cap']:.2f} microbatches"
    )


def plan_run(run: Run) -> None:
    """Plan, and say in one line and in metrics.jsonl what was found. Collective over all ranks."""
    if run.progress.step >= run.config.train.steps or run.config.parallel.pp == 1:
        return  # nothing to run, or no bubble
    with world_collective("planning of the schedule"):
        found = settle_schedule(run.rank, run.coming_batch())
    run.note("plan", step=run.progress.step, **{name: found[name] for name in FIELDS["plan"] if name != "step"})
    if run.metrics is not None:
        print(f"sixfold: {in_words(found)}", file=sys.stderr, flush=True)
