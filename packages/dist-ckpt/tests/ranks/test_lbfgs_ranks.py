"""LBFGS over sharded weights: its lists of DTensors are filled item by item, and an error says what to do."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError


def stepped(mesh, steps):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return model, optimizer


def resumes(rank, ranks, folder):
    mesh = init_device_mesh("cpu", (ranks,))
    model, optimizer = stepped(mesh, 2)
    dist_ckpt.save({"model": model, "optimizer": optimizer}, folder)
    for steps in (0, 1):
        again, own = stepped(mesh, steps)
        before = again.weight.full_tensor().clone()
        with pytest.raises(MismatchError, match="have it make as many steps before the load as were made before the"):
            dist_ckpt.load({"model": again, "optimizer": own}, folder)
        assert torch.equal(again.weight.full_tensor(), before)
    again, own = stepped(mesh, 2)
    for tensor in (again.weight, *own.state[again.weight]["old_dirs"]):
        tensor.detach().zero_()
    dist_ckpt.load({"model": again, "optimizer": own}, folder)
    pairs = zip(own.state[again.weight]["old_dirs"], optimizer.state[model.weight]["old_dirs"], strict=True)
    return torch.equal(again.weight.full_tensor(), model.weight.full_tensor()) and all(
        torch.equal(mine.full_tensor(), theirs.full_tensor()) for mine, theirs in pairs
    )


def test_the_remedy_of_the_error_resumes_it(tmp_path):
    assert run_ranks(resumes, 1, tmp_path / "c") == [True]
