"""Save and load in one process beside torch DCP: one large state and many small tensors.

OMP_NUM_THREADS=1 pytest packages/dist-ckpt/benchmarks/bench_checkpoint.py --benchmark-only
"""

import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor
from sixfold.dist_ckpt.box import range_boxes
from sixfold.dist_ckpt.table import merge, tabulate
from sixfold.dist_ckpt.validation import table_problems

STATES = {"large": (16, 4 * 2**20), "small": (2_000, 512)}  # tensors, float32 elements each


@pytest.fixture(params=list(STATES))
def state(request, benchmark):
    count, elements = STATES[request.param]
    benchmark.extra_info.update(tensors=count, bytes=4 * count * elements)
    return {f"t{i}": torch.randn(elements) for i in range(count)}


def sharded(tensors):
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def test_save(benchmark, state, tmp_path):
    benchmark.pedantic(dist_ckpt.save, (sharded(state), tmp_path / "c"), rounds=3, warmup_rounds=1)


def test_save_dcp(benchmark, state, tmp_path):
    warnings.simplefilter("ignore")
    benchmark.pedantic(dcp.save, (state,), {"checkpoint_id": str(tmp_path / "c")}, rounds=3, warmup_rounds=1)


def test_load(benchmark, state, tmp_path):
    dist_ckpt.save(sharded(state), tmp_path / "c")
    benchmark.pedantic(dist_ckpt.load, (sharded(state), tmp_path / "c"), rounds=3, warmup_rounds=1)


def test_load_dcp(benchmark, state, tmp_path):
    warnings.simplefilter("ignore")
    dcp.save(state, checkpoint_id=str(tmp_path / "c"))
    benchmark.pedantic(dcp.load, (state,), {"checkpoint_id": str(tmp_path / "c")}, rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("ranks", [64])
def test_validation_of_flattened_shards(benchmark, ranks):
    """100 keys of (1024, 1024), each cut into one range per rank: what the first rank does at each save."""
    benchmark.extra_info.update(ranks=ranks, keys=100)
    elements = 1024 * 1024
    cuts = [elements * i // ranks for i in range(ranks + 1)]
    by_rank = [
        [
            ShardedTensor(
                f"k{k}", None, torch.float32, (1024, 1024), (1024, 1024), (0, 0), None, flattened_range=slice(a, b)
            )
            for k in range(100)
        ]
        for a, b in pairwise(cuts)
    ]
    tables = [tabulate(records)[0].encode() for records in by_rank]
    assert benchmark(lambda: table_problems(merge(tables), "saved")) == []


def test_a_range_as_boxes(benchmark):
    assert len(benchmark(range_boxes, (64, 128, 256), 1_234, 1_500_001)) == 5
