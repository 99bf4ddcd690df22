"""One stream of a unit: parameters that are sharded over one mesh and are all trainable, or all frozen.

    layout.py --> ParamAndGradBuffer (this file) = cut + weights + gradients + records --> units.py

Puts the parts together; starts no collective and installs no hook. A frozen stream is one of its own: a layout
shared with trainable parameters would give gathers and reductions different owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import nn

from sixfold.fsdp.comm import Ranks
from sixfold.fsdp.config import MixedPrecision, ShardingStrategy
from sixfold.fsdp.flat import Cut, DataParallelBuffer, ParamRecord
from sixfold.fsdp.gradients import Gradients
from sixfold.fsdp.layout import TensorSpec, plan_layout
from sixfold.fsdp.weights import Weights

__all__ = ["DataParallelBuffer", "Granularity", "ParamAndGradBuffer"]

Granularity = Callable[[str, nn.Parameter], str | int]


class ParamAndGradBuffer:
    """The memory of one stream.

    Attributes:
        unit: its unit's name.
        ranks: the mesh it is sharded over.
        cut: where its elements lie here.
        weights, gradients, records: what lies there; ``gradients`` stay idle where ``trainable`` is False.
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
    ) -> None:
        self.unit = unit
        self.ranks = ranks
        self.device = device
        self.trainable = any(parameter.requires_grad for _, parameter in parameters)
        dtypes = [precision.param_dtype or parameter.dtype for _, parameter in parameters]
        gather_dtype = reduce(torch.promote_types, dtypes)
        narrow = min((gather_dtype, precision.main_dtype), key=lambda dtype: dtype.itemsize)
        specs = [
            TensorSpec(name, tuple(p.shape), narrow, granularity(name, p) if granularity else "element")
            for name, p in parameters
        ]
        self.cut = _cut(specs, ranks, strategy, narrow.itemsize, align_bytes)
        self.records = [
            ParamRecord(name, parameter, spec, dtype, self)
            for (name, parameter), spec, dtype in zip(parameters, specs, dtypes, strict=True)
        ]
        self.weights = Weights(
            self.records,
            self.cut,
            gather_dtype=gather_dtype,
            main_dtype=precision.main_dtype,
            shards_params=strategy.shards_params,
            device=device,
        )
        self.gradients = Gradients(
            unit,
            self.records,
            self.cut,
            main_dtype=precision.main_dtype,
            shards_grads=strategy.shards_grads,
            device=device,
        )


def _cut(specs: Sequence[TensorSpec], ranks: Ranks, strategy: ShardingStrategy, itemsize: int, align_bytes: int) -> Cut:
    parts = ranks.shard.size if strategy.shards_optimizer else 1
    layout = plan_layout(specs, parts, align_bytes=align_bytes)
    numel = parts * (layout.shard_bytes // itemsize)
    # Whole sums are cut in as many equal pieces as there are ranks by grad_sum="rank_order" under no_shard too.
    full_numel = -(-numel // ranks.shard.size) * ranks.shard.size
    return Cut(layout=layout, itemsize=itemsize, part=ranks.shard.rank if parts > 1 else 0, full_numel=full_numel)
