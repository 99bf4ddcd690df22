"""float8 with other rules, exponents alone, float4 in pairs: saved, loaded, exported and read as their bytes."""

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, MismatchError, ShardingError, hugging_face, tools

NAMES = ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]


def made(name, shape=(4, 8)):
    return torch.arange(32, dtype=torch.uint8).reshape(shape).view(getattr(torch, name))


def raw(tensor):
    return tensor.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_come_back_from_our_folder_and_from_safetensors_of_both(tmp_path, name):
    safetensors = pytest.importorskip("safetensors.torch")
    ours, library = tmp_path / "ours", tmp_path / "library"
    dist_ckpt.save({"w": made(name)}, tmp_path / "native", group=None)
    target = torch.zeros_like(made(name).view(torch.uint8)).view(made(name).dtype)
    dist_ckpt.load({"w": target}, tmp_path / "native", group=None)
    assert raw(target) == [*range(32)]
    assert tools.diff(tmp_path / "native", tmp_path / "native")["equal"]

    hugging_face.export({"w": made(name)}, ours, group=None)
    found = safetensors.load_file(ours / "model.safetensors")["w"]
    assert found.dtype == made(name).dtype and found.shape == (4, 8) and raw(found) == [*range(32)]
    tools.convert(tmp_path / "native", tmp_path / "converted", to="safetensors")
    assert (tmp_path / "converted/model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()

    library.mkdir()
    safetensors.save_file({"w": made(name)}, library / "model.safetensors")
    target.view(torch.uint8).zero_()
    hugging_face.load({"w": target}, library, group=None)
    assert raw(target) == [*range(32)]


def test_packed_numbers_are_compared_by_their_bytes_and_converted_to_nothing(tmp_path):
    for number, folder in enumerate("ab"):
        packed = torch.arange(32, dtype=torch.uint8)
        packed[3] += number
        dist_ckpt.save({"w": packed.view(torch.float4_e2m1fn_x2)}, tmp_path / folder, group=None)
    assert tools.diff(tmp_path / "a", tmp_path / "b")["different"][0]["count"] == 1
    for policy in ("exact", "cast"):
        with pytest.raises(MismatchError, match=r"w: asked for torch.float32, stored is torch.float4_e2m1fn_x2; torch"):
            dist_ckpt.load({"w": torch.zeros(32)}, tmp_path / "a", group=None, dtype_policy=policy)


def test_what_has_no_form_is_refused_by_name_with_what_to_do(tmp_path):
    with pytest.raises(ShardingError, match=r"w is a torch.Tensor, .*uint1.*; save its bytes, as .view\(torch.uint8\)"):
        dist_ckpt.save({"w": torch.zeros(4, dtype=torch.uint8).view(torch.uint1)}, tmp_path / "a", group=None)
    dist_ckpt.save({"w": made("float8_e8m0fnu")}, tmp_path / "b", group=None)
    with pytest.raises(CheckpointError, match=r"w: zarr has no name for torch.float8_e8m0fnu; the torch_dist format"):
        tools.convert(tmp_path / "b", tmp_path / "c", to="zarr")


def test_what_safetensors_has_no_form_for_is_refused_by_name_with_what_to_do(tmp_path):
    pytest.importorskip("safetensors", reason="export to Hugging Face is an extra")
    with pytest.raises(CheckpointError, match=r"w: safetensors knows no torch.float4_e2m1fn_x2; leave"):
        hugging_face.export({"w": made("float4_e2m1fn_x2")[0, 0].clone()}, tmp_path / "d", group=None)


def test_an_odd_number_of_packed_ones_is_refused_by_name(tmp_path):
    head = b'{"w":{"dtype":"F4","shape":[2,1],"data_offsets":[0,1]}}'
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"\0")
    with pytest.raises(MismatchError, match=r"w: F4 \[2, 1\] is not read here: torch has pairs"):
        hugging_face.load({"w": torch.zeros(1)}, tmp_path, group=None)
