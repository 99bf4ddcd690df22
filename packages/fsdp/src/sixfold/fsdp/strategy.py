"""The sharding strategies, and the check of a value among named ones.

    ShardingStrategy (this file) --> config.py, cost_model.py

It needs no torch: the cost model uses it without.
"""

from __future__ import annotations

from enum import Enum, StrEnum

from sixfold.fsdp.errors import FsdpError


class ShardingStrategy(StrEnum):
    """What is split over the data-parallel group: ZeRO 0, 1, 2, 3 as one switch."""

    no_shard = "no_shard"
    optim = "optim"
    optim_grads = "optim_grads"
    optim_grads_params = "optim_grads_params"

    @property
    def shards_optimizer(self) -> bool:
        """Main weights and optimizer state are split (ZeRO-1 and up)."""
        return self is not ShardingStrategy.no_shard

    @property
    def shards_grads(self) -> bool:
        """Gradients are reduced to shards in every micro-batch (ZeRO-2 and up)."""
        return self in (ShardingStrategy.optim_grads, ShardingStrategy.optim_grads_params)

    @property
    def shards_params(self) -> bool:
        """Compute weights are gathered before use and freed after it (ZeRO-3)."""
        return self is ShardingStrategy.optim_grads_params


def one_of(field: str, value: object, allowed: tuple[str, ...]) -> str:
    """``value`` as text if it is one of ``allowed``, else FsdpError naming both."""
    text = value.value if isinstance(value, Enum) else value
    if not isinstance(text, str) or text not in allowed:
        raise FsdpError(f"{field} is {value!r}; it is one of {', '.join(allowed)}")
    return text
