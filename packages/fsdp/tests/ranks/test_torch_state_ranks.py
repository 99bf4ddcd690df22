"""State as torch's own tools have it: saved by DCP from here and loaded by FSDP2, and the other way, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_helpers import Block, Net, batch, loss_of, make_adamw, make_net, same
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from ranktest import run_ranks
from sixfold.fsdp import FsdpError, FullyShardedDataParallel, fully_shard_optimizer, torch_state


def step(call, optimizer, rank, at):
    loss_of(call(batch(at, 0, rank)), batch(at, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def grouped(net, lr):
    """Two groups, so that names must find the right one."""
    decayed = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], lr=lr)


def ours(lr=1e-2, kind=None, **options):
    net = make_net(**(kind or {}))
    options.setdefault("process_group", dist.group.WORLD)
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], **options)
    return model, fully_shard_optimizer(grouped(net, lr), model)


def theirs(ranks, lr, kind):
    net = make_net(**kind)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in net.blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(net, mesh=mesh)
    return net, grouped(net, lr)


def whole(state):
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}


def flat(optimizer_state):
    return {
        f"{name}.{key}": v.full_tensor() if isinstance(v, DTensor) else v
        for name, state in optimizer_state["state"].items()
        for key, v in state.items()
    }


def there_and_back(rank, ranks, folder, granularity, kind):
    grain = {"granularity": lambda name, parameter: granularity, "kind": kind}
    model, optimizer = ours(**grain)
    step(model, optimizer, rank, 0)
    saved = {
        "model": torch_state.get_model_state_dict(model),
        "optim": torch_state.get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(saved, checkpoint_id=f"{folder}/ours")
    peer, peers_optimizer = theirs(ranks, 0.5, kind)
    weights, state = get_state_dict(peer, peers_optimizer)
    form = sorted(weights) == sorted(saved["model"]) and sorted(flat(state)) == sorted(flat(saved["optim"]))
    loaded = {"model": weights, "optim": state}
    dcp.load(loaded, checkpoint_id=f"{folder}/ours")
    set_state_dict(peer, peers_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    step(model, optimizer, rank, 1)
    step(peer, peers_optimizer, rank, 1)
    found = [form, same(whole(peer.state_dict()), model.full_state_dict())]

    weights, state = get_state_dict(peer, peers_optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/theirs")
    again, agains_optimizer = ours(lr=0.5, **grain)
    again.materialize_state(agains_optimizer)
    into = {
        "model": torch_state.get_model_state_dict(again),
        "optim": torch_state.get_optimizer_state_dict(again, agains_optimizer),
    }
    dcp.load(into, checkpoint_id=f"{folder}/theirs")
    torch_state.set_model_state_dict(again, into["model"])
    torch_state.set_optimizer_state_dict(again, agains_optimizer, into["optim"])
    at_once = flat(torch_state.get_optimizer_state_dict(again, agains_optimizer))
    found.append(same(flat(state), at_once))
    found.append([group["lr"] for group in agains_optimizer.param_groups])
    step(peer, peers_optimizer, rank, 2)
    step(again, agains_optimizer, rank, 2)
    return [*found, same(whole(peer.state_dict()), again.full_state_dict())]


def both_granularities(rank, ranks, folder):  # in one job: importing DCP and FSDP2 takes seconds
    kinds = {"element": {"tied": True, "frozen": True}, "row": {}}
    return [there_and_back(rank, ranks, f"{folder}/{grain}", grain, kind) for grain, kind in kinds.items()]


@pytest.mark.slow
def test_dcp_takes_training_to_fsdp2_and_back_bit_for_bit(tmp_path):
    for results in run_ranks(both_granularities, 2, str(tmp_path)):
        for form, there, state, lr, back in results:
            assert form and there == [] and state == [] and back == []
            assert lr == [1e-2, 1e-2]


def on_replicas(rank, ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for strategy in ("optim_grads_params", "no_shard"):
        net = Net()
        model = FullyShardedDataParallel(
            net, mesh=mesh, strategy=strategy, fsdp_unit_modules=[Block], initial="broadcast"
        )
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        step(model, optimizer, rank, 0)
        state = torch_state.get_model_state_dict(model)
        kinds = {type(value).__name__ for value in state.values()}
        full = model.full_state_dict()
        found.append((same(full, whole(state)), kinds))
        moments = flat(torch_state.get_optimizer_state_dict(model, optimizer))
        assert {"embedding.weight.exp_avg", "embedding.weight.step"} <= moments.keys()
        with torch.no_grad():
            for record in model.state_records():
                record.tensor.zero_()
        torch_state.set_model_state_dict(model, state)
        found.append((same(full, model.full_state_dict()), kinds))
    return found


@pytest.mark.slow
def test_dtensors_of_a_hybrid_mesh_are_replicated_and_cut():
    for found in run_ranks(on_replicas, 4):
        assert [one for one, _ in found] == [[], [], [], []]
        assert [kinds for _, kinds in found][::2] == [{"DTensor"}, {"Tensor"}]


def refusal(action):
    with pytest.raises(FsdpError) as caught:
        action()
    return str(caught.value)


def wrong(rank, ranks):
    model, optimizer = ours()
    model.materialize_state(optimizer)
    state = torch_state.get_optimizer_state_dict(model, optimizer)
    before = flat(state)
    fewer = {**state, "state": {name: one for name, one in state["state"].items() if name != "norm.bias"}}
    regrouped = {**state, "param_groups": state["param_groups"][:1]}
    found = [
        refusal(lambda: torch_state.set_optimizer_state_dict(model, optimizer, fewer)),
        refusal(lambda: torch_state.set_optimizer_state_dict(model, optimizer, regrouped)),
    ]
    weights = torch_state.get_model_state_dict(model)
    found.append(refusal(lambda: model.load_full_state_dict(weights if rank == 0 else None)))
    for main in optimizer.state:
        optimizer.state[main]["odd"] = torch.zeros(3, 3)
    found.append(refusal(lambda: torch_state.get_optimizer_state_dict(model, optimizer)))
    for main in optimizer.state:
        del optimizer.state[main]["odd"]
    return found, same(before, flat(torch_state.get_optimizer_state_dict(model, optimizer)))


@pytest.mark.slow
def test_a_state_that_does_not_fit_is_refused_on_all_ranks_and_nothing_is_loaded():
    first, second = run_ranks(wrong, 2)
    assert first == second
    (fewer, regrouped, alone, odd), untouched = first
    assert "missing: norm.bias; nothing was loaded" in fewer
    assert "no group of the given state holds just the parameters of group 1" in regrouped
    assert "is a DTensor, of which one rank has a part" in alone
    assert "optimizer state 'odd' of" in odd and "state_records" in odd
    assert untouched == []


def named_groups(rank, ranks):
    """Two groups with names of the user's own; what is paired wrongly or differs between ranks."""
    net = make_net()
    pairs = [(f"my.{name}", parameter) for name, parameter in net.named_parameters()]
    parts = [[one for one in pairs if one[1].dim() > 1], [one for one in pairs if one[1].dim() < 2]]
    model = FullyShardedDataParallel(net, process_group=dist.group.WORLD, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(torch.optim.AdamW([{"params": part} for part in parts], lr=1e-2), model)
    wanted = {id(main): f"my.{name}" for name, main in model.main_parameters()}

    def wrong():
        return [
            (group["param_names"], [wanted[id(main)] for main in group["params"]])
            for group in optimizer.param_groups
            if group["param_names"] != [wanted[id(main)] for main in group["params"]]
        ]

    found = wrong()
    step(model, optimizer, rank, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    found += wrong()
    state = torch_state.get_optimizer_state_dict(model, optimizer)
    for group, part in zip(state["param_groups"], parts, strict=True):
        assert group["param_names"] == [f"my.{name}" for name in group["params"]]
        assert sorted(group["param_names"]) == sorted(name for name, _ in part)
    torch_state.set_optimizer_state_dict(model, optimizer, state)
    return found + wrong(), [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.slow
def test_names_of_an_optimizers_parameters_stay_with_them():
    results = run_ranks(named_groups, 2)
    assert [wrong for wrong, _ in results] == [[], []]
    assert results[0][1] != results[1][1]  # ranks hold different parameters
