"""The fully parallel wrappers on real ranks: the same checkpoint, the work shared out, errors everywhere."""

import time

import pytest
import torch
import torch.distributed as dist
from dist_ckpt_helpers import flip_byte

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CorruptError, LostPeerError, ShardedObject, ShardedTensor, ShardingError
from sixfold.dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy


def values(tp=0):
    generator = torch.Generator().manual_seed(tp)
    return {
        "big": torch.randn(700, 512, generator=generator),
        **{f"small.{i}": torch.randn(100 + i, generator=generator) for i in range(12)},
        "half": torch.randn(33, 7, generator=generator).bfloat16(),
        "scalar": torch.tensor(3 + tp),
        "empty": torch.empty(0, 4),
        "mask": torch.randn(9, generator=generator) > 0,
    }


def replicated(rank, *, fill):
    state = {
        key: ShardedTensor.from_rank_offsets(key, t if fill else torch.zeros_like(t), replica_id=rank)
        for key, t in values().items()
    }
    state["rng"] = ShardedObject("rng", {"of": "all"}, (1,), (0,), replica_id=rank)
    state["strided"] = ShardedTensor.from_rank_offsets(
        "strided", torch.arange(12.0).view(3, 4).t() * (1 if fill else 0), replica_id=rank
    )
    return {"model": state, "step": 3}


def check(loaded):
    for key, expected in values().items():
        assert torch.equal(loaded["model"][key], expected), key
    assert torch.equal(loaded["model"]["strided"], torch.arange(12.0).view(3, 4).t())
    assert loaded["model"]["rng"] == {"of": "all"}
    assert loaded["step"] == 3


def save_and_load(rank, ranks, folder):
    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    assert saver.backend == "torch_dist"
    dist_ckpt.save(replicated(rank, fill=True), folder, saver)
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    check(dist_ckpt.load(replicated(rank, fill=False), folder, loader))
    check(dist_ckpt.load(replicated(rank, fill=False), folder))


@pytest.mark.slow
def test_replicas_are_written_evenly_and_read_once(tmp_path):
    run_ranks(save_and_load, 4, tmp_path / "c")
    sizes = [(tmp_path / "c" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    total = sum(t.nbytes for t in values().values())
    assert max(sizes) <= 1.01 * total / 4 + 12_000  # frames of small tensors add some hundred bytes each


def count_reads(rank, ranks, folder):
    """Bytes that the load plan of this rank reads, by the frames' own records."""
    from sixfold.dist_ckpt.collectives import relay

    seen = []
    running = relay.Relay.running

    def spy(self):
        seen.append(sum(record.data.nbytes for record in self.mine))
        return running(self)

    relay.Relay.running = spy
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    check(dist_ckpt.load(replicated(rank, fill=False), folder, loader))
    return seen[0]


@pytest.mark.slow
def test_each_wanted_byte_is_read_by_one_rank(tmp_path):
    run_ranks(save_and_load, 2, tmp_path / "c")
    read = run_ranks(count_reads, 4, tmp_path / "c")
    total = sum(t.nbytes for t in values().values()) + 48
    assert sum(read) == total
    assert max(read) <= 1.01 * total / 4 + 4_000


def load_with_an_error_before_reading(rank, ranks, folder):
    def progress(done, total):
        if rank == 1:
            raise OSError("the terminal is gone")

    loader, start = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()), time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        dist_ckpt.load(replicated(rank, fill=False), folder, loader, timeout_s=8.0, progress=progress)
    return str(caught.value), time.monotonic() - start


@pytest.mark.slow
def test_ranks_do_not_wait_for_tensors_of_one_that_fails_before_it_reads(tmp_path):
    run_ranks(save_and_load, 2, tmp_path / "c")
    for text, seconds in run_ranks(load_with_an_error_before_reading, 2, tmp_path / "c"):
        assert text.startswith("progress(0")
        assert seconds < 6.0


def over_dp_groups(rank, ranks, folder):
    """TP 2 x DP 2: shards are replicated over DP, and each DP group shares out its own."""
    tp, dp = rank % 2, rank // 2
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def state(fill):
        made = {}
        for key, whole in {"a": torch.arange(600_000.0).view(1000, 600), "b": torch.arange(40.0).view(4, 10)}.items():
            part = whole.chunk(2, 1)[tp].contiguous()
            data = part if fill else torch.zeros_like(part)
            made[key] = ShardedTensor.from_rank_offsets(key, data, (1, tp, 2), replica_id=(0, 0, dp))
        return made

    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), groups[tp], do_cache_distribution=True)
    for step in (1, 2):  # the second save uses the kept distribution
        dist_ckpt.save(state(True), folder / str(step), saver)
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), groups[tp], do_cache_distribution=True)
    for step in (1, 2):
        loaded = dist_ckpt.load(state(False), folder / str(step), loader)
        assert torch.equal(loaded["a"], torch.arange(600_000.0).view(1000, 600).chunk(2, 1)[tp])
        assert torch.equal(loaded["b"], torch.arange(40.0).view(4, 10).chunk(2, 1)[tp])
    other = state(True) | {"c": ShardedTensor.from_rank_offsets("c", torch.zeros(2), replica_id=rank)}
    with pytest.raises(ShardingError, match="do_cache_distribution"):
        dist_ckpt.save(other, folder / "3", saver)
    with pytest.raises(ShardingError, match="do_cache_distribution"):
        dist_ckpt.load({"a": state(False)["a"]}, folder / "1", loader)


