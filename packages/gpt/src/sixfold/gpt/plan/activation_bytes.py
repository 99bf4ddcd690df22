"""What one forward of a stage keeps for its backward, and what backward needs beside it.

    config, layers, device --> activations (this file) --> plan.py

Integers only. Counted is every storage that autograd saves, once, parameters apart: the model of decoder.py,
attention.py, norm.py and loss.py, tensor by tensor; a test compares it with ``saved_tensors_hooks``.

t tokens of a micro-batch on this rank (rows * length / cp), h hidden size, q and k widths of queries and of keys, f
width of the feed-forward part; q, k and f are those of a tensor-parallel rank. With sequence parallelism what lies
between two blocks is cut over tp, and what the linears read is gathered again in backward: it is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sixfold.gpt.config.lora import ATTENTION, FEED_FORWARD

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig

QUERY_BLOCK, BLOCKS_LONGEST = 128, 512  # as attention.py, which needs torch; a test compares
_LOSS_CHUNK = {"cpu": 2**18}  # float32 elements, as loss.py
_LOSS_CHUNK_ELSEWHERE = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a micro-batch on one rank: see the module's names; ``item`` are bytes of an activation.

    Attributes:
        s: length of a row on all ranks of cp; t: tokens here.
        ring: keys are passed around, else gathered.
        between: ranks over which what lies between blocks is cut.
        repeats: query heads that share a key head.
        routed: tokens whose experts this rank chooses; rows: what its experts get, in equal shares of all.
    """

    b: int
    s: int
    t: int
    h: int
    q: int
    k: int
    f: int
    heads: int
    head_dim: int
    vocab: int
    tp: int
    cp: int
    ring: bool
    item: int
    between: int
    repeats: int
    routed: int
    rows: int
    expert_f: int
    shared_f: int

    @classmethod
    def of(cls, config: TrainConfig, parallel: ParallelConfig) -> Shape:
        """Of ``config`` at the degrees of ``parallel``."""
        model, tp, cp = config.model, parallel.tp, parallel.cp
        b, s = config.train.micro_batch_size, config.data.seq_length
        return cls(
            b=b,
            s=s,
            t=b * s // cp,
            h=model.hidden_size,
            q=model.num_attention_heads * model.head_dim // tp,
            k=model.num_query_groups * model.head_dim // tp,
            f=model.ffn_hidden_size // tp,
            heads=model.num_attention_heads // tp,
            head_dim=model.head_dim,
            vocab=model.padded_vocab_size // tp,
            tp=tp,
            cp=cp,
            ring=cp > 1 and parallel.cp_comm_type == "p2p",
            item=4 if config.train.precision == "fp32" else 2,
            between=tp if parallel.sequence else 1,
            repeats=model.num_attention_heads // model.num_query_groups,
            routed=-(-b * s // cp // tp),
            rows=b * s // cp * model.experts_per_token,
            expert_f=model.moe_ffn_hidden_size // tp,
            shared_f=model.shared_ffn_hidden_size // tp,
        )

    @property
    def hidden_bytes(self) -> int:
        """Of hidden states of a micro-batch, as they go from stage to stage."""
        return self.t * self.h * self.item // self.between

    @property
    def gathers_keys(self) -> bool:
        """Keys of whole rows are here during attention, of which the rank has a part."""
        return self.cp > 1 and not self.ring


def windowed(config: TrainConfig, shape: Shape, layer: int) -> bool:
    """A window of ``layer`` is shorter than the row."""
    return config.model.seen_keys(layer, shape.s) < shape.s


def attention_backend(config: TrainConfig, shape: Shape, device: str, layer: int) -> str:
    """As attention.py chooses it."""
    if shape.ring:
        return "ring"
    if device == "cpu" and config.data.seq_length <= BLOCKS_LONGEST:
        return "blocks"
    if config.model.attn_logit_softcapping:
        return "math"
    if device == "cpu":
        return "sdpa"
    parts = config.data.document_mask or windowed(config, shape, layer)
    return "varlen" if parts and config.train.precision != "fp32" else "sdpa"


def norm_bytes(shape: Shape) -> int:
    """Of an RMSNorm between blocks: the unit vectors and a scale of each token."""
    return (shape.t * shape.h * shape.item + 4 * shape.t) // shape.between


def post_norm_bytes(config: TrainConfig, shape: Shape) -> int:
    """Of a second norm of a layer's part. If the only norm is behind it, what it reads is kept in the other's place."""
    return norm_bytes(shape) if config.model.norm_position == "both" else 0


def adapter_bytes(config: TrainConfig, shape: Shape, among: Sequence[str]) -> int:
    """Of the adapters of the linears ``among``: the outputs of A."""
    return config.lora.rank * shape.t * shape.item * len(set(among) & set(config.lora.targets))


def attention_bytes(config: TrainConfig, shape: Shape, device: str, layer: int) -> int:
    """Of attention and its norm: norm, its output, what the back end saves, what the output matrix reads."""
    item, t = shape.item, shape.t
    found = post_norm_bytes(config, shape) + norm_bytes(shape) + shape.hidden_bytes
    found += adapter_bytes(config, shape, ATTENTION)
    if config.model.qk_norm:
        whole = config.model.qk_norm_over == "projection"
        scales = 2 if whole else shape.heads + shape.heads // shape.repeats
        found += t * (shape.q + shape.k) * item + 4 * t * scales
    found += t * shape.q * item + _core_bytes(config, shape, device, layer)  # queries first
    if not config.model.kv_lora_rank:
        return found + t * shape.q * item  # attention's result
    # Of values that were padded the back end keeps the whole result, but for blocks, and the output matrix what is cut.
    padded = 0 if attention_backend(config, shape, device, layer) == "blocks" else t * shape.q * item
    return found + padded + t * shape.heads * config.model.v_head_dim * item + _latent_bytes(config, shape)


def _latent_bytes(config: TrainConfig, shape: Shape) -> int:
    """Latents, behind their norms and, over tp, as they were gathered: the matrices read parts of that."""
    model = config.model
    normed = model.q_lora_rank + model.kv_lora_rank
    norms = shape.t * (normed * shape.item + 4 * (1 + (model.q_lora_rank > 0))) // shape.between
    together = shape.t * (normed + model.qk_rope_head_dim) * shape.item
    return norms + together + (together // shape.between if shape.between > 1 else 0)


def _core_bytes(config: TrainConfig, shape: Shape, device: str, layer: int) -> int:
    """Keys, values and what else the back end saves beside queries and result."""
    backend, item = attention_backend(config, shape, device, layer), shape.item
    normaliser = 4 * shape.t * shape.heads
    if backend == "ring":
        return 2 * shape.t * shape.k * item + normaliser
    keys = shape.b * shape.s if shape.gathers_keys else shape.t
    if backend == "blocks":
        return 2 * keys * shape.k * item + probabilities(shape) * item
    if backend == "math":
        return normaliser + 2 * keys * shape.k * item
    # Keys are repeated where the kernel groups no queries itself.
    groups = shape.repeats == 1 or (device != "cpu" and config.train.precision != "fp32")
    found = normaliser
    if shape.gathers_keys and device != "cpu":
        if backend == "varlen":  # one segment after the other: at most the keys up to the ends of both chunks
            keys += keys // (2 * shape.cp)
        elif not config.data.document_mask and not windowed(
            config, shape, layer
        ):  # the results of two chunks, and both together
            found += shape.t * shape.q * item
    return found + 2 * keys * (shape.k if groups else shape.q) * item


def probabilities(shape: Shape) -> int:
    """Elements of blocks of queries times the keys up to their end; of the rank of cp that has most."""
    chunk = shape.s // (2 * shape.cp)
    chunks: list[tuple[tuple[int, int], ...]] = [((0, shape.s),)]
    if shape.cp > 1:
        begins = ((r * chunk, shape.s - (r + 1) * chunk) for r in range(shape.cp))
        chunks = [tuple((begin, begin + chunk) for begin in pair) for pair in begins]
    return shape.b * shape.heads * max(sum(map(_seen, spans)) for spans in chunks)


def _seen(span: tuple[int, int]) -> int:
    first, last = span
    ends = [min(begin + QUERY_BLOCK, last) for begin in range(first, last, QUERY_BLOCK)]
    return sum((end - begin) * end for begin, end in zip([first, *ends], ends, strict=False))


def feed_forward_bytes(shape: Shape) -> int:
    """Of the feed-forward part and its norm: gate, up, silu(gate) and their product."""
    return norm_bytes(shape) + shape.hidden_bytes + 4 * shape.t * shape.f * shape.item


def expert_bytes(config: TrainConfig, shape: Shape) -> int:
    """Of a mixture of experts and its norm: probabilities and choices, rows of the experts with gate and up, results.

    Expected, with equally many tokens for each expert; the most that can be is a multiple of it.
    """
    model, item, n = config.model, shape.item, shape.routed
    k = model.experts_per_token
    found = norm_bytes(shape) + n * shape.h * item + 4 * n * model.num_experts + 8 * n * k
    if shape.tp > shape.between and shape.shared_f:  # besides its share the tokens that all tensor-parallel ranks have
        found += shape.hidden_bytes
    found += 4 * n * k + ((4 * n * k + 4 * n) if model.norm_topk_prob else 0)
    found += shape.rows * (shape.h + 2 * shape.expert_f) * item + n * k * shape.h * item
    found += 4 * shape.t * shape.shared_f * item
    if model.shared_expert_gate:
        found += n * (shape.h + 1) * item
    return found


def second_part_bytes(config: TrainConfig, shape: Shape, layer: int) -> int:
    """Of a layer behind attention."""
    second = expert_bytes(config, shape) if config.model.has_experts(layer) else feed_forward_bytes(shape)
    if not config.model.has_experts(layer):
        second += adapter_bytes(config, shape, FEED_FORWARD)
    return second + post_norm_bytes(config, shape)


def index_bytes(config: TrainConfig, shape: Shape, layers: Sequence[int]) -> int:
    """Which row is whose, in layers with experts: kept for backward beside what autograd saves."""
    if config.train.recompute == "full":
        return 0
    travelled = 2 * shape.rows if shape.rows != shape.routed * config.model.experts_per_token else 0
    each = 8 * (2 * shape.routed * config.model.experts_per_token + travelled)
    return each * sum(map(config.model.has_experts, layers))


def dropout_bytes(config: TrainConfig, shape: Shape) -> int:
    """Of dropout in a layer: a byte for each element of its two parts, which says whether it stays."""
    return 2 * shape.t * shape.h // shape.between if config.train.hidden_dropout else 0


def layer_bytes(config: TrainConfig, shape: Shape, device: str, layer: int) -> int:
    """What a layer keeps until its backward."""
    recompute = config.train.recompute
    if recompute == "full":
        return shape.hidden_bytes
    second = second_part_bytes(config, shape, layer) + dropout_bytes(config, shape)
    return second + (shape.hidden_bytes if recompute == "selective" else attention_bytes(config, shape, device, layer))


def shared_bytes(config: TrainConfig, shape: Shape, device: str, layers: Sequence[int]) -> int:
    """What layers of a stage share: tables of the rotary positions, and a mask where the back end takes one.

    Layers that slide and others have a mask each.
    """
    rows = shape.b if config.data.document_mask else 1
    length = shape.t // shape.b
    kinds = {config.model.slides(layer): layer for layer in layers}
    tables = len(kinds) if config.model.rope_local_base_freq else 1
    found = 2 * tables * rows * length * config.model.rotated * shape.item
    masked = config.data.document_mask or (shape.cp > 1 and device == "cpu")
    for layer in kinds.values():
        if attention_backend(config, shape, device, layer) == "sdpa" and (masked or windowed(config, shape, layer)):
            found += rows * length * shape.s * shape.item
    return found


def head_bytes(shape: Shape) -> int:
    """Of the last norm, the head and the loss: logits, and of each token its target, normaliser and mask.

    A vocabulary over several ranks takes another mask: of targets that are here.
    """
    normed = norm_bytes(shape) + shape.hidden_bytes
    return normed + shape.t * (shape.vocab * shape.item + 8 + 4 + 1 + (shape.tp > 1))


def stage_bytes(
    config: TrainConfig, shape: Shape, device: str, *, layers: Sequence[int], first: bool, last: bool
) -> int:
    """What one forward of a stage saves, parameters apart, the loss included."""
    found = sum(layer_bytes(config, shape, device, layer) for layer in layers)
    if layers and config.train.recompute == "none":
        found += shared_bytes(config, shape, device, layers)
    tokens = shape.t * (8 + (shape.tp > 1))  # and which of them are in this rank's rows
    tokens += shape.t * shape.h // shape.between if config.train.embedding_dropout else 0
    return found + (tokens if first else 0) + (head_bytes(shape) if last else 0)


def backward_bytes(
    config: TrainConfig, shape: Shape, device: str, *, layers: Sequence[int], last: bool, gradients: int
) -> int:
    """What backward needs at its worst moment beside all that was saved; an estimate from above.

    Either the gradient of the logits and a chunk of them in float32, or what a layer computes again, two gradients as
    wide as its widest part, and what sequence parallelism gathers. Beside either ``gradients`` elements of weights'
    gradients before they are added to a sum.
    """
    weights, worst = gradients * shape.item, 0
    if last:
        chunk = min(shape.t * shape.vocab, _LOSS_CHUNK.get(device, _LOSS_CHUNK_ELSEWHERE))
        worst = shape.t * shape.vocab * shape.item + 8 * chunk + weights
    for layer in layers:
        again = {
            "none": 0,
            "selective": attention_bytes(config, shape, device, layer),
            "full": attention_bytes(config, shape, device, layer)
            + second_part_bytes(config, shape, layer)
            + dropout_bytes(config, shape),
        }[config.train.recompute]
        inside = again + max(_attention_gradients(shape), _second_gradients(config, shape, layer))
        worst = max(worst, inside + weights)
    return worst


def _attention_gradients(shape: Shape) -> int:
    """Two of the widest, what sequence parallelism gathers, and gradients of the keys of other ranks."""
    gathered = shape.t * shape.h * shape.item if shape.between > 1 else 0
    if shape.gathers_keys:  # as they are made, sent and received
        gathered += 3 * 2 * shape.b * shape.s * shape.k * shape.item
    if shape.ring:  # queries' in float32; keys' here, on their way in and out; keys on their way
        gathered += 4 * shape.t * shape.q + 2 * shape.t * shape.k * (3 * 4 + 2 * shape.item)
    return gathered + 2 * shape.t * max(shape.q, shape.h) * shape.item


def _second_gradients(config: TrainConfig, shape: Shape, layer: int) -> int:
    gathered = shape.t * shape.h * shape.item if shape.between > 1 else 0
    if not config.model.has_experts(layer):
        return gathered + 2 * shape.t * max(shape.f, shape.h) * shape.item
    # Everything between gate, up and down once, and rows as they come, are sorted and go.
    return gathered + shape.rows * (7 * shape.expert_f + 3 * shape.h) * shape.item
