"""On two ranks: a wrap without a group takes all, and buffers are compared, sent and told of."""

from __future__ import annotations

import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, batch, make_net
from torch import nn

from ranktest import run_ranks
from sixfold.fsdp import FsdpError, FullyShardedDataParallel, fully_shard, fully_shard_optimizer


def without_a_group(rank, ranks):
    torch.manual_seed(0)
    net, alone = nn.Linear(3, 3), nn.Linear(3, 3)
    model, single = fully_shard(net), fully_shard(alone, process_group=None)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=1.0), model)
    net(torch.full((1, 3), float(rank))).sum().backward()
    optimizer.step()
    shared, apart = (one.report()["ranks"]["shard"] for one in (model, single))
    return shared, apart, model.full_state_dict()["weight"].tolist()


def test_a_wrap_without_a_group_trains_all_ranks_together_and_none_is_one_process():
    torch.manual_seed(0)
    expected = nn.Linear(3, 3).weight.detach() - 0.5  # the mean of gradients 0 and 1
    for shared, alone, weights in run_ranks(without_a_group, 2):
        assert (shared, alone) == (2, 1)
        torch.testing.assert_close(torch.tensor(weights), expected)


def destroyed_groups(rank, ranks):
    raised, before = [], threading.excepthook
    threading.excepthook = lambda args: raised.append(repr(args.exc_value))
    group = dist.new_group([0, 1])
    model = fully_shard(nn.Linear(3, 3), process_group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    time.sleep(0.4)  # the thread looks every 0.25 s
    threading.excepthook = before
    return model is not None, raised


def test_a_group_destroyed_before_its_model_ends_no_thread_with_an_error():
    """As every recipe of torch ends: destroy_process_group(), and then the process."""
    assert run_ranks(destroyed_groups, 2) == [(True, [])] * 2


class Rotary(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("angles", torch.tensor([1.0, value]), persistent=False)


def other_buffers(rank, ranks):
    torch.manual_seed(0)
    nets = [Rotary(float(rank)), Rotary(float(rank)), Rotary(float(rank))]
    try:
        fully_shard(nets[0])
    except FsdpError as error:
        text = str(error)
    fully_shard(nets[1], initial="broadcast")
    fully_shard(nets[2], initial="trust")
    return text, [net.angles[1].item() for net in nets[1:]]


def test_buffers_that_differ_at_the_start_are_told_and_each_remedy_works():
    for rank, (text, values) in enumerate(run_ranks(other_buffers, 2)):
        assert "the module buffer angles differs on rank 1 at the start" in text
        assert values == [0.0, float(rank)]


def statistics(rank, ranks):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard(net)
    told = [str(one.message) for one in caught if "running statistics" in str(one.message)]
    net(torch.full((4, 2), float(rank + 1)) + torch.arange(4.0)[:, None])
    before = net[1].running_mean.tolist()
    model.broadcast_buffers()
    dist.barrier()
    return len(told), before, net[1].running_mean.tolist()


def test_batch_statistics_of_each_rank_are_warned_of_and_can_be_those_of_the_first():
    (told, first, sent), (_, other, received) = run_ranks(statistics, 2)
    assert told == 1 and first != other
    assert first == sent == received


def norms_of_gradients(rank, ranks):
    net = make_net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    model(batch(0, 0, 0)).square().mean().backward()
    gradients = [main.grad for _, main in model.main_parameters() if main.grad is not None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.linalg.norm(torch.stack([one.norm(p=2) for one in gradients]))  # as recipes of SAM do
    return [str(one.message) for one in caught], model.grad_square_sum().sqrt().item()


def test_a_norm_of_one_rank_is_warned_of_and_the_call_that_it_names_gives_the_whole_one():
    plain = make_net()
    plain(batch(0, 0, 0)).square().mean().backward()
    whole = torch.stack([one.grad.norm() for one in plain.parameters()]).norm()
    for texts, norm in run_ranks(norms_of_gradients, 2):
        assert texts and all("model.grad_square_sum().sqrt() is the norm over all ranks" in one for one in texts)
        assert norm == pytest.approx(whole.item(), rel=1e-6)
