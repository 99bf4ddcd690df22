"""``backward(inputs=some parameters)`` on several ranks: the others keep no gradient, and no optimizer moves them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same

from ranktest import run_ranks
from sixfold.fsdp import FullyShardedDataParallel, fully_shard_optimizer


def chosen(net):
    return [net.blocks[1].up.weight, net.norm.weight]


def partly(net, loss):
    loss.backward(inputs=chosen(net))


def twice(net, loss):
    loss.backward(inputs=chosen(net), retain_graph=True)
    loss.backward(inputs=[net.blocks[1].down.weight])


def partly_then_all(net, loss):
    loss.backward(inputs=chosen(net), retain_graph=True)
    loss.backward()


def all_then_partly(net, loss):
    loss.backward(retain_graph=True)
    loss.backward(inputs=chosen(net))


WAYS = [partly, twice, partly_then_all, all_then_partly]


def expected_of(way, ranks):
    """Plain data parallel in one process: each rank's gradients added, None where no rank has one."""
    net = make_net()
    optimizer = make_adamw(net.parameters())
    for step in range(2):
        for rank in range(ranks):
            way(net, loss_of(net(batch(step, 0, rank)), batch(step, 0, rank)))
        for p in net.parameters():
            if p.grad is not None:
                p.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def run(rank, ranks):
    found = {}
    for way in WAYS:
        for postponed in (False, True):
            net = make_net()
            model = FullyShardedDataParallel(net, process_group=dist.group.WORLD, fsdp_unit_modules=[Block])
            optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
            for step in range(2):
                loss = loss_of(net(batch(step, 0, rank)), batch(step, 0, rank))
                if postponed:
                    with model.no_sync():
                        way(net, loss)
                else:
                    way(net, loss)
                optimizer.step()
                optimizer.zero_grad()
            weights, expected = model.full_state_dict(), expected_of(way, ranks)
            differ = same(expected, weights)
            if way in (partly_then_all, all_then_partly):  # sums of two backwards have another order here
                differ = [name for name in differ if not torch.allclose(expected[name], weights[name], atol=1e-4)]
            found[way.__name__, postponed] = differ
    return found


@pytest.mark.slow
def test_parameters_that_backward_was_not_asked_for_stay_as_they_are():
    for found in run_ranks(run, 2):
        assert not any(found.values()), found
