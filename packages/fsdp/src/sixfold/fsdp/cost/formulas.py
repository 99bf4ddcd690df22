"""When communication hides behind computation, and what a rank holds: formulas only.

    bandwidth, FLOP/s, model --> thresholds, bytes, collectives (this file) --> terms.py, command.py, formulas.py

Source: the reference slides ("communication hiding"), recomputed; Rajbhandari et al. 2020. Pure arithmetic:
no tensors, no processes. B is bytes/s of one node before the division by tp, F is FLOP/s of one device.
What the slides leave out (latency, ring factor, attention, replicas) is in terms.py; the command of this module,
``python -m sixfold.fsdp.cost_model``, is in command.py.
"""

from __future__ import annotations

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.strategy import ShardingStrategy, one_of

SLIDES_FLOPS = 600e12  # achieved FLOP/s that the slides' numbers follow from
SLIDES_TP = (1, 2, 4, 8)
_STRATEGIES = tuple(strategy.value for strategy in ShardingStrategy)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise FsdpError(f"{name} is {value}; it is > 0")


def node_bandwidth(links: int = 8, gbit_per_s: float = 400, efficiency: float = 0.85) -> float:
    """Bytes per second that a node's links carry."""
    _positive(links=links, gbit_per_s=gbit_per_s, efficiency=efficiency)
    return links * gbit_per_s * 1e9 / 8 * efficiency


def tokens_to_hide_forward(flops: float, bandwidth: float, *, tp: int = 1, param_bytes: float = 2) -> float:
    """Tokens per micro-batch above which a layer's gather hides behind the forward before it.

    A parameter costs 2 FLOPs per token and ``param_bytes`` on the wire: tokens > param_bytes/2 * F * tp / B.
    """
    _positive(flops=flops, bandwidth=bandwidth, tp=tp, param_bytes=param_bytes)
    return param_bytes / 2 * flops * tp / bandwidth


def tokens_to_hide_backward(
    flops: float,
    bandwidth: float,
    *,
    tp: int = 1,
    param_bytes: float = 2,
    grad_bytes: float = 4,
    experts: int = 1,
    ep: int = 1,
    top_k: int = 1,
    recompute: bool = False,
) -> float:
    """Tokens per micro-batch above which gather and reduce-scatter hide behind the backward.

    Backward is 4 FLOPs per active parameter and token, 6 with recompute; a rank holds experts/ep experts
    of which a token visits top_k.
    """
    _positive(flops=flops, bandwidth=bandwidth, tp=tp, experts=experts, ep=ep, top_k=top_k)
    per_token = 6 if recompute else 4
    return (param_bytes + grad_bytes) / per_token * (experts / ep) / top_k * flops * tp / bandwidth


def memory_bytes(
    strategy: ShardingStrategy | str,
    params: float,
    world_size: int,
    *,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes per rank: params * (p + g + K), each term divided by ``world_size`` where it is sharded."""
    chosen = ShardingStrategy(one_of("strategy", strategy, _STRATEGIES))
    _positive(params=params, world_size=world_size)
    return params * (
        param_bytes / (world_size if chosen.shards_params else 1)
        + grad_bytes / (world_size if chosen.shards_grads else 1)
        + optimizer_bytes / (world_size if chosen.shards_optimizer else 1)
    )


def collectives(strategy: ShardingStrategy | str, microbatches: int = 1, *, tree: bool = False) -> dict[str, int]:
    """Traffic per optimizer step in multiples of the model's bytes (an upper bound; units may stay gathered).

    ``tree``: with ``grad_sum="tree"`` every strategy reduces each micro-batch.
    """
    chosen = ShardingStrategy(one_of("strategy", strategy, _STRATEGIES))
    _positive(microbatches=microbatches)
    gathers = {"no_shard": 0, "optim": 1, "optim_grads": 1, "optim_grads_params": 2 * microbatches}
    once = microbatches if tree else 1
    scatters = {"no_shard": 0, "optim": once, "optim_grads": microbatches, "optim_grads_params": microbatches}
    return {
        "all_gather": gathers[chosen.value],
        "reduce_scatter": scatters[chosen.value],
        "all_reduce": 0 if chosen.shards_optimizer else once,
    }


def slides_tables() -> dict[str, object]:
    """The slides' numbers: bandwidth, thresholds by tp, memory of 7.5e9 parameters on 64 ranks, collectives at GA=4."""
    bandwidth = node_bandwidth()
    return {
        "bandwidth_bytes_per_s": {str(tp): bandwidth / tp for tp in SLIDES_TP},
        "forward_tokens": {str(tp): tokens_to_hide_forward(SLIDES_FLOPS, bandwidth, tp=tp) for tp in SLIDES_TP},
        "backward_tokens": {str(tp): tokens_to_hide_backward(SLIDES_FLOPS, bandwidth, tp=tp) for tp in SLIDES_TP},
        "memory_bytes": {name: memory_bytes(name, 7.5e9, 64) for name in _STRATEGIES},
        "collectives": {name: collectives(name, 4) for name in _STRATEGIES},
    }
