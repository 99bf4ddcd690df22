"""A byte budget at two ranks: bits of the emulation, and all-gathers as torch's dispatcher sees them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_count_helpers import gathers
from fsdp_helpers import Block, batch, emulate, loss_of, make_adamw, make_net, same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer, residency

STEPS, ACCUMULATE = 3, 2
VARIANTS = [{}, {"tied": True, "frozen": True}, {"recompute": "around"}, {"recompute": "reentrant"}]


class Gathers(TorchDispatchMode):
    """Number of gathers of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("c10d"):
            self.calls += gathers(args)
        return func(*args, **(kwargs or {}))


def train(
    rank: int, options: dict, budget: object, dtype: torch.dtype | None, steps: int = STEPS
) -> tuple[dict[str, Tensor], int, dict]:
    net = make_net(**options)
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(param_dtype=dtype),
        buffers=BufferConfig(gathered_bytes=budget),
    )
    optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
    for step in range(steps):
        count = Gathers()
        with count:
            for k in range(ACCUMULATE):
                loss_of(model(batch(step, k, rank)), batch(step, k, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict(), count.calls if steps else 0, model.report()


def train_all(rank: int, ranks: int, variants: list[dict], dtype: torch.dtype | None) -> list:
    results = []
    for options in variants:
        units = train(rank, options, "all", dtype, steps=0)[2]["units"]
        sizes = {name: unit["gathered_bytes"] for name, unit in units.items()}
        least = sizes[""] + max(size for name, size in sizes.items() if name)
        budgets = [least] if options else [least, sum(sizes.values()) - 1]
        results.append([(sizes, *train(rank, options, budget, dtype)) for budget in budgets])
    return results


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.slow
def test_a_budget_changes_traffic_and_no_bit(dtype: torch.dtype | None) -> None:
    variants = VARIANTS if dtype is None else [{}]
    results = run_ranks(train_all, 2, variants, dtype)
    for at, options in enumerate(variants):
        expected = emulate(
            ranks=2, steps=STEPS, accumulate=ACCUMULATE, net_options=options, per_microbatch=True, param_dtype=dtype
        )
        for rank in range(2):
            for sizes, weights, calls, report in results[rank][at]:
                assert same(expected, weights) == [], f"{options} on rank {rank}"
                if "frozen" not in options:  # whose flat buffer is a second all-gather of its unit
                    assert calls == report["plan"]["gathers"] + 1, "the root unit once"
                budget = report["plan"]["budget_bytes"]
                assert report["plan"]["peak_bytes"] <= budget
                names = [name for name in sizes if name]
                uses = (names + names[::-1]) * ACCUMULATE
                least = residency.solve(uses, sizes, budget_bytes=budget - sizes[""])
                assert report["plan"]["gathered_bytes"] <= 1.25 * least.gathered_bytes