@pytest.mark.slow
def test_groups_share_out_their_own_shards_and_keep_the_distribution(tmp_path):
    run_ranks(over_dp_groups, 4, tmp_path)
    sizes = [(tmp_path / "2" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 1.02 * min(sizes) + 4096


def one_rank_reads_damage(rank, ranks, folder):
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    with pytest.raises(CorruptError, match="distcp"):
        dist_ckpt.load(replicated(rank, fill=False), folder, loader, timeout_s=20.0)
    return True


@pytest.mark.slow
def test_damage_that_one_rank_reads_is_raised_on_all_without_waiting(tmp_path):
    run_ranks(save_and_load, 2, tmp_path / "c")
    flip_byte(tmp_path / "c" / "__0_0.distcp", 200_000)
    assert run_ranks(one_rank_reads_damage, 3, tmp_path / "c", timeout=60.0) == [True] * 3


def one_replica_has_drifted(rank, ranks, folder):
    told = []
    for key in ("big", "half"):  # the first is cut, and each rank writes a part of it
        state = replicated(rank, fill=True)
        state["model"][key].data.add_(rank == ranks - 1)
        with pytest.raises(ShardingError) as caught:
            dist_ckpt.save(state, folder, FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()))
        told.append(str(caught.value))
    return told


def test_replicas_that_disagree_are_an_error_also_where_their_ranks_write_parts(tmp_path):
    for told in run_ranks(one_replica_has_drifted, 3, tmp_path / "c"):
        assert "big from (0, 0): ranks [0, 1], [2] hold different values of one shard" in told[0]
        assert "half from (0, 0): ranks [0, 1], [2] hold different values of one shard" in told[1]


def two_main_replicas(rank, ranks, folder):
    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    with pytest.raises(ShardingError, match="overlap"):
        dist_ckpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(5))}, folder, saver)
    return not folder.exists()


def test_two_main_replicas_stay_an_error(tmp_path):
    assert run_ranks(two_main_replicas, 2, tmp_path / "c") == [True, True]


def a_rank_fails_before_sharing_out(rank, ranks, folder):
    from sixfold.dist_ckpt import ShardedTensorFactory

    def build(key, data, replica_id, flattened_range):
        raise ValueError("no such layer")

    state = replicated(rank, fill=True)
    if rank == 1:
        state["f"] = ShardedTensorFactory("f", torch.zeros(1), build, dict.get)
    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    with pytest.raises(dist_ckpt.CheckpointError, match="no such layer"):
        dist_ckpt.save(state, folder, saver, timeout_s=20.0)
    return True


def test_an_error_before_sharing_out_is_raised_on_all(tmp_path):
    assert run_ranks(a_rank_fails_before_sharing_out, 2, tmp_path / "c", timeout=60.0) == [True, True]


