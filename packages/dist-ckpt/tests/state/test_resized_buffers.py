"""Modules whose buffers take the shape of what is loaded, as observers of quantisation-aware training do."""

import copy
import warnings

import pytest
import torch
from torch import nn

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError


class Queue(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.register_buffer("seen", torch.arange(float(*sizes)) if sizes else torch.zeros(0))

    def _load_from_state_dict(self, state, prefix, *others):
        self.seen = torch.zeros_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *others)


def prepared():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = torch.ao.quantization
        model = nn.Sequential(quantization.QuantStub(), nn.Linear(6, 8), nn.ReLU(), quantization.DeQuantStub()).train()
        model.qconfig = quantization.get_default_qat_qconfig("x86")
        return quantization.prepare_qat(model)


def trained():
    model = prepared()
    model(torch.arange(30.0).reshape(5, 6))
    return model


@pytest.mark.parametrize(("saved", "fresh"), [(lambda: Queue(4), Queue), (trained, prepared)], ids=["queue", "QAT"])
def test_the_error_names_the_way_that_works(tmp_path, saved, fresh):
    model, found = saved(), fresh()
    dist_ckpt.save({"a": {"model": model}}, tmp_path)
    before = copy.deepcopy(found.state_dict())
    with pytest.raises(MismatchError) as error:
        dist_ckpt.load({"a": {"model": found}}, tmp_path)
    assert "takes it by load_state_dict(load({}, path)['a']['model'])" in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())
    found.load_state_dict(dist_ckpt.load({}, tmp_path)["a"]["model"])
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.state_dict().items())


def test_a_weight_of_another_shape_is_told_of_no_buffers(tmp_path):
    dist_ckpt.save({"model": nn.Linear(3, 4)}, tmp_path)
    with pytest.raises(MismatchError) as error:
        dist_ckpt.load({"model": nn.Linear(3, 5)}, tmp_path)
    assert "load_state_dict" not in str(error.value)
