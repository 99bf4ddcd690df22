"""Collectives counted as torch's dispatcher sees them, against the table of strategies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_count_helpers import gathers
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net
from torch.utils._python_dispatch import TorchDispatchMode

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, cost_model, fully_shard_optimizer

KINDS = {
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}


class Count(TorchDispatchMode):
    """Calls of each kind of collective, and bytes of all ranks' parts; control messages (int64) apart.

    Two ranks on gloo swap what each lacks: on the gathers' communicator that is an all-gather.
    """

    def __init__(self):
        super().__init__()
        self.calls = dict.fromkeys(KINDS.values(), 0)
        self.nbytes = dict.fromkeys(KINDS.values(), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d"):
            for part, kind in KINDS.items():
                if part in name:
                    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                    if leaves[0].dtype != torch.int64:
                        halves = 2 if kind == "all_to_all" else 1
                        kind = "all_gather" if gathers(args) else kind
                        self.calls[kind] += 1
                        self.nbytes[kind] += max(leaf.nbytes for leaf in leaves) * halves
        return func(*args, **(kwargs or {}))


def count_step(
    rank: int, ranks: int, strategy: str, accumulate: int, options: dict, config: dict, grad_sum: str
) -> tuple[dict, dict, int, int]:
    net = make_net(**options)
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        strategy=strategy,
        fsdp_unit_modules=[Block],
        buffers=BufferConfig(**config),
        mixed_precision=MixedPrecision(grad_sum=grad_sum),
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(3):
        count = Count()
        with count:
            for k in range(accumulate):
                with model.microbatch(last=k == accumulate - 1):
                    loss_of(model(batch(step, k, rank)), batch(step, k, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    gathered = sum(unit["gathered_bytes"] for unit in model.report()["units"].values())
    return count.calls, count.nbytes, gathered, len(model.units)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.slow
def test_a_step_moves_at_most_what_the_table_says(strategy):
    accumulate = 2
    calls, nbytes, model_bytes, units = run_ranks(count_step, 2, strategy, accumulate, {}, {}, "backend")[0]
    table = cost_model.collectives(strategy, accumulate)
    table["all_to_all"] = table.pop("reduce_scatter")  # on gloo: the exchange of a sum in rank order
    for kind, models in table.items():
        assert calls[kind] <= models * units, kind
        assert nbytes[kind] <= models * model_bytes, kind
    assert calls["all_to_all"] == table["all_to_all"] * units
    assert calls["all_reduce"] == table["all_reduce"] * units
    assert calls["reduce_scatter"] == 0
    if strategy in ("optim", "optim_grads"):
        assert calls["all_gather"] == units


@pytest.mark.slow
def test_recompute_around_or_inside_a_unit_gathers_nothing_more():
    plain = run_ranks(count_step, 2, "optim_grads_params", 2, {}, {}, "backend")[0][0]
    for recompute in ("inside", "around", "reentrant"):
        result = run_ranks(count_step, 2, "optim_grads_params", 2, {"recompute": recompute}, {}, "backend")[0][0]
        assert result == plain, recompute


@pytest.mark.slow
def test_a_buffer_for_every_unit_is_gathered_once_per_step():
    calls, _, _, units = run_ranks(count_step, 2, "optim_grads_params", 3, {}, {"gathered_bytes": "all"}, "backend")[0]
    assert calls["all_gather"] == units


@pytest.mark.slow
def test_rank_order_sends_on_gloo_what_the_back_ends_order_sends():
    backend = run_ranks(count_step, 2, "optim_grads", 2, {}, {}, "backend")[0]
    assert run_ranks(count_step, 2, "optim_grads", 2, {}, {}, "rank_order")[0] == backend
