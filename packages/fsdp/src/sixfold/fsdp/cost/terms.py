"""What the reference slides leave out: latency, ring factor, attention, HSDP, recompute, fp8, shared links.

    Model, Cluster, Run --> times of a layer, thresholds, memory, traffic (this file) --> command.py

Pure arithmetic on the closed forms of formulas.py, which it equals where every further term is switched off. Seconds
are of one layer and one micro-batch on one device; tokens are those of one micro-batch on one device (sequence length
times micro-batch size, divided by cp).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sixfold.fsdp.cost.formulas import SLIDES_FLOPS, collectives, memory_bytes, node_bandwidth
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.strategy import ShardingStrategy

NVLINK_BANDWIDTH = 450e9 * 0.85  # bytes/s that one H100 receives from the others of its node


_MAY_BE_ZERO = ("vocab", "experts", "latency_s")


def _check_numbers(config: Any) -> None:
    """Counts are >= 1 and rates > 0, but for those that may be 0; each is named with its value."""
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool | str | None):
            continue
        if field.name in _MAY_BE_ZERO:
            right, rule = value >= 0, ">= 0"
        elif isinstance(value, int):
            right, rule = value >= 1, ">= 1"
        else:
            right, rule = value > 0, "> 0"
        if not right:
            raise FsdpError(f"{field.name} is {value}; it is {rule}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A transformer: ``layers`` of attention and a feed-forward part, dense or of ``experts``.

    Args:
        ffn: width of the feed-forward part, or of one expert. None: 4 * hidden.
        heads, kv_heads: heads of attention. None: as many key and value heads as heads.
        gated: the feed-forward part has three matrices (SwiGLU), not two.
        experts, top_k: experts of a layer (0: a dense model), and how many of them a token visits.
        output_projection: False leaves attention's output matrix out, as the slides' 11 h^2 does.
    """

    layers: int
    hidden: int
    ffn: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int = 0
    gated: bool = False
    experts: int = 0
    top_k: int = 1
    output_projection: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.kv_heads is not None and (self.heads is None or self.heads % self.kv_heads):
            raise FsdpError(f"kv_heads is {self.kv_heads}; it divides heads, which is {self.heads}")
        if self.experts and self.top_k > self.experts:
            raise FsdpError(f"top_k is {self.top_k}; it is at most experts, {self.experts}")

    @property
    def attention_params(self) -> float:
        """Query, key, value and output matrices of a layer."""
        grouped = 1.0 if self.kv_heads is None or self.heads is None else self.kv_heads / self.heads
        return self.hidden**2 * (1 + 2 * grouped + self.output_projection)

    @property
    def ffn_params(self) -> float:
        """Of the feed-forward part, of one expert where there are experts."""
        return self.hidden * (self.ffn or 4 * self.hidden) * (3 if self.gated else 2)

    @property
    def dense_params(self) -> float:
        """Of a layer, without experts."""
        return self.attention_params + (0 if self.experts else self.ffn_params)

    @property
    def active_params(self) -> float:
        """Of a layer, those that a token multiplies with."""
        return self.attention_params + self.ffn_params * (self.top_k if self.experts else 1)

    @property
    def params(self) -> float:
        """Of the model, embedding and head (untied) included."""
        return self.layers * (self.dense_params + self.experts * self.ffn_params) + 2 * self.vocab * self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Devices and what connects them.

    Args:
        flops: achieved FLOP/s of one device in bf16.
        node_bytes_per_s: what all links of a node carry together, one way.
        nvlink_bytes_per_s: what one device receives from the others of its node.
        latency_s: latency of one collective, whatever its size.
        ring: True: an all-gather over N ranks moves (N - 1)/N of its bytes. False: it moves all, as the slides count.
    """

    gpus: int
    gpus_per_node: int = 8
    flops: float = SLIDES_FLOPS
    node_bytes_per_s: float = node_bandwidth()
    nvlink_bytes_per_s: float = NVLINK_BANDWIDTH
    latency_s: float = 0.0
    ring: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How the model is split over ranks.

    Args:
        replicas: copies of the shards (HSDP). A shard group has data-parallel size / replicas ranks.
        fp8: weights are gathered as one byte, and matrix products run at twice the FLOP/s.
        grad_bytes: bytes of a gradient on the wire, 4 or 2.
        causal: attention computes half of its products.
        experts_share_links: the ep expert groups of a node gather at once over the same links. False: as the slides.
        seq_length, micro_batch: None if you ask for thresholds only. Attention's products need seq_length.
    """

    strategy: ShardingStrategy = ShardingStrategy.optim_grads_params
    tp: int = 1
    cp: int = 1
    ep: int = 1
    replicas: int = 1
    accumulate: int = 1
    recompute: bool = False
    fp8: bool = False
    grad_bytes: float = 4.0
    causal: bool = True
    experts_share_links: bool = True
    seq_length: int | None = None
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)

    @property
    def param_bytes(self) -> float:
        """Of a gathered weight."""
        return 1.0 if self.fp8 else 2.0

    @property
    def tokens(self) -> float | None:
        """Of a micro-batch on one device, where both of its factors are given."""
        if self.seq_length is None or self.micro_batch is None:
            return None
        return self.seq_length * self.micro_batch / self.cp


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Forward or backward of one layer in its dearest micro-batch.

    ``compute_s`` is per token: communication hides above ``tokens`` = ``communication_s`` / ``compute_s``.
    """

    compute_s: float
    communication_s: float

    @property
    def tokens(self) -> float:
        """The threshold: tokens of a micro-batch on one device."""
        return self.communication_s / self.compute_s

    def exposed_s(self, tokens: float) -> float:
        """Communication that computation of so many tokens does not hide."""
        return max(0.0, self.communication_s - self.compute_s * tokens)


def groups(cluster: Cluster, run: Run) -> tuple[int, int]:
    """Ranks of the shard group and data-parallel size (cp included: gradients are summed over it too).

    Raises:
        FsdpError: the degrees do not divide the devices.
    """
    data = cluster.gpus // run.tp
    for name, degree, whole in (
        ("tp", run.tp, cluster.gpus),
        ("cp", run.cp, data),
        ("ep", run.ep, data),
        ("replicas", run.replicas, data),
    ):
        if whole % degree:
            raise FsdpError(f"{name} is {degree}; it divides {whole} ({cluster.gpus} gpus, tp {run.tp})")
    return data // run.replicas, data


def transfer_s(cluster: Cluster, run: Run, nbytes: float, ranks: int, *, apart: int = 1) -> float:
    """Seconds of one all-gather or reduce-scatter of ``nbytes`` in all, over ``ranks`` that lie ``apart``.

    Groups that lie between each other (tp, and expert groups where they share links) divide a node's links.
    """
    if ranks == 1:
        return 0.0
    moved = nbytes * ((ranks - 1) / ranks if cluster.ring else 1.0)
    stride = run.tp * apart
    if ranks * stride <= cluster.gpus_per_node:
        return cluster.latency_s + moved / cluster.nvlink_bytes_per_s
    sharing = run.tp * (min(apart, max(1, cluster.gpus_per_node // run.tp)) if run.experts_share_links else 1)
    return cluster.latency_s + moved / min(cluster.node_bytes_per_s / sharing, cluster.nvlink_bytes_per_s)


def replicate_s(cluster: Cluster, run: Run, nbytes: float) -> float:
    """Seconds of HSDP's all-reduce over replicas of the shards of ``nbytes``; every device of a node sends at once."""
    shard, _ = groups(cluster, run)
    if run.replicas == 1:
        return 0.0
    moved = 2 * (run.replicas - 1) / run.replicas * nbytes / shard
    if cluster.gpus <= cluster.gpus_per_node:
        return cluster.latency_s + moved / cluster.nvlink_bytes_per_s
    return cluster.latency_s + moved * min(cluster.gpus_per_node, cluster.gpus) / cluster.node_bytes_per_s


