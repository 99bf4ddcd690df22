"""State of an optimizer goes to the parameter of its name, where the module stands beside it."""

import copy

import pytest
import torch
import torch.distributed.checkpoint
from dist_ckpt_dcp_helpers import same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError


def stepped(names, order=None, seed=0):
    """Layers made in an order of names, and an optimizer after a step in which each gradient is another."""
    torch.manual_seed(seed)
    layers, optimizer = fresh(names, order)
    for number, name in enumerate(sorted(names)):
        layers[name].weight.grad = torch.full((3, 3), number + 1.0)
        layers[name].bias.grad = torch.full((3,), -number - 1.0)
    optimizer.step()
    return layers, optimizer


def fresh(names, order=None):
    layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
    parameters = [*layers.parameters()]
    return layers, torch.optim.AdamW(parameters if order is None else [parameters[at] for at in order], lr=0.1)


def moments(layers, optimizer):
    return {
        name: optimizer.state[own]["exp_avg"].clone() for name, own in layers.named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize("make", [fresh, stepped])
@pytest.mark.parametrize(("names", "order"), [("qk", None), ("kq", None), ("qk", (3, 1, 0, 2)), ("kq", (1, 3, 2, 0))])
def test_moments_go_with_their_weights_as_by_torchs_own_state_dicts(tmp_path, make, names, order):
    then, optimizer = stepped("qk")
    dist_ckpt.save({"model": then, "optimizer": optimizer}, tmp_path / "c")
    now, own = make(names, order)
    dist_ckpt.load({"model": now, "optimizer": own}, tmp_path / "c")
    wanted, oracle = fresh(names, order)
    model_state, optimizer_state = get_state_dict(then, optimizer)
    set_state_dict(wanted, oracle, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert same(moments(now, own), moments(wanted, oracle))
    assert same(now.state_dict(), then.state_dict())
    assert own.state_dict().keys() == {"state", "param_groups"}
    assert [group["params"] for group in own.state_dict()["param_groups"]] == [[0, 1, 2, 3]]


def test_a_reordered_model_goes_on_as_the_one_of_before(tmp_path):
    then, optimizer = stepped("qk")
    dist_ckpt.save({"optimizer": optimizer, "model": nn.parallel.DataParallel(then)}, tmp_path / "c")
    now, own = fresh("kq")
    dist_ckpt.load({"model": torch.compile(now), "optimizer": own}, tmp_path / "c")
    for layers, each in ((then, optimizer), (now, own)):
        each.zero_grad()
        (layers["q"](torch.ones(1, 3)) * layers["k"](torch.ones(1, 3))).sum().backward()
        each.step()
    assert same(now.state_dict(), then.state_dict())


def test_a_new_layer_begins_without_state_and_takes_that_of_no_other(tmp_path):
    then, optimizer = stepped(["body", "head"])
    dist_ckpt.save({"model": then, "optimizer": optimizer}, tmp_path / "c")
    now, own = fresh(["other", "body"])
    dist_ckpt.load({"model": now, "optimizer": own}, tmp_path / "c", strict="log_unexpected")
    assert torch.equal(own.state[now["body"].weight]["exp_avg"], optimizer.state[then["body"].weight]["exp_avg"])
    assert {id(parameter) for parameter in own.state} == set(map(id, now["body"].parameters()))
    assert own.state_dict()["state"].keys() == {2, 3}


def test_state_under_names_of_torchs_recipe_goes_by_name_too(tmp_path):
    then, optimizer = stepped("qk")
    model_state, optimizer_state = get_state_dict(then, optimizer)
    dist_ckpt.save({"model": model_state, "optimizer": optimizer_state}, tmp_path / "c")
    now, own = fresh("kq")
    dist_ckpt.load({"model": now, "optimizer": own}, tmp_path / "c")
    assert same(moments(now, own), moments(then, optimizer))


def test_tied_weights_have_one_name_in_whatever_order_they_are_made(tmp_path):
    def of(names):
        layers, shared = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in (*names, "own")}), None
        for name in names:
            shared = layers[name].weight if shared is None else shared
            layers[name].weight = shared
        return layers, torch.optim.AdamW(layers.parameters())

    layers, optimizer = of(["embedding", "head"])
    (layers["head"].weight.sum() + 3 * layers["own"].weight.sum()).backward()
    optimizer.step()
    dist_ckpt.save({"model": layers, "optimizer": optimizer}, tmp_path / "c")
    now, own = of(["head", "embedding"])
    dist_ckpt.load({"model": now, "optimizer": own}, tmp_path / "c")
    assert same(moments(now, own), moments(layers, optimizer))


def test_a_parameter_of_another_group_is_refused(tmp_path):
    def of(first, second):
        layers = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "qk"})
        groups = [{"params": [layers[first].weight], "lr": 0.1}, {"params": [layers[second].weight]}]
        return layers, torch.optim.AdamW(groups)

    layers, optimizer = of("q", "k")
    dist_ckpt.save({"model": layers, "optimizer": optimizer}, tmp_path / "c")
    layers, optimizer = of("k", "q")
    with pytest.raises(MismatchError, match=r"model\.k\.weight was in group 1, and is in group 0 now"):
        dist_ckpt.load({"model": layers, "optimizer": optimizer}, tmp_path / "c")


