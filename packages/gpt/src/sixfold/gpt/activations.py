"""What one forward of a stage keeps for its backward, and what backward needs beside it.

    config, layers, device --> activations (this file) --> plan.py

Integers only. Counted is every storage that autograd saves, once, parameters apart: the model of model.py,
attention.py, norm.py and loss.py, tensor by tensor; a test compares it with ``saved_tensors_hooks``.

t tokens of a micro-batch on this rank (rows * length / cp), h hidden size, q and k widths of queries and of keys, f
width of the feed-forward part; q, k and f are those of a tensor-parallel rank. With sequence parallelism what lies
between two blocks is cut over tp, and what the linears read is gathered again in backward: it is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sixfold.gpt.config import ParallelConfig, TrainConfig

QUERY_BLOCK, BLOCKS_LONGEST = 128, 512  # as attention.py, which needs torch; a test compares
_LOSS_CHUNK = {"cpu": 2**18}  # float32 elements, as loss.py
_LOSS_CHUNK_ELSEWHERE = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a micro-batch on one rank: see the module's names; ``item`` are bytes of an activation."""

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
    item: int
    between: int  # ranks over which what lies between blocks is cut
    repeats: int

    @classmethod
    def of(cls, config: TrainConfig, parallel: ParallelConfig) -> Shape:
        """Of ``config`` at the degrees of ``parallel``."""
        model, tp = config.model, parallel.tp
        b, s = config.train.micro_batch_size, config.data.seq_length
        return cls(
            b=b,
            s=s,
            t=b * s // parallel.cp,
            h=model.hidden_size,
            q=model.num_attention_heads * model.head_dim // tp,
            k=model.num_query_groups * model.head_dim // tp,
            f=model.ffn_hidden_size // tp,
            heads=model.num_attention_heads // tp,
            head_dim=model.head_dim,
            vocab=model.padded_vocab_size // tp,
            tp=tp,
            item=4 if config.train.precision == "fp32" else 2,
            between=tp if parallel.sequence else 1,
            repeats=model.num_attention_heads // model.num_query_groups,
        )

    @property
    def hidden_bytes(self) -> int:
        """Of hidden states of a micro-batch, as they go from stage to stage."""
        return self.t * self.h * self.item // self.between


def attention_backend(config: TrainConfig, device: str) -> str:
    """As attention.py chooses it."""
    if device == "cpu":
        return "blocks" if config.data.seq_length <= BLOCKS_LONGEST else "sdpa"
    return "varlen" if config.data.document_mask and config.train.precision != "fp32" else "sdpa"


def norm_bytes(shape: Shape) -> int:
    """Of an RMSNorm between blocks: the unit vectors and a scale of each token."""
    return (shape.t * shape.h * shape.item + 4 * shape.t) // shape.between


def attention_bytes(config: TrainConfig, shape: Shape, device: str) -> int:
    """Of attention and its norm: norm, its output, what the back end saves, what the output matrix reads."""
    backend, item, t = attention_backend(config, device), shape.item, shape.t
    found = norm_bytes(shape) + t * shape.h * item // shape.between
    if config.model.qk_norm:
        found += t * (shape.q + shape.k) * item + 4 * t * (shape.heads + shape.heads // shape.repeats)
    found += 2 * t * shape.q * item  # queries, and attention's result
    if backend == "blocks":
        found += 2 * t * shape.k * item + _probabilities(shape) * item
    else:  # and a normaliser of each query and head; keys are repeated where the kernel groups no queries itself
        groups = shape.repeats == 1 or (device != "cpu" and config.train.precision != "fp32")
        found += 2 * t * (shape.k if groups else shape.q) * item + 4 * t * shape.heads
    return found


def _probabilities(shape: Shape) -> int:
    """Elements of blocks of queries times the keys up to their end."""
    ends = [min(begin + QUERY_BLOCK, shape.s) for begin in range(0, shape.s, QUERY_BLOCK)]
    starts = [0, *ends[:-1]]
    return shape.b * shape.heads * sum((end - begin) * end for begin, end in zip(starts, ends, strict=True))


def feed_forward_bytes(shape: Shape) -> int:
    """Of the feed-forward part and its norm: gate, up, silu(gate) and their product."""
    return norm_bytes(shape) + shape.t * shape.h * shape.item // shape.between + 4 * shape.t * shape.f * shape.item


def layer_bytes(config: TrainConfig, shape: Shape, device: str, layer: int) -> int:
    """What a layer keeps until its backward."""
    recompute = config.train.recompute
    if recompute == "full":
        return shape.hidden_bytes
    if recompute == "selective":
        return shape.hidden_bytes + feed_forward_bytes(shape)
    return attention_bytes(config, shape, device) + feed_forward_bytes(shape)


def shared_bytes(config: TrainConfig, shape: Shape, device: str) -> int:
    """What all layers of a stage share: tables of the rotary positions, and a mask where the back end takes one."""
    rows = shape.b if config.data.document_mask else 1
    length = shape.t // shape.b
    found = 2 * rows * length * shape.head_dim * shape.item
    if attention_backend(config, device) == "sdpa" and config.data.document_mask:
        found += rows * length * shape.s * shape.item
    return found


def head_bytes(shape: Shape) -> int:
    """Of the last norm, the head and the loss: logits, and of each token its target, normaliser and mask.

    A vocabulary over several ranks takes another mask: of targets that are here.
    """
    normed = norm_bytes(shape) + shape.t * shape.h * shape.item // shape.between
    return normed + shape.t * (shape.vocab * shape.item + 8 + 4 + 1 + (shape.tp > 1))


def stage_bytes(
    config: TrainConfig, shape: Shape, device: str, *, layers: Sequence[int], first: bool, last: bool
) -> int:
    """What one forward of a stage saves, parameters apart, the loss included."""
    found = sum(layer_bytes(config, shape, device, layer) for layer in layers)
    if layers and config.train.recompute == "none":
        found += shared_bytes(config, shape, device)
    tokens = shape.t * (8 + (shape.tp > 1))  # and which of them are in this rank's rows
    return found + (tokens if first else 0) + (head_bytes(shape) if last else 0)


def backward_bytes(
    config: TrainConfig, shape: Shape, device: str, *, layers: Sequence[int], last: bool, gradients: int
) -> int:
    """What backward needs at its worst moment beside all that was saved; an estimate from above.

    Either the gradient of the logits and a chunk of them in float32, or what a layer computes again, two gradients as
    wide as its widest part, and what sequence parallelism gathers. Beside either ``gradients`` elements of weights'
    gradients before they are added to a sum.
    """
    weights = gradients * shape.item
    head = layer = 0
    if last:
        chunk = min(shape.t * shape.vocab, _LOSS_CHUNK.get(device, _LOSS_CHUNK_ELSEWHERE))
        head = shape.t * shape.vocab * shape.item + 8 * chunk + weights
    if layers:
        again = {
            "none": 0,
            "selective": attention_bytes(config, shape, device),
            "full": attention_bytes(config, shape, device) + feed_forward_bytes(shape),
        }[config.train.recompute]
        gathered = shape.t * shape.h * shape.item if shape.between > 1 else 0
        layer = again + gathered + 2 * shape.t * max(shape.f, shape.q, shape.h) * shape.item + weights
    return max(head, layer)