def _layer_s(model: Model, cluster: Cluster, run: Run, per_param: float) -> float:
    """Seconds to gather or scatter a layer at ``per_param`` bytes: its dense part and this rank's experts."""
    shard, data = groups(cluster, run)
    seconds = transfer_s(cluster, run, model.dense_params / run.tp * per_param, shard)
    if model.experts:
        mine = model.experts / run.ep * model.ffn_params / run.tp * per_param
        seconds += transfer_s(cluster, run, mine, max(1, data // run.ep // run.replicas), apart=run.ep)
    return seconds


def forward(model: Model, cluster: Cluster, run: Run) -> Pass:
    """A layer's forward in the micro-batch in which its weights are gathered."""
    gathers = run.strategy is not ShardingStrategy.no_shard
    return Pass(
        compute_s=_flops_per_token(model, run) / _device_flops(cluster, run),
        communication_s=_layer_s(model, cluster, run, run.param_bytes) if gathers else 0.0,
    )


def backward(model: Model, cluster: Cluster, run: Run) -> Pass:
    """A layer's backward in the micro-batch that reduces it: gradients, replicas, under ZeRO-3 gathered weights."""
    flops = _flops_per_token(model, run) * (3 if run.recompute else 2)
    seconds = _layer_s(model, cluster, run, run.grad_bytes)
    if run.strategy is ShardingStrategy.no_shard:
        seconds *= 2  # an all-reduce is a reduce-scatter and an all-gather
    if run.strategy.shards_params:
        seconds += _layer_s(model, cluster, run, run.param_bytes)
    whole = (model.dense_params + model.experts / run.ep * model.ffn_params) / run.tp * run.grad_bytes
    return Pass(
        compute_s=flops / _device_flops(cluster, run), communication_s=seconds + replicate_s(cluster, run, whole)
    )


def _device_flops(cluster: Cluster, run: Run) -> float:
    return cluster.flops * (2 if run.fp8 else 1)


def _flops_per_token(model: Model, run: Run) -> float:
    """Of a layer's forward: 2 per active parameter, and 4 * hidden per token that is looked at."""
    looked_at = (run.seq_length or 0) * (0.5 if run.causal else 1.0)
    return (2 * model.active_params + 4 * model.hidden * looked_at) / run.tp


def exposed_s(model: Model, cluster: Cluster, run: Run) -> float | None:
    """Seconds per optimizer step in which a device waits for communication; None without tokens. A lower bound."""
    if run.tokens is None:
        return None
    times = collectives(run.strategy, run.accumulate)
    gathers = min(times["all_gather"], run.accumulate)  # in forwards; ZeRO-3's others are part of its backwards
    scatters = max(times["reduce_scatter"], times["all_reduce"])
    ahead, back = forward(model, cluster, run), backward(model, cluster, run)
    return model.layers * (gathers * ahead.exposed_s(run.tokens) + scatters * back.exposed_s(run.tokens))


def memory(model: Model, cluster: Cluster, run: Run, *, optimizer_bytes: float = 12.0) -> dict[str, float]:
    """Bytes of one device by purpose, activations apart. fp32 main weights and AdamW: 12; fp32 main gradients.

    ``slots`` are the two largest units gathered and ``pool`` two units' local sums in fp32 (units are layers, embedding
    and head; a pool slot is at most a layer: larger units are reduced in pieces).
    """
    shard, data = groups(cluster, run)
    expert = model.layers * model.experts * model.ffn_params / run.ep / run.tp
    dense = model.params / run.tp - expert * run.ep
    parts = {"weights": "param_bytes", "gradients": "grad_bytes", "optimizer": "optimizer_bytes"}
    each = {"param_bytes": run.param_bytes, "grad_bytes": 4.0, "optimizer_bytes": optimizer_bytes}
    sizes: dict[str, float] = {}
    for name, kind in parts.items():
        only = {other: each[other] if other == kind else 0.0 for other in each}
        sizes[name] = memory_bytes(run.strategy, dense, shard, **only)
        if expert:
            sizes[name] += memory_bytes(run.strategy, expert, max(1, data // run.ep // run.replicas), **only)
    layer = (model.dense_params + model.experts / run.ep * model.ffn_params) / run.tp
    largest = max(layer, model.vocab * model.hidden / run.tp)
    sizes["slots"] = run.param_bytes * (largest + layer) if run.strategy.shards_params else 0.0
    sizes["pool"] = 8.0 * layer if run.strategy.shards_grads else 0.0
    sizes["total"] = sum(sizes.values())
    return sizes


def traffic(model: Model, cluster: Cluster, run: Run) -> dict[str, float]:
    """Bytes that one device gathers and reduces per optimizer step, by collective."""
    whole = model.params / run.tp - model.layers * model.experts * model.ffn_params / run.tp * (1 - 1 / run.ep)
    times = collectives(run.strategy, run.accumulate)
    result = {
        "all_gather": times["all_gather"] * whole * run.param_bytes,
        "reduce_scatter": times["reduce_scatter"] * whole * run.grad_bytes,
        "all_reduce": times["all_reduce"] * whole * run.grad_bytes,
    }
    if run.replicas > 1 and run.strategy.shards_optimizer:
        shard, _ = groups(cluster, run)
        result["all_reduce"] = times["reduce_scatter"] * whole * run.grad_bytes / shard
    return result
