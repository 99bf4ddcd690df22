"""The weights of a stage whose optimizer steps inside the program."""

import pytest
import torch
from gpt_helpers import tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sixfold.gpt.engine.weight_versions import Batches, StageWeights
from sixfold.gpt.errors import TrainError


class Reads(TorchDispatchMode):
    """Counts what the host reads of tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reduced(tmp_path, targets, *wrong):
    """A stage of two layers behind the reduction of a batch; ``wrong`` parameters have a gradient that is infinite."""
    module, batches = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), Batches()
    weights = StageWeights(1, module, tiny_config(tmp_path), None, batches)
    batches.add(torch.tensor(targets, dtype=torch.float64), 0.1)
    for name, parameter in module.named_parameters():
        weights.accumulate(parameter, torch.full_like(parameter, torch.inf if name in wrong else float(targets > 0)))
    weights.reduce_grad()
    return module, weights


def test_an_update_reads_one_value_on_the_host(tmp_path):
    module, weights = reduced(tmp_path, 4.0)
    before = module[1].weight.detach().clone()
    with Reads() as reads:
        weights.step()
    assert reads.count == 1 and not torch.equal(before, module[1].weight)


def test_a_gradient_that_is_not_finite_is_that_to_which_the_backward_comes_first(tmp_path):
    module, weights = reduced(tmp_path, 4.0, "0.bias", "1.weight")
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    with pytest.raises(TrainError, match=r"the gradient of 1\.weight \(stage 1\) is not finite"):
        weights.step()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def test_a_batch_without_targets_is_no_gradient_that_is_not_finite(tmp_path):
    _, weights = reduced(tmp_path, 0.0)
    with pytest.raises(TrainError, match=r"^no token of the global batch is a target"):
        weights.step()
