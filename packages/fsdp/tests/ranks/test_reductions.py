"""Reductions in other dtypes, sums, pieces and meshes: bits of an emulation, and allocations of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_count_helpers import fake_world
from fsdp_helpers import Block, emulate, make_adamw, make_net, same, train_steps
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

BF16 = torch.bfloat16
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS, ACCUMULATE = 2, 2
PIECES = (None, 1 << 11)  # bytes: the larger units go in two to five pieces


def train(rank: int, strategy: str, mesh_shape: tuple[int, ...], bucket: int | None, **precision: Any) -> dict:
    net = make_net()
    mesh = init_device_mesh("cpu", mesh_shape)
    model = FullyShardedDataParallel(
        net,
        mesh=mesh,
        strategy=strategy,
        fsdp_unit_modules=[Block, nn.Embedding],
        mixed_precision=MixedPrecision(**precision),
        buffers=BufferConfig(bucket_bytes=bucket),
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    train_steps(model, optimizer, rank, steps=STEPS, accumulate=ACCUMULATE)
    return model.full_state_dict()


def train_all(rank: int, ranks: int, mesh_shape: tuple[int, ...], cases: list[dict]) -> list[dict[str, Tensor]]:
    return [
        train(rank, case["strategy"], mesh_shape, bucket, **case["precision"]) for case in cases for bucket in PIECES
    ]


PRECISIONS = {
    "bf16 travels": {"reduce_dtype": BF16},
    "bf16 computes and travels": {"param_dtype": BF16, "reduce_dtype": BF16},
    "bf16 travels, summed in order": {"reduce_dtype": BF16, "grad_sum": "rank_order"},
    "bf16 main gradients": {"grad_dtype": BF16},
    "fp32": {},
    "fp32, summed in order": {"grad_sum": "rank_order"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_two_ranks_have_the_bits_of_the_emulation_in_every_dtype_whole_and_in_pieces(strategy: str) -> None:
    cases = [{"strategy": strategy, "precision": precision} for precision in PRECISIONS.values()]
    results = run_ranks(train_all, 2, (2,), cases)
    for at, (name, precision) in enumerate(PRECISIONS.items()):
        expected = emulate(
            ranks=2,
            steps=STEPS,
            accumulate=ACCUMULATE,
            net_options={},
            per_microbatch=strategy in ("optim_grads", "optim_grads_params"),
            param_dtype=precision.get("param_dtype"),
            reduce_dtype=precision.get("reduce_dtype", torch.float32),
            sum_dtype=torch.float32 if "grad_sum" in precision else precision.get("reduce_dtype", torch.float32),
            grad_dtype=precision.get("grad_dtype", torch.float32),
        )
        for rank in range(2):
            for bucket in range(2):
                assert same(expected, results[rank][2 * at + bucket]) == [], f"{name}, {PIECES[bucket]}, rank {rank}"


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
@pytest.mark.slow
def test_pieces_have_the_bits_of_whole_units_in_rank_order(mesh_shape: tuple[int, ...]) -> None:
    precision = {"grad_sum": "rank_order", "reduce_dtype": BF16}
    cases = [{"strategy": strategy, "precision": precision} for strategy in ("no_shard", "optim_grads_params")]
    ranks = 4 if len(mesh_shape) == 2 else 3
    for result in run_ranks(train_all, ranks, mesh_shape, cases):
        assert same(result[0], result[1]) == []
        assert same(result[2], result[3]) == []


class Wide(nn.Module):
    """Units of different sizes whose weights are over 16 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64 * (1 + at % 2), bias=False) for at in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).float().sum() for layer in self.layers]).sum()


def allocations(step: Callable[[], None]) -> int:
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = found.profiler.kineto_results.events()
    return sum(event.nbytes() >= 16_384 for event in events if event.name() == "[memory]")


def count_hybrid(rank: int, ranks: int, cases: list[dict]) -> list[tuple[int, int]]:
    fake_world(4)
    mesh, counts, x = init_device_mesh("cpu", (2, 2)), [], torch.ones(2, 64)

    def stepper(call: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            for _ in range(ACCUMULATE):
                call(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    for case in cases:
        plain, net = Wide(), Wide()
        model = FullyShardedDataParallel(
            net,
            mesh=mesh,
            strategy=case["strategy"],
            fsdp_unit_modules=[nn.Linear],
            mixed_precision=MixedPrecision(**case["precision"]),
            buffers=BufferConfig(bucket_bytes=case["bucket"]),
            initial="trust",
        )
        optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, foreach=False), model)
        plain_step = stepper(plain, torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False))
        counts.append((allocations(plain_step), allocations(stepper(model, optimizer))))
    return counts


@pytest.mark.slow
def test_hybrid_sharding_allocates_nothing_in_a_steady_step() -> None:
    cases = [
        {"strategy": strategy, "precision": {"reduce_dtype": reduce_dtype, "grad_sum": grad_sum}, "bucket": bucket}
        for strategy in ("no_shard", "optim_grads_params")
        for reduce_dtype in (None, BF16)
        for grad_sum, bucket in (("backend", None), ("rank_order", 1 << 13))
    ]
    for case, (plain, ours) in zip(cases, run_ranks(count_hybrid, 1, cases)[0], strict=True):
        assert ours <= plain, case
