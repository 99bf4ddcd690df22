"""What stands under an optimizer's name in the checkpoint is no state of one: an error before anything changes."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, tools

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def stepped():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


OTHERS = {
    "flattened": lambda model, optimizer: get_optimizer_state_dict(model, optimizer, options=FLAT),
    "a module": lambda model, optimizer: model,
    "a scheduler": lambda model, optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    "its state alone": lambda model, optimizer: {"state": optimizer.state_dict()["state"]},
    "a number": lambda model, optimizer: 3,
    "an empty dict": lambda model, optimizer: {},
}


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "ignore_all"])
@pytest.mark.parametrize("saved", OTHERS)
def test_what_is_no_state_of_an_optimizer_goes_into_none(tmp_path, saved, strict):
    model, optimizer = stepped()
    dist_ckpt.save({"model": model, "optimizer": OTHERS[saved](model, optimizer)}, tmp_path)
    again = nn.Linear(2, 2)
    before, own = copy.deepcopy(again.state_dict()), torch.optim.AdamW(again.parameters())
    with pytest.raises(MismatchError, match=r"optimizer is AdamW, and what was saved there has .* no param_groups"):
        dist_ckpt.load({"model": again, "optimizer": own}, tmp_path, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items()) and not own.state


def test_the_remedy_of_the_error_loads_what_torch_has_flattened(tmp_path):
    model, optimizer = stepped()
    dist_ckpt.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}, tmp_path)
    again = nn.Linear(2, 2)
    own = torch.optim.AdamW(again.parameters())
    loaded = dist_ckpt.load({"optimizer": get_optimizer_state_dict(again, own, options=FLAT)}, tmp_path)
    set_optimizer_state_dict(again, own, loaded["optimizer"], options=FLAT)
    assert torch.equal(own.state[again.bias]["exp_avg_sq"], optimizer.state[model.bias]["exp_avg_sq"])


HALVES = {
    "some keys": ("us", {"to": "torch_dist", "keys": "model.*"}, "param_groups and not its state"),
    "some keys in zarr": ("us", {"to": "zarr", "keys": "model.*"}, "param_groups and not its state"),
    "tensors alone": ("us", {"to": "safetensors"}, "state and not its param_groups"),
    "bytes of DCP in zarr": ("torch", {"to": "zarr"}, "state and not its param_groups"),
}


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "ignore_all"])
@pytest.mark.parametrize("half", HALVES)
def test_half_of_an_optimizer_is_an_error_before_anything_changes(tmp_path, half, strict):
    by, options, words = HALVES[half]
    if options["to"] == "safetensors":
        pytest.importorskip("safetensors", reason="needs the extra safetensors")
    model, optimizer = stepped()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if by == "us":
        dist_ckpt.save(state, tmp_path / "c", group=None)
    else:
        torch_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    tools.convert(tmp_path / "c", tmp_path / "d", **options)
    again = nn.Linear(2, 2)
    before, own = copy.deepcopy(again.state_dict()), torch.optim.AdamW(again.parameters())
    with pytest.raises(MismatchError, match=f"optimizer: the checkpoint has its {words}"):
        dist_ckpt.load({"model": again, "optimizer": own}, tmp_path / "d", group=None, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items()) and not own.state
    dist_ckpt.load({"model": again}, tmp_path / "d", group=None)
    assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize("by", ["us", "torch"])
def test_an_optimizer_without_state_is_whole(tmp_path, by):
    state = {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5).state_dict()}
    if by == "us":
        dist_ckpt.save(state, tmp_path / "c", group=None)
    else:
        torch_dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    own = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    dist_ckpt.load({"optimizer": own}, tmp_path / "c", group=None)
    assert own.param_groups[0]["lr"] == 0.5
