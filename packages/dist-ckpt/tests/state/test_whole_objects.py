"""A model and its optimizer as objects of a state dict: they go on as if unbroken, whatever wraps and shards them."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from usual_ways_helpers import OPTIMIZERS

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError


def made(name="AdamW", seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8, bias=name != "Muon"), nn.Tanh(), nn.Linear(8, 3, bias=name != "Muon"))
    return model, optimizer_of(name, model)


def optimizer_of(name, model):
    return getattr(torch.optim, name)(model.parameters(), lr=1e-2, **OPTIMIZERS[name])


def train(model, optimizer, steps):
    for step in steps:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def weights(model):
    return {
        name.removeprefix("module.").removeprefix("_orig_mod."): getattr(
            value, "full_tensor", lambda v=value: v
        )().clone()
        for name, value in model.state_dict().items()
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def test_the_table_has_all_optimizers_of_torch_but_the_one_of_sparse_gradients():
    classes = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"}
    assert classes - OPTIMIZERS.keys() == {"SparseAdam"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_new_optimizer_goes_on_as_if_unbroken(name, tmp_path):
    model, optimizer = made(name)
    train(model, optimizer, range(3))
    dist_ckpt.save({"model": model, "optimizer": optimizer, "step": 3}, tmp_path / "c", group=None)
    train(model, optimizer, range(3, 6))
    other, new = made(name, seed=1)
    loaded = dist_ckpt.load({"model": other, "optimizer": new, "step": 0}, tmp_path / "c", group=None)
    assert (loaded["step"], loaded["optimizer"] is new) == (3, True)
    train(other, new, range(3, 6))
    assert_same(weights(other), weights(model))


def test_sparse_adam_goes_on_too(tmp_path):
    def step(table, optimizer, word):
        optimizer.zero_grad()
        table(torch.tensor([word])).sum().backward()
        optimizer.step()

    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    step(table, optimizer, 1)
    dist_ckpt.save({"table": table, "optimizer": optimizer}, tmp_path / "c", group=None)
    other = nn.Embedding(5, 2, sparse=True)
    new = torch.optim.SparseAdam(other.parameters())
    dist_ckpt.load({"table": other, "optimizer": new}, tmp_path / "c", group=None)
    for word in (1, 3):
        step(table, optimizer, word)
        step(other, new, word)
    assert_same(weights(other), weights(table))


def wrapped(kind, rank, ranks, model):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    return model


def saves(rank, ranks, kind, name, folder):
    model = wrapped(kind, rank, ranks, made(name)[0])
    optimizer = optimizer_of(name, model)
    train(model, optimizer, range(3))
    dist_ckpt.save({"model": model, "optimizer": optimizer}, folder)
    train(model, optimizer, range(3, 6))
    return weights(model)


def loads(rank, ranks, kind, name, folder):
    model = wrapped(kind, rank, ranks, made(name, seed=1)[0])
    optimizer = optimizer_of(name, model)
    dist_ckpt.load({"model": model, "optimizer": optimizer}, folder)
    train(model, optimizer, range(3, 6))
    return weights(model)


@pytest.mark.parametrize("name", ["AdamW", pytest.param("SGD", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("before", "ranks", "after", "more"),
    [
        ("fsdp2", 2, "plain", 1),
        ("plain", 1, "fsdp2", 2),
        pytest.param("fsdp2", 2, "fsdp2", 4, marks=pytest.mark.slow),
        pytest.param("ddp", 2, "plain", 1, marks=pytest.mark.slow),
        pytest.param("ddp", 2, "fsdp2", 2, marks=pytest.mark.slow),
        pytest.param("compiled", 1, "ddp", 2, marks=pytest.mark.slow),
    ],
)
def test_wrappers_and_numbers_of_ranks_may_change_between_save_and_load(before, ranks, after, more, name, tmp_path):
    saved = run_ranks(saves, ranks, before, name, tmp_path / "c")
    found = run_ranks(loads, more, after, name, tmp_path / "c")
    for value in found:
        assert value.keys() == saved[0].keys()
        for key in value:  # sums of gradients over other numbers of ranks may round otherwise
            torch.testing.assert_close(value[key], saved[0][key], rtol=1e-5, atol=1e-6)


def test_a_wrapped_model_that_an_older_version_saved_with_its_prefix_loads(tmp_path):
    model, _ = made()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    dist_ckpt.save({"model": compiled.state_dict()}, tmp_path / "c", group=None)
    other = torch.compile(made(seed=1)[0], backend="eager")
    dist_ckpt.load({"model": other}, tmp_path / "c", group=None)
    assert_same(weights(other), weights(model))


def test_moments_that_a_state_dict_of_an_optimizer_lacks_are_an_error_that_says_to_pass_the_optimizer(tmp_path):
    run_ranks(saves, 2, "fsdp2", "AdamW", tmp_path / "c")
    model, optimizer = made(seed=1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(MismatchError, match="pass the optimizer itself in place of its state dict"):
        dist_ckpt.load(state, tmp_path / "c", group=None)
    dist_ckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "c", group=None)
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2, 3}


class Copied(TorchDispatchMode):
    """Where values were copied to, but from a tensor to itself."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0] is not args[1]:
            self.places.append(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


def test_a_module_that_is_given_itself_is_read_in_place_and_copied_no_second_time(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
    model[2].weight = nn.Parameter(torch.randn(8, 6).t())  # of other strides
    model.tied = model[0]
    wanted = copy.deepcopy(model.state_dict())
    dist_ckpt.save({"model": model}, tmp_path / "c", group=None)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    with Copied() as copied:
        dist_ckpt.load({"model": model}, tmp_path / "c", group=None)
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    assert [place for place in copied.places if place in own] == [model[2].weight.data_ptr()]  # which is not in order
    assert all(map(torch.equal, model.state_dict().values(), wanted.values()))


def test_moments_go_with_named_parameters_in_another_order(tmp_path):
    def of(*names):
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in names})
        return layers, torch.optim.AdamW(layers.named_parameters())

    layers, optimizer = of("a", "b")
    (layers["a"].weight.sum() + 2 * layers["b"].weight.sum()).backward()
    optimizer.step()
    dist_ckpt.save({"model": layers, "optimizer": optimizer}, tmp_path / "c")
    for names in ("ba", "ab"):
        layers, optimizer = of(*names)
        dist_ckpt.load({"model": layers, "optimizer": optimizer}, tmp_path / "c")
        assert optimizer.state[layers["b"].weight]["exp_avg"].mean().item() == pytest.approx(0.2)
        assert optimizer.param_groups[0]["param_names"] == [f"{name}.weight" for name in names]


