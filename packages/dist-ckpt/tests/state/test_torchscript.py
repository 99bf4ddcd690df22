"""Modules of TorchScript are saved and loaded as their state dicts."""

import pytest
import torch
from dist_ckpt_dcp_helpers import same
from torch import nn

from sixfold import dist_ckpt


class Net(nn.Module):
    """With a single child under the name of a wrapper, and with buffers."""

    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x):
        return self.module(x)


def scripted(make):
    return torch.jit.script(make())


def traced(make):
    return torch.jit.trace(make(), torch.ones(2, 3), check_trace=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("form", [scripted, traced])
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), Net, lambda: nn.Sequential(Net(), nn.Linear(3, 3))])
@pytest.mark.parametrize("around", [lambda module: module, nn.DataParallel, lambda module: nn.ModuleList([module])])
def test_it_goes_on_with_its_optimizer_as_before(tmp_path, form, make, around):
    module = around(form(make))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    stepped(module, optimizer)
    dist_ckpt.save({"model": module, "optimizer": optimizer}, tmp_path)
    again = around(form(make))
    own = torch.optim.AdamW([*again.parameters()][::-1], lr=0.1)  # moments go by the names of the weights
    dist_ckpt.load({"model": again, "optimizer": own}, tmp_path)
    assert same(again.state_dict(), module.state_dict())
    stepped(module, optimizer)
    stepped(again, own)
    assert same(again.state_dict(), module.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_loads_what_the_plain_module_saved_and_the_other_way_round(tmp_path):
    plain, script = Net(), torch.jit.script(Net())
    for saved, loaded in ((plain, script), (script, Net())):
        dist_ckpt.save({"model": saved}, tmp_path)
        dist_ckpt.load({"model": loaded}, tmp_path)
        assert same(saved.state_dict(), loaded.state_dict())


def stepped(module, optimizer):
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
