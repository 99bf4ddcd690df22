"""Versions that modules keep beside their weights: what was saved reaches load_state_dict, as after torch.load."""

import io

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sixfold import dist_ckpt


class Old(nn.Module):
    """Keeps the logarithm of its scale."""

    _version = 1

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.5]))


class New(Old):
    """Keeps the scale, and migrates what was saved before."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, local_metadata, *others):
        if local_metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"].exp()
        super()._load_from_state_dict(state, prefix, local_metadata, *others)


def by_object(model, folder):
    dist_ckpt.load({"model": model}, folder)


def by_state_dict(model, folder):
    model.load_state_dict(dist_ckpt.load({"model": model.state_dict()}, folder)["model"])


def by_nothing(model, folder):
    model.load_state_dict(dist_ckpt.load({}, folder)["model"])


def plain(module):
    return module


@pytest.mark.parametrize("form", ["module", "state dict"])
@pytest.mark.parametrize("load", [by_object, by_state_dict, by_nothing])
@pytest.mark.parametrize("kind", [Old, New])
def test_a_module_migrates_what_an_older_one_saved_as_after_torch_load(tmp_path, load, kind, form):
    saved, buffer = nn.Sequential(nn.Linear(2, 2), kind()), io.BytesIO()
    torch.save(saved.state_dict(), buffer)
    buffer.seek(0)
    expected, found = (nn.Sequential(nn.Linear(2, 2), New()) for _ in range(2))
    expected.load_state_dict(torch.load(buffer))
    dist_ckpt.save({"model": saved if form == "module" else saved.state_dict(), "step": 1}, tmp_path)
    load(found, tmp_path)
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@pytest.mark.parametrize("before", [plain, checkpoint_wrapper])
@pytest.mark.parametrize("after", [plain, checkpoint_wrapper, torch.compile])
def test_versions_stand_under_the_names_of_modules_whatever_wraps_them(tmp_path, before, after):
    dist_ckpt.save({"model": nn.Sequential(before(Old()))}, tmp_path)
    found = New()
    dist_ckpt.load({"model": nn.Sequential(after(found))}, tmp_path)
    assert torch.equal(found.scale, Old().scale.exp())


def test_a_module_that_was_not_saved_has_its_own_version(tmp_path):
    dist_ckpt.save({"model": nn.ModuleDict({"a": Old()})}, tmp_path)
    found = nn.ModuleDict({"a": New(), "b": New()})
    dist_ckpt.load({"model": found}, tmp_path, strict="ignore_all")
    assert torch.equal(found["a"].scale, Old().scale.exp()) and torch.equal(found["b"].scale, Old().scale)
