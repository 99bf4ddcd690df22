"""The usual ways to save a run: what is saved, what takes a load back, and the doors that it goes through.

    seed --> made: a Run --> states: what a script saves --> a door --> folder
    folder --> a door --> take: gives it to a new Run --> whole: every value of it, for comparing

A Run is a model, its optimizer and schedule, and what a way has besides. All ranks train on the same batch, so each
number of ranks that is a power of two has the same gradients to the bit.
"""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import quiet
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointManager, PerRank, dcp

#: all of torch.optim but SparseAdam, with options that give each the state that it can have
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


class Loader:
    """Each rank has a position of its own."""

    def __init__(self) -> None:
        self.position = -1

    def state_dict(self):
        return {"position": self.position, "order": torch.full((3,), self.position)}

    def load_state_dict(self, state):
        assert state["order"].unique().tolist() == [state["position"]]
        self.position = state["position"]


def _generator_of_numpy():
    import numpy

    return numpy.random.RandomState(0)


@dataclass
class Run:
    model: nn.Module  # as the script has it, wrapped
    optimizer: torch.optim.Optimizer
    schedule: Any
    average: nn.Module | None = None
    swa: torch.optim.swa_utils.AveragedModel | None = None
    loader: Loader = field(default_factory=Loader)
    generator: torch.Generator = field(default_factory=torch.Generator)
    python: random.Random = field(default_factory=partial(random.Random, 0))
    numpy: Any = field(default_factory=_generator_of_numpy)
    step: int = 0
    of_others: list[Any] | None = None  # what the ranks of another world had of their own

    def own(self):
        """What this rank alone has."""
        states = {"torch": self.generator.get_state(), "python": self.python.getstate()}
        return states | {"numpy": self.numpy.get_state()}

    def set_own(self, values):
        self.generator.set_state(values["torch"])
        self.python.setstate(values["python"])
        self.numpy.set_state(values["numpy"])


# ---- how a model is laid out


def with_tp(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return with_fsdp(model, mesh["dp"])


def with_fsdp(model, mesh):
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)
    return model


