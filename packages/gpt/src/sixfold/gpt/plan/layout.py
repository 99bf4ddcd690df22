"""A configuration at the degrees of a world, cut into stages and ranks, and what its stages cost.

    TrainConfig, ParallelConfig --> Layout (this file) --> costs of its stages (this file) --> plan.py
    tensor_sizes.py, activation_bytes.py, stage_times.py -----------^

From pure cores alone: no torch, no process group, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import sixfold.pipeline as pipeline
from sixfold.fsdp.cost_model import StoredBytes
from sixfold.gpt.config.rules import check_rules
from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig
from sixfold.gpt.machine.devices import Device
from sixfold.gpt.parallel.stages import stage_layers
from sixfold.gpt.plan.activation_bytes import Shape, backward_bytes, index_bytes, stage_bytes
from sixfold.gpt.plan.stage_times import StageTimes, overlapped_s, stage_flops, stage_times
from sixfold.gpt.plan.stored_bytes import held_gradients, reduces_per_microbatch, stored
from sixfold.gpt.plan.tensor_sizes import Unit, units_of_rank


class PlannedConfig(TrainConfig):
    """A configuration that may ask for what a run refuses."""

    def __post_init__(self) -> None:
        check_rules(self)


@dataclass(frozen=True)
class Layout:
    """A configuration at the degrees of a world, cut into stages and ranks.

    Attributes:
        kind: of device, by which attention is chosen.
        fused: operators without products are fused; None: where ``train.compile`` says so.
    """

    config: TrainConfig
    parallel: ParallelConfig
    kind: str
    fused: bool | None = None

    @property
    def is_fused(self) -> bool:
        """Chains of operators without products are one kernel each."""
        return self.config.train.compile if self.fused is None else self.fused

    @property
    def microbatches(self) -> int:
        """Of a rank in a step of ``train.global_batch_size``."""
        return self.config.train.global_batch_size // (self.config.train.micro_batch_size * self.parallel.dp)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return self.parallel.entry.placement(self.parallel.pp, self.parallel.stages_per_rank)

    @cached_property
    def layers(self) -> list[range]:
        """Of each stage."""
        return stage_layers(self.config.model.num_layers, self.parallel.stages, self.parallel.layers_per_stage)

    @cached_property
    def shape(self) -> Shape:
        """Of a microbatch."""
        return Shape.of(self.config, self.parallel)

    @cached_property
    def split(self) -> bool:
        """The schedule's backwards are input and weight gradients."""
        return self.parallel.entry.split

    @cached_property
    def per_microbatch(self) -> bool:
        """Gradients are reduced in every backward; the only one of a step is its last."""
        if self.microbatches == 1 and not self.split:
            return True
        return reduces_per_microbatch(
            self.config, self.parallel, stages=self.parallel.stages_per_rank, split=self.split
        )

    @property
    def reduces_each(self) -> bool:
        """Gradients travel in every microbatch."""
        return self.per_microbatch or self.config.grad_sum == "tree"

    def is_last(self, stage: int) -> bool:
        """Has the head."""
        return stage == self.parallel.stages - 1

    def units(self, stages: Sequence[int]) -> tuple[Unit, ...]:
        """The fsdp units of those stages on one rank; worked out once."""
        key = tuple(stages)
        if key not in self._known_units:
            self._known_units[key] = self._units(key)
        return self._known_units[key]

    @cached_property
    def _known_units(self) -> dict[tuple[int, ...], tuple[Unit, ...]]:
        return {}

    def _units(self, stages: Sequence[int]) -> tuple[Unit, ...]:
        last = self.parallel.stages - 1
        both_ends = self.config.model.tie_embeddings and {0, last} <= set(stages)
        return units_of_rank(
            self.config, self.parallel, {stage: self.layers[stage] for stage in stages}, tied_here=both_ends
        )

    def stored(self, stages: Sequence[int], rank: int = 0) -> StoredBytes:
        """Bytes of a rank that holds those stages, activations apart; ``rank`` is its place in dp x cp."""
        units = self.units(stages)
        gloo = self.kind == "cpu"
        return stored(self.config, self.parallel, units, per_microbatch=self.per_microbatch, gloo=gloo, rank=rank)

    def activation_bytes(self, stage: int) -> int:
        """What autograd saves in one forward of a stage."""
        return stage_bytes(
            self.config,
            self.shape,
            self.kind,
            layers=self.layers[stage],
            first=stage == 0,
            last=self.is_last(stage),
        )

    def held_bytes(self, stage: int) -> int:
        """Of a microbatch between forward and backward: what autograd saves, and the input that came from elsewhere."""
        rows = index_bytes(self.config, self.shape, self.layers[stage])
        return self.activation_bytes(stage) + rows + (self.shape.hidden_bytes if stage else 0)

    def temporary_bytes(self, stages: Sequence[int]) -> int:
        """Of a rank's backward at its worst."""
        return max(self._backward_bytes(stage) for stage in stages)

    def _backward_bytes(self, stage: int) -> int:
        held = (
            held_gradients(unit, self.config, self.parallel, per_microbatch=self.per_microbatch)
            for unit in self.units([stage])
        )
        return backward_bytes(
            self.config,
            self.shape,
            self.kind,
            layers=self.layers[stage],
            last=self.is_last(stage),
            gradients=max(held, default=0),
        )

    def stages_of(self, rank: int) -> list[int]:
        """On a pipeline rank."""
        return [stage for stage, where in enumerate(self.placement) if where == rank]


