"""Loads as users write them: of a plain model's checkpoint into parts of its tensors."""

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, ShardedTensor


def asked(dtype):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4, dtype=dtype))}


def test_strict_dtypes_refuse_a_conversion_of_a_plain_tensor_into_a_shard(tmp_path):
    dist_ckpt.save({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"w: asked for torch\.bfloat16, stored is torch\.float32"):
        dist_ckpt.load(asked(torch.bfloat16), tmp_path / "c", dtype_policy="strict")
    for dtype, policy in ((torch.bfloat16, "exact"), (torch.float32, "strict")):
        loaded = dist_ckpt.load(asked(dtype), tmp_path / "c", dtype_policy=policy)
        assert loaded["w"].dtype == dtype
        assert loaded["w"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("policy", ["exact", "cast", "strict"])
def test_complex_values_of_a_plain_tensor_do_not_go_into_a_real_shard(tmp_path, policy):
    dist_ckpt.save({"w": torch.full((4,), 1 + 2j)}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"w: asked for torch\.float32, stored is torch\.complex64"):
        dist_ckpt.load(asked(torch.float32), tmp_path / "c", dtype_policy=policy)
