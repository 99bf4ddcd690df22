"""A parameter that no rank used has no gradient, whatever the number of ranks; one that any rank used has the sum.

The oracle is plain torch: as many copies of the net as there are ranks, in one process; and DDP.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, fully_shard_optimizer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
EXPERTS, STEPS, MICROBATCHES = 4, 4, 2
Used = tuple[int, ...]

# (step, microbatch, rank) -> experts: by all ranks alike, by one rank alone, by another in each microbatch, by none.
SCHEDULE: dict[tuple[int, int, int], Used] = {
    (0, 0, 0): (0,), (0, 0, 1): (0,), (0, 1, 0): (0,), (0, 1, 1): (0,),
    (1, 0, 0): (1,), (1, 0, 1): (0, 1), (1, 1, 0): (1,), (1, 1, 1): (1,),
    (2, 0, 0): (0, 1), (2, 0, 1): (1,), (2, 1, 0): (2,), (2, 1, 1): (1, 2),
    (3, 0, 0): (), (3, 0, 1): (), (3, 1, 0): (), (3, 1, 1): (0,),
}  # fmt: skip
WAYS = ("each", "last", "no_sync", "in step", "scaled to 1")


class Layer(nn.Module):
    """Experts in one unit; the last one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(EXPERTS))
        self.out = nn.Linear(5, 5)

    def forward(self, x: Tensor, used: Used) -> Tensor:
        y = self.out(x)
        for expert in used:
            y = y + self.experts[expert](x)
        return y.tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.idle = nn.Linear(3, 3)  # of the root unit

    def forward(self, x: Tensor, used: Used) -> Tensor:
        for layer in self.layers:
            x = layer(x, used)
        return self.head(x)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.3, foreach=False)


def loss_of(call: Any, step: int, microbatch: int, rank: int, alike: bool) -> Tensor:
    torch.manual_seed(100 * step + 10 * microbatch + rank)
    return call(torch.randn(4, 5), SCHEDULE[step, microbatch, 0 if alike else rank]).square().mean()


def plainly(ranks: int, microbatches: int, alike: bool) -> tuple[list[set[str]], dict[str, Tensor]]:
    """Names that have a gradient, by step; the weights in the end."""
    net, had = made(), []
    optimizer = adamw(net)
    for step in range(STEPS):
        total: dict[str, Tensor] = {}
        for rank in range(ranks):
            for microbatch in range(microbatches):
                loss_of(net, step, microbatch, rank, alike).backward()
            for name, parameter in net.named_parameters():
                if parameter.grad is not None:
                    total[name] = total[name] + parameter.grad if name in total else parameter.grad.clone()
            net.zero_grad()
        for name, parameter in net.named_parameters():
            parameter.grad = total[name] / ranks if name in total else None
        had.append(set(total))
        optimizer.step()
        net.zero_grad()
    return had, {name: one.detach().clone() for name, one in net.named_parameters()}


def units_of_experts(options: dict[str, Any]) -> bool:
    """Ranks use the same units, so here the same experts."""
    return nn.Linear in options.get("fsdp_unit_modules", ())


def sharded(rank: int, way: str, microbatches: int, **options: Any) -> tuple[list[set[str]], dict[str, Tensor]]:
    net, had, alike = made(), [], units_of_experts(options)
    model = FullyShardedDataParallel(net, **{"fsdp_unit_modules": [Layer], **options})
    optimizer = fully_shard_optimizer(adamw(net), model)
    for step in range(STEPS):
        for microbatch in range(microbatches):
            with ExitStack() as stack:
                if way == "last":
                    stack.enter_context(model.microbatch(last=microbatch == microbatches - 1))
                if way in ("no_sync", "in step"):
                    stack.enter_context(model.no_sync())
                loss_of(model, step, microbatch, rank, alike).backward()
        if way == "no_sync":
            model.finish_grad_sync()
        if way == "scaled to 1":
            model.clip_grad_norm_(1e9)
        if way != "in step":
            had.append({name for name, main in model.main_parameters() if main.grad is not None})
        optimizer.step()
        if way == "in step":
            had.append({name for name, main in model.main_parameters() if main.grad is not None})
        optimizer.zero_grad()
    steps = {float(optimizer.state[main]["step"]) for name, main in model.main_parameters() if name == "head.weight"}
    assert steps <= {float(STEPS)}, steps
    assert not [name for name, main in model.main_parameters() if "experts.3" in name and optimizer.state.get(main)]
    return had, model.full_state_dict()


def differences(
    found: list[tuple[list[set[str]], dict[str, Tensor]]], expected: tuple[list[set[str]], dict[str, Tensor]]
) -> list[str]:
    had, weights = expected
    wrong = []
    for step in range(STEPS):
        together = set().union(*(one[0][step] for one in found))
        wrong += [f"step {step}: {name}" for name in sorted(together ^ had[step])]
    for _, mine in found:
        wrong += [name for name in weights if not torch.allclose(mine[name], weights[name], rtol=1e-5, atol=1e-6)]
    return wrong


CASES: list[tuple[str, int, dict[str, Any]]] = [
    *((way, MICROBATCHES, {"strategy": strategy}) for way in WAYS for strategy in STRATEGIES),
    *((way, 1, {"checks": checks}) for way in ("each", "in step") for checks in ("off", "unit")),
    ("each", 2, {"fsdp_unit_modules": [nn.Linear], "buffers": BufferConfig(merge_bytes=10**6)}),
    ("each", 2, {"fsdp_unit_modules": [nn.Linear]}),
    ("each", 2, {"fsdp_unit_modules": [nn.Linear], "buffers": BufferConfig(merge_bytes=None)}),
    ("last", 2, {"granularity": lambda name, parameter: "tensor"}),
]


def by_ddp(rank: int) -> tuple[list[set[str]], dict[str, Tensor]]:
    net, had = made(), []
    wrapped = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = adamw(net)
    for step in range(STEPS):
        loss_of(wrapped, step, 0, rank, False).backward()
        had.append({name for name, parameter in net.named_parameters() if parameter.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return had, {name: one.detach().clone() for name, one in net.named_parameters()}


def train_all(rank: int, ranks: int) -> list[tuple[list[set[str]], dict[str, Tensor]]]:
    found = [sharded(rank, way, microbatches, **options) for way, microbatches, options in CASES]
    return [*found, by_ddp(rank)]


def test_a_parameter_that_no_rank_used_has_no_gradient_and_one_that_any_rank_used_has_the_sum() -> None:
    results = run_ranks(train_all, 2)
    expected = {(count, alike): plainly(2, count, alike) for count in (1, 2) for alike in (False, True)}
    for at, (way, count, options) in enumerate(CASES):
        wrong = differences([one[at] for one in results], expected[count, units_of_experts(options)])
        assert wrong == [], (way, count, options)
    assert differences([one[-1] for one in results], expected[1, False]) == [], "DDP"
