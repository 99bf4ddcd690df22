"""Stateful objects through ``dcp.Writer`` and ``dcp.Reader``: a trainer stops and goes on as if it had not."""

import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import dcp_load, dcp_save, everything, same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from sixfold.dist_ckpt import dcp


class Weights(Stateful):
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict):
        set_model_state_dict(self.model, state_dict)


class Moments(Stateful):
    def __init__(self, model, adam, flat):
        self.model, self.adam = model, adam
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.adam, options=self.options)

    def load_state_dict(self, state_dict):
        set_optimizer_state_dict(self.model, self.adam, state_dict, options=self.options)


class Loader(Stateful):
    """As torchtitan's: the state of each rank is a pickle under the rank's name."""

    def __init__(self, position):
        self.position = position

    def state_dict(self):
        return {"dp_rank_0": pickle.dumps({"position": self.position}), "world_size": 1}

    def load_state_dict(self, state_dict):
        assert state_dict["world_size"] == 1
        self.position = pickle.loads(state_dict["dp_rank_0"])["position"]


class Progress(Stateful):
    """As torchtitan's train state: a 0-dim tensor and streams."""

    def __init__(self, step, losses):
        self.step, self.losses = step, losses

    def state_dict(self):
        stream = io.BytesIO()
        torch.save(self.losses, stream)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": stream}

    def load_state_dict(self, state_dict):
        self.step = int(state_dict["step"].item())
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"])


class Trainer:
    def __init__(self, seed, flat=True):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adam, lambda step: 1 / (1 + step))
        self.loader, self.progress = Loader(0), Progress(0, [])
        self.flat = flat

    def states(self):
        return {
            "model": Weights(self.model),
            "optimizer": Moments(self.model, self.adam, self.flat),
            "lr_scheduler": self.schedule,
            "dataloader": self.loader,
            "train_state": self.progress,
        }

    def steps(self, count):
        for _ in range(count):
            torch.manual_seed(self.loader.position)
            loss = self.model(torch.rand(5, 3)).square().mean()
            loss.backward()
            self.adam.step()
            self.adam.zero_grad()
            self.schedule.step()
            self.loader.position += 1
            self.progress.step += 1
            self.progress.losses.append(loss.item())
        return self


@pytest.mark.parametrize("flat", [True, False])
def test_a_trainer_goes_on_bitwise_as_the_one_that_never_stopped(tmp_path, flat):
    straight = Trainer(0, flat).steps(5)
    stopped = Trainer(0, flat).steps(3)
    dcp_save(stopped.states(), dcp.Writer(tmp_path / "c"))
    resumed = Trainer(1, flat)
    dcp_load(resumed.states(), dcp.Reader(tmp_path / "c"))
    assert (resumed.progress.step, resumed.loader.position) == (3, 3)
    resumed.steps(2)
    assert resumed.progress.losses == straight.progress.losses
    assert same(resumed.model.state_dict(), straight.model.state_dict())
    assert resumed.schedule.get_last_lr() == straight.schedule.get_last_lr()


def test_modules_and_optimizers_themselves_are_stateful(tmp_path):
    saved, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    dcp_save({"model": saved}, dcp.Writer(tmp_path / "c"))
    dcp_load({"model": other}, dcp.Reader(tmp_path / "c"))
    assert torch.equal(saved.weight, other.weight)


def test_the_pair_of_model_and_optimizer_of_torchs_tutorial(tmp_path):
    trainer = Trainer(0).steps(2)
    model, optim = get_state_dict(trainer.model, trainer.adam)
    dcp_save({"model": model, "optim": optim}, dcp.Writer(tmp_path / "c"))
    other = Trainer(1).steps(1)
    model, optim = get_state_dict(other.model, other.adam)
    state = dcp_load({"model": model, "optim": optim}, dcp.Reader(tmp_path / "c"))
    set_state_dict(other.model, other.adam, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert same(other.model.state_dict(), trainer.model.state_dict())
    assert same(other.adam.state_dict(), trainer.adam.state_dict())


def test_what_a_stateful_gives_lies_under_the_names_that_torch_gives_it(tmp_path):
    states = Trainer(0).steps(1).states
    dcp_save(states(), dcp.Writer(tmp_path / "ours"))
    dcp_save(states(), torch_dcp.FileSystemWriter(tmp_path / "torchs"))
    assert same(
        everything(torch_dcp.FileSystemReader(tmp_path / "ours")),
        everything(torch_dcp.FileSystemReader(tmp_path / "torchs")),
    )
