"""Two ranks, two stages on each, a 1F1B program: gradients equal the emulation, whatever the strategy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import VOCABULARY, Block
from torch import nn

from ranktest import run_ranks
from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision

PROGRAM = ["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "0F2", "1F2", "1B1", "0B1", "1B2", "0B2"]
WIDTH = 9


def container() -> nn.ModuleDict:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(WIDTH), Block(WIDTH))
    last = nn.Sequential(Block(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5))
    return nn.ModuleDict({"0": first, "1": last})


def tokens(rank: int, microbatch: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(10 * rank + microbatch))


def run_program(rank: int, calls: list, before=lambda stage, microbatch: None) -> None:
    inputs, outputs = {}, {}
    for stage, kind, k in ((int(a[0]), a[1], int(a[2])) for a in PROGRAM):
        if kind == "F":
            inputs[stage, k] = tokens(rank, k) if stage == 0 else outputs[0, k].detach().requires_grad_()
            outputs[stage, k] = calls[stage](inputs[stage, k])
        else:
            before(stage, k)
            gradient = torch.ones_like(outputs[1, k]) if stage == 1 else inputs[1, k].grad
            outputs[stage, k].backward(gradient)


def train(rank: int, ranks: int, strategy: str, grad_sum: str) -> list[tuple[str, int, int, torch.Tensor]]:
    with torch.device("meta"):
        net = container()
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        strategy=strategy,
        fsdp_unit_modules=[Block, nn.Embedding],
        grad_divisor=1.0,
        mixed_precision=MixedPrecision(grad_sum=grad_sum),
    )
    handles = [model.stage_handle(net["0"], fused=True), model.stage_handle(net["1"], fused=True)]
    for _ in range(2):
        model.zero_grad()
        run_program(
            rank,
            [handle.call for handle in handles],
            lambda stage, k: handles[stage].before_last_backward() if k == 2 else None,
        )
        for stage in (1, 0):
            handles[stage].after_backward(2)
            handles[stage].reduce_grad()
        model.finish_grad_sync()
    mains = dict(model.main_parameters())
    return [(r.name, r.start, r.stop, mains[r.name].grad.view(-1)) for r in model.state_records() if r.replica == 0]


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(("ranks", "grad_sum"), [(2, "backend"), (3, "rank_order")])
@pytest.mark.slow
def test_driven_gradients_equal_the_sum_over_ranks_in_order(strategy, ranks, grad_sum):
    sums = {}
    for rank in range(ranks):
        net = container()
        run_program(rank, [net["0"], net["1"]])
        for name, p in net.named_parameters():
            sums[name] = sums[name] + p.grad.view(-1) if name in sums else p.grad.view(-1).clone()
    found = {name: torch.full_like(value, float("nan")) for name, value in sums.items()}
    for records in run_ranks(train, ranks, strategy, grad_sum):
        for name, start, stop, gradient in records:
            assert torch.isnan(found[name][start:stop]).all(), f"{name}[{start}:{stop}] is in two records"
            found[name][start:stop] = gradient
    assert all(torch.equal(found[name], sums[name]) for name in sums)


class Choosing(nn.Module):
    """Two linears; a rank may use the first only."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use_both = True

    def forward(self, x):
        return self.always(x) + self.sometimes(x) if self.use_both else self.always(x)


def choosing_stage(rank: int) -> nn.ModuleDict:
    torch.manual_seed(0)
    net = nn.ModuleDict({"0": nn.Sequential(Choosing(), Choosing(), Choosing())})
    net["0"][2].use_both = rank == 0
    return net


def batch_of(rank: int, microbatch: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * rank + microbatch))


def train_choosing(rank: int, ranks: int) -> tuple[dict[str, torch.Tensor], int]:
    net = choosing_stage(rank)
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[Choosing],
        granularity=lambda name, parameter: "tensor",
        grad_divisor=1.0,
        timeout_s=5.0,
    )
    handle = model.stage_handle(net["0"], fused=True)
    for k in range(2):
        handle.call(batch_of(rank, k)).sum().backward()
        handle.after_backward(k)
    handle.reduce_grad()
    model.finish_grad_sync()
    return {name: main.grad for name, main in model.main_parameters()}, model.report()["reductions"]


def test_a_parameter_that_one_rank_leaves_unused_parts_no_collectives():
    # Whether the program splits its backward is told from missing gradients, and all ranks must tell alike.
    found: dict[str, torch.Tensor] = {}
    for gradients, reductions in run_ranks(train_choosing, 2):
        found.update(gradients)
        assert reductions == 2 * 3, "fused: one reduction per unit and micro-batch"
    total: dict[str, torch.Tensor] = {}
    for k in range(2):
        nets = [choosing_stage(rank) for rank in range(2)]
        for rank, net in enumerate(nets):
            net["0"](batch_of(rank, k)).sum().backward()
        for (name, first), second in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
            both = first.grad if second.grad is None else first.grad + second.grad
            total[name] = total[name] + both if name in total else both
    assert found.keys() == total.keys()
    assert [name for name in total if not torch.equal(found[name], total[name])] == []
