"""A trainer's default device and default dtype change nothing about what is saved, loaded or shown.

``meta`` stands for an accelerator: a tensor that this package makes there by accident has no values.
"""

import contextlib

import pytest
import torch
from dist_ckpt_helpers import one
from forked_worker import fork_workers

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, ShardedObject, ShardedTensor, ShardingError
from sixfold.dist_ckpt.background.saver import AsyncSaver
from sixfold.dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from sixfold.dist_ckpt.tools import commands as tools


@contextlib.contextmanager
def accelerator():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def cpu(*shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, device="cpu").reshape(shape).to(dtype)


def state(fill, rank=0, ranks=1):
    def local(*shape, **options):
        return cpu(*shape, **options) + rank if fill else torch.zeros_like(cpu(*shape, **options))

    flat = ShardedTensor.from_rank_offsets_flat("flat", local(6), (6, 2), flattened_range=slice(0, 6))
    rest = ShardedTensor.from_rank_offsets_flat("flat", local(6), (6, 2), flattened_range=slice(6, 12))
    return {
        "even": ShardedTensor.from_rank_offsets("even", local(4, 3), (0, rank, ranks)),
        "turned": ShardedTensor.from_rank_offsets("turned", local(5, 3).t(), (1, rank, ranks)),
        "large": ShardedTensor.from_rank_offsets("large", local(300, 1000), (0, rank, ranks)),
        "half": ShardedTensor.from_rank_offsets("half", local(7, dtype=torch.bfloat16), (0, rank, ranks)),
        **({"flat": [flat, rest]} if rank == 0 else {}),
        "common": {"t": cpu(3), "pair": (cpu(2), 1)},
        "o": ShardedObject("o", {"t": cpu(2)}, (ranks,), (rank,)),
        "padded": ShardedTensor.from_rank_offsets("padded", local(2), (0, rank, ranks), allow_shape_mismatch=True),
    }


def check(loaded, asked, rank=0):
    for key, shape in {"even": (4, 3), "large": (300, 1000), "padded": (2,)}.items():
        assert torch.equal(loaded[key], cpu(*shape) + rank), key
    assert torch.equal(loaded["turned"], cpu(5, 3).t() + rank)
    assert torch.equal(loaded["half"], cpu(7, dtype=torch.bfloat16) + rank)
    assert [part.tolist() for part in loaded.get("flat", [])] == [cpu(6).tolist()] * 2 * ("flat" in asked)
    assert torch.equal(loaded["common"]["t"], cpu(3))
    assert torch.equal(loaded["common"]["pair"][0], cpu(2))
    assert torch.equal(loaded["o"]["t"], cpu(2))


@pytest.mark.parametrize("kind", [("torch_dist", 1), ("zarr", 1)])
def test_a_default_device_changes_nothing_in_one_process(tmp_path, kind):
    with accelerator():
        saved, asked = state(fill=True), state(fill=False)
        if kind[0] == "zarr":  # it holds no flattened shards
            del saved["flat"], asked["flat"]
        dist_ckpt.save(saved, tmp_path / "c", kind, check_finite=kind[0] == "torch_dist")
        check(dist_ckpt.load(asked, tmp_path / "c"), asked)
        plain = dist_ckpt.load_plain_tensors(tmp_path / "c")
        assert torch.equal(plain["even"], cpu(4, 3))
        cast = dist_ckpt.load({"e": one("even", cpu(4, 3, dtype=torch.float64) * 0)}, tmp_path / "c")["e"]
        assert torch.equal(cast, cpu(4, 3, dtype=torch.float64))
        with pytest.raises(MismatchError, match="half"):  # values that do not survive are found
            dist_ckpt.save({"h": one("half", cpu(3) + 0.1)}, tmp_path / "d", kind)
            dist_ckpt.load({"h": one("half", cpu(3, dtype=torch.bfloat16))}, tmp_path / "d")


def test_a_default_device_changes_nothing_for_the_tools(tmp_path):
    dist_ckpt.save(state(fill=True), tmp_path / "c")
    with accelerator():
        assert tools.verify(tmp_path / "c")["ok"]
        for to in ("torch_dist", "zarr"):
            tools.convert(tmp_path / "c", tmp_path / to, to=to)
        assert tools.diff(tmp_path / "c", tmp_path / "torch_dist")["equal"]
        assert tools.diff(tmp_path / "c", tmp_path / "zarr")["equal"]
        tools.inspect(tmp_path / "c")


def test_a_default_device_changes_nothing_for_an_export_to_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    dist_ckpt.save(state(fill=True), tmp_path / "c")
    with accelerator():
        tools.convert(
            tmp_path / "c", tmp_path / "st", to="safetensors", keys="turned"
        )  # a tuple of tensors has no name
    assert torch.equal(safetensors.load_file(tmp_path / "st" / "model.safetensors")["turned"], cpu(5, 3).t())


def save_and_load(rank, ranks, folder):
    fork_workers()
    with accelerator():
        dist_ckpt.save(state(True, rank, ranks), folder / "c")
        asked = state(False, rank, ranks)
        check(dist_ckpt.load(asked, folder / "c"), asked, rank)
        with AsyncSaver("world") as saver:
            saver.save(state(True, rank, ranks), folder / "a").wait()
        asked = state(False, rank, ranks)
        check(dist_ckpt.load(asked, folder / "a"), asked, rank)
        replicas = {"r": one("r", cpu(9, 3), replica_id=rank)}
        dist_ckpt.save(replicas, folder / "f", FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()))
        replicas["r"].data.zero_()
        strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
        assert torch.equal(dist_ckpt.load(replicas, folder / "f", strategy)["r"], cpu(9, 3))
        try:
            dist_ckpt.save({"x": one("x", cpu(2))}, folder / "bad")
        except ShardingError as error:
            return str(error)


@pytest.mark.slow
def test_a_default_device_changes_nothing_on_several_ranks(tmp_path):
    first, second = run_ranks(save_and_load, 2, tmp_path)
    assert first == second
    assert "overlap" in first