def mesh_of(ranks, columns):
    """Two axes; the second has at most so many ranks."""
    columns = min(ranks, columns)
    return init_device_mesh("cpu", (ranks // columns, columns), mesh_dim_names=("dp", "tp"))


LAYOUTS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "plain": lambda model, ranks: model,
    "ddp": lambda model, ranks: nn.parallel.DistributedDataParallel(model),
    "fsdp2": lambda model, ranks: with_fsdp(model, init_device_mesh("cpu", (ranks,))),
    "fsdp2 and tp": lambda model, ranks: with_tp(model, mesh_of(ranks, 2)),
    "hsdp": lambda model, ranks: with_fsdp(model, mesh_of(ranks, max(1, ranks // 2))),
}


class Net(nn.Module):
    """Buffers beside parameters; 3 rows that no number of ranks here divides."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh())


def made(layout, ranks, seed, *, average=False):
    torch.manual_seed(seed)
    net = Net()
    model = LAYOUTS[layout](net, ranks)
    matrices = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in net.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    run = Run(model, optimizer, schedule)
    if average:
        run.average = LAYOUTS[layout](Net(), ranks)
        run.swa = torch.optim.swa_utils.AveragedModel(Net(), use_buffers=True)
    run.generator.manual_seed(seed)
    return run


def train(run, steps):
    for _ in range(steps):
        run.step += 1
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(run.step))
        run.model(x).square().mean().backward()
        run.optimizer.step()
        run.schedule.step()
        run.optimizer.zero_grad()
        run.loader.position = 100 * run.step + dist.get_rank()
        torch.rand(3 + dist.get_rank(), generator=run.generator)
        run.python.random()
        run.numpy.rand(2 + dist.get_rank())
        if run.average is not None:
            with torch.no_grad():
                for kept, now in zip(run.average.parameters(), run.model.parameters(), strict=True):
                    kept.mul_(0.9).add_(now, alpha=0.1)
            torch.manual_seed(run.step)
            run.swa.update_parameters(Net())


def full(value):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def whole(run):
    """Every value of a run by the names of the model alone, whatever wraps and shards it."""
    net = getattr(run.model, "module", run.model)
    moments = {
        name: {part: full(value) for part, value in run.optimizer.state[parameter].items()}
        for name, parameter in net.named_parameters()
    }
    groups = [{key: v for key, v in group.items() if key != "params"} for group in run.optimizer.param_groups]
    found = {
        "model": {name: full(value) for name, value in net.state_dict().items()},
        "moments": moments,
        "groups": groups,
        "schedule": run.schedule.state_dict(),
        "step": run.step,
    }
    if run.average is not None:
        found["average"] = {name: full(value) for name, value in run.average.state_dict().items()}
        found["swa"] = {name: full(value) for name, value in run.swa.state_dict().items()}
    return found


# ---- what is saved, and who takes it back


class App(Stateful):
    """PyTorch's recipe."""

    def __init__(self, run):
        self.run = run

    def state_dict(self):
        model, optimizer = get_state_dict(self.run.model, self.run.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.run.model, self.run.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip


def state_dicts(run, **_):
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "schedule": run.schedule.state_dict(),
        "step": run.step,
    }


def take_state_dicts(run, loaded, **_):
    run.model.load_state_dict(loaded["model"])
    run.optimizer.load_state_dict(loaded["optimizer"])
    run.schedule.load_state_dict(loaded["schedule"])
    run.step = loaded["step"]


def objects(run, torchs, **_):
    """The README's first program; torch's own calls fill no optimizer that has no state, so there by its functions."""
    if torchs:
        model, optimizer = get_state_dict(run.model, run.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": run.schedule, "step": run.step}
    return {"model": run.model, "optimizer": run.optimizer, "schedule": run.schedule, "step": run.step}


def take_objects(run, loaded, torchs, **_):
    if torchs:
        App(run).load_state_dict(loaded)
    run.step = loaded["step"]


def app(run, **_):
    return {"app": App(run), "schedule": run.schedule.state_dict(), "step": run.step}


def take_app(run, loaded, **_):
    run.schedule.load_state_dict(loaded["schedule"])
    run.step = loaded["step"]


def lightning(run, **_):
    """The keys of a Lightning checkpoint."""
    score = {"best_model_score": torch.tensor(0.25), "best_k_models": {"a.ckpt": torch.tensor(0.5)}, "kth_value": None}
    return {
        "epoch": 1,
        "global_step": run.step,
        "pytorch-lightning_version": "2.5.1",
        "state_dict": run.model.module.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": run.step}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val.loss', 'every_n_train_steps': 0}": score},
        "optimizer_states": [run.optimizer.state_dict()],
        "lr_schedulers": [run.schedule.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.05, "betas": (0.9, 0.999), "name": None},
    }


def take_lightning(run, loaded, **_):
    expected = lightning(run)
    assert loaded.keys() == expected.keys()
    for name in ("epoch", "pytorch-lightning_version", "hparams_name", "hyper_parameters"):
        assert loaded[name] == expected[name], name
    assert loaded["loops"]["fit_loop"]["epoch_progress"]["total"]["ready"] == loaded["global_step"]
    (score,) = loaded["callbacks"].values()
    assert (score["best_model_score"].item(), score["best_k_models"]["a.ckpt"].item()) == (0.25, 0.5)
    run.model.module.load_state_dict(loaded["state_dict"])
    run.optimizer.load_state_dict(loaded["optimizer_states"][0])
    run.schedule.load_state_dict(loaded["lr_schedulers"][0])
    run.step = loaded["global_step"]


def own_of(run, torchs, saved_by, value, name):
    """A value of each rank: PerRank, or for torch's calls a key for each rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if torchs:
        wanted = [rank] if saved_by == ranks else range(saved_by)
        return {f"rank{number}": copy.deepcopy(value) for number in wanted}
    return PerRank(value) if saved_by == ranks else PerRank(value, partial(_kept, run, name))


def _kept(run, name, values, rank, ranks):
    assert (rank, ranks) == (dist.get_rank(), dist.get_world_size())
    run.of_others = {**(run.of_others or {}), name: values}
    return values[0]


def take_own(run, loaded, torchs, saved_by, name):
    """This rank's value; at another number of ranks the first one's, and all are kept for comparing."""
    if not torchs:
        return loaded
    if saved_by != dist.get_world_size():
        run.of_others = {**(run.of_others or {}), name: [loaded[f"rank{number}"] for number in range(saved_by)]}
        return loaded["rank0"]
    return loaded[f"rank{dist.get_rank()}"]


def accelerate(run, torchs, saved_by):
    """A folder of several checkpoints."""
    return {
        "pytorch_model_fsdp_0": {"model": get_model_state_dict(run.model)},
        "optimizer_0": {"optimizer": get_optimizer_state_dict(run.model, run.optimizer)},
        "scheduler": {"scheduler": run.schedule.state_dict(), "step": run.step},
        "random_states": {"own": own_of(run, torchs, saved_by, run.own(), "own")},
    }


def take_accelerate(run, loaded, torchs, saved_by):
    set_model_state_dict(run.model, loaded["pytorch_model_fsdp_0"]["model"])
    set_optimizer_state_dict(run.model, run.optimizer, loaded["optimizer_0"]["optimizer"])
    run.schedule.load_state_dict(loaded["scheduler"]["scheduler"])
    run.step = loaded["scheduler"]["step"]
    run.set_own(take_own(run, loaded["random_states"]["own"], torchs, saved_by, "own"))


def loaders(run, torchs, saved_by):
    loader = run.loader.state_dict() if torchs else run.loader
    return {
        **state_dicts(run),
        "loader": own_of(run, torchs, saved_by, loader, "loader"),
        "own": own_of(run, torchs, saved_by, run.own(), "own"),
    }


def take_loaders(run, loaded, torchs, saved_by):
    take_state_dicts(run, loaded)
    run.set_own(take_own(run, loaded["own"], torchs, saved_by, "own"))
    if torchs:
        run.loader.load_state_dict(take_own(run, loaded["loader"], torchs, saved_by, "loader"))


def averages(run, torchs, **_):
    """A sharded copy of the weights that lags behind, and torch's AveragedModel as an object."""
    return {**objects(run, torchs), "ema": run.average.state_dict(), "swa": run.swa, "decay": 0.9}


def take_averages(run, loaded, torchs, **_):
    assert loaded["decay"] == 0.9
    take_objects(run, loaded, torchs)
    run.average.load_state_dict(loaded["ema"])


class Way(NamedTuple):
    layout: str
    states: Callable[..., Any]
    take: Callable[..., Any]
    is_set: bool = False  # several state dicts, each saved for itself
    has_own: bool = False  # values of each rank
    average: bool = False
    first_step: str = ""  # who needs one of a new optimizer: "torch", whose load fills what is there, or "all"
    of_model: Callable[[Run], Any] = lambda run: {"model": run.model.state_dict()}  # what of it is the model's

    def made(self, ranks, seed):
        return made(self.layout, ranks, seed, average=self.average)


WAYS = {
    "state dicts": Way("plain", state_dicts, take_state_dicts, first_step="torch"),
    "ddp": Way("ddp", state_dicts, take_state_dicts, first_step="torch"),
    "fsdp2": Way("fsdp2", objects, take_objects),
    "fsdp2 state dicts": Way("fsdp2", state_dicts, take_state_dicts, first_step="all"),
    "fsdp2 and tp": Way("fsdp2 and tp", objects, take_objects),
    "hsdp": Way("hsdp", objects, take_objects),
    "app": Way("fsdp2", app, take_app, of_model=lambda run: {"app": {"model": run.model.state_dict()}}),
    "app of a plain model": Way(
        "plain", app, take_app, of_model=lambda run: {"app": {"model": run.model.state_dict()}}
    ),
    "lightning": Way(
        "ddp",
        lightning,
        take_lightning,
        first_step="torch",
        of_model=lambda run: {"state_dict": run.model.module.state_dict()},
    ),
    "accelerate": Way("fsdp2", accelerate, take_accelerate, is_set=True, has_own=True),
    "loaders": Way("plain", loaders, take_loaders, has_own=True, first_step="torch"),
    "averages": Way("fsdp2", averages, take_averages, average=True),
}


# ---- where it goes through


def torchs_calls(module):
    """``save`` and ``load`` of torch.distributed.checkpoint, or of what takes its place."""

    def save(state, folder):
        with quiet():
            module.save(state, checkpoint_id=folder)

    def load(state, folder):
        with quiet():
            module.load(state, checkpoint_id=folder)
        return state

    return save, load


def managed_save(state, folder):
    with CheckpointManager(folder, every=5) as manager:
        assert not manager.save(7, state)
        assert manager.save(7, state, {"loss": 0.5}, force=True)


def managed_load(state, folder):
    restored = CheckpointManager(folder).restore(state)
    assert (restored.step, restored.metrics) == (7, {"loss": 0.5})
    return restored.state


class Door(NamedTuple):
    save: Callable[[Any, Any], Any]
    load: Callable[[Any, Any], Any]
    torchs: bool  # takes what torch's functions take


DOORS = {
    "torch": Door(*torchs_calls(torch_dcp), True),  # the oracle
    "native": Door(dist_ckpt.save, dist_ckpt.load, False),
    "manager": Door(managed_save, managed_load, False),
    "door": Door(*torchs_calls(dcp), True),
}


def save_by(way, door, run, folder):
    states = way.states(run, torchs=door.torchs, saved_by=dist.get_world_size())
    for name, state in states.items() if way.is_set else [("c", states)]:
        door.save(state, folder / name)


def load_by(way, door, run, folder, saved_by):
    """Into a run that has other values."""
    if way.first_step == "all" or (door.torchs and way.first_step):
        train(run, 1)
    states = way.states(run, torchs=door.torchs, saved_by=saved_by)
    if way.is_set:
        loaded = {name: door.load(state, folder / name) for name, state in states.items()}
    else:
        loaded = door.load(states, folder / "c")
    way.take(run, loaded, torchs=door.torchs, saved_by=saved_by)


def model_by(reader, way, run, folder):
    """The weights and buffers of a save, by torch's calls, with its own reader or ours, into a run that has others."""
    DOORS[reader].load(way.of_model(run), folder / ("pytorch_model_fsdp_0" if way.is_set else "c"))
    net = getattr(run.model, "module", run.model)
    return {name: full(value) for name, value in net.state_dict().items()}
