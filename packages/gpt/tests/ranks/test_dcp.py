"""Checkpoints are plain torch DCP folders: torch reads a run's, and a run starts from torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gpt_helpers import tiny_config
from run_helpers import final_tensors, losses, run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.dist_ckpt import retention
from sixfold.gpt import GPTModel, load_model


def newest(config):
    return retention.latest(f"{config.run.dir}/checkpoints")


@pytest.mark.slow
def test_plain_torch_dcp_reads_the_model_and_the_moments_of_a_sharded_run(tmp_path):
    config = tiny_config(tmp_path, "parallel.dp=2", "train.steps=2")
    run(config, 2)
    expected = load_model(config.run.dir).state_dict()
    model = GPTModel(config.model)
    assert not torch.equal(model.state_dict()["layers.3.ffn.up.weight"], expected["layers.3.ffn.up.weight"])
    moments = {f"model.{name}": torch.full_like(tensor, -1) for name, tensor in expected.items()}
    state = {"model": model.state_dict(), "optimizer.state.exp_avg_sq": moments}
    dcp.load(state, checkpoint_id=newest(config), no_dist=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert all((tensor >= 0).all() and tensor.any() for tensor in moments.values())

    dcp_to_torch_save(newest(config), tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    tensors = final_tensors(config)
    assert whole.keys() == tensors.keys() and all(torch.equal(whole[key], tensors[key]) for key in tensors)


@pytest.mark.slow
def test_a_run_starts_from_a_folder_that_torch_wrote(tmp_path):
    config = tiny_config(tmp_path, "train.steps=1", f"checkpoint.init_from={tmp_path / 'dcp'}")
    model = GPTModel(config.model)
    model.initialize(99)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    run(config, 1)
    seeded = tiny_config(tmp_path, "train.steps=1", run="seeded")
    run(seeded, 1)
    assert losses(config) != losses(seeded)
    source = tiny_config(tmp_path, "train.steps=0", "checkpoint.save_initial=true", "train.seed=99", run="source")
    run(source, 1)
    again = tiny_config(tmp_path, "train.steps=1", f"checkpoint.init_from={source.run.dir}", run="again")
    run(again, 1)
    assert losses(config) == losses(again)
