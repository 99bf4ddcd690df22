"""A net in the hands of a user: plain, or wrapped. What is done to one is done to the other.

hooks/test_uses.py, hooks/test_uses_refused.py, optimizers/test_torch_optimizers.py --> World (this file)
"""

from __future__ import annotations

import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw
from torch import nn

from sixfold.fsdp import fully_shard, fully_shard_optimizer

WIDTH = 13
SETTINGS = {
    "no units": {},
    "zero-3": {"fsdp_unit_modules": [Block, nn.Embedding]},
    "zero-1": {"fsdp_unit_modules": [Block, nn.Embedding], "strategy": "optim"},
    "zero-0": {"fsdp_unit_modules": [Block, nn.Embedding], "strategy": "no_shard"},
}
MAKERS = {  # of torch.optim, element by element
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.3),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
}
WHOLE = {  # over whole tensors
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Muon": lambda p: torch.optim.Muon([one for one in p if one.ndim == 2], lr=1e-2),
}


class Net(nn.Module):
    """Embedding and blocks are units, norm and head are the root's. ``special`` runs in the middle of forward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, hidden=19 + 4 * i) for i in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.special = None

    def forward(self, tokens):
        x = self.embedding(tokens) if not tokens.is_floating_point() else tokens
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.special(self, x) if self.special is not None else self.head(x)


class World:
    """``call`` is the net itself, or the wrapper; ``net`` is the inner module in both."""

    def __init__(self, options, make_optimizer=make_adamw):
        torch.manual_seed(0)
        self.net = Net()
        self.call = self.net
        if options is not None:
            self.call = fully_shard(self.net, **options)
        self.optimizer = make_optimizer(list(self.net.parameters()))
        self.wrapped = options is not None
        if self.wrapped:
            fully_shard_optimizer(self.optimizer, self.call)

    def loss(self, step, call=None):
        return loss_of((self.call if call is None else call)(batch(step, 0, 0)), batch(step, 0, 0))

    def train(self, steps=1, first=0, call=None):
        for step in range(first, first + steps):
            self.loss(step, call).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def held(self):
        """Parameters that the optimizer holds."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def weights(self):
        return self.call.full_state_dict() if self.wrapped else self.net.state_dict()


def a_closure(world):
    def closure():
        world.optimizer.zero_grad()
        loss = world.loss(0)
        loss.backward()
        return loss

    return torch.stack([world.optimizer.step(closure).detach() for _ in range(3)])
