"""The usual ways in which people save: each makes a training state, hands it over, takes it back, and shows all of it.

    Way.state() --> dist_ckpt.save, dist_ckpt.load --> Way.restore(loaded)
    Way.whole() --> {name: value}, tensors gathered: what must be equal before and after (this file)

What is compared comes from torch alone. Worlds of 1, 2 and 4 ranks are meant.
"""

import random

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    """Linear layers of uneven rows, an embedding that is tied, a norm with buffers."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("positions", torch.randn(5), persistent=True)

    def forward(self, tokens):
        return self.norm(self.down(torch.relu(self.up(self.embed(tokens)))))


def train(model, optimizer, steps, scheduler=None):
    for step in range(steps):
        model(torch.arange(6) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def whole(node, name=""):
    """All leaves by name, DTensors whole, copied."""
    if isinstance(node, dict):
        return {key: value for part, child in node.items() for key, value in whole(child, f"{name}.{part}").items()}
    if isinstance(node, list | tuple):
        return {key: value for at, child in enumerate(node) for key, value in whole(child, f"{name}.{at}").items()}
    if isinstance(node, DTensor):
        node = node.full_tensor()
    return {name: (str(node.dtype), node.tolist()) if isinstance(node, torch.Tensor) else node}


class Way:
    """A model with AdamW, both plain and the same on every rank."""

    def __init__(self, rank, ranks, seed, steps):
        self.rank, self.ranks = rank, ranks
        self.model = self.wrapped(Net(seed))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * (seed + 1))
        self.more(seed)
        self.train(steps)

    def wrapped(self, model):
        return model

    def more(self, seed):
        """What else there is, before the training."""

    def train(self, steps):
        train(self.model, self.optimizer, steps)

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": 7}

    def restore(self, loaded):
        self.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])

    def whole(self):
        return whole({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})


class Ddp(Way):
    def wrapped(self, model):
        return nn.parallel.DistributedDataParallel(model)


class Fsdp2(Way):
    def wrapped(self, model):
        mesh = init_device_mesh("cpu", (self.ranks,))
        for layer in (model.embed, model.up, model.down, model):
            fully_shard(layer, mesh=mesh)
        return model


class Fsdp2Tp(Way):
    def wrapped(self, model):
        tp = 2 if self.ranks > 1 else 1
        mesh = init_device_mesh("cpu", (self.ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh["dp"])
        return model


class _App(Stateful):
    """As in torch's tutorial."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


class AppOfTutorial(Fsdp2):
    def state(self):
        return {"app": _App(self.model, self.optimizer)}

    def restore(self, loaded):
        """The load has done it."""


class PlainApp(Way):
    def state(self):
        return {"app": _App(self.model, self.optimizer)}

    def restore(self, loaded):
        """The load has done it."""


class Objects(Way):
    """The objects themselves."""

    def more(self, seed):
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10 + seed)

    def train(self, steps):
        train(self.model, self.optimizer, steps, self.scheduler)

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def restore(self, loaded):
        """The load has done it."""

    def whole(self):
        return super().whole() | whole(self.scheduler.state_dict(), "scheduler")


class Lightning(Way):
    """The keys of a Lightning checkpoint."""

    def more(self, seed):
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    def train(self, steps):
        train(self.model, self.optimizer, steps, self.scheduler)

    def state(self):
        return {
            "epoch": 1,
            "global_step": 2,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": self.model.state_dict(),
            "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 2, "completed": 1}}}},
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "kth": {}}},
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [self.scheduler.state_dict()],
            "hparams_name": "kwargs",
            "hyper_parameters": {"lr": 0.1, "layers": (1, 2)},
        }

    def restore(self, loaded):
        self.model.load_state_dict(loaded["state_dict"])
        self.optimizer.load_state_dict(loaded["optimizer_states"][0])
        self.scheduler.load_state_dict(loaded["lr_schedulers"][0])
        assert loaded["callbacks"]["ModelCheckpoint{'monitor': None}"]["best_model_score"] == 0.5
        assert loaded["hyper_parameters"] == {"lr": 0.1, "layers": (1, 2)}

    def whole(self):
        return super().whole() | whole(self.scheduler.state_dict(), "scheduler")


class Accelerate(Fsdp2):
    """accelerate's folders for FSDP2, as one state dict, with names for the optimizer's state."""

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "override": {"step": 3, "samples_seen": 48}}

    def restore(self, loaded):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )


class Ema(Fsdp2):
    """A copy of the weights that lags behind, as DTensors, and torch's AveragedModel of a plain model."""

    def more(self, seed):
        self.ema = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.plain = torch.optim.swa_utils.AveragedModel(
            Net(seed + 5), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )

    def train(self, steps):
        for _ in range(steps):
            train(self.model, self.optimizer, 1)
            for name, value in self.model.named_parameters():
                self.ema[name].lerp_(value.detach(), 0.1)
            self.plain.update_parameters(Net(9))

    def state(self):
        return super().state() | {"ema": self.ema, "averaged": self.plain.state_dict()}

    def restore(self, loaded):
        super().restore(loaded)
        self.ema = loaded["ema"]
        self.plain.load_state_dict(loaded["averaged"])

    def whole(self):
        return super().whole() | whole({"ema": self.ema, "averaged": self.plain.state_dict()})


class Rng(Way):
    """States of random generators that are the same on every rank."""

    def more(self, seed):
        import numpy as np

        torch.manual_seed(seed + 100)
        random.seed(seed)
        np.random.seed(seed)

    def states(self):
        import numpy as np

        return {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }

    def state(self):
        return super().state() | {"rng": self.states()}

    def restore(self, loaded):
        import numpy as np

        super().restore(loaded)
        torch.set_rng_state(loaded["rng"]["torch"])
        random.setstate(loaded["rng"]["python"])
        np.random.set_state(loaded["rng"]["numpy"])

    def whole(self):
        numpy_state = list(self.states()["numpy"])
        numpy_state[1] = numpy_state[1].tolist()
        return super().whole() | whole({**self.states(), "numpy": numpy_state}, "rng")


class Loaders(Way):
    """torchtitan's data loader: one entry for each data rank, under a key of its own."""

    def more(self, seed):
        self.positions = {"sample": 10 * seed + self.rank, "token_buffer": [1, 2, self.rank]}

    def state(self):
        return super().state() | {"dataloader": {"world_size": self.ranks, f"dp_rank_{self.rank}": self.positions}}


class RankRng(Rng):
    """States of random generators, another on each rank."""

    def more(self, seed):
        random.seed(seed + self.rank)

    def states(self):
        return {"python": random.getstate()}

    def whole(self):
        return Way.whole(self)


WAYS = {way.__name__: way for way in (Way, Ddp, Fsdp2, Fsdp2Tp, AppOfTutorial, PlainApp, Objects, Lightning)}
WAYS |= {way.__name__: way for way in (Accelerate, Ema, Rng)}