def test_moments_never_go_to_parameters_of_another_group(tmp_path):
    def of(*order):
        layers = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "ab"})
        groups = [{"params": [(f"{name}.weight", layers[name].weight)], "lr": 0.1} for name in order]
        return layers, torch.optim.AdamW(groups)

    layers, optimizer = of("a", "b")
    (layers["a"].weight.sum() + layers["b"].weight.sum()).backward()
    optimizer.step()
    dist_ckpt.save({"model": layers, "optimizer": optimizer}, tmp_path / "c")
    layers, optimizer = of("b", "a")
    with pytest.raises(MismatchError, match=r"b\.weight was in group 1, and is in group 0 now"):
        dist_ckpt.load({"model": layers, "optimizer": optimizer}, tmp_path / "c")


def test_what_a_scheduler_left_in_the_groups_makes_no_other_optimizer(tmp_path):
    """Also beside an option that a newer torch has and the saved one had not."""
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0].pop("fused")
    dist_ckpt.save({"optimizer": optimizer}, tmp_path / "c")
    again = torch.optim.AdamW(layer.parameters())
    dist_ckpt.load({"optimizer": again}, tmp_path / "c")
    assert torch.equal(again.state[layer.weight]["exp_avg"], optimizer.state[layer.weight]["exp_avg"])


@pytest.mark.parametrize(("then", "now"), [("AdamW", "SGD"), ("SGD", "AdamW"), ("Adagrad", "RMSprop")])
def test_an_optimizer_of_another_kind_gets_no_state_of_one(tmp_path, then, now):
    def of(kind):
        layer = torch.nn.Linear(3, 3)
        optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.1)
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return optimizer

    dist_ckpt.save({"optimizer": of(then)}, tmp_path / "c")
    with pytest.raises(MismatchError, match=f"optimizer is {now}, and another optimizer was saved"):
        dist_ckpt.load({"optimizer": of(now)}, tmp_path / "c")
    dist_ckpt.load({"optimizer": of(then)}, tmp_path / "c")
