"""Steps on the same main gradients with ``grad_sum="tree"``: the same weights and state at any ranks and strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_gradient_helpers import set_gradients
from fsdp_helpers import Block, make_net, same
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def matrices(net: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in net.parameters() if parameter.dim() == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1),
    "AdamW foreach": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, fused=True),
    "SGD fused": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=1e-2),
    "Muon": lambda net: torch.optim.Muon(matrices(net), lr=1e-2, weight_decay=0.1),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=1e-2),
}


def stepped(name: str, strategy: str, group: Any) -> dict[str, Tensor]:
    net = make_net(width=24)
    model = FullyShardedDataParallel(
        net,
        process_group=group,
        strategy=strategy,
        fsdp_unit_modules=[Block],
        granularity=(lambda name, parameter: "tensor") if name == "Adafactor" else None,
        mixed_precision=MixedPrecision(grad_sum="tree"),
    )
    optimizer = fully_shard_optimizer(OPTIMIZERS[name](net), model)
    for _ in range(3):
        set_gradients(model, make_net(width=24))
        model.clip_grad_norm_(1e-2)
        optimizer.step()
        model.zero_grad()
    return model.full_state_dict()


def of_ranks(rank: int, ranks: int) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {(name, one): stepped(name, one, dist.group.WORLD) for name in OPTIMIZERS for one in STRATEGIES}


@pytest.mark.slow
def test_steps_have_the_same_bits_at_any_ranks_and_strategy_for_each_kind_of_optimizer():
    alone = {name: stepped(name, "no_shard", None) for name in OPTIMIZERS}
    start = make_net(width=24).state_dict()
    assert all(not torch.equal(one["blocks.1.up.weight"], start["blocks.1.up.weight"]) for one in alone.values())
    for ranks in (2, 4):
        for found in run_ranks(of_ranks, ranks):
            different = {key: names for key, one in found.items() if (names := same(alone[key[0]], one))}
            assert different == {}, f"{ranks} ranks"


def refused(rank: int, ranks: int, grad_sum: str, fused: bool) -> str:
    net = make_net(width=13)
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(grad_sum=grad_sum),
        buffers=BufferConfig(align_bytes=16),
    )
    try:
        fully_shard_optimizer(torch.optim.AdamW(net.parameters(), fused=fused), model)
    except FsdpError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_fused_step_over_cuts_inside_a_vector_is_refused_with_a_tree_alone():
    for text in run_ranks(refused, 2, "tree", True):
        assert text.startswith("AdamW has fused=True on a CPU, grad_sum is 'tree', and ")
        assert "BufferConfig(align_bytes=128)" in text and "fused=False" in text
    assert run_ranks(refused, 2, "tree", False) == run_ranks(refused, 2, "backend", True) == ["", ""]
