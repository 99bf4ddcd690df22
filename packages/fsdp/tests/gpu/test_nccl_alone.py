"""NCCL with one rank: everything goes through the back end, in streams, with registered memory, to the same bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_count_helpers import Calls
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, fully_shard_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture(scope="module")
def nccl():
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()


def train(group, strategy, **buffers):
    net = make_net().cuda()
    model = FullyShardedDataParallel(
        net, process_group=group, strategy=strategy, fsdp_unit_modules=[Block], buffers=BufferConfig(**buffers)
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    with Calls() as calls:
        for step in range(3):
            tokens = batch(step, 0, 0).cuda()
            loss_of(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    model.check()
    return model.full_state_dict(), calls.names, model


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_one_rank_on_nccl_communicates_and_has_the_bits_of_one_process(nccl, strategy):
    plain, none, _ = train(None, strategy)
    weights, calls, model = train(nccl, strategy, always_communicate=True)
    assert none == [] and len(calls) >= 3 * len(model.units)
    assert same(plain, weights) == []
    assert model.report()["communicators"] == "nccl: 2 made from the given groups"


def test_memory_is_registered_or_the_report_says_why_not(nccl):
    _, _, model = train(nccl, "optim_grads_params", always_communicate=True)
    said = model.report()["user_buffers"]
    assert said.startswith(("registered: a group of one has no peers", "off: ")), said
    _, _, model = train(nccl, "optim_grads_params", always_communicate=True, user_buffers="off")
    assert model.report()["user_buffers"] == "off: user_buffers='off'"


def test_cta_limits_are_taken(nccl):
    weights, _, _ = train(nccl, "optim_grads_params", always_communicate=True, nccl_min_ctas=1, nccl_max_ctas=4)
    assert same(train(None, "optim_grads_params")[0], weights) == []
    with pytest.raises(FsdpError, match="share_communicator=True makes no group"):
        train(nccl, "optim", always_communicate=True, share_communicator=True, nccl_max_ctas=4)
