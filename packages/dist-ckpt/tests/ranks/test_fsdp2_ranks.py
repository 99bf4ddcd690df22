"""FSDP2's model and optimizer, saved at one number of ranks and loaded at others: every element of every state."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt.optimizers import get_param_id_to_sharded_param_map, optim_state_to_sharding_state


def trained(ranks, seed, steps):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))  # 7 and 3: uneven
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 5)).sum().backward()
        adam.step()
        adam.zero_grad()
    return model, adam


def described(model, adam, leaves):
    """As records made by hand, or DTensors as they are."""
    state = model.state_dict(keep_vars=True)
    if not leaves:
        state = {key: dist_ckpt.ShardedTensor.from_dtensor(key, value) for key, value in state.items()}
    optim_state = adam.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        id_map = get_param_id_to_sharded_param_map(state, model.parameters())
    assert len(id_map) == 4
    steps = {number: float(parts["step"]) for number, parts in optim_state["state"].items()}
    optim_state_to_sharding_state(optim_state, id_map, exclude_keys=("step",))
    return {"model": state, "optimizer": optim_state, "steps": steps}


def whole_of(model, adam):
    states = {key: value.full_tensor() for key, value in model.state_dict().items()}
    for number, parts in adam.state_dict()["state"].items():
        states |= {f"{number}.{name}": parts[name].full_tensor() for name in ("exp_avg", "exp_avg_sq")}
    return {key: value.tolist() for key, value in states.items()}


def save(rank, ranks, folder, leaves):
    model, adam = trained(ranks, 0, 2)
    dist_ckpt.save({"all": described(model, adam, leaves)} if leaves else described(model, adam, leaves), folder)
    return whole_of(model, adam)


def load(rank, ranks, folder, leaves):
    model, adam = trained(ranks, 1, 1)
    state = described(model, adam, leaves)
    loaded = dist_ckpt.load({"all": state}, folder)["all"] if leaves else dist_ckpt.load(state, folder)
    for number, parts in loaded["optimizer"]["state"].items():
        assert all(isinstance(part, DTensor) for part in parts.values())
        parts["step"] = torch.tensor(loaded["steps"][number])
    if leaves:
        model.load_state_dict(loaded["model"])
    adam.load_state_dict(loaded["optimizer"])
    found = whole_of(model, adam)
    model(torch.ones(2, 5)).sum().backward()
    adam.step()  # it goes on: the state is of the parameters' own kind
    return found


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.slow
def test_fsdp2s_adamw_saved_at_two_ranks_loads_at_one_and_at_four(tmp_path, leaves):
    expected = run_ranks(save, 2, tmp_path / "c", leaves)[0]
    for ranks in (1, 4):
        assert run_ranks(load, ranks, tmp_path / "c", leaves) == [expected] * ranks


def tensor_parallel(rank, ranks, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh["dp"])
    kinds = sorted({type(kind).__name__ for p in model.parameters() for kind in p.placements})
    dist_ckpt.save(model.state_dict(), folder)
    expected = {key: value.full_tensor().tolist() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    loaded = dist_ckpt.load(model.state_dict(), folder)
    model.load_state_dict(loaded)
    again = {key: value.full_tensor().tolist() for key, value in model.state_dict().items()}
    return kinds, expected, again == expected, type(loaded).__name__


@pytest.mark.slow
def test_fsdp2_over_tensor_parallel_layers_is_saved_whole_and_loads(tmp_path):
    results = run_ranks(tensor_parallel, 4, tmp_path / "c")
    kinds, expected, _, _ = results[0]
    assert "_StridedShard" in kinds
    assert [(same, kind) for _, _, same, kind in results] == [(True, "OrderedDict")] * 4
    assert {key: value.tolist() for key, value in dist_ckpt.load_plain_tensors(tmp_path / "c").items()} == expected


class Branches(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            self.add_module(name, torch.nn.Linear(4, 4, bias=False))

    def forward(self, x):
        return self.a(x).tanh() + self.b(x).sin() * self.c(x)


def branches(ranks, names, steps):
    model = Branches(names)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
        adam.step()
        adam.zero_grad()
    return model, adam


def evaluated(model):
    with torch.no_grad():
        model(torch.ones(1, 4))


def moments(model, adam):
    model.state_dict()  # FSDP2 puts the sharded parameters back
    return {name: adam.state[own]["exp_avg"].full_tensor().tolist() for name, own in model.named_parameters()}


def after_an_evaluation(rank, ranks, folder):
    """Two models with an optimizer each, the optimizers first; an evaluation before the save, and before the load."""
    pairs = [branches(ranks, "abc", 3), branches(ranks, "bac", 2)]
    expected = [moments(*pair) for pair in pairs]
    for model, _ in pairs:
        evaluated(model)
    dist_ckpt.save({"steps": [adam for _, adam in pairs], "models": [model for model, _ in pairs]}, folder)
    fresh = [branches(ranks, "cba", 0), branches(ranks, "cab", 0)]
    for model, _ in fresh:
        evaluated(model)
    dist_ckpt.load({"steps": [adam for _, adam in fresh], "models": [model for model, _ in fresh]}, folder)
    return [moments(*pair) for pair in fresh] == expected


def test_moments_go_by_name_after_an_evaluation_with_the_optimizers_first(tmp_path):
    assert run_ranks(after_an_evaluation, 2, tmp_path / "c") == [True, True]
