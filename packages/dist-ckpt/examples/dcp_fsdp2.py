"""FSDP2 and torch.distributed.checkpoint, the usual script with one line changed: the import of reader and writer.

python dcp_fsdp2.py    or    torchrun --nproc-per-node 2 dcp_fsdp2.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from sixfold.dist_ckpt.dcp import Reader as FileSystemReader, Writer as FileSystemWriter  # isort: skip


class App:
    """Model and optimizer as one Stateful: torch calls these two methods."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 15), torch.nn.ReLU(), torch.nn.Linear(15, 8))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, object]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict) -> None:
        set_state_dict(
            self.model, self.optim, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )

    def step(self) -> float:
        loss = self.model(torch.ones(4, 8)).square().mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        return loss.item()


def save(folder: str) -> list[float]:
    """Two steps, a checkpoint, two more; the losses after the checkpoint."""
    app = App(seed=0)
    for _ in range(2):
        app.step()
    dcp.save({"app": app}, storage_writer=FileSystemWriter(folder))
    return [app.step() for _ in range(2)]


def resume(folder: str) -> list[float]:
    """Two steps from the checkpoint, at any number of ranks; their losses."""
    app = App(seed=1)
    dcp.load({"app": app}, storage_reader=FileSystemReader(folder))
    return [app.step() for _ in range(2)]


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    losses = save(folder[0]), resume(folder[0])
    print("losses without a stop and after it:", *losses)
    dist.destroy_process_group()
