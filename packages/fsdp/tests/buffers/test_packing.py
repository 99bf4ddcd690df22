"""Several dtypes in one gathered buffer: every tensor in one piece, the same owner for bytes and elements."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from sixfold.fsdp import FullyShardedDataParallel
from sixfold.fsdp.buffers.packing import pack, travels_as
from sixfold.fsdp.layout import TensorSpec

FP8 = torch.float8_e4m3fn


def make(seed, ranks):
    rng = random.Random(seed)
    specs = []
    for i in range(rng.randint(1, 9)):
        dtype = rng.choice([FP8, FP8, torch.bfloat16, torch.float32])
        shape = (rng.randint(1, 40), rng.randint(1, 30)) if rng.random() < 0.6 else (rng.randint(0, 200),)
        specs.append(TensorSpec(f"t{i}", shape, dtype, rng.choice(["element", "element", "row", "tensor", 8])))
    return specs, pack(specs, ranks, main_itemsize=4, align_bytes=16)


@pytest.mark.parametrize("seed", range(40))
def test_bytes_of_all_ranks_put_together_hold_every_tensor_in_one_piece(seed):
    ranks = 1 + seed % 5
    specs, packing = make(seed, ranks)
    shard_bytes = packing.layout.shard_bytes // packing.itemsize * packing.pitch
    gathered = bytearray(ranks * shard_bytes)
    held = [0] * len(specs)
    taken = set()
    for rank in range(ranks):
        for part in packing.layout.slices(rank):
            at = next(i for i, spec in enumerate(specs) if spec.name == part.name)
            size = travels_as(specs[at].dtype, packing.pitch, fp8=specs[at].dtype is FP8).itemsize
            start = rank * shard_bytes + part.offset_bytes // packing.itemsize * packing.pitch
            stop = start + (part.stop - part.start) * size
            position = (rank * packing.layout.shard_bytes + part.offset_bytes) // packing.itemsize
            first = packing.layout.offsets_bytes[at] // packing.itemsize
            assert position == first + part.start, "elements of main weights and gradients lie in one piece too"
            assert stop <= (rank + 1) * shard_bytes, "the bytes of a part lie in its rank's shard"
            assert taken.isdisjoint(range(start, stop)), "no two tensors share a byte"
            taken.update(range(start, stop))
            gathered[start:stop] = bytes([at + 1]) * (stop - start)
            held[at] += part.stop - part.start
    assert held == [spec.numel for spec in specs]
    for at, (spec, offset) in enumerate(zip(specs, packing.layout.offsets_bytes, strict=True)):
        size = travels_as(spec.dtype, packing.pitch, fp8=spec.dtype is FP8).itemsize
        start = offset // packing.itemsize * packing.pitch
        assert bytes(gathered[start : start + spec.numel * size]) == bytes([at + 1]) * spec.numel * size
        assert not spec.numel or start % min(16, packing.pitch * 16) == 0


def test_fp8_matrices_beside_bf16_norms_travel_as_one_byte():
    specs = [
        TensorSpec("norm", (4096,), torch.bfloat16),
        TensorSpec("up", (4096, 16384), FP8),
        TensorSpec("down", (16384, 4096), FP8),
    ]
    for ranks in (1, 8, 64, 512):
        packing = pack(specs, ranks, main_itemsize=4, align_bytes=128)
        assert packing.pitch == 1
        assert packing.positions <= (2 * 4096 * 16384 + 2 * 4096) * 1.01


def test_few_fp8_weights_beside_bf16_matrices_travel_wide_so_that_matrices_can_be_cut():
    specs = [TensorSpec("up", (512, 2048), torch.bfloat16), TensorSpec("gate", (64, 64), FP8)]
    packing = pack(specs, 64, main_itemsize=4, align_bytes=128)
    assert packing.pitch == 2
    assert packing.positions * packing.pitch <= 2 * (512 * 2048 + 64 * 64) * 1.05


def test_one_dtype_is_planned_as_ever():
    specs = [TensorSpec("a", (13, 19), torch.bfloat16), TensorSpec("b", (19,), torch.bfloat16)]
    packing = pack(specs, 3, main_itemsize=4, align_bytes=128)
    assert (packing.pitch, packing.itemsize) == (2, 2)
    assert packing.layout.specs == tuple(specs)
    narrow_main = pack([TensorSpec("a", (64,), torch.float32)], 2, main_itemsize=2, align_bytes=128)
    assert (narrow_main.pitch, narrow_main.itemsize) == (4, 2)


class Mixed(nn.Module):
    """A bf16 matrix and an fp32 norm, as models with fp32 norms have them."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width, bias=False).to(torch.bfloat16)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.up(self.norm(x).to(torch.bfloat16)).to(torch.float32)


def test_a_bf16_matrix_beside_an_fp32_norm_is_gathered_as_bf16_and_needs_no_copy():
    torch.manual_seed(0)
    net = nn.Sequential(Mixed(256), Mixed(256))
    x = torch.randn(3, 256)
    expected = net(x).detach()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Mixed])
    assert torch.equal(model(x), expected)
    unit = model.report()["units"]["0"]
    exact = 2 * 256 * 256 + 4 * 2 * 256
    assert exact <= unit["wire_bytes"] == unit["gathered_bytes"] <= exact + 4 * 128


def test_a_small_bf16_matrix_beside_large_fp32_ones_travels_widened_and_is_copied_out():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(64, 64)
            self.gate = nn.Linear(8, 8).to(torch.bfloat16)

        def forward(self, x):
            return self.up(x) + self.gate(x[:, :8].to(torch.bfloat16)).repeat(1, 8)

    torch.manual_seed(0)
    net = nn.Sequential(Wide(), Wide())
    x = torch.randn(3, 64)
    expected = net(x).detach()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Wide])
    assert torch.equal(model(x), expected)
    unit = model.report()["units"]["0"]
    assert unit["wire_bytes"] <= 4 * (64 * 64 + 64 + 8 * 8 + 8) + 5 * 128
    assert unit["gathered_bytes"] > unit["wire_bytes"]
