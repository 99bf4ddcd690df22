"""One flat buffer of a unit: parameters that are sharded over one mesh and are all trainable, or all frozen.

    layout.py --> ParamAndGradBuffer (this file) = cut + weights + gradients + records --> unit.py

Puts the parts together; starts no collective and installs no hook. Frozen parameters have a flat buffer of their own:
a layout shared with trainable ones would give gathers and reductions different owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from sixfold.fsdp.buffers.column_ranges import round_up
from sixfold.fsdp.buffers.flat_tensor import Cut, DataParallelBuffer, ParamRecord
from sixfold.fsdp.buffers.gradients import Gradients
from sixfold.fsdp.buffers.layout import TensorSpec
from sixfold.fsdp.buffers.packing import Packing, pack
from sixfold.fsdp.buffers.weights import Weights
from sixfold.fsdp.collectives.comm import Ranks
from sixfold.fsdp.config import MixedPrecision, ShardingStrategy
from sixfold.fsdp.fp8.quantized import FP8
from sixfold.fsdp.fp8.scaled_matmul import Fp8Matmul

__all__ = ["DataParallelBuffer", "Granularity", "ParamAndGradBuffer"]

Granularity = Callable[[str, nn.Parameter], str | int]


class ParamAndGradBuffer:
    """A flat buffer: weights and gradients of its parameters, in one layout.

    Args:
        held: bytes of whole tensors that each rank owns in other flat buffers of this mesh; see ``plan_layout``.
    Attributes:
        unit: its unit's name.
        ranks: the mesh it is sharded over.
        cut: where its elements lie here.
        weights, gradients, records: what lies there; ``gradients`` stay idle where ``trainable`` is False.
        all_reduced: every rank needs all of a sum. A group of one scatters where weights are sharded: it tries
            what more ranks do.
    """

    def __init__(
        self,
        unit: str,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        ranks: Ranks,
        strategy: ShardingStrategy,
        precision: MixedPrecision,
        align_bytes: int,
        device: torch.device,
        granularity: Granularity | None = None,
        held: Sequence[int] | None = None,
    ) -> None:
        self.unit = unit
        self.ranks = ranks
        self.device = device
        self.trainable = any(parameter.requires_grad for _, parameter in parameters)
        fp8 = frozenset(name for name, _ in parameters if precision.fp8 is not None and precision.fp8(name))
        packing = pack(
            [
                TensorSpec(
                    name,
                    tuple(parameter.shape),
                    FP8 if name in fp8 else precision.param_dtype or parameter.dtype,
                    granularity(name, parameter) if granularity else "element",
                )
                for name, parameter in parameters
            ],
            ranks.shard.size if strategy.shards_optimizer else 1,
            main_itemsize=precision.main_dtype.itemsize,
            align_bytes=align_bytes,
            held=held,
        )
        self.cut = _cut(packing, ranks)
        self.all_reduced = self.cut.parts == 1 and not strategy.shards_params
        self.records = [
            ParamRecord(name, parameter, spec, precision.param_dtype or parameter.dtype, self)
            for (name, parameter), spec in zip(parameters, packing.layout.specs, strict=True)
        ]
        self.weights = Weights(
            self.records,
            self.cut,
            pitch=packing.pitch,
            fp8=fp8,
            matmul=Fp8Matmul(precision.fp8_matmul),
            main_dtype=precision.main_dtype,
            shards_params=strategy.shards_params,
            device=device,
        )
        self.gradients = Gradients(
            unit,
            self.records,
            self.cut,
            main_dtype=precision.main_dtype,
            grad_dtype=precision.grad_dtype,
            shards_grads=strategy.shards_grads,
            device=device,
            tree=precision.grad_sum == "tree",
        )


def _cut(packing: Packing, ranks: Ranks) -> Cut:
    # Whole sums are cut in as many equal pieces as there are ranks by grad_sum="rank_order" under no_shard too.
    full_numel = round_up(packing.positions, ranks.shard.size)
    part = ranks.shard.rank if packing.layout.world_size > 1 else 0
    return Cut(layout=packing.layout, itemsize=packing.itemsize, part=part, full_numel=full_numel)
