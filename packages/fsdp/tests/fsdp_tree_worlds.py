"""Odd training loops with ``grad_sum="tree"``, run alike by plain torch and by ranks.

    test_tree_loops.py: a loop(world) --> PlainTree (all ranks in one process), ShardedTree (one rank) --> gradients

Plain torch has ``main.grad += gradient`` of each microbatch. PlainTree has the same sum in another order: a number that
was there before, and to it the tree over the microbatches since. Who writes to a gradient, or begins a batch, begins a
tree. Gradients of one unit are one: who writes to one of them begins the tree of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fsdp_helpers import batch, loss_of, make_adamw, make_net
from fsdp_tree_helpers import Named, differ, gradients_of, hint, tree_sum, wrap
from torch import Tensor, nn


def unit_of(name: str) -> str:
    first, second = (*name.split("."), "", "")[:2]
    return f"{first}.{second}" if first == "blocks" else first if first == "embedding" else ""


class PlainTree:
    """All ranks' microbatches in one process."""

    def __init__(self, ranks: int, microbatches: int, make_optimizer: Callable[[Any], Any] = make_adamw, **net: Any):
        self.ranks, self.divisor, self.step_number = ranks, float(microbatches), 0
        self.net, self.compute = make_net(**net), make_net(**net)
        self.optimizer = make_optimizer(list(self.net.parameters()))
        self.base: dict[str, Tensor | None] = {}
        self.leaves: dict[str, dict[int, Tensor]] = {}
        self.shown: Named | None = None  # what gradients were; None: microbatches came since
        self.new_batch()

    def mains(self) -> dict[str, nn.Parameter]:
        return dict(self.net.named_parameters())

    def new_batch(self) -> None:
        """Trees begin anew; microbatches are counted from 0 again."""
        self.round = 0
        for name, p in self.mains().items():
            self.base[name], self.leaves[name] = (None if p.grad is None else p.grad.clone()), {}
        self.shown = {}

    def _look(self) -> None:
        """What somebody wrote since."""
        if self.shown is None:
            return
        written = set()
        for name, p in self.mains().items():
            if p.grad is None:
                self.base[name], self.leaves[name] = None, {}
            elif name not in self.shown or differ(p.grad, self.shown[name]):
                written.add(unit_of(name))
        for name, p in self.mains().items():
            if unit_of(name) in written and p.grad is not None:
                self.base[name], self.leaves[name] = p.grad.clone(), {}
        self.shown = None

    def run(self, *, last: bool = True, loss: Callable[..., Tensor] | None = None, only: Any = None) -> None:
        """A microbatch of each rank; ``only``: the parameters that have gradients, by name and rank."""
        self._look()
        for rank in range(self.ranks):
            g = self.round * self.ranks + rank
            self.compute.load_state_dict(self.net.state_dict())
            for (_, p), (_, q) in zip(self.net.named_parameters(), self.compute.named_parameters(), strict=True):
                q.requires_grad_(p.requires_grad)
            found = gradients_of(self.compute, lambda g=g, rank=rank: self._loss(self.compute, g, rank, loss))
            for name, gradient in found.items():
                if only is None or only(name):
                    self.leaves[name][g] = gradient
        self.round += 1
        if last:
            self.show()

    def _loss(self, net: nn.Module, g: int, rank: int, loss: Callable[..., Tensor] | None) -> Tensor:
        if loss is not None:
            return loss(net, self.step_number, g, rank)
        return loss_of(net(batch(self.step_number, g, 0)), batch(self.step_number, g, 0))

    def show(self) -> None:
        self.shown = {}
        for name, p in self.mains().items():
            if self.leaves[name]:
                total, base = tree_sum(self.leaves[name]) / torch.tensor(self.divisor), self.base[name]
                p.grad = total if base is None else base + total
            if p.grad is not None:
                self.shown[name] = p.grad.clone()

    def step(self) -> None:
        self.optimizer.step()
        self.step_number += 1
        self.new_batch()

    def zero(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.new_batch()

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.mains().items()}

    def whole(self) -> Named:
        return {name: p.detach().clone() for name, p in self.mains().items()}


class ShardedTree:
    """One rank of several."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        microbatches: int,
        make_optimizer: Callable[[Any], Any] = make_adamw,
        net: dict[str, Any] | None = None,
        **options: Any,
    ):
        from sixfold.fsdp import fully_shard_optimizer

        self.rank, self.ranks, self.round, self.step_number = rank, ranks, 0, 0
        self.net = make_net(**(net or {}))
        self.model = wrap(self.net, microbatches, **options)
        self.optimizer = fully_shard_optimizer(make_optimizer(list(self.net.parameters())), self.model)

    def mains(self) -> dict[str, nn.Parameter]:
        return dict(self.model.main_parameters())

    def run(self, *, last: bool = True, loss: Callable[..., Tensor] | None = None, only: Any = None) -> None:
        g = self.round * self.ranks + self.rank
        inputs = None if only is None else [p for name, p in self.net.named_parameters() if only(name)]
        with hint(self.model, "last", last):
            if loss is not None:
                value = loss(self.model, self.step_number, g, self.rank)
            else:
                value = loss_of(self.model(batch(self.step_number, g, 0)), batch(self.step_number, g, 0))
            value.backward(inputs=inputs)
        self.round += 1

    def show(self) -> None:
        self.model.finish_grad_sync()

    def new_batch(self) -> None:
        self.round = 0

    def step(self) -> None:
        self.optimizer.step()
        self.round = 0
        self.step_number += 1

    def zero(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self.round = 0

    def gradients(self) -> dict[str, Any]:
        """``(start, stop, part)`` or None, of tensors that lie here."""
        mains, found = self.mains(), {}
        for record in self.model.state_records():
            if record.name in mains and record.stop > record.start:
                gradient = mains[record.name].grad
                part = None if gradient is None else gradient.detach().clone().view(-1)
                found[record.name] = (record.start, record.stop, part)
        return found

    def whole(self) -> Named:
        return self.model.full_state_dict()


def unlike(plain: dict[str, Tensor | None], found: dict[str, Any]) -> list[str]:
    """Names of gradients with other bits, or None on one side."""
    bad = []
    for name, (start, stop, part) in found.items():
        whole = plain[name]
        if (whole is None) != (part is None):
            bad.append(f"{name} is {'not ' if whole is None else ''}None")
        elif whole is not None and differ(whole.reshape(-1)[start:stop], part):
            bad.append(name)
    return bad
