"""How long a rank works and communicates for one microbatch of a stage, and for the rest of a step.

    config, parallel, layers, Device --> StageTimes (this file) --> pipeline.Costs --> plan.py

Seconds from formulas: no torch, no ranks. Transfers are those of ``sixfold.fsdp.cost_terms``.

[Note: two streams share a device] While a collective is in flight its kernels take multiprocessors and memory bandwidth
from matrix products, and they from it: computation runs at ``1 - COMPUTE_LOSS`` of its rate and communication at
``1 - LINK_LOSS`` of its own until one of them is done. The two numbers are fitted to the three measured runs of
Llama-3-70B in the reference slides (within 3 % of each), whose page on the harm of parallel communication to matrix
products says why; with none, three configurations come out in another order than they were measured in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sixfold.fsdp.cost_terms import Cluster, Run, replicate_s, transfer_s
from sixfold.fsdp.strategy import ShardingStrategy
from sixfold.gpt.activations import Shape
from sixfold.gpt.devices import Device
from sixfold.gpt.sizes import Formats, Unit, wire_bytes

if TYPE_CHECKING:
    from sixfold.gpt.config import ParallelConfig, TrainConfig

COMPUTE_LOSS = 0.15
LINK_LOSS = 0.54
_OPTIMIZER_BYTES = 34  # read and written for an element: gradient twice, main weight and two moments both ways, bf16


def overlapped_s(compute: float, communication: float) -> float:
    """Seconds in which both are done. [Note: two streams share a device]"""
    computing = compute / (1 - COMPUTE_LOSS)
    if computing * (1 - LINK_LOSS) <= communication:
        return communication + LINK_LOSS * computing
    return compute + COMPUTE_LOSS * communication / (1 - LINK_LOSS)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFlops:
    """Floating point operations of one microbatch of a stage on one rank: forward, input and weight gradients."""

    forward: float
    backward_input: float
    backward_weight: float


def stage_flops(config: TrainConfig, parallel: ParallelConfig, *, layers: int, last: bool) -> StageFlops:
    """Of matrix products and attention; the mask's half of attention's products counts as not computed.

    Attention's backward is twice its forward. Recomputation is part of ``backward_input``.
    """
    model, shape = config.model, Shape.of(config, parallel)
    matrices = 2.0 * model.layer_matmul_parameters / parallel.tp * shape.t
    attention = 4.0 * shape.q * shape.t * shape.s / 2
    projections = 2.0 * model.hidden_size * 2 * (shape.q + shape.k) * shape.t
    again = {"none": 0.0, "selective": attention + projections, "full": matrices + attention}[config.train.recompute]
    head = 2.0 * shape.h * shape.vocab * shape.t if last else 0.0
    return StageFlops(
        forward=layers * (matrices + attention) + head,
        backward_input=layers * (matrices + 2 * attention + again) + head,
        backward_weight=layers * matrices + head,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that a rank sends in a step, by the axis of the mesh."""

    dp: float
    tp: float
    pp: float
    cp: float


def cluster_of(device: Device, ranks: int) -> Cluster:
    """``device`` as the cost model of sixfold.fsdp takes it."""
    return Cluster(
        gpus=ranks,
        gpus_per_node=device.per_node,
        flops=device.flops or 1.0,
        node_bytes_per_s=device.node_bytes_per_s,
        nvlink_bytes_per_s=device.near_bytes_per_s,
        latency_s=device.latency_s,
    )


