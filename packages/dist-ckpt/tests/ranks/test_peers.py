"""The format is torch DCP's and megatron-core's own: each reads what the other wrote."""

import contextlib
import struct
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import one

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, ShardedTensor


def quiet():
    context = warnings.catch_warnings()
    context.__enter__()
    warnings.simplefilter("ignore")
    stack = contextlib.ExitStack()
    stack.push(context)
    return stack


def test_dcp_reads_flattened_shards_as_the_true_tensor(tmp_path):
    whole = torch.randn(6, 5)
    shards = [
        ShardedTensor.from_rank_offsets_flat(
            "model.w", part.clone(), (3, 5), (0, i, 2), flattened_range=slice(start, start + len(part))
        )
        for i, band in enumerate(whole.chunk(2))
        for start, part in ((0, band.reshape(-1)[:4]), (4, band.reshape(-1)[4:]))
    ]
    state = {
        "w": shards,
        "bf": one("bf", whole.bfloat16()),
        "s": one("s", torch.tensor(3)),
        "e": one("e", torch.empty(0, 2)),
    }
    dist_ckpt.save(state, tmp_path / "c")
    asked = {
        "model": {"w": torch.zeros(6, 5)},
        "bf": torch.zeros(6, 5).bfloat16(),
        "s": torch.tensor(0),
        "e": torch.empty(0, 2),
    }
    with quiet():
        dcp.load(asked, checkpoint_id=str(tmp_path / "c"))
    assert torch.equal(asked["model"]["w"], whole)
    assert torch.equal(asked["bf"], whole.bfloat16())
    assert asked["s"].item() == 3


def test_we_read_a_plain_dcp_folder_strided_tensors_included(tmp_path):
    tensors = {"w": torch.randn(8, 3), "t": torch.randn(4, 6).t(), "s": torch.tensor(2.0), "i": torch.arange(3)}
    with quiet():
        dcp.save({**tensors, "step": 5}, checkpoint_id=str(tmp_path / "c"))
    assert dist_ckpt.check_is_distributed_checkpoint(tmp_path / "c")
    assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {}
    plain = dist_ckpt.load_plain_tensors(tmp_path / "c")
    assert plain.keys() == tensors.keys()
    assert all(torch.equal(plain[key], tensor) for key, tensor in tensors.items())
    column = ShardedTensor("t", torch.zeros(6, 1), torch.float32, (6, 1), (6, 4), (0, 2), None)
    loaded = dist_ckpt.load({"t": column}, tmp_path / "c", validate_access_integrity=False)
    assert torch.equal(loaded["t"], tensors["t"][:, 2:3])


def test_the_crc_in_foreign_frames_is_checked(tmp_path):
    with quiet():
        dcp.save({"w": torch.ones(1000)}, checkpoint_id=str(tmp_path / "c"))
    path = tmp_path / "c" / "__0_0.distcp"
    data = path.read_bytes()
    place = data.index(struct.pack("<8f", *[1.0] * 8)) + 102  # the byte 0x80 of 1.0
    path.write_bytes(data[:place] + b"\x00" + data[place + 1 :])
    with quiet():
        asked = {"w": torch.zeros(1000)}
        dcp.load(asked, checkpoint_id=str(tmp_path / "c"))
    assert not torch.equal(asked["w"], torch.ones(1000)), "DCP loads the damage silently"
    with pytest.raises(CorruptError, match="CRC-32"):
        dist_ckpt.load_plain_tensors(tmp_path / "c")
    request = dist_ckpt.load_tensors_metadata(tmp_path / "c")
    dist_ckpt.load(request, tmp_path / "c", verify="off")


def dcp_sharded(rank, ranks, folder):
    """Each library loads, sharded over two ranks, what the other saved sharded over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(24.0).view(6, 4)
    with quiet():
        dcp.save({"w": distribute_tensor(whole, mesh, [Shard(1)])}, checkpoint_id=str(folder / "theirs"))
        row = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4), (0, rank, ranks))
        loaded = dist_ckpt.load({"w": row}, folder / "theirs")["w"]
        assert torch.equal(loaded, whole.chunk(ranks)[rank])
        dist_ckpt.save({"w": row}, folder / "ours")
        asked = {"w": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)])}
        dcp.load(asked, checkpoint_id=str(folder / "ours"))
    return torch.equal(asked["w"].full_tensor(), whole)


def test_sharded_checkpoints_pass_both_ways(tmp_path):
    assert run_ranks(dcp_sharded, 2, tmp_path) == [True, True]