def test_without_a_module_beside_it_state_goes_by_place_also_in_checkpoints_of_before(tmp_path):
    then, optimizer = stepped("qk")
    dist_ckpt.save({"optimizer": optimizer}, tmp_path / "c")
    assert "parameter_names" not in dist_ckpt.load_common_state_dict(tmp_path / "c")["optimizer"]
    state = copy.deepcopy(optimizer.state_dict())
    dist_ckpt.save({"model": then.state_dict(), "optimizer": state}, tmp_path / "before")
    for folder in ("c", "before"):
        _, own = fresh("qk")
        dist_ckpt.load({"optimizer": own}, tmp_path / folder)
        assert torch.equal(own.state_dict()["state"][2]["exp_avg"], state["state"][2]["exp_avg"])
    now, own = fresh("qk")
    dist_ckpt.load({"model": now, "optimizer": own}, tmp_path / "before")
    assert same(moments(now, own), moments(then, optimizer))


def test_an_optimizer_alone_that_was_saved_beside_its_model_loads_by_place(tmp_path):
    then, optimizer = stepped("qk")
    dist_ckpt.save({"model": then, "optimizer": optimizer}, tmp_path / "c")
    now, own = fresh("qk")
    loaded = dist_ckpt.load({"optimizer": own}, tmp_path / "c")
    assert loaded["optimizer"] is own
    assert same(moments(now, own), moments(then, optimizer))
    names = ["q.weight", "q.bias", "k.weight", "k.bias"]
    common = dist_ckpt.load_common_state_dict(tmp_path / "c")["optimizer"]
    assert common["parameter_names"] == [f"model.{name}" for name in names]


class Plain(torch.optim.Optimizer):
    """Of a user: a moment of its parameter's shape, and one number for each row of a matrix."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["moment"] = parameter.grad.clone()
            state["rows"] = parameter.grad.flatten(1).sum(1) if parameter.dim() > 1 else parameter.grad.sum()


def with_step(parameters, kind, **options):
    optimizer = kind(parameters, **options)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


KINDS = [
    *((kind, {}) for kind in (torch.optim.AdamW, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.ASGD)),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"centered": True}),
]


@pytest.mark.parametrize("loads", ["a fresh one", "one with state"])
@pytest.mark.parametrize("saved_as", ["alone", "beside the model", "state dict", "by torch"])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_moments_of_another_shape_than_their_parameters_are_an_error(tmp_path, kind, options, saved_as, loads):
    then = nn.Linear(3, 4)
    optimizer, folder = with_step([*then.parameters()], kind, **options), tmp_path / "c"
    state = {"optimizer": optimizer, "model": then} if saved_as == "beside the model" else {"optimizer": optimizer}
    if saved_as == "by torch":
        torch.distributed.checkpoint.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder, no_dist=True)
    else:
        dist_ckpt.save({"optimizer": optimizer.state_dict()} if saved_as == "state dict" else state, folder)
    now = nn.Linear(6, 4)
    own = kind(now.parameters(), **options) if loads == "a fresh one" else with_step([*now.parameters()], kind)
    with pytest.raises(
        MismatchError, match=r"parameter 0 was saved with shape \(4, 3\), and the parameter has \(4, 6\)"
    ):
        dist_ckpt.load({"optimizer": own}, folder)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Plain])
def test_moments_of_parameters_in_another_order_are_an_error_that_names_the_parameter(tmp_path, kind):
    then = nn.Linear(3, 4)
    dist_ckpt.save({"optimizer": with_step([*then.parameters()], kind)}, tmp_path / "c")
    now = nn.Linear(3, 4)
    own = kind([now.bias, now.weight])
    wanted = r"of parameter 0 \(model\.bias\) was saved with shape \(4, 3\), and the parameter has \(4,\)"
    with pytest.raises(MismatchError, match=wanted):
        dist_ckpt.load({"model": now, "optimizer": own}, tmp_path / "c", strict="log_unexpected")
    assert not own.state


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, Plain])
def test_optimizers_whose_state_has_shapes_of_its_own_come_back(tmp_path, kind):
    def of():
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1))

    then, now = of(), of()
    optimizer, own = kind(then.parameters()), kind(now.parameters())
    then(torch.ones(2, 4)).sum().backward()
    optimizer.step(*[lambda: torch.tensor(1.0)] * (kind is torch.optim.LBFGS))
    dist_ckpt.save({"optimizer": optimizer}, tmp_path / "c")
    dist_ckpt.load({"optimizer": own}, tmp_path / "c")
    assert [*map(in_order, own.state.values())] == [*map(in_order, optimizer.state.values())]


def in_order(state):
    return repr(sorted(state.items()))
