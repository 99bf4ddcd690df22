"""What goes wrong between ranks is named on all of them."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, Net, batch, loss_of, make_adamw, make_net
from torch import nn

from ranktest import run_ranks, store
from sixfold.fsdp import FsdpError, FullyShardedDataParallel, fully_shard_optimizer


def wrap(net, **options):
    return FullyShardedDataParallel(net, process_group=dist.group.WORLD, fsdp_unit_modules=[Block], **options)


def outcome(action) -> tuple[str, str | None, int | None, str | None, tuple[int, ...]]:
    with pytest.raises(FsdpError) as caught:
        action()
    error = caught.value
    return str(error), error.unit, error.step, error.op, error.ranks


def different_shapes(rank, ranks):
    net = make_net()
    if rank == 1:
        net.blocks[1].up = nn.Linear(13, 29)
    return outcome(lambda: wrap(net))


def test_different_shapes_are_named_on_all_ranks():
    for text, _, _, op, ranks in run_ranks(different_shapes, 3):
        assert "blocks.1.up.weight is (23, 13) torch.float32" in text and "(29, 13)" in text
        assert (op, ranks) == ("check", (1,))


def different_options(rank, ranks):
    strategies = outcome(lambda: wrap(make_net(), strategy="optim" if rank == 2 else "optim_grads"))
    selected = [nn.Linear] if rank == 2 else [Block]
    world = dist.group.WORLD
    units = outcome(lambda: FullyShardedDataParallel(make_net(), process_group=world, fsdp_unit_modules=selected))
    return strategies, units


def test_different_options_are_named_on_all_ranks():
    for (text, *_, ranks), (units_text, *_, units_ranks) in run_ranks(different_options, 3):
        assert "strategy is optim_grads, on rank 2 optim;" in text and ranks == (2,)
        assert "units is ['', 'blocks.0', 'blocks.1', 'blocks.2'], on rank 2" in units_text and units_ranks == (2,)


def unit_missing_on_one(rank, ranks):
    module = make_net() if rank != 1 else nn.Linear(2, 2)
    return outcome(lambda: wrap(module))


def test_an_error_of_one_rank_at_wrap_is_raised_on_all():
    for text, _, _, _, ranks in run_ranks(unit_missing_on_one, 3):
        assert "Block" in text and "matches no module of Linear" in text and ranks == (1,)


def different_values(rank, ranks):
    net = make_net()
    if rank == 1:
        with torch.no_grad():
            net.blocks[2].norm.weight[3] += 1e-6
    return outcome(lambda: wrap(net))


def test_different_start_values_are_named_on_all_ranks():
    for text, _, _, op, ranks in run_ranks(different_values, 3):
        assert "blocks.2.norm.weight differ on rank 1" in text
        assert (op, ranks) == ("check", (1,))


class Skipping(Net):
    skip = False

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            if not (self.skip and i == 1):
                x = block(x)
        return self.head(self.norm(x))


def skip_a_unit(rank, ranks, checks):
    torch.manual_seed(0)
    net = Skipping()
    model = wrap(net, checks=checks, fault_store=store(), timeout_s=10.0)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)

    def steps():
        for step in range(3):
            net.skip = rank == 1 and step == 2
            loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = outcome(steps)
    return found, outcome(lambda: model(batch(0, 0, 0)))[0]


def test_a_unit_skipped_on_one_rank_is_named_before_the_collective():
    for (text, unit, step, op, ranks), later in run_ranks(skip_a_unit, 3, "unit"):
        assert (unit, step, op, ranks) == ("blocks.1", 2, "gather", (1,)), text
        assert "rank 1 is at gather of blocks.2" in text
        assert "earlier fault" in later


def not_finite(rank, ranks):
    net = make_net()
    model = wrap(net, checks="unit")
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    before = model.full_state_dict()

    def step():
        factor = float("inf") if rank == 1 else 1.0
        (loss_of(model(batch(0, 0, rank)), batch(0, 0, rank)) * factor).backward()

    found = outcome(step)
    optimizer.zero_grad()
    return found, all(torch.isfinite(value).all() for value in before.values())


def test_a_gradient_that_is_not_finite_is_named_before_the_reduction():
    for (text, unit, step, op, ranks), clean in run_ranks(not_finite, 2):
        assert (step, op, ranks) == (0, "reduce", (1,)) and unit is not None
        assert "not finite" in text and clean


def different_order(rank, ranks):
    """Equal sizes, so that no collective fails: only the digests differ."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        strategy="optim",
        fsdp_unit_modules=[nn.Linear],
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)

    class Run(nn.Module):
        def forward(self, x):
            return net[1](net[0](x)) if rank != 1 else net[0](net[1](x))

    net.append(Run())

    def steps():
        for _ in range(3):
            model.entry(net[2])(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return outcome(steps)


def test_another_order_of_units_is_found_by_the_digest_of_the_step():
    for text, _, _, op, ranks in run_ranks(different_order, 3):
        assert "different orders in step 0" in text
        assert (op, ranks) == ("check", (1,))


def die(rank, ranks):
    net = make_net()
    model = wrap(net, fault_store=store(), timeout_s=5.0)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    began = time.monotonic()

    def steps():
        nonlocal began
        for step in range(5):
            if step == 2:
                began = time.monotonic()
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = outcome(steps)
    return found, time.monotonic() - began


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_dies_is_named_by_the_survivors(ranks):
    results = run_ranks(die, ranks, allow_exit=(1,))
    for rank in range(ranks):
        if rank != 1:
            (text, unit, step, op, lost), seconds = results[rank]
            assert lost == (1,), text
            assert step == 2 and op in ("gather", "reduce", "check") and (unit is not None or op == "check")
            assert seconds < 10.0, f"{seconds:.1f} s"
