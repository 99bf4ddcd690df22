"""The checkpoint calls of accelerate's FSDP plugin with one line changed: the import of reader and writer.

``save_fsdp_model`` and its three companions put one folder for the model and one for the optimizer into a directory.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from sixfold.dist_ckpt.dcp import Reader as FileSystemReader, Writer as FileSystemWriter  # isort: skip


def save_fsdp_model(model: torch.nn.Module, output_dir: str) -> None:
    ckpt_dir = os.path.join(output_dir, "pytorch_model_fsdp_0")
    os.makedirs(ckpt_dir, exist_ok=True)
    state_dict = {"model": get_model_state_dict(model)}
    dist_cp.save(state_dict=state_dict, storage_writer=FileSystemWriter(ckpt_dir), planner=DefaultSavePlanner())


def load_fsdp_model(model: torch.nn.Module, input_dir: str) -> None:
    ckpt_dir = os.path.join(input_dir, "pytorch_model_fsdp_0")
    state_dict = {"model": get_model_state_dict(model)}
    dist_cp.load(state_dict=state_dict, storage_reader=FileSystemReader(ckpt_dir), planner=DefaultLoadPlanner())
    set_model_state_dict(model, state_dict["model"])


def save_fsdp_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, output_dir: str) -> None:
    ckpt_dir = os.path.join(output_dir, "optimizer_0")
    os.makedirs(ckpt_dir, exist_ok=True)
    dist_cp.save(
        state_dict={"optimizer": get_optimizer_state_dict(model, optimizer)},
        storage_writer=FileSystemWriter(ckpt_dir),
        planner=DefaultSavePlanner(),
    )


def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, input_dir: str) -> None:
    ckpt_dir = os.path.join(input_dir, "optimizer_0")
    optim_state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dist_cp.load(optim_state, checkpoint_id=ckpt_dir, storage_reader=FileSystemReader(ckpt_dir))
    set_optimizer_state_dict(model, optimizer, optim_state["optimizer"])


def trainer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(folder: str) -> list[float]:
    model, optimizer = trainer(seed=0)
    steps(model, optimizer)
    save_fsdp_model(model, folder)
    save_fsdp_optimizer(optimizer, model, folder)
    return steps(model, optimizer)


def resume(folder: str) -> list[float]:
    model, optimizer = trainer(seed=1)
    load_fsdp_model(model, folder)
    load_fsdp_optimizer(optimizer, model, folder)
    return steps(model, optimizer)


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    losses = save(folder[0]), resume(folder[0])
    print("losses without a stop and after it:", *losses)
    dist.destroy_process_group()
