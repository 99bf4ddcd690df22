"""After AdamW steps, weights of real ranks equal those of one process that emulates them, bit by bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, batch, emulate, loss_of, make_adamw, make_net, same, train_steps
from torch import Tensor

from ranktest import run_ranks
from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS, ACCUMULATE = 3, 2
VARIANTS = {
    "plain": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "unused": {"unused": True},
    "recompute inside": {"recompute": "inside"},
    "recompute around": {"recompute": "around"},
    "recompute reentrant": {"recompute": "reentrant"},
}


def train(rank: int, strategy: str, net_options: dict, hint: bool, **precision: object) -> dict[str, Tensor]:
    net = make_net(**net_options)
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        strategy=strategy,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(**precision),
    )
    optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
    train_steps(model, optimizer, rank, steps=STEPS, accumulate=ACCUMULATE, hint=hint)
    return model.full_state_dict()


def train_variants(
    rank: int, ranks: int, strategy: str, variants: list[dict], hint: bool, precision: dict
) -> list[dict[str, Tensor]]:
    return [train(rank, strategy, options, hint, **precision) for options in variants]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_two_ranks_equal_the_emulation_for_every_kind_of_model(strategy: str) -> None:
    results = run_ranks(train_variants, 2, strategy, list(VARIANTS.values()), True, {})
    sharded_grads = strategy in ("optim_grads", "optim_grads_params")
    for at, (name, options) in enumerate(VARIANTS.items()):
        expected = emulate(
            ranks=2, steps=STEPS, accumulate=ACCUMULATE, net_options=options, per_microbatch=sharded_grads
        )
        for rank in range(2):
            assert same(expected, results[rank][at]) == [], f"{name} on rank {rank}"


def train_without_sync(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """Two updates of two microbatches, the first of them under ``no_sync``, by each strategy."""
    found = []
    for strategy in STRATEGIES:
        net = make_net()
        model = FullyShardedDataParallel(
            net, process_group=dist.group.WORLD, strategy=strategy, fsdp_unit_modules=[Block]
        )
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        for step in range(2):
            first, last = batch(step, 0, rank), batch(step, 1, rank)
            with model.no_sync():
                loss_of(model(first), first).backward()
            loss_of(model(last), last).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.full_state_dict())
    return found


@pytest.mark.slow
def test_strategies_have_equal_bits_if_all_but_the_last_microbatch_run_without_sync() -> None:
    whole, *sharded = run_ranks(train_without_sync, 2)[0]
    assert [same(whole, one) for one in sharded] == [[], [], []]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_four_ranks_in_rank_order_equal_the_emulation(strategy: str) -> None:
    results = run_ranks(train_variants, 4, strategy, [{"tied": True}], True, {"grad_sum": "rank_order"})
    sharded_grads = strategy in ("optim_grads", "optim_grads_params")
    expected = emulate(
        ranks=4, steps=STEPS, accumulate=ACCUMULATE, net_options={"tied": True}, per_microbatch=sharded_grads
    )
    assert [same(expected, result[0]) for result in results] == [[], [], [], []]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_bf16_compute_keeps_fp32_sums_and_main_weights(strategy: str) -> None:
    results = run_ranks(train_variants, 2, strategy, [{}], True, {"param_dtype": torch.bfloat16})
    expected = emulate(
        ranks=2,
        steps=STEPS,
        accumulate=ACCUMULATE,
        net_options={},
        per_microbatch=strategy in ("optim_grads", "optim_grads_params"),
        param_dtype=torch.bfloat16,
    )
    assert same(expected, results[0][0]) == []
    assert same(expected, results[1][0]) == []


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.slow
def test_without_hints_every_backward_reduces(strategy: str) -> None:
    results = run_ranks(train_variants, 2, strategy, [{}], False, {})
    expected = emulate(ranks=2, steps=STEPS, accumulate=ACCUMULATE, net_options={}, per_microbatch=True)
    assert same(expected, results[0][0]) == []


def train_fsdp2(rank: int, ranks: int) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = make_adamw(net.parameters())
    for step in range(STEPS):
        for k in range(ACCUMULATE):
            tokens = batch(step, k, rank)
            loss_of(net(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor() for name, value in net.state_dict().items()}


@pytest.mark.slow
def test_two_ranks_equal_fsdp2_bit_for_bit() -> None:
    theirs = run_ranks(train_fsdp2, 2)[0]
    ours = run_ranks(train_variants, 2, "optim_grads_params", [{}], True, {})[0][0]
    assert same(theirs, ours) == []
