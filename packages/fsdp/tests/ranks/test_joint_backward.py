"""One backward over several calls reduces each unit once, whatever became of other graphs of the model."""

from __future__ import annotations

import pytest
from fsdp_count_helpers import fake_world
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net

from ranktest import run_ranks
from sixfold.fsdp import FullyShardedDataParallel, fully_shard_optimizer

FIRST = ["none", "dropped", "kept", "raised"]


def train(first: str, steps: int = 4) -> list[float]:
    """Reductions per unit of each step: a backward over two losses after a call whose graph is ``first``."""
    net = make_net()
    model = FullyShardedDataParallel(net, process_group=fake_world(2), fsdp_unit_modules=[Block], initial="trust")
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    counts, kept, before = [], [], 0
    for step in range(steps):
        zero, one, two = (batch(step, k, 0) for k in range(3))
        if first != "none":
            loss = loss_of(model(zero), zero)
            if first == "kept":
                kept.append(loss)
            if first == "raised":
                loss.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            del loss
        (loss_of(model(one), one) + loss_of(model(two), two)).backward()
        counts.append((model._engine.reduction.reductions - before) / len(model.units))
        before = model._engine.reduction.reductions
        optimizer.step()
        optimizer.zero_grad()
    return counts


def train_in_flight(steps: int = 3) -> list[float]:
    """The same of three micro-batches in flight, each with a backward of its own."""
    net = make_net()
    model = FullyShardedDataParallel(net, process_group=fake_world(2), fsdp_unit_modules=[Block], initial="trust")
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    counts, before = [], 0
    for step in range(steps):
        losses = [loss_of(model(batch(step, k, 0)), batch(step, k, 0)) for k in range(3)]
        while losses:
            losses.pop(0).backward()
        counts.append((model._engine.reduction.reductions - before) / len(model.units))
        before = model._engine.reduction.reductions
        optimizer.step()
        optimizer.zero_grad()
    return counts


def train_all(rank: int, ranks: int) -> dict[str, list[float]]:
    return {first: train(first) for first in FIRST} | {"in flight": train_in_flight()}


@pytest.mark.slow
def test_a_backward_over_two_losses_reduces_each_unit_once_beside_a_graph_without_backward() -> None:
    found = run_ranks(train_all, 1)[0]
    assert found.pop("in flight") == [3.0] * 3, "one for each micro-batch"
    assert found == {first: [1.0] * 4 for first in FIRST}
