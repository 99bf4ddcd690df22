"""Save and load in one process beside torch DCP: one large state and many small tensors.

    OMP_NUM_THREADS=1 pytest packages/dist-ckpt/benchmarks/bench_checkpoint.py --benchmark-only

Equal work: both get the plain dict of tensors (making ShardedTensors is timed), save into a new folder each round with
fsync, and load into tensors that are there, which are cleared before each round and compared after the last. Threads
are each library's default: DCP writes with one, Sixfold with two. Sixfold hashes and checks, DCP does not.
"""

from itertools import count, pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor
from sixfold.dist_ckpt.geometry.box import range_boxes
from sixfold.dist_ckpt.plans.shard_table import merge, tabulate
from sixfold.dist_ckpt.validation import table_problems

STATES = {"large": (16, 4 * 2**20), "small": (2_000, 512)}  # tensors, float32 elements each


@pytest.fixture(params=list(STATES))
def state(request, benchmark):
    tensors, elements = STATES[request.param]
    benchmark.extra_info.update(tensors=tensors, bytes=4 * tensors * elements)
    return {f"t{i}": torch.randn(elements) for i in range(tensors)}


def sharded(tensors):
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def save_sixfold(tensors, folder):
    dist_ckpt.save(sharded(tensors), folder)


def load_sixfold(tensors, folder):
    dist_ckpt.load(sharded(tensors), folder)


def save_dcp(tensors, folder):
    dcp.save(tensors, checkpoint_id=str(folder))


def load_dcp(tensors, folder):
    dcp.load(tensors, checkpoint_id=str(folder))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [save_sixfold, save_dcp])
def test_save(benchmark, state, tmp_path, save):
    folders = (tmp_path / str(number) for number in count())
    benchmark.pedantic(save, setup=lambda: ((state, next(folders)), {}), rounds=3, warmup_rounds=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("save", "load"), [(save_sixfold, load_sixfold), (save_dcp, load_dcp)])
def test_load(benchmark, state, tmp_path, save, load):
    save(state, tmp_path / "c")
    targets = {key: torch.empty_like(tensor) for key, tensor in state.items()}

    def cleared():
        for target in targets.values():
            target.zero_()
        return (targets, tmp_path / "c"), {}

    benchmark.pedantic(load, setup=cleared, rounds=3, warmup_rounds=1)
    assert all(torch.equal(targets[key], tensor) for key, tensor in state.items())


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
