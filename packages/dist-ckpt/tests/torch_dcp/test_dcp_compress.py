"""``dcp.Writer(compress=)``: torch's reader, our ``Reader`` and ``load`` find the values, and damage is found."""

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import contents, dcp_save, everything, same
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CorruptError, dcp, tools

pytest.importorskip("zstandard", reason="needs zstandard, the extra zstd")


def state():
    half = torch.arange(9_000.0).to(torch.bfloat16)
    return contents() | {"large": torch.arange(100_000).view(250, 400), "half": half}


def nbytes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def test_torch_and_the_package_read_it_and_it_is_smaller(tmp_path):
    dcp_save(state(), dcp.Writer(tmp_path / "plain"))
    dcp_save(state(), dcp.Writer(tmp_path / "c", compress="zstd"))
    assert nbytes(tmp_path / "c") < nbytes(tmp_path / "plain") / 2
    assert same(everything(FileSystemReader(tmp_path / "c")), state())
    assert same(everything(dcp.Reader(tmp_path / "c")), state())
    mine = {"large": torch.zeros(250, 400, dtype=torch.int64)}
    dist_ckpt.load(mine, tmp_path / "c", group=None, verify="full")
    assert torch.equal(mine["large"], state()["large"])
    assert tools.verify(tmp_path / "c")["problems"] == [] and tools.inspect(tmp_path / "c")["compress"] == "zstd"
    dcp_to_torch_save(tmp_path / "c", tmp_path / "one.pt")
    assert same(torch.load(tmp_path / "one.pt", weights_only=False)["large"], state()["large"])


def test_a_writer_of_cached_plans_serves_save_after_save(tmp_path):
    writer, planner = dcp.Writer("", compress="zstd"), DefaultSavePlanner(enable_plan_caching=True)
    for step in range(3):
        made = {"w": torch.full((20_000,), step), "step": step}
        dcp_save(made, writer, checkpoint_id=str(tmp_path / f"{step}"), planner=planner)
        assert same(everything(FileSystemReader(tmp_path / f"{step}")), made)


def test_damage_is_found_and_another_word_is_refused(tmp_path):
    dcp_save(state(), dcp.Writer(tmp_path / "c", compress="zstd"))
    file = max((tmp_path / "c").glob("*.distcp"), key=lambda path: path.name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError):
        dist_ckpt.load({"large": torch.zeros(250, 400, dtype=torch.int64)}, tmp_path / "c", group=None)
    with pytest.raises(CheckpointError, match="compress is 'gzip'; it is None or 'zstd'"):
        dcp.Writer(tmp_path / "d", compress="gzip")


def sharded(rank, ranks, folder, placement, load):
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(120_000.0).view(400, 300)
    tensor = distribute_tensor(torch.zeros_like(whole) if load else whole, mesh, [placement])
    if load:
        torch_dcp.load({"w": tensor}, storage_reader=dcp.Reader(folder))
    else:
        torch_dcp.save({"w": tensor}, storage_writer=dcp.Writer(folder, compress="zstd"))
    return torch.equal(tensor.full_tensor(), whole)


def test_shards_of_two_ranks_load_by_columns_on_three(tmp_path):
    assert all(run_ranks(sharded, 2, tmp_path / "c", Shard(0), False))
    assert all(run_ranks(sharded, 3, tmp_path / "c", Shard(1), True))
    assert all(run_ranks(sharded, 1, tmp_path / "c", Replicate(), True))
