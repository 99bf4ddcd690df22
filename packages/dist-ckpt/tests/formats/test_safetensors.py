"""Headers of safetensors, taken apart without the library: what is believed, and what is refused."""

import json
import os
import struct

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, MismatchError, ShardedTensor, tools
from sixfold.dist_ckpt.formats import safetensors


def write(path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path.parent


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def parts(places):
    return {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(places)}, "x": entry("U8", [1], 0, 1)}


def test_tensors_off_their_alignment_load_and_are_cut(tmp_path):
    header = {"x": entry("U8", [3], 0, 3), "y": entry("F32", [2, 2], 3, 19)}
    folder = write(
        tmp_path / "m" / "any.safetensors", header, bytes([1, 2, 3]) + struct.pack("<4f", 1.5, 2.5, 3.5, 4.5)
    )
    assert dist_ckpt.load_plain_tensors(folder)["y"].tolist() == [[1.5, 2.5], [3.5, 4.5]]
    columns = [ShardedTensor.from_rank_offsets("y", torch.zeros(2, 1), (1, i, 2)) for i in range(2)]
    assert [part.tolist() for part in dist_ckpt.load({"y": columns}, folder)["y"]] == [[[1.5], [3.5]], [[2.5], [4.5]]]
    tools.convert(folder, tmp_path / "c", to="torch_dist")
    assert tools.diff(folder, tmp_path / "c")["equal"]


def test_a_snapshot_of_links_into_a_cache_is_a_folder_of_files(tmp_path):
    write(tmp_path / "blobs" / "model.safetensors", {"x": entry("I8", [2], 0, 2)}, bytes([1, 2]))
    (tmp_path / "snapshot").mkdir()
    os.symlink("../blobs/model.safetensors", tmp_path / "snapshot" / "model.safetensors")
    assert dist_ckpt.load_plain_tensors(tmp_path / "snapshot")["x"].tolist() == [1, 2]


DAMAGE = {
    "a name twice": (
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"\0",
        "'x' stands there twice",
    ),
    "a field twice": (b'{"x":{"dtype":"I8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\0", "'dtype' stands"),
    "bytes after the last tensor": ({"x": entry("U8", [1], 0, 1)}, b"\0\0", "its header speaks of"),
    "a gap": ({"x": entry("U8", [1], 0, 1), "y": entry("U8", [1], 2, 3)}, b"\0\0\0", "y: .* gap"),
    "a truth value as a count": ({"x": entry("U8", [True], 0, 1)}, b"\0", "lists of counts"),
    "a key more": ({"x": {**entry("U8", [1], 0, 1), "more": 1}}, b"\0", "dtype, shape and data_offsets"),
    "no place of a part": (parts({}), b"\0", "saved_offsets None"),
    "a place that is none": (parts({"x": [0]}), b"\0", "saved_offsets None"),
    "a place in two dimensions": (parts({"x": {"saved_offsets": [0, 0]}}), b"\0", "saved_offsets"),
    "a place before the first": (parts({"x": {"saved_offsets": [-1]}}), b"\0", "saved_offsets"),
    "places that are no JSON": (
        {"__metadata__": {"DCP_SHARDING_INFO": "{"}, "x": entry("U8", [1], 0, 1)},
        b"\0",
        "DCP_SHARDING_INFO is no JSON",
    ),
    "metadata that is none": ({"__metadata__": [1], "x": entry("U8", [1], 0, 1)}, b"\0", "__metadata__"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_header_that_contradicts_itself_is_damage(tmp_path, name):
    header, body, words = DAMAGE[name]
    folder = write(tmp_path / "m" / "model.safetensors", header, body)
    with pytest.raises(CorruptError, match=rf"model\.safetensors: .*{words}"):
        dist_ckpt.load_tensors_metadata(folder)
    (problem,) = tools.verify(folder)["problems"][:1]
    assert problem["kind"] == "unreadable"


def test_a_long_header_is_refused_before_it_is_read():
    with pytest.raises(CorruptError, match="at most 100000000"):
        safetensors.header_bytes(struct.pack("<Q", 100_000_001), 2**40)


def test_what_is_not_read_is_told_as_such_and_not_as_damage(tmp_path):
    packed = write(tmp_path / "packed" / "model.safetensors", {"x": entry("F6_E2M3", [4], 0, 3)}, b"\0" * 3)
    write(tmp_path / "two" / "a.safetensors", {})
    two = write(tmp_path / "two" / "b.safetensors", {})
    for folder, words in ((packed, "dtype F6_E2M3"), (two, "what belongs together")):
        with pytest.raises(MismatchError, match=words):
            dist_ckpt.load_tensors_metadata(folder)


def test_the_usual_names_win_over_others(tmp_path):
    write(tmp_path / "m" / "consolidated.safetensors", {"other": entry("U8", [1], 0, 1)}, b"\0")
    folder = write(tmp_path / "m" / "model.safetensors", {"x": entry("U8", [1], 0, 1)}, b"\0")
    assert set(dist_ckpt.load_tensors_metadata(folder)) == {"x"}
