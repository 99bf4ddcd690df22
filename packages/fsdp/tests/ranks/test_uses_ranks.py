"""Uses of a wrapped module on several ranks: traffic, refusals, and what only ranks can get wrong."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_helpers import Block, Net, batch, loss_of, make_adamw, make_net, same
from torch import nn

from ranktest import run_ranks
from sixfold.fsdp import FsdpError, fully_shard, fully_shard_optimizer


def wrap(net, **options):
    return fully_shard(net, process_group=dist.group.WORLD, fsdp_unit_modules=[Block, nn.Embedding], **options)


def refusal(action) -> str:
    with pytest.raises(FsdpError) as caught:
        action()
    return str(caught.value)


class HandTied(Net):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def hand_tied(rank, ranks):
    found = []
    for checks in ("off", "order", "unit"):
        torch.manual_seed(0)
        model = wrap(HandTied(), checks=checks)
        found.append(refusal(lambda model=model: model(batch(0, 0, rank))))
    return found


@pytest.mark.slow
def test_a_weight_read_outside_its_unit_is_refused_in_every_mode_of_checks():
    for found in run_ranks(hand_tied, 2):
        assert all("embedding.weight: linear() reads its values outside a call" in text for text in found)


def of_the_inner_module(rank, ranks):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    net = make_net()
    model = wrap(net)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    loss_of(net(batch(0, 0, rank)), batch(0, 0, rank)).backward()
    optimizer.step()
    refusals = {
        "inner": refusal(net.state_dict),
        "part": refusal(net.blocks[0].state_dict),
        "outer": refusal(nn.Sequential(model).state_dict),
        "load": refusal(lambda: net.load_state_dict({})),
        "dcp model": refusal(lambda: get_model_state_dict(model)),
        "dcp optimizer": refusal(lambda: get_optimizer_state_dict(model, optimizer)),
        "ddp": refusal(lambda: nn.parallel.DistributedDataParallel(net)),
    }
    kept = net.state_dict(keep_vars=True)
    assert kept.keys() == dict(net.named_parameters()).keys()
    refusals["kept"] = refusal(lambda: torch.save(kept, io.BytesIO()))
    return refusals, model.full_state_dict()


@pytest.mark.slow
def test_state_dicts_and_torchs_own_wrappers_are_refused_and_inner_calls_train_alike_on_all_ranks():
    results = run_ranks(of_the_inner_module, 2)
    for refusals, weights in results:
        for name in ("inner", "part"):
            assert "full_state_dict() (collective)" in refusals[name]
        for name in ("outer", "dcp model", "dcp optimizer", "load"):
            assert "state_records" in refusals[name], name
        assert "outside a call of its unit" in refusals["ddp"]
        assert ".data is taken" in refusals["kept"]
        assert same(weights, results[0][1]) == []


def gradients_after(action):
    net = make_net()
    model = wrap(net)
    action(net, model)
    model.finish_grad_sync()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.main_parameters()}, model.report()


def of_inputs(rank, ranks):
    def grad_of_x(net, model):
        x = torch.ones(2, 13, requires_grad=True)
        run = model.entry(net.blocks[0])
        torch.autograd.grad(run(x).sum(), x)
        run(x).sum().backward(inputs=[x])

    def two_forwards(net, model):
        first, second = (loss_of(net(batch(step, 0, rank)), batch(step, 0, rank)) for step in (0, 1))
        (first + second).backward()

    none, quiet = gradients_after(grad_of_x)
    _, twice = gradients_after(two_forwards)
    return [name for name, gradient in none.items() if gradient is not None], quiet["reductions"], twice["reductions"]


@pytest.mark.slow
def test_gradients_of_inputs_reduce_nothing_and_two_forwards_of_one_backward_reduce_each_unit_once():
    for left, quiet, twice in run_ranks(of_inputs, 2):
        assert left == [] and quiet == 0
        assert twice == 1 + 1 + 3, "root, embedding, three blocks"


def frozen_later(rank, ranks):
    """Both ranks freeze a block after a step: weight decay must not move it. The oracle is one plain process."""
    net, plain = make_net(), make_net()
    model = wrap(net, grad_divisor=1.0)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    twin = make_adamw(plain.parameters())
    for step in range(4):
        if step == 1:
            for one in (net, plain):
                one.blocks[1].requires_grad_(False)
        if step == 3:
            for one in (net, plain):
                one.requires_grad_(True)
        loss_of(net(batch(step, 0, rank)), batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        # both ranks' gradients, added in fp32 from rank 0 on; two addends have one order only
        for source in range(ranks):
            loss_of(plain(batch(step, 0, source)), batch(step, 0, source)).backward()
        twin.step()
        twin.zero_grad()
    return same(dict(plain.state_dict()), model.full_state_dict())


@pytest.mark.slow
def test_freezing_after_wrapping_is_honoured_on_all_ranks():
    assert run_ranks(frozen_later, 2) == [[], []]


def scaler_and_states(rank, ranks):
    net = make_net()
    model = wrap(net)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model(batch(0, 0, rank)), batch(0, 0, rank))).backward()
    scaled = refusal(lambda: scaler.step(optimizer))
    optimizer.zero_grad()
    loss_of(model(batch(0, 0, rank)), batch(0, 0, rank)).backward()
    optimizer.step()
    state = optimizer.state_dict()
    states: list = [None] * ranks
    dist.all_gather_object(states, state)
    optimizer.load_state_dict(states[rank])
    other = refusal(lambda: optimizer.load_state_dict(states[1 - rank]))
    lbfgs = refusal(lambda: fully_shard_optimizer(torch.optim.LBFGS(list(net.parameters())), model))
    factored = refusal(lambda: fully_shard_optimizer(torch.optim.Adafactor(list(net.parameters())), model))
    return scaled, other, lbfgs, factored


@pytest.mark.slow
def test_optimizers_that_need_more_than_a_shard_are_refused_on_all_ranks():
    for rank, (scaled, other, lbfgs, factored) in enumerate(run_ranks(scaler_and_states, 2)):
        assert "GradScaler" in scaled and "bfloat16" in scaled
        assert f"the state is rank {1 - rank} of 2" in other and f"this is rank {rank} of 2" in other
        assert "LBFGS takes products over all parameters" in lbfgs
        assert "Adafactor updates embedding.weight" in factored and "cut between ranks" in factored


def torchs_clip(rank, ranks):
    """Over the optimizer's own parameters; returns what it said, by strategy."""
    found = {}
    for strategy in ("no_shard", "optim", "optim_grads_params"):
        net = make_net()
        model = wrap(net, strategy=strategy)
        optimizer = fully_shard_optimizer(torch.optim.SGD(list(net.parameters()), lr=0.1), model)
        for step in range(2):
            loss_of(model(batch(step, 0, rank)), batch(step, 0, rank)).backward()
            held = [p for group in optimizer.param_groups for p in group["params"]]
            total = torch.stack([p.grad.norm() for p in held]).square().sum()
            if strategy != "no_shard":
                dist.all_reduce(total)
                found[strategy, step] = refusal(lambda held=held: nn.utils.clip_grad_norm_(held, 1e-3))
            else:
                found[strategy, step] = nn.utils.clip_grad_norm_(held, 1e3).item()
            torch.testing.assert_close(total.sqrt(), model.clip_grad_norm_(1e3))
            assert type(copy.deepcopy(held[0].grad)) is torch.Tensor
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.slow
def test_torchs_clip_over_shards_is_refused_and_a_users_own_sum_of_norms_is_not():
    for found in run_ranks(torchs_clip, 2):
        for (strategy, _), said in found.items():
            assert isinstance(said, float) if strategy == "no_shard" else "use model.clip_grad_norm_()" in said


def dtensors(rank, ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    net = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (ranks,))
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Shard(0)]))
    return refusal(lambda: fully_shard(net, process_group=dist.group.WORLD))


def test_a_dtensor_parameter_is_refused_by_name():
    for text in run_ranks(dtensors, 2):
        assert "weight is a DTensor; parameters are plain tensors" in text and "local tensors" in text
