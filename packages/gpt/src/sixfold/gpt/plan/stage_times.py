"""How long a rank works and communicates for one microbatch of a stage, and for the rest of a step.

    config, parallel, layers, Device --> StageTimes (this file) --> pipeline.Costs --> plan.py

Seconds from formulas: no torch, no ranks. Transfers are those of ``sixfold.fsdp.cost.terms``.

[Note: two streams share a device] A collective in flight and matrix products take multiprocessors and memory bandwidth
from each other. Until one of them is done, computation runs at ``1 - COMPUTE_LOSS`` of its rate and communication at
``1 - LINK_LOSS`` of its own. The two numbers are fitted to the three measured runs of Llama-3-70B in the reference
slides (within 3 % of each). Without them the plans of these three have another order than the measurements.

[Note: attention counts whole] A causal kernel skips half of attention's products and runs the others at about half
the rate of large products (FlashAttention-2 on an H100: a third of the peak). So all of them are counted, at the rate
of products, as MFU counts them: a planned MFU is never above the share of the peak that products are planned at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sixfold.fsdp.cost.terms import Cluster, Run, replicate_s, transfer_s
from sixfold.gpt.machine.devices import Device
from sixfold.gpt.plan.activation_bytes import Shape
from sixfold.gpt.plan.communication_bytes import SentBytes, stage_sent
from sixfold.gpt.plan.elementwise_bytes import elementwise_bytes
from sixfold.gpt.plan.stored_bytes import formats_of, ranks_of, wire_bytes
from sixfold.gpt.plan.tensor_sizes import Unit

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig

COMPUTE_LOSS = 0.02
LINK_LOSS = 0.56
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


def stage_flops(config: TrainConfig, parallel: ParallelConfig, layers: Sequence[int], *, last: bool) -> StageFlops:
    """Of matrix products and attention, whose products count whole. [Note: attention counts whole]

    Of experts those that a token meets, in equal shares of the ranks. Attention's backward is twice its forward.
    Recomputation is part of ``backward_input``.
    """
    model, shape = config.model, Shape.of(config, parallel)
    sparse = sum(map(model.has_experts, layers))
    weights = (len(layers) - sparse) * model.layer_matmul_parameters + sparse * model.expert_layer_matmul_parameters
    matrices = 2.0 * weights / parallel.tp * shape.t
    attention = sum(4.0 * shape.q * shape.t * model.seen_keys(layer, shape.s) for layer in layers)
    projections = len(layers) * 2.0 * model.attention_matmul_parameters / parallel.tp * shape.t
    again = {"none": 0.0, "selective": attention + projections, "full": matrices + attention}[config.train.recompute]
    head = 2.0 * shape.h * shape.vocab * shape.t if last else 0.0
    return StageFlops(
        forward=matrices + attention + head,
        backward_input=matrices + 2 * attention + again + head,
        backward_weight=matrices + head,
    )


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


def sent_s(device: Device, parallel: ParallelConfig, sent: SentBytes) -> float:
    """Seconds in which a rank sends what splits one model asks for; nothing of it hides behind computation here.

    Ranks of a node are neighbours on tp, then on ep or cp. An all-to-all that leaves the node sends what stays in it
    beside what leaves.
    """
    node, near, far = device.per_node, device.near_bytes_per_s, device.far_bytes_per_s
    tp = sent.tp / (near if parallel.tp <= node else far)
    cp = sent.cp / (near if parallel.cp * parallel.tp <= node else far)
    peers = parallel.ep * parallel.tp - 1
    inside = min(peers, node - 1) / peers if peers else 1.0
    return tp + cp + max(sent.ep * inside / near, sent.ep * (1 - inside) / far)


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
    layers: Sequence[int],
    *,
    first: bool,
    last: bool,
    fused: bool,
) -> StageTimes:
    """Times of a stage of ``units`` on ``device``, whose ``flops`` are known; ``fused`` as in elementwise_bytes.py."""
    rate = device.flops_of(config.train.precision)
    assert rate is not None, f"{device.name} has no FLOP/s"
    flops = stage_flops(config, parallel, layers, last=last)
    moved = elementwise_bytes(config, Shape.of(config, parallel), device.kind, layers, last=last, fused=fused)
    ahead, back = stage_sent(config, Shape.of(config, parallel), parallel, layers, first=first, last=last)
    gather, reduce = _unit_transfers(config, parallel, device, units)
    return StageTimes(
        forward=flops.forward / rate + moved.forward / device.memory_bytes_per_s + sent_s(device, parallel, ahead),
        backward_input=flops.backward_input / rate
        + moved.backward / device.memory_bytes_per_s
        + sent_s(device, parallel, back),
        backward_weight=flops.backward_weight / rate,
        gather=gather,
        reduce=reduce,
    )


def _unit_transfers(
    config: TrainConfig, parallel: ParallelConfig, device: Device, units: Sequence[Unit]
) -> tuple[float, float]:
    """Seconds to gather all units, and to reduce them."""
    formats = formats_of(config, parallel)
    cluster = cluster_of(device, parallel.dp * parallel.cp * parallel.tp)
    run = Run(tp=parallel.tp, replicas=parallel.dp_replicate)
    gather = reduce = 0.0
    for stream in (stream for unit in units for stream in unit.streams):
        shard, copies = ranks_of(parallel, experts=stream.experts)
        apart = parallel.ep if stream.experts else 1
        gather += transfer_s(cluster, run, wire_bytes(stream, formats), shard, apart=apart)
        if stream.frozen:
            continue
        reduce += transfer_s(cluster, run, stream.numel * formats.reduce, shard, apart=apart)
        if copies > 1:
            reduce += replicate_s(cluster, run, stream.numel * formats.main)
    return gather, reduce


def optimizer_s(device: Device, elements: int) -> float:
    """Seconds of an AdamW step on ``elements`` main weights, bound by memory."""
    return _OPTIMIZER_BYTES * elements / device.memory_bytes_per_s
