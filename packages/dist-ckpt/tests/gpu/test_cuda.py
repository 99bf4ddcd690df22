"""CUDA tensors, and the control channel where the given group is NCCL alone."""

import pytest
import torch
import torch.distributed as dist
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor, hugging_face

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda.is_available() is false"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_cuda_tensors_come_back_in_place_bit_for_bit(tmp_path, dtype):
    values = torch.randn(300, 500, device="cuda").to(dtype)
    dist_ckpt.save({"w": one("w", values), "seed": torch.arange(3, device="cuda")}, tmp_path / "c")
    target = torch.zeros(300, 500, device="cuda").to(dtype)
    loaded = dist_ckpt.load({"w": one("w", target)}, tmp_path / "c")
    assert loaded["w"].data_ptr() == target.data_ptr()
    assert torch.equal(target.view(torch.uint8), values.view(torch.uint8))
    assert loaded["seed"].tolist() == [0, 1, 2]


def test_column_slices_load_onto_the_device(tmp_path):
    whole = torch.randn(64, 48)
    dist_ckpt.save({"w": one("w", whole)}, tmp_path / "c")
    parts = [ShardedTensor.from_rank_offsets("w", torch.zeros(64, 12, device="cuda"), (1, i, 4)) for i in range(4)]
    loaded = dist_ckpt.load({"w": parts}, tmp_path / "c")["w"]
    assert torch.equal(torch.cat(loaded, 1).cpu(), whole)


def test_an_nccl_group_gets_a_gloo_channel_of_its_own(tmp_path):
    dist.init_process_group(
        "nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        state = {"w": one("w", torch.ones(5, device="cuda")), "it": 3}
        dist_ckpt.save(state, tmp_path / "c")
        state["w"].data.zero_()
        loaded = dist_ckpt.load(state, tmp_path / "c")
        assert loaded["w"].tolist() == [1.0] * 5
        assert loaded["it"] == 3
    finally:
        dist.destroy_process_group()


def test_a_model_on_the_device_goes_to_files_of_hugging_face_and_back(tmp_path):
    safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    saved, model = (torch.nn.Linear(30, 20, device="cuda") for _ in range(2))
    hugging_face.export(saved, tmp_path / "m", dtype=torch.bfloat16)
    files = safe.load_file(tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(files[key], value.bfloat16().cpu()) for key, value in saved.state_dict().items())
    hugging_face.load(model, tmp_path / "m", dtype_policy="exact")
    assert all(torch.equal(value, files[key].float().cuda()) for key, value in model.state_dict().items())
