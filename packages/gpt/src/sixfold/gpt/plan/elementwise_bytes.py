"""Bytes that operators without matrix products read and write for one microbatch of a stage.

    config, Shape, layers --> ElementwiseBytes (this file) --> stage_times.py: seconds at the memory's rate

Norms, rotary positions, activations, residuals, sums of gradients, the loss. Counted operator by operator in norm.py,
rope.py, decoder.py and loss.py: each reads its inputs and writes its result once. Compiled, a layer's chains are one
kernel each, which reads what enters the chain and writes what leaves it; the loss is not compiled. Integers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sixfold.gpt.plan.activation_bytes import Shape, attention_backend, probabilities

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementwiseBytes:
    """Bytes read and written: in forward, in backward (recomputation included)."""

    forward: float
    backward: float

    def __add__(self, other: ElementwiseBytes) -> ElementwiseBytes:
        return ElementwiseBytes(forward=self.forward + other.forward, backward=self.backward + other.backward)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passes:
    """How often each part goes over its elements, in elements of the activations' dtype: forward, backward.

    Attributes:
        norm, residual: of a hidden state; rotary: of a query or key; swiglu: of a feed-forward width.
    """

    norm: tuple[float, float]
    rotary: tuple[float, float]
    swiglu: tuple[float, float]
    residual: tuple[float, float]


# A norm in bf16 casts to float32 and back: an element of float32 counts as two. Residual: the sum itself; in backward
# the sum of both ways' gradients, and those of what q, k, v and gate, up read.
_EAGER_HALF = _Passes(norm=(13, 20), rotary=(7, 7), swiglu=(5, 9), residual=(3, 7.5))
_EAGER_FULL = _Passes(norm=(5, 12), rotary=(7, 7), swiglu=(5, 9), residual=(3, 7.5))
_COMPILED = _Passes(norm=(3, 4), rotary=(2, 2), swiglu=(3, 5), residual=(2, 4.5))
_PROBABILITIES = (6, 8)  # of the CPU's blocks of attention: mask, softmax; a flash kernel writes none
_DROPPED = (96, 5)  # bytes of an element: its share of a 64-bit word's hash, eleven passes; what stays, and its scale
_ROWS = (4, 6)  # of an expert's rows: sorted, sent back, weighted and summed
# Bytes of a logit, beside its own item: cast to float32, logsumexp; cast, difference, exp, product, cast back.
_LOSS = (20, 34)


def elementwise_bytes(
    config: TrainConfig, shape: Shape, device: str, layers: Sequence[int], *, last: bool, fused: bool
) -> ElementwiseBytes:
    """Of a stage of ``layers`` (their global numbers) and a microbatch.

    Args:
        fused: chains of operators are one kernel each, as ``train.compile`` makes them and Megatron-Core has them.
    """
    passes = _passes(config, fused=fused)
    found = ElementwiseBytes(forward=0.0, backward=0.0)
    sparse = sum(map(config.model.has_experts, layers))
    for experts, count in ((False, len(layers) - sparse), (True, sparse)):
        one = _layer(config, shape, device, passes, experts=experts)
        found += ElementwiseBytes(forward=count * one.forward, backward=count * one.backward)
    if last:
        hidden = shape.t * shape.h * shape.item / shape.between
        norm = passes.norm
        logits = shape.t * shape.vocab
        found += ElementwiseBytes(
            forward=norm[0] * hidden + logits * (_LOSS[0] + shape.item),
            backward=norm[1] * hidden + logits * (_LOSS[1] + shape.item),
        )
    return found


def _layer(config: TrainConfig, shape: Shape, device: str, passes: _Passes, *, experts: bool) -> ElementwiseBytes:
    first, second = _attention(config, shape, device, passes), _second(config, shape, passes, experts=experts)
    elements = 2 * shape.t * shape.h / shape.between if config.train.hidden_dropout else 0
    dropped = ElementwiseBytes(
        forward=elements * (_DROPPED[0] + 3 * shape.item), backward=elements * (_DROPPED[1] + 3 * shape.item)
    )
    whole = first.forward + second.forward + dropped.forward
    again = {"none": 0.0, "selective": first.forward, "full": whole}[config.train.recompute]
    return first + second + dropped + ElementwiseBytes(forward=0.0, backward=again)


def _attention(config: TrainConfig, shape: Shape, device: str, passes: _Passes) -> ElementwiseBytes:
    """A norm, rotary positions, a residual; and probabilities where the back end writes them."""
    hidden = shape.t * shape.h * shape.item / shape.between
    between = config.model.layer_norms / 2  # norms of hidden states, of this half of a layer
    heads = shape.t * (shape.q + shape.k) * shape.item
    written = probabilities(shape) * shape.item if attention_backend(config, shape, device, 0) == "blocks" else 0
    norms = 2.0 if config.model.qk_norm else 0.0
    return ElementwiseBytes(
        forward=(between * passes.norm[0] + passes.residual[0]) * hidden
        + (passes.rotary[0] + norms / 2 * passes.norm[0]) * heads
        + _PROBABILITIES[0] * written,
        backward=(between * passes.norm[1] + passes.residual[1]) * hidden
        + (passes.rotary[1] + norms / 2 * passes.norm[1]) * heads
        + _PROBABILITIES[1] * written,
    )


def _second(config: TrainConfig, shape: Shape, passes: _Passes, *, experts: bool) -> ElementwiseBytes:
    norms = config.model.layer_norms / 2
    hidden = shape.t * shape.h * shape.item / shape.between
    wide, rows = shape.t * shape.f * shape.item, 0
    if experts:
        wide = (shape.rows * shape.expert_f + shape.t * shape.shared_f) * shape.item
        rows = shape.rows * shape.h * shape.item
    return ElementwiseBytes(
        forward=(norms * passes.norm[0] + passes.residual[0]) * hidden + passes.swiglu[0] * wide + _ROWS[0] * rows,
        backward=(norms * passes.norm[1] + passes.residual[1]) * hidden + passes.swiglu[1] * wide + _ROWS[1] * rows,
    )


def _passes(config: TrainConfig, *, fused: bool) -> _Passes:
    if fused:
        return _COMPILED
    return _EAGER_FULL if config.train.precision == "fp32" else _EAGER_HALF
