"""Weights that came or went between a save and a load: moments go by name, or nothing has changed."""

import copy
import logging

import pytest
import torch
from torch import nn

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError


def layers(names):
    return nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})


def adam(model, *groups):
    return torch.optim.Adam([{"params": [model[name].weight for name in group]} for group in groups], lr=0.1)


def stepped(model, optimizer):
    for number, group in enumerate(optimizer.param_groups):
        for at, weight in enumerate(group["params"]):
            weight.grad = torch.full((3, 3), 10.0 * number + at + 1)
    optimizer.step()
    return model, optimizer


CASES = {  # weights of the model and groups of the optimizer, then and now
    "unfrozen": ("abcd", ["cd"], "abcd", ["abcd"]),
    "unfrozen, new ones last": ("abcd", ["cd"], "abcd", ["cdab"]),
    "frozen": ("abcd", ["abcd"], "abcd", ["cd"]),
    "the last ones frozen": ("abcd", ["abcd"], "abcd", ["ab"]),
    "all but one": ("abcd", ["ab"], "abcd", ["bcd"]),
    "in two groups": ("abcd", ["ab", "cd"], "abcd", ["b", "cd"]),
    "a new layer": ("bc", ["bc"], "abc", ["abc"]),
    "a lost layer": ("abc", ["abc"], "bc", ["bc"]),
    "a new layer, others in another order": ("bc", ["bc"], "acb", ["acb"]),
}


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_moments_go_by_the_names_of_weights_that_stayed(tmp_path, caplog, case, fresh):
    names, groups, names_now, groups_now = CASES[case]
    then = layers(names)
    _, optimizer = stepped(then, adam(then, *groups))
    dist_ckpt.save({"model": then, "optimizer": optimizer}, tmp_path)
    now = layers(names_now)
    own = adam(now, *groups_now)
    if not fresh:
        stepped(now, own)
    with caplog.at_level(logging.WARNING, "sixfold.dist_ckpt"):
        strict = "assume_ok_unexpected" if names == names_now else "ignore_all"
        dist_ckpt.load({"model": now, "optimizer": own}, tmp_path, strict=strict)
    stayed = {*"".join(groups)} & {*"".join(groups_now)}
    for name in {*names} & {*names_now}:
        assert torch.equal(now[name].weight, then[name].weight)
    assert {id(weight) for weight in own.state} == {id(now[name].weight) for name in stayed}
    for name in stayed:
        moments = own.state[now[name].weight], optimizer.state[then[name].weight]
        for key, value in moments[1].items():
            assert torch.equal(moments[0][key], value), (name, key)
    for name in {*"".join(groups)} ^ {*"".join(groups_now)}:
        assert f"model.{name}.weight" in caplog.text
    assert [len(group["params"]) for group in own.param_groups] == [len(group) for group in groups_now]
    stepped(now, own)


@pytest.mark.parametrize("beside", [True, False], ids=["beside its model", "alone"])
def test_other_groups_are_one_error_before_anything_changes(tmp_path, beside):
    then = layers("abcd")
    _, optimizer = stepped(then, adam(then, "abcd"))
    dist_ckpt.save({"model": then, "optimizer": optimizer} if beside else {"optimizer": optimizer}, tmp_path)
    now = layers("abcd")
    before, own = copy.deepcopy(now.state_dict()), adam(now, "ab", "cd")
    state = {"model": now, "optimizer": own} if beside else {"optimizer": own}
    with pytest.raises(MismatchError, match="groups of 4 parameters, and this one has groups of 2, 2 parameters"):
        dist_ckpt.load(state, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in now.state_dict().items()) and not own.state


def test_without_names_other_counts_are_one_error_before_anything_changes(tmp_path):
    then = layers("abcd")
    _, optimizer = stepped(then, adam(then, "abcd"))
    dist_ckpt.save({"model": then.state_dict(), "optimizer": optimizer}, tmp_path)
    now = layers("abcd")
    before, own = copy.deepcopy(now.state_dict()), adam(now, "cd")
    with pytest.raises(MismatchError, match="groups of 4 parameters, and this one has groups of 2 parameters"):
        dist_ckpt.load({"model": now, "optimizer": own}, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in now.state_dict().items()) and not own.state


def test_a_weight_that_went_into_another_group_is_an_error_also_if_others_came(tmp_path):
    then = layers("abcd")
    _, optimizer = stepped(then, adam(then, "ab", "cd"))
    dist_ckpt.save({"model": then, "optimizer": optimizer}, tmp_path)
    now = layers("abcd")
    with pytest.raises(MismatchError, match=r"model\.a\.weight was in group 0, and is in group 1 now"):
        dist_ckpt.load({"model": now, "optimizer": adam(now, "b", "acd")}, tmp_path)


@pytest.mark.parametrize("key", ["model", "net"])
def test_an_optimizer_of_which_no_weight_was_saved_is_an_error_unless_it_had_no_state(tmp_path, key):
    then, now = layers("abcd"), layers("abcd")
    optimizer, own = adam(then, "ab"), adam(now, "ab" if key == "net" else "cd")
    before = copy.deepcopy(now.state_dict())
    dist_ckpt.save({"model": then, "optimizer": optimizer}, tmp_path / "without")
    stepped(then, optimizer)
    dist_ckpt.save({"model": then, "optimizer": optimizer}, tmp_path / "with")
    first = "a" if key == "net" else "c"
    wanted = rf"state of model\.a\.weight, model\.b\.weight alone, and this one holds {key}\.{first}\.weight"
    with pytest.raises(MismatchError, match=wanted):
        dist_ckpt.load({key: now, "optimizer": own}, tmp_path / "with", strict="ignore_all")
    assert all(torch.equal(value, before[name]) for name, value in now.state_dict().items()) and not own.state
    dist_ckpt.load({key: now, "optimizer": own}, tmp_path / "without", strict="ignore_all")
    assert not own.state
