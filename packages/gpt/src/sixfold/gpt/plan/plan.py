"""What a configuration takes on a number of ranks: memory, traffic, bubble and time of a step.

    TrainConfig, world, Device --> plan_layout (this file) --> LayoutPlan --> report.py, search.py
    layout.py: what stages cost    simulated_programs.py: programs, and ``schedule_for``

From pure cores alone: no torch, no process group, no device. A configuration that a run refuses can be planned;
``LayoutPlan.refused`` says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sixfold.pipeline as pipeline
from sixfold.fsdp.cost_model import StoredBytes, collectives
from sixfold.gpt.config.rules import check_world, refusals
from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig
from sixfold.gpt.machine.devices import Device
from sixfold.gpt.plan.communication_bytes import SentBytes, Traffic, dp_bytes, stage_sent, tp_sums
from sixfold.gpt.plan.layout import Layout, PlannedConfig, compute_costs, device_costs, times_of
from sixfold.gpt.plan.simulated_programs import Simulated, plan_program, say_plan, schedule_for, simulated
from sixfold.gpt.plan.stage_times import optimizer_s, overlapped_s
from sixfold.gpt.plan.stored_bytes import ranks_of, saved_bytes
from sixfold.gpt.plan.tensor_sizes import stage_parameters
from sixfold.gpt.plan.time_range import TimeRange, time_range_of

__all__ = [
    "LayoutPlan", "PlannedConfig", "RankPlan", "StagePlan", "as_json", "bubbles", "plan_layout", "plan_program",
    "say_plan", "schedule_for", "step_seconds",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A stage: what it holds, and bytes of it on its rank."""

    stage: int
    rank: int
    layers: tuple[int, ...]
    parameters: int
    stored: StoredBytes
    activation_bytes: int
    microbatches_held: int


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """A pipeline rank: bytes at its worst moment.

    Attributes:
        activations: of all microbatches in flight, with the inputs and outputs of stages that wait.
        temporary: beside them within a backward.
        older: versions of the weights beside the newest, under schedules that keep some.
        host: activations that wait in host memory (``train.offload_activations``).
        saved: its share of a checkpoint.
    """

    rank: int
    stored: StoredBytes
    activations: int
    temporary: int
    older: int = 0
    host: int = 0
    saved: int = 0

    @property
    def peak(self) -> int:
        """All of it."""
        return self.stored.total + self.older + self.activations + self.temporary


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """A layout and what it takes.

    Attributes:
        fits: every rank's peak is within ``memory_bytes``, or there is no bound.
        step_s: seconds of a step; None where the device's FLOP/s are not known.
        refused: what a run would refuse of this configuration, a line each.
    """

    config: TrainConfig
    parallel: ParallelConfig
    world: int
    device: Device
    microbatches: int
    bubble_over_ideal: float
    stages: tuple[StagePlan, ...]
    ranks: tuple[RankPlan, ...]
    traffic: Traffic
    memory_bytes: int | None
    step_s: float | None
    refused: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(rank.peak for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """No rank needs more than there is."""
        return self.memory_bytes is None or self.peak_bytes <= self.memory_bytes

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole job."""
        tokens = self.config.train.global_batch_size * self.config.data.seq_length
        return None if self.step_s is None else tokens / self.step_s

    @property
    def flops_per_rank(self) -> float | None:
        """Model FLOP/s of a rank, by the convention of ``GPTConfig.flops_per_token``."""
        if self.tokens_per_second is None:
            return None
        return self.config.model.flops_per_token(self.config.data.seq_length) * self.tokens_per_second / self.world

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s over the device's peak: never above the efficiency that products are planned with."""
        if self.flops_per_rank is None or self.device.peak_flops is None:
            return None
        return self.flops_per_rank / self.device.peak_flops

    @property
    def time_range(self) -> TimeRange:
        """How published runs of this kind lay about what is planned for them."""
        return time_range_of(self.config, self.device)

    @property
    def saved_bytes_R(self) -> list[int]:
        """What each rank writes of a checkpoint: the ranks of a pipeline stage lie one behind the other."""
        return [one.saved for one in self.ranks for _ in range(self.world // len(self.ranks))]

    @property
    def step_s_range(self) -> tuple[float, float] | None:
        """Seconds of a step, by ``time_range``: the fastest and the slowest."""
        return None if self.step_s is None else (self.step_s / self.time_range.high, self.step_s / self.time_range.low)

    def range_of(self, speed: float | None) -> list[float] | None:
        """Lowest and highest of something that grows with the speed."""
        return None if speed is None else [speed * self.time_range.low, speed * self.time_range.high]


def plan_layout(
    config: TrainConfig, world: int, device: Device, *, memory_bytes: int | None = None, fused: bool | None = None
) -> LayoutPlan:
    """Work out what ``config`` takes on ``world`` ranks.

    Args:
        device: what each rank computes on.
        memory_bytes: of a rank; None: the device's.
        fused: operators without products are fused, as Megatron-Core's are; None: where ``train.compile`` says so.
    Raises:
        ConfigError: the degrees do not divide the world.
    """
    parallel = check_world(config, world)
    layout = Layout(config, parallel, device.kind, fused)
    alone = simulated(layout, compute_costs(layout))
    stages = tuple(
        StagePlan(
            stage=stage,
            rank=layout.placement[stage],
            layers=tuple(layers),
            parameters=stage_parameters(config.model, layers, first=stage == 0, last=layout.is_last(stage)),
            stored=layout.stored([stage]),
            activation_bytes=layout.activation_bytes(stage),
            microbatches_held=round(alone.held[stage]),
        )
        for stage, layers in enumerate(layout.layers)
    )
    ranks = tuple(_rank_plan(layout, alone, rank) for rank in range(parallel.pp))
    return LayoutPlan(
        config=config,
        parallel=parallel,
        world=world,
        device=device,
        microbatches=layout.microbatches,
        bubble_over_ideal=alone.bubble,
        stages=stages,
        ranks=ranks,
        traffic=_traffic(layout, alone.messages),
        memory_bytes=device.memory_bytes if memory_bytes is None else memory_bytes,
        step_s=step_seconds(layout, device),
        refused=tuple(refusals(config)),
    )


def _rank_plan(layout: Layout, alone: Simulated, rank: int) -> RankPlan:
    stages = layout.stages_of(rank)
    held = layout.stored(stages)
    activations, host = round(alone.peaks[rank]), 0
    if layout.config.train.offload_activations and layout.kind != "cpu":  # a layer on its way each way
        per_layer = max(layout.held_bytes(stage) // max(len(layout.layers[stage]), 1) for stage in stages)
        activations, host = min(2 * per_layer, activations), activations
    if layout.parallel.pp > 1:
        activations += round(alone.outputs[rank]) * layout.shape.hidden_bytes
    return RankPlan(
        rank=rank,
        stored=held,
        activations=activations,
        temporary=layout.temporary_bytes(stages),
        older=(alone.versions[rank] - 1) * held.parameters,
        host=host,
        saved=saved_bytes(layout.config, layout.parallel, layout.units(stages)),
    )


def step_seconds(layout: Layout, device: Device) -> float | None:
    """Seconds of a step: the program, what is reduced or gathered around it, and the optimizer."""
    if device.flops_of(layout.config.train.precision) is None:
        return None
    program = simulated(layout, device_costs(layout, device)).makespan
    around, elements = 0.0, 0
    sharding = layout.parallel.sharding
    times = times_of(layout, device)
    for rank in range(layout.parallel.pp):
        mine = [times[stage] for stage in layout.stages_of(rank)]
        reduced = sum(one.reduce for one in mine) * (2 if sharding == "no_shard" else 1)
        backward = sum(one.backward_input + one.backward_weight for one in mine)
        rest = 0.0 if layout.reduces_each else max(overlapped_s(backward, reduced) - backward, 0.0)
        if sharding in ("optim", "optim_grads"):  # gathered once, before and in the first forward
            forward = sum(one.forward for one in mine)
            rest += max(overlapped_s(forward, sum(one.gather for one in mine)) - forward, 0.0)
        around = max(around, rest)
        elements = max(elements, _updated(layout, rank))
    return program + around + optimizer_s(device, elements)


def _updated(layout: Layout, rank: int) -> int:
    """Elements of main weights that the optimizer of a rank updates."""
    whole, total = layout.parallel.sharding == "no_shard", 0
    for unit in layout.units(layout.stages_of(rank)):
        for stream in unit.trained:
            total += stream.numel // (1 if whole else ranks_of(layout.parallel, experts=stream.experts)[0])
    return total


def _traffic(layout: Layout, messages: Sequence[float]) -> Traffic:
    """Of the rank that sends most, axis by axis."""
    config, parallel, count = layout.config, layout.parallel, layout.microbatches
    moved = dict(collectives(parallel.sharding, count, tree=config.grad_sum == "tree"))
    if not layout.reduces_each:
        moved["reduce_scatter"] = min(moved["reduce_scatter"], 1)
    found = {"dp": 0.0, "tp": 0.0, "cp": 0.0, "ep": 0.0}
    for rank in range(parallel.pp):
        stages, sent, once = layout.stages_of(rank), SentBytes(), 0.0
        for stage in stages:
            ends = {"first": stage == 0, "last": layout.is_last(stage)}
            ahead, back = stage_sent(config, layout.shape, parallel, layout.layers[stage], **ends)
            sent = sent + ahead + back
            once += tp_sums(config, parallel, layout.layers[stage], last=ends["last"])
        found["dp"] = max(found["dp"], dp_bytes(config, parallel, layout.units(stages), moved))
        found["tp"] = max(found["tp"], count * sent.tp + once)
        found["cp"] = max(found["cp"], count * sent.cp)
        found["ep"] = max(found["ep"], count * sent.ep)
    return Traffic(pp=max(messages) * layout.shape.hidden_bytes if parallel.pp > 1 else 0.0, **found)


def bubbles(planned: LayoutPlan, *, seconds: float = 1.0) -> Mapping[str, float]:
    """Bubble over ideal of every schedule that this cut can have, at zero communication cost; quick ones alone."""
    found: dict[str, float] = {}
    began = time.perf_counter()
    for entry in pipeline.schedules.registered():
        if entry.arguments_for(planned.parallel.stages_per_rank) is None or time.perf_counter() - began > seconds:
            continue
        if entry.name == "hanayo" and planned.parallel.pp * planned.microbatches > 128:
            continue  # a search of its own
        parallel = replace(planned.parallel, schedule=entry.name)
        layout = Layout(planned.config, parallel, planned.device.kind)
        try:
            found[entry.name] = simulated(layout, compute_costs(layout)).bubble
        except pipeline.ScheduleError:
            continue  # too few microbatches for it
    return dict(sorted(found.items(), key=lambda item: item[1]))


def as_json(planned: LayoutPlan) -> dict[str, Any]:
    """The object of ``sixfold plan --json``."""
    parallel = planned.parallel
    peaks = {rank.rank: rank.peak for rank in planned.ranks}
    return {
        "world": planned.world,
        "layout": {axis: getattr(parallel, axis) for axis in ("pp", "dp", "cp", "tp", "ep")},
        "schedule": parallel.schedule,
        "sharding": parallel.sharding,
        "microbatches": planned.microbatches,
        "parameters": planned.config.model.num_parameters,
        "bubble_over_ideal": planned.bubble_over_ideal,
        "fits": planned.fits,
        "stages": [
            {
                "stage": one.stage,
                "rank": one.rank,
                "layers": list(one.layers),
                "parameters": one.parameters,
                "parameter_bytes": one.stored.parameters,
                "gradient_bytes": one.stored.gradients,
                "optimizer_bytes": one.stored.optimizer,
                "activation_bytes_per_microbatch": one.activation_bytes,
                "microbatches_held": one.microbatches_held,
                "peak_bytes": peaks[one.rank],
            }
            for one in planned.stages
        ],
        "ranks": [
            {
                "rank": one.rank,
                "parameter_bytes": one.stored.parameters,
                "gradient_bytes": one.stored.gradients,
                "optimizer_bytes": one.stored.optimizer,
                "buffer_bytes": one.stored.gathered + one.stored.reducing,
                "activation_bytes": one.activations,
                "temporary_bytes": one.temporary,
                "older_weights_bytes": one.older,
                "host_bytes": one.host,
                "saved_bytes": one.saved,
                "peak_bytes": one.peak,
            }
            for one in planned.ranks
        ],
        "communication": {
            "dp_bytes": planned.traffic.dp,
            "tp_bytes": planned.traffic.tp,
            "pp_bytes": planned.traffic.pp,
            "cp_bytes": planned.traffic.cp,
            "ep_bytes": planned.traffic.ep,
        },
        "device": planned.device.name,
        "memory_bytes": planned.memory_bytes,
        "step_seconds": planned.step_s,
        "tokens_per_second": planned.tokens_per_second,
        "flops_per_rank": planned.flops_per_rank,
        "mfu": planned.mfu,
        "step_seconds_range": None if planned.step_s_range is None else list(planned.step_s_range),
        "tokens_per_second_range": planned.range_of(planned.tokens_per_second),
        "mfu_range": planned.range_of(planned.mfu),
        "range_from": planned.time_range.source,
        "refused": list(planned.refused),
    }
