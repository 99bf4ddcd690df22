"""A weight with several names: its module stands under two keys, or the optimizer was made with names of its own."""

import copy
import logging

import pytest
import torch
import torch.distributed.checkpoint
from dist_ckpt_dcp_helpers import same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError


def made(seed, *, reverse=False, named=False, only=""):
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("body", "head")})
    found = [(name, weight) for name, weight in model.named_parameters() if name.startswith(only)]
    found = found[::-1] if reverse else found
    return model, torch.optim.AdamW(found if named else [weight for _, weight in found], lr=0.1)


def trained(model, optimizer, steps=1):
    for step in range(steps):
        model["head"](model["body"](torch.full((1, 3), step + 1.0))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def resumed_by_torch(model, optimizer):
    """The oracle: both as torch's own state dicts bring them back, one step further."""
    again, own = made(1)
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return trained(again, own)[0].state_dict()


KEYS = {  # what stands in the state dict for "model", then and now
    "a part of it apart, then": (lambda m: {"backbone": m["body"], "model": m}, lambda m: {"model": m}),
    "the best is the newest, then": (
        lambda m: {"best": m, "model": m},
        lambda m: {"best": copy.deepcopy(m), "model": m},
    ),
    "under the other key": (lambda m: {"best": m, "model": m}, lambda m: {"best": m}),
    "the two changed places": (lambda m: {"a": m, "z": copy.deepcopy(m)}, lambda m: {"z": copy.deepcopy(m), "a": m}),
    "in wrappers": (lambda m: {"best": nn.DataParallel(m), "model": m}, lambda m: {"model": torch.compile(m)}),
}


@pytest.mark.parametrize("case", KEYS)
def test_moments_are_found_by_any_name_that_the_weight_had(tmp_path, caplog, case):
    then, now = KEYS[case]
    model, optimizer = trained(*made(0), steps=2)
    dist_ckpt.save({**then(model), "optimizer": optimizer}, tmp_path)
    again, own = made(1)
    with caplog.at_level(logging.WARNING, "sixfold.dist_ckpt"):
        dist_ckpt.load({**now(again), "optimizer": own}, tmp_path)
    assert "state" not in caplog.text
    assert same(trained(again, own)[0].state_dict(), resumed_by_torch(model, optimizer))
    assert own.state_dict().keys() == {"state", "param_groups"}


def test_a_part_beside_its_model_finds_state_under_names_of_torchs_recipe(tmp_path):
    model, optimizer = trained(*made(0))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dist_ckpt.save({**state, "backbone": model["body"].state_dict()}, tmp_path)
    again, own = made(1, reverse=True)
    dist_ckpt.load({"backbone": again["body"], "model": again, "optimizer": own}, tmp_path)
    for name, weight in again.named_parameters():
        assert torch.equal(own.state[weight]["exp_avg"], optimizer.state[model.get_parameter(name)]["exp_avg"])


def tied(is_tied, reverse=False):
    torch.manual_seed(int(is_tied))
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in ("embed", "head")})
    if is_tied:
        model["head"].weight = model["embed"].weight
    weights = [*model.parameters()]
    return model, torch.optim.AdamW(weights[::-1] if reverse else weights, lr=0.1)


@pytest.mark.parametrize("reverse", [False, True])
def test_weights_that_were_tied_and_are_two_now_share_no_moments(tmp_path, caplog, reverse):
    model, optimizer = tied(True)
    (model["embed"].weight.sum() * 2).backward()
    optimizer.step()
    dist_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path)
    again, own = tied(False, reverse)
    with caplog.at_level(logging.WARNING, "sixfold.dist_ckpt"):
        dist_ckpt.load({"model": again, "optimizer": own}, tmp_path)
    assert torch.equal(again["head"].weight, model["embed"].weight)
    assert {id(weight) for weight in own.state} == {id(again["embed"].weight)}
    assert "no saved state goes to model.head.weight, which begins without" in caplog.text


@pytest.mark.parametrize("beside", [True, False], ids=["beside its model", "alone"])
@pytest.mark.parametrize("named", ["then", "now", "both", "none"])
@pytest.mark.parametrize(("reverse", "only"), [(True, ""), (False, "head"), (True, "body")])
def test_names_of_named_parameters_make_nothing_worse(tmp_path, reverse, only, named, beside):
    model, optimizer = trained(*made(0, named=named in ("then", "both")))
    dist_ckpt.save({"model": model, "optimizer": optimizer} if beside else {"optimizer": optimizer}, tmp_path)
    again, own = made(1, reverse=reverse, only=only, named=named in ("now", "both"))
    state = {"model": again, "optimizer": own} if beside else {"optimizer": own}
    if not beside and named != "both":  # by place, as in torch: nothing tells which is which
        with pytest.raises(MismatchError, match="was saved with"):
            dist_ckpt.load(state, tmp_path)
        return
    dist_ckpt.load(state, tmp_path)
    names = [name for name, _ in again.named_parameters() if name.startswith(only)]
    for name in names:
        moments = own.state[again.get_parameter(name)], optimizer.state[model.get_parameter(name)]
        assert torch.equal(moments[0]["exp_avg"], moments[1]["exp_avg"])
    assert len(own.state) == len(names)
    wanted = (names[::-1] if reverse else names) if named in ("now", "both") else None
    assert own.param_groups[0].get("param_names") == wanted
    more = [("new", nn.Parameter(torch.ones(3)))]
    own.add_param_group({"params": more if wanted else [weight for _, weight in more]})  # torch refuses half of them


def test_names_that_have_none_in_common_say_nothing_about_the_order(tmp_path):
    model, optimizer = trained(*made(0, named=True))
    dist_ckpt.save({"optimizer": optimizer}, tmp_path)
    again = made(1)[0]
    own = torch.optim.AdamW([(f"layers.{name}", weight) for name, weight in again.named_parameters()])
    dist_ckpt.load({"optimizer": own}, tmp_path)
    assert torch.equal(own.state[again["head"].bias]["exp_avg"], optimizer.state[model["head"].bias]["exp_avg"])


def test_names_of_an_optimizer_saved_alone_are_those_within_the_model_beside_it_now(tmp_path):
    model, optimizer = trained(*made(0, named=True))
    dist_ckpt.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    again, own = made(1, reverse=True)
    dist_ckpt.load({"model": torch.compile(again), "optimizer": own}, tmp_path)
    assert torch.equal(own.state[again["head"].bias]["exp_avg"], optimizer.state[model["head"].bias]["exp_avg"])