# ---- costs and programs


def program_of(config: TrainConfig, parallel: ParallelConfig, microbatches: int) -> pipeline.Program:
    """The schedule of ``parallel`` as a program of compute actions; of weight versions, a few batches of it."""
    pipe = config.pipeline
    return _program(parallel.entry.name, parallel.pp, microbatches, parallel.stages_per_rank, pipe.group, pipe.steps)


@lru_cache(maxsize=16)  # some are searched for seconds, and a plan simulates each under several costs
def _program(name: str, ranks: int, microbatches: int, chunks: int, group: int, steps: int) -> pipeline.Program:
    if name == "pipedream":
        return pipeline.pipedream(ranks, max(2 * ranks, microbatches))
    if name == "pipedream_2bw":
        return pipeline.pipedream_2bw(ranks, microbatches, steps=steps)
    options = {"group": group} if group else {}
    return pipeline.schedules.by_name(name).with_chunks(ranks, microbatches, chunks, **options)


def batches_of(program: pipeline.Program) -> int:
    """Optimizer steps in it; 1 of a program that leaves them to its caller."""
    last = program.placement[-1]
    steps = sum(a.kind is pipeline.Kind.STEP and a.stage == program.stages - 1 for a in program.ranks[last])
    return max(steps, 1)


def compute_costs(layout: Layout) -> pipeline.Costs:
    """Costs of stages by floating point operations alone: for shares of time, where no rate is known."""
    flops = [
        stage_flops(layout.config, layout.parallel, layers, last=layout.is_last(stage))
        for stage, layers in enumerate(layout.layers)
    ]
    return _costs(layout, [(one.forward, one.backward_input, one.backward_weight) for one in flops])


def device_costs(layout: Layout, device: Device) -> pipeline.Costs:
    """Costs of stages in seconds on ``device``, with what sharding sends beside them and the messages between ranks."""
    parallel = layout.parallel
    gathers = parallel.sharding == "optim_grads_params"
    seconds = []
    for stage, times in enumerate(times_of(layout, device)):
        gather = times.gather if gathers else 0.0
        reduce = times.reduce if layout.reduces_each else 0.0
        whole = times.backward_input + times.backward_weight
        back = overlapped_s(whole, gather + reduce)
        weight = times.backward_weight * back / whole if whole else 0.0
        seconds.append((overlapped_s(times.forward, gather), back - weight, weight))
        assert len(seconds) == stage + 1, f"stage {stage} has no times"
    inside = parallel.pp * parallel.dp * parallel.cp * parallel.tp <= device.per_node
    rate = device.near_bytes_per_s if inside else device.far_bytes_per_s
    hop = device.latency_s + layout.shape.hidden_bytes / rate if parallel.pp > 1 else 0.0
    return replace(_costs(layout, seconds), hop=hop)


def times_of(layout: Layout, device: Device) -> list[StageTimes]:
    return [
        stage_times(
            layout.config,
            layout.parallel,
            device,
            layout.units([stage]),
            layers,
            first=stage == 0,
            last=layout.is_last(stage),
            fused=layout.is_fused,
        )
        for stage, layers in enumerate(layout.layers)
    ]


def _costs(layout: Layout, times: Sequence[tuple[float, float, float]]) -> pipeline.Costs:
    forward, backward_input, backward_weight = zip(*times, strict=True)
    held = [layout.held_bytes(stage) for stage in range(layout.parallel.stages)]
    return pipeline.Costs(forward, backward_input, backward_weight, activation=held)
