"""A checkpoint manager that calls torch.distributed.checkpoint as torchtitan's does, with one line changed.

Folders ``step-N``, saves in the background over a gloo group of their own, the last k kept, a train state that is
Stateful, and the first weights from a Hugging Face folder. The line is the import of readers and writer.
"""

import io
import os
import pickle
import queue
import re
import shutil
import tempfile
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageReader
from sixfold.dist_ckpt.dcp import Reader as FileSystemReader, Reader as HuggingFaceStorageReader, Writer as FileSystemWriter  # noqa: E501  # isort: skip  # fmt: skip

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Weights(Stateful):
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict) -> None:
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


class Optimizers(Stateful):
    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state_dict: dict) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=FLAT)


class DataLoader(Stateful):
    """Each data-parallel rank has its position, under a name of its own."""

    def __init__(self) -> None:
        self.position, self.key = 0, f"dp_rank_{dist.get_rank()}"

    def state_dict(self) -> dict:
        return {self.key: pickle.dumps({"position": self.position}), "world_size": dist.get_world_size()}

    def load_state_dict(self, state_dict: dict) -> None:
        self.position = pickle.loads(state_dict[self.key])["position"]


class TrainState(Stateful):
    def __init__(self) -> None:
        self.step, self.losses = 0, []

    def state_dict(self) -> dict:
        losses = io.BytesIO()
        torch.save(self.losses, losses)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": losses}

    def load_state_dict(self, state_dict: dict) -> None:
        self.step = int(state_dict["step"].item())
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"], weights_only=False)


class CheckpointManager:
    def __init__(self, states: dict, folder: str, *, asynchronous: bool, keep_latest_k: int) -> None:
        self.states, self.folder, self.keep_latest_k = states, folder, keep_latest_k
        self.group = dist.new_group(backend="gloo") if asynchronous else None
        self.future, self.to_purge = None, queue.Queue()
        self.purger = threading.Thread(target=self._purge)
        self.purger.start()

    def save(self, step: int) -> None:
        self.wait()
        checkpoint_id = self._id_of(step)
        writer = FileSystemWriter(checkpoint_id)
        if self.group is not None:
            self.future = dcp.async_save(
                self._flat(), storage_writer=writer, checkpoint_id=checkpoint_id, process_group=self.group
            )
        else:
            dcp.save(self._flat(), storage_writer=writer, checkpoint_id=checkpoint_id)
        self._purge_stale()

    def load(self, step: int = -1) -> bool:
        step = self._find_load_step() if step == -1 else step
        if step == -1:
            return False
        states = self._flat()
        dcp.load(states, storage_reader=FileSystemReader(self._id_of(step)))
        self.states["model"].load_state_dict(states)
        return True

    def load_hf(self, folder: str) -> None:
        """The first weights, at whatever layout the model has here."""
        states = self.states["model"].state_dict()
        dcp.load(states, storage_reader=HuggingFaceStorageReader(folder))
        self.states["model"].load_state_dict(states)

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()
            self.future = None

    def close(self) -> None:
        self.wait()
        self.to_purge.put(None)
        self.purger.join()

    def _flat(self) -> dict:
        """The model's tensors lie at the top, beside the other states."""
        return {key: value for key, value in self.states.items() if key != "model"} | self.states["model"].state_dict()

    def _id_of(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step}")

    def _steps(self) -> list[int]:
        if not os.path.isdir(self.folder):
            return []
        names = (re.fullmatch(r"step-(\d+)", name) for name in os.listdir(self.folder))
        return sorted(int(match.group(1)) for match in names if match)

    def _find_load_step(self) -> int:
        complete = [s for s in self._steps() if os.path.isfile(os.path.join(self._id_of(s), ".metadata"))]
        return max(complete, default=-1)

    def _purge_stale(self) -> None:
        if dist.get_rank() == 0:
            for step in self._steps()[: -self.keep_latest_k]:
                self.to_purge.put(self._id_of(step))

    def _purge(self) -> None:
        while (path := self.to_purge.get()) is not None:
            shutil.rmtree(path, ignore_errors=True)


class Trainer:
    def __init__(self, folder: str, *, seed: int, asynchronous: bool) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.loader, self.train_state = DataLoader(), TrainState()
        states = {
            "model": Weights(self.model),
            "optimizer": Optimizers(self.model, self.optimizer),
            "lr_scheduler": self.schedule,
            "dataloader": self.loader,
            "train_state": self.train_state,
        }
        self.checkpoints = CheckpointManager(states, folder, asynchronous=asynchronous, keep_latest_k=2)

    def train(self, to_step: int) -> list[float]:
        while self.train_state.step < to_step:
            torch.manual_seed(100 * self.loader.position)  # the batch at this position
            loss = self.model(torch.rand(4, 6)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.loader.position += 1
            self.train_state.step += 1
            self.train_state.losses.append(loss.item())
            self.checkpoints.save(self.train_state.step)
        self.checkpoints.wait()
        return self.train_state.losses


def save(folder: str, asynchronous: bool = True) -> list[float]:
    """Four steps with a checkpoint after each; their losses."""
    trainer = Trainer(folder, seed=0, asynchronous=asynchronous)
    losses = trainer.train(4)
    trainer.checkpoints.close()
    return losses


def resume(folder: str, asynchronous: bool = True) -> list[float]:
    """From the newest checkpoint to step 6; the losses of all six steps."""
    trainer = Trainer(folder, seed=1, asynchronous=asynchronous)
    assert trainer.checkpoints.load()
    losses = trainer.train(6)
    trainer.checkpoints.close()
    return losses


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    root = [tempfile.mkdtemp()]
    dist.broadcast_object_list(root)
    save(os.path.join(root[0], "run"))
    print("losses:", *resume(os.path.join(root[0], "run")))
    print("kept:", *sorted(os.listdir(os.path.join(root[0], "run"))))
    dist.destroy_process_group()
