"""Flattened ranges beside the same tensors unflattened: save, and load at another layout. The peer is the plain form.

    OMP_NUM_THREADS=1 pytest packages/dist-ckpt/benchmarks/bench_flattened.py
    DIST_CKPT_BENCH_MIB=512 ... at another size (default 64 MiB of float32 in 8 tensors)

One process holds all shards; files lie in a temporary folder and are warm. The time of flattened / plain is the
figure. Both forms hold the same boxes: a flat half of a TP part is its upper rows, which the plain form holds as a part
of a two-dimensional grid.
"""

import os
from itertools import chain, product

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor

MIB = int(os.environ.get("DIST_CKPT_BENCH_MIB", "64"))
COLUMNS = 1024
ROWS = MIB * 2**20 // 4 // 8 // COLUMNS
AXES = [0, 1] * 4


def state(tp, dp, *, flattened):
    made = {}
    for i, axis in enumerate(AXES):
        shape = [ROWS, COLUMNS]
        shape[axis] //= tp
        rows, elements = shape[0] // dp, shape[0] * shape[1] // dp
        shards = made[f"w{i}"] = []
        for t, d in product(range(tp), range(dp)):
            if flattened:
                span = slice(d * elements, (d + 1) * elements)
                data, grid = torch.ones(elements), (axis, t, tp)
                shards.append(
                    ShardedTensor.from_rank_offsets_flat(f"w{i}", data, tuple(shape), grid, flattened_range=span)
                )
            else:
                grid = [(0, t * dp + d, tp * dp)] if axis == 0 else [(0, d, dp), (1, t, tp)]
                shards.append(ShardedTensor.from_rank_offsets(f"w{i}", torch.ones(rows, shape[1]), *grid))
    return made


@pytest.mark.parametrize("flattened", [False, True], ids=["plain", "flattened"])
def test_save(benchmark, tmp_path, flattened):
    saved = state(2, 2, flattened=flattened)
    benchmark.extra_info.update(mib=MIB, tp=2, dp=2)
    benchmark.pedantic(dist_ckpt.save, (saved, tmp_path / "c"), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("layout", [(2, 2), (4, 1), (1, 8)], ids=str)
@pytest.mark.parametrize("flattened", [False, True], ids=["plain", "flattened"])
def test_load(benchmark, tmp_path, flattened, layout):
    dist_ckpt.save(state(2, 2, flattened=flattened), tmp_path / "c")
    asked = state(*layout, flattened=flattened)
    for record in chain.from_iterable(asked.values()):
        record.data.zero_()
    benchmark.extra_info.update(mib=MIB, tp=layout[0], dp=layout[1])
    benchmark.pedantic(dist_ckpt.load, (asked, tmp_path / "c"), rounds=5, warmup_rounds=1)
    assert all(bool((record.data == 1).all()) for record in chain.from_iterable(asked.values()))