def reader_dies(rank, ranks, folder):
    import os
    import signal

    from sixfold.dist_ckpt.collectives import relay

    if rank == 1:
        relay.Relay.on_complete = lambda self, index: os.kill(os.getpid(), signal.SIGKILL)
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    with pytest.raises(LostPeerError, match="rank 1"):
        dist_ckpt.load(replicated(rank, fill=False), folder, loader, timeout_s=30.0)
    return True


@pytest.mark.slow
def test_a_rank_that_dies_before_it_sends_is_told_within_seconds(tmp_path):
    run_ranks(save_and_load, 2, tmp_path / "c")
    assert run_ranks(reader_dies, 2, tmp_path / "c", timeout=60.0, allow_exit=(1,))[0] is True


def padded_flattened_and_converted(rank, ranks, folder):
    """What a range may be besides plain: padded, flattened, of another dtype, strided; all replicated."""
    whole = torch.arange(700_000.0).view(1000, 700)
    if rank == 0:
        dist_ckpt.save({"w": ShardedTensor.from_rank_offsets("w", whole)}, folder, group=None)
    dist.barrier()
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    asked = {
        "padded": ShardedTensor.from_rank_offsets(
            "w", torch.full((1200, 700), -1.0), replica_id=rank, allow_shape_mismatch=True
        ),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "w", torch.zeros(600_001), (1000, 700), flattened_range=slice(77, 600_078), replica_id=rank
        ),
        "double": ShardedTensor.from_rank_offsets("w", torch.zeros(1000, 700).double(), replica_id=rank),
        "strided": ShardedTensor.from_rank_offsets("w", torch.zeros(700, 1000).t(), replica_id=rank),
    }
    loaded = {}
    for name, record in asked.items():
        loaded[name] = dist_ckpt.load({"w": record}, folder, loader, validate_access_integrity=False)["w"]
    expected = torch.zeros(1200, 700)
    expected[:1000] = whole
    return [
        torch.equal(loaded["padded"], expected),
        torch.equal(loaded["flat"], whole.flatten()[77:600_078]),
        torch.equal(loaded["double"], whole.double()),
        torch.equal(loaded["strided"], whole),
    ]


@pytest.mark.slow
def test_padded_flattened_converted_and_strided_ranges_are_sent_on_too(tmp_path):
    assert run_ranks(padded_flattened_and_converted, 2, tmp_path / "c") == [[True] * 4] * 2


def two_halves_that_both_are_main(rank, ranks, folder):
    size = 4 if rank else 8
    record = ShardedTensor("k", torch.full((size,), float(rank)), torch.float32, (size,), (8,), (0,), None, 0)
    with pytest.raises(ShardingError, match=r"k\[0:4\] of rank 1 .*overlap"):
        dist_ckpt.save({"k": record}, folder, FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()))


def test_an_overlap_at_the_start_of_a_shard_that_is_shared_out_is_told(tmp_path):
    run_ranks(two_halves_that_both_are_main, 3, tmp_path / "c")


def load_slowly(rank, ranks, folder):
    """A load of what takes longer to read than the deadline before anything is sent, into strided tensors too."""
    import time

    from sixfold.dist_ckpt.save_load import reader

    def state(make):
        own = {f"own.{rank}": ShardedTensor.from_rank_offsets(f"own.{rank}", make((1 << 20,)))}
        shared = {key: make((4, 6)).t() if key < "x" else make((4, 6)) for key in "vwxyz"}
        return own | {k: ShardedTensor.from_rank_offsets(k, t, replica_id=rank) for k, t in shared.items()}

    dist_ckpt.save(state(torch.ones), folder)
    read = reader.Reader._read

    def slowly(self, file, run):
        time.sleep(1.2 if run.stop - run.start > 1 << 20 else 0)
        return read(self, file, run)

    reader.Reader._read = slowly
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    with torch.inference_mode():
        loaded = dist_ckpt.load(state(torch.zeros), folder, loader, timeout_s=1.0, verify="off")
    return all(bool(tensor.eq(1).all()) for tensor in loaded.values())


@pytest.mark.slow
def test_ranks_that_read_for_longer_than_the_deadline_are_not_late_and_inference_mode_holds(tmp_path):
    assert run_ranks(load_slowly, 2, tmp_path / "c") == [True, True]
