"""Bytes that operators write in forward and backward beyond the plain ones, beside FSDP2, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_bench_helpers import Net
from fsdp_bytes_helpers import forward_backward, written
from fsdp_count_helpers import fake_world

from ranktest import run_ranks
from sixfold.fsdp import MixedPrecision

WIDTH, LAYERS = 64, 6
BF16 = torch.bfloat16


def count(rank: int, ranks: int, size: int) -> dict[str, tuple[int, int]]:
    """Total and copied bytes of each kind, in its fourth step."""
    group = fake_world(size)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "sixfold": {},
        "fsdp2": {},
        "plain bf16": {},
        "sixfold bf16": {"mixed_precision": MixedPrecision(param_dtype=BF16, reduce_dtype=BF16)},
    }
    found = {}
    for kind, options in kinds.items():
        torch.manual_seed(0)
        net, batch = Net(WIDTH, LAYERS), torch.randn(4, WIDTH)
        if "bf16" in kind:
            batch = batch.to(BF16)
            net = net.to(BF16) if kind == "plain bf16" else net
        step, drop = forward_backward(kind.split()[0], group, net, list(net.blocks), batch, **options)
        for _ in range(3):
            step()
            drop()
        seen = written(step)
        found[kind] = seen.total, seen.copied
    return found


@pytest.mark.slow
def test_forward_and_backward_write_each_gradient_once_more_and_divide_the_shard() -> None:
    model = 4 * sum(p.numel() for p in Net(WIDTH, LAYERS).parameters())
    for size in (2, 8):
        found = run_ranks(count, 1, size)[0]
        ours, theirs = found["sixfold"][0] - found["plain"][0], found["fsdp2"][0] - found["plain"][0]
        assert ours <= 1.02 * (1 + 1 / size) * model, "a copy to the sum that travels, and a division of the shard"
        assert ours <= 0.38 * theirs, f"{ours / model:.3f} and {theirs / model:.3f} models"
        # bf16 gradients that travel as bf16 are copied as they are; no fp32 sum of the whole is written.
        low = found["sixfold bf16"][0] - found["plain bf16"][0]
        assert low <= 1.02 * (0.5 + 2 / size) * model, f"{low / model:.3f} models"