def layer_model_bytes(config: TrainConfig, shape: Shape, parallel: ParallelConfig) -> tuple[float, float]:
    """(tp, cp) bytes that a rank sends for one layer and microbatch, forward and backward.

    tp with sequence parallelism: an all-gather before and a reduce-scatter after attention and feed-forward part, the
    same in backward, where what was gathered is gathered again; else two all-reduces each way. cp: keys and values are
    gathered in forward and again in backward, and their gradients reduced.
    """
    tp, cp = parallel.tp, parallel.cp
    hidden = shape.t * shape.h * shape.item
    forward = 4 * (tp - 1) / tp * hidden
    moved = forward * (2.5 if parallel.sequence else 2.0)
    keys = 2 * shape.b * shape.s * shape.k * shape.item * (cp - 1) / cp
    around = 3 * keys
    if config.train.recompute == "full":
        moved, around = moved + forward, around + keys
    return moved, around


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of one microbatch of a stage: computation, and what data parallelism sends beside it.

    Attributes:
        forward, backward_input, backward_weight: on the rank alone, tensor and context parallelism included.
        gather: all weights of the stage, in a microbatch that gathers them.
        reduce: all gradients of the stage, replicas included.
    """

    forward: float
    backward_input: float
    backward_weight: float
    gather: float
    reduce: float


def stage_times(
    config: TrainConfig,
    parallel: ParallelConfig,
    device: Device,
    units: Sequence[Unit],
    *,
    layers: int,
    last: bool,
) -> StageTimes:
    """Times of a stage of ``units`` on ``device``, whose ``flops`` are known."""
    rate = device.flops_of(config.train.precision)
    assert rate is not None, f"{device.name} has no FLOP/s"
    flops, shape = stage_flops(config, parallel, layers=layers, last=last), Shape.of(config, parallel)
    tp_bytes, cp_bytes = layer_model_bytes(config, shape, parallel)
    # Of these bytes forward sends about two fifths and one third; neither hides behind computation here.
    tp_s = layers * tp_bytes / device.near_bytes_per_s
    cp_rate = device.near_bytes_per_s if parallel.cp * parallel.tp <= device.per_node else device.far_bytes_per_s
    cp_s = layers * cp_bytes / cp_rate
    gather, reduce = _unit_transfers(config, parallel, device, units)
    return StageTimes(
        forward=flops.forward / rate + 0.4 * tp_s + cp_s / 3,
        backward_input=flops.backward_input / rate + 0.6 * tp_s + cp_s * 2 / 3,
        backward_weight=flops.backward_weight / rate,
        gather=gather,
        reduce=reduce,
    )


def _unit_transfers(
    config: TrainConfig, parallel: ParallelConfig, device: Device, units: Sequence[Unit]
) -> tuple[float, float]:
    """Seconds to gather all units, and to reduce them."""
    formats = Formats.of(config)
    cluster = cluster_of(device, parallel.dp * parallel.cp * parallel.tp)
    run = Run(tp=parallel.tp, replicas=parallel.dp_replicate)
    shard = parallel.dp * parallel.cp // parallel.dp_replicate
    gather = reduce = 0.0
    for unit in units:
        if not unit.tensors:
            continue
        gather += transfer_s(cluster, run, wire_bytes(unit, formats), shard)
        reduce += transfer_s(cluster, run, unit.numel * formats.reduce, shard)
        reduce += replicate_s(cluster, run, unit.numel * formats.main)
    return gather, reduce


def dp_bytes(config: TrainConfig, parallel: ParallelConfig, units: Sequence[Unit], moved: dict[str, int]) -> float:
    """Bytes that a rank sends over dp x cp in a step: rings of as many models as ``moved`` says of each collective."""
    formats = Formats.of(config)
    shard = parallel.dp * parallel.cp // parallel.dp_replicate
    numel = sum(unit.numel for unit in units)
    part = (shard - 1) / shard
    sent = sum(wire_bytes(unit, formats) for unit in units) * part * moved["all_gather"]
    sent += numel * part * (moved["reduce_scatter"] + 2 * moved["all_reduce"]) * formats.reduce
    if parallel.dp_replicate > 1:
        copies = max(moved["reduce_scatter"], moved["all_reduce"])
        over = numel / shard if ShardingStrategy(parallel.sharding).shards_optimizer else numel
        sent += 2 * (parallel.dp_replicate - 1) / parallel.dp_replicate * over * formats.main * copies
    return sent


def optimizer_s(device: Device, elements: int) -> float:
    """Seconds of an AdamW step on ``elements`` main weights, bound by memory."""
    return _OPTIMIZER_BYTES * elements / device.memory_bytes_per_s
