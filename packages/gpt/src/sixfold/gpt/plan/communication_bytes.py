"""Bytes that a rank sends for one microbatch of a layer, and for its gradients and weights in a step.

    config, parallel, Shape --> SentBytes of a layer, of a stage's ends (this file) --> stage_times.py, plan.py

Numbers only: no torch, no ranks. Of a collective over n ranks that leaves W bytes a rank sends (n - 1) / n W, of an
all-reduce twice that; of an all-to-all all rows but its own part.

[Note: what backward repeats] What tensor parallelism gathered is gathered again in backward. Where a part is
recomputed, that recomputation gathers it. It ends before the last collective of the part, because nothing saved lies
behind it, if no norm does. Where backwards are split and the part is recomputed, W gathers it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sixfold.fsdp.strategy import ShardingStrategy
from sixfold.gpt.plan.stored_bytes import formats_of, ranks_of, wire_bytes
from sixfold.gpt.plan.tensor_sizes import Unit, summed_numel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig
    from sixfold.gpt.plan.activation_bytes import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class SentBytes:
    """Bytes by the axis of the mesh: over tp, over cp, and to the ranks that hold other experts (or parts of them)."""

    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(tp=self.tp + other.tp, cp=self.cp + other.cp, ep=self.ep + other.ep)

    def times(self, count: float) -> SentBytes:
        """Of so many."""
        return SentBytes(tp=self.tp * count, cp=self.cp * count, ep=self.ep * count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that a rank sends in a step, by the axis of the mesh."""

    dp: float
    tp: float
    pp: float
    cp: float
    ep: float


def layer_sent(
    config: TrainConfig, shape: Shape, parallel: ParallelConfig, *, experts: bool
) -> tuple[SentBytes, SentBytes]:
    """Of a layer and microbatch: (forward, backward with what it computes again)."""
    ahead = _attention(config, shape, parallel), _feed_forward(config, shape, parallel, experts=experts)
    return ahead[0][0] + ahead[1][0], ahead[0][1] + ahead[1][1]


def _attention(config: TrainConfig, shape: Shape, parallel: ParallelConfig) -> tuple[SentBytes, SentBytes]:
    recomputed = config.train.recompute != "none"
    to_its_end = config.train.recompute == "full" or config.model.norm_position != "pre"
    ahead, back = _part(shape, parallel, recomputed=recomputed, to_its_end=to_its_end)
    if config.model.kv_lora_rank:
        ahead, back = _latent_part(config, shape, parallel, recomputed=recomputed, to_its_end=to_its_end)
    # Keys and values of all ranks, and their gradients; a ring passes both on in backward, gradients in float32.
    whole = 2 * shape.b * shape.s * shape.k * shape.item
    keys = whole * (parallel.cp - 1) / parallel.cp
    if config.model.qk_norm_over == "projection":  # of queries and of keys a number of each token, all-reduced
        once = 2 * (parallel.tp - 1) / parallel.tp * 2 * 4 * shape.t
        ahead, back = ahead + once, back + once * (2 if recomputed else 1)
    gradients = keys + whole * 4 / shape.item if shape.ring else keys
    return SentBytes(tp=ahead, cp=keys), SentBytes(tp=back, cp=gradients + (keys if recomputed else 0))


def _feed_forward(
    config: TrainConfig, shape: Shape, parallel: ParallelConfig, *, experts: bool
) -> tuple[SentBytes, SentBytes]:
    recomputed, behind = config.train.recompute == "full", config.model.norm_position != "pre"
    if not experts:
        ahead, back = _part(shape, parallel, recomputed=recomputed, to_its_end=behind)
        return SentBytes(tp=ahead), SentBytes(tp=back)
    others = 1 - 1 / (parallel.ep * parallel.tp)
    rows = 2 * shape.rows * shape.h * shape.item * others  # to the experts and back
    ahead = back = 0.0
    if shape.shared_f:
        ahead, back = _part(shape, parallel, recomputed=recomputed, to_its_end=recomputed)
    if not parallel.sequence:  # shares of the same tokens: results are gathered, and gradients of what was cut
        once = (parallel.tp - 1) / parallel.tp * shape.t * shape.h * shape.item
        ahead, back = ahead + once, back + once * (1 + (shape.shared_f > 0) + (recomputed and behind))
    return SentBytes(tp=ahead, ep=rows), SentBytes(tp=back, ep=rows * (2 if recomputed else 1))


