"""Which part of a canonical tensor a tensor- and expert-parallel rank holds.

    canonical name, Cuts --> runs, whole_shape (this file) --> initial_weights.py draws it, training_state.py saves it
                         |-> stretches (this file) --> engine/weight_digests.py
                         `-> replicated (this file) --> norm, sums over tp

Integers only: no torch. Checkpoints hold canonical tensors whole, so nothing in them depends on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

Cut = Mapping[int, tuple[int, int]]  # dimension -> (which part, of how many equal ones)

UNCUT: Cut = MappingProxyType({})

# Dimension of a canonical tensor that tensor parallelism splits, by the ends of its name. Longer ends come first.
_TP: tuple[tuple[str, int], ...] = (
    ("experts.gate.weight", 1), ("experts.up.weight", 1), ("experts.down.weight", 2),
    ("q.weight", 0), ("k.weight", 0), ("v.weight", 0), ("q.bias", 0), ("k.bias", 0), ("v.bias", 0),
    ("attention.out.weight", 1), ("q_b.weight", 0), ("kv_b.weight", 0), ("gate.weight", 0), ("up.weight", 0),
    ("down.weight", 1),
    ("embedding.weight", 0), ("head.weight", 0),
    ("q.lora_b", 0), ("k.lora_b", 0), ("v.lora_b", 0), ("gate.lora_b", 0), ("up.lora_b", 0),
    ("out.lora_a", 1), ("down.lora_a", 1),
)  # fmt: skip
# Tensors of which each tensor-parallel rank, with or without sequence parallelism, has its part of the gradient alone.
_PARTIAL_GRADIENTS = (".lora_a", ".lora_b", "q_norm.weight", "k_norm.weight", "router.weight", "shared_gate.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """Positions of a rank on the axes that cut weights."""

    tp_rank: int = 0
    tp: int = 1
    ep_rank: int = 0
    ep: int = 1

    def of(self, name: str) -> Cut:
        """The part of canonical tensor ``name`` that lies here; dimensions that are whole are left out."""
        found: dict[int, tuple[int, int]] = {}
        if self.ep > 1 and is_expert(name):
            found[0] = self.ep_rank, self.ep
        dimension = _tp_dimension(name)
        if self.tp > 1 and dimension is not None:
            found[dimension] = self.tp_rank, self.tp
        return found

    def replica(self, name: str) -> int:
        """0 on the one tensor-parallel rank whose copy of ``name`` counts, and where ``name`` is split."""
        return self.tp_rank if replicated(name) else 0


WHOLE = Cuts()


def is_expert(name: str) -> bool:
    """A weight with a leading axis of experts, on the experts' own mesh."""
    return ".experts." in name


def replicated(name: str) -> bool:
    """Every tensor-parallel rank has the whole of it.

    Norms, the router, a shared expert's gate, what makes latents, and one matrix of each adapter.
    """
    return _tp_dimension(name) is None


def summed_over_tp(name: str, *, sequence: bool) -> bool:
    """Whether tensor-parallel ranks each have a part of the gradient of ``name``, of which every rank has a copy.

    Norms of queries and keys see the rank's heads, the router and a shared expert's gate the rank's tokens, and with
    sequence parallelism every norm does, and what makes latents. Without it all ranks have the same whole gradients.
    Of an adapter one matrix is cut, so each rank has a part of the other's gradient.
    """
    if not replicated(name):
        return False
    return sequence or name.endswith(_PARTIAL_GRADIENTS)


def whole_shape(cut: Cut, local: Sequence[int]) -> tuple[int, ...]:
    """The canonical shape of a tensor whose part has shape ``local``."""
    return tuple(size * cut.get(dimension, (0, 1))[1] for dimension, size in enumerate(local))


def runs(cut: Cut, local: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Elements ``[start, stop)`` of a flattened part as runs of the flattened canonical tensor, in order.

    Args:
        local: shape of the part.
    Yields:
        First element in the part, first element in the whole, number of elements; a run is contiguous in both.
    """
    whole = whole_shape(cut, local)
    # From this dimension on the part's elements are consecutive in the whole, but for where a run starts.
    inner = max((dimension for dimension, (_, parts) in cut.items() if parts > 1), default=0)
    length = math.prod(local[inner:])
    at = start
    while at < stop:
        index, offset = divmod(at, max(length, 1))
        here = min(length - offset, stop - at)
        yield at, _begin(cut, local, whole, inner, index) + offset, here
        at += here


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """``count`` runs of ``length`` elements, one behind the other in the part, and ``stride`` apart in the whole."""

    at: int  # first element in the part
    whole_at: int  # and in the whole
    length: int
    count: int
    stride: int


def stretches(cut: Cut, local: Sequence[int], start: int, stop: int) -> list[Stretch]:
    """``runs`` with those that repeat evenly as one: the columns of a matrix are a few stretches, whatever its rows."""
    found: list[Stretch] = []
    for at, whole_at, length in runs(cut, local, start, stop):
        last = found[-1] if found else None
        if last is not None and last.length == length:
            gap = whole_at - (last.whole_at + (last.count - 1) * last.stride)
            if last.count == 1 or gap == last.stride:
                found[-1] = replace(last, count=last.count + 1, stride=gap)
                continue
        found.append(Stretch(at=at, whole_at=whole_at, length=length, count=1, stride=0))
    return found


def _begin(cut: Cut, local: Sequence[int], whole: Sequence[int], inner: int, index: int) -> int:
    """Where run ``index`` starts in the flattened whole."""
    at, stride = 0, math.prod(whole[inner:])
    if inner < len(local):
        at = cut.get(inner, (0, 1))[0] * local[inner] * math.prod(whole[inner + 1 :])
    for dimension in range(inner - 1, -1, -1):
        index, coordinate = divmod(index, local[dimension])
        at += (coordinate + cut.get(dimension, (0, 1))[0] * local[dimension]) * stride
        stride *= whole[dimension]
    return at


def _tp_dimension(name: str) -> int | None:
    if name.endswith(("norm.weight", "router.weight", "shared_gate.weight")):
        return None
    return next((dimension for end, dimension in _TP if name.endswith(end)), None)