def _part(shape: Shape, parallel: ParallelConfig, *, recomputed: bool, to_its_end: bool) -> tuple[float, float]:
    """Over tp for one of a layer's two parts: (forward, backward). [Note: what backward repeats]"""
    once = (parallel.tp - 1) / parallel.tp * shape.t * shape.h * shape.item
    if parallel.sequence:  # gathered before and scattered behind, and the same of gradients; what was gathered again
        return 2 * once, (3 + (recomputed and to_its_end) + (recomputed and parallel.entry.split)) * once
    return 2 * once, (2 + 2 * (recomputed and to_its_end)) * once


def _latent_part(
    config: TrainConfig, shape: Shape, parallel: ParallelConfig, *, recomputed: bool, to_its_end: bool
) -> tuple[float, float]:
    """``_part`` of latent attention: latents are gathered in place of hidden states, and kept. Without a latent of
    queries hidden states travel for these."""
    model = config.model
    share = (parallel.tp - 1) / parallel.tp * shape.t * shape.item
    once, latents = share * shape.h, share * (model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim)
    queries = 0.0 if model.q_lora_rank else once
    if not parallel.sequence:
        return 2 * once, 2 * (latents + queries) + 2 * once * (recomputed and to_its_end)
    back = once + latents + 2 * queries + latents * recomputed + once * (recomputed and to_its_end)
    return once + latents + queries, back + queries * (recomputed and parallel.entry.split)


def ends_sent(shape: Shape, parallel: ParallelConfig, *, first: bool, last: bool) -> tuple[SentBytes, SentBytes]:
    """Of the embedding and of the head with its loss, on the stages that have them: (forward, backward)."""
    share = (parallel.tp - 1) / parallel.tp
    once = share * shape.t * shape.h * shape.item
    ahead = back = 0.0
    if first:
        ahead += once if parallel.sequence else 2 * once
        back += once if parallel.sequence else 0
    if last:
        ahead += (once if parallel.sequence else 0) + share * 2 * 3 * 4 * shape.t  # maxima, sums, target logits
        back += 2 * once
    return SentBytes(tp=ahead), SentBytes(tp=back)


def stage_sent(
    config: TrainConfig, shape: Shape, parallel: ParallelConfig, layers: Sequence[int], *, first: bool, last: bool
) -> tuple[SentBytes, SentBytes]:
    """Of a stage of ``layers`` and a microbatch: (forward, backward)."""
    ahead, back = ends_sent(shape, parallel, first=first, last=last)
    sparse = sum(map(config.model.has_experts, layers))
    for experts, count in ((False, len(layers) - sparse), (True, sparse)):
        if count:
            forward, backward = layer_sent(config, shape, parallel, experts=experts)
            ahead, back = ahead + forward.times(count), back + backward.times(count)
    return ahead, back


def tp_sums(config: TrainConfig, parallel: ParallelConfig, layers: Sequence[int], *, last: bool) -> float:
    """Over tp in a step, for gradients of weights that all of its ranks have: an all-reduce of this rank's shards."""
    shard = 1 if parallel.sharding == "no_shard" else ranks_of(parallel, experts=False)[0]
    numel = summed_numel(config, layers, sequence=parallel.sequence, last=last)
    return 2 * (parallel.tp - 1) / parallel.tp * 4 * numel / shard


def dp_bytes(config: TrainConfig, parallel: ParallelConfig, units: Sequence[Unit], moved: Mapping[str, int]) -> float:
    """Bytes that a rank sends over dp x cp in a step: rings of as many models as ``moved`` says of each collective.

    Experts travel among the ranks that share them alone.
    """
    formats, sent = formats_of(config, parallel), 0.0
    for experts in (False, True):
        shard, copies = ranks_of(parallel, experts=experts)
        streams = [stream for unit in units for stream in unit.streams if stream.experts is experts]
        numel, part = sum(stream.numel for stream in streams if not stream.frozen), (shard - 1) / shard
        sent += sum(wire_bytes(stream, formats) for stream in streams) * part * moved["all_gather"]
        sent += numel * part * (moved["reduce_scatter"] + 2 * moved["all_reduce"]) * formats.reduce
        if copies > 1:
            times = max(moved["reduce_scatter"], moved["all_reduce"])
            over = numel / shard if ShardingStrategy(parallel.sharding).shards_optimizer else numel
            sent += 2 * (copies - 1) / copies * over * formats.main * times
    return sent
