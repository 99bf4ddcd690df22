"""The tools and the command: what they report of whole, foreign and damaged folders."""

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import flip_byte, one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, MismatchError, ShardedObject, ShardedTensor, StorageError
from sixfold.dist_ckpt.__main__ import main
from sixfold.dist_ckpt.tools import commands as tools


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.0.w": torch.randn(6, 4, generator=generator),
        "layer.1.w": torch.randn(5, 3, generator=generator).bfloat16(),
        "ids": torch.arange(70_000),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 3),
    }


def state(**changed):
    records = {key: one(key, tensor) for key, tensor in (tensors() | changed).items()}
    w = records["layer.0.w"].data
    records["layer.0.w"] = [
        ShardedTensor.from_rank_offsets("layer.0.w", w[:, 2 * i : 2 * i + 2].contiguous(), (1, i, 2)) for i in range(2)
    ]
    rng = [ShardedObject("rng", {"seed": i}, (2,), (i,)) for i in range(2)]
    return {"model": records, "rng": rng, "iteration": 7, "opt": {"lr": 0.5}}


@pytest.fixture
def folder(tmp_path):
    dist_ckpt.save(state(), tmp_path / "c")
    return tmp_path / "c"


def kinds(path, **options):
    found = tools.verify(path, **options)
    assert found["ok"] == (not found["problems"])
    return {(problem["kind"], problem["file"]) for problem in found["problems"]}


def test_inspect_lists_what_was_saved(folder):
    found = tools.inspect(folder)
    assert {key: found[key] for key in ("path", "backend", "version", "integrity")} == {
        "path": str(folder),
        "backend": "torch_dist",
        "version": 1,
        "integrity": True,
    }
    assert found["tensors"] == [
        {
            "key": key,
            "dtype": str(tensor.dtype)[6:],
            "shape": list(tensor.shape),
            "nbytes": tensor.nbytes,
            "chunks": {"layer.0.w": 2, "none": 0}.get(key, 1),
        }
        for key, tensor in sorted(tensors().items())
    ]
    assert found["nbytes"] == sum(tensor.nbytes for tensor in tensors().values())
    assert found["objects"] == [{"key": "rng", "shape": [2]}]
    assert found["common"] == ["iteration", "opt"]
    assert {entry["name"]: entry["nbytes"] for entry in found["files"]} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }
    assert len(found["save_id"]) == 16
    assert [entry["key"] for entry in tools.inspect(folder, keys="layer.*")["tensors"]] == ["layer.0.w", "layer.1.w"]
    json.dumps(found)


def test_inspect_of_a_plain_dcp_folder(tmp_path):
    dcp.save({"w": torch.ones(3, 2), "step": 5}, checkpoint_id=str(tmp_path / "c"))
    found = tools.inspect(tmp_path / "c")
    assert (found["backend"], found["version"], found["save_id"], found["integrity"]) == (
        "torch_dist",
        None,
        None,
        False,
    )
    assert [entry["key"] for entry in found["tensors"]] == ["w"]
    assert found["objects"] == [{"key": "step", "shape": []}]


def test_common_data_with_classes_is_shown_and_compared_without_importing_them(folder, tmp_path, capsys):
    for name, rate in (("a", 0.1), ("b", 0.1), ("d", 0.2)):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / name))
        torch.save({"args": Namespace(rate=rate), "n": 1}, tmp_path / name / "common.pt")
    assert tools.inspect(tmp_path / "a")["common"] == ["args", "n"]
    assert tools.diff(tmp_path / "a", tmp_path / "b")["equal"]
    assert tools.diff(tmp_path / "a", tmp_path / "d")["common_differs"] == ["args"]


def test_verify_of_a_whole_folder_reads_every_byte(folder):
    found = tools.verify(folder)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert found == {
        "path": str(folder),
        "ok": True,
        "checked": True,
        "checked_bytes": sum(sizes.values()) - sizes["integrity.json"],
        "problems": [],
        "leftovers": [],
    }
    quick = tools.verify(folder, quick=True)
    assert (quick["ok"], quick["checked"], quick["checked_bytes"]) == (True, False, 0)


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata", "metadata.json"])
def test_verify_names_every_kind_of_damage(folder, name):
    path = folder / name
    data = path.read_bytes()
    flip_byte(path, len(data) // 2)
    assert ("checksum", name) in kinds(folder)
    path.write_bytes(bytes(len(data)))
    assert ("checksum", name) in kinds(folder)
    path.write_bytes(data[:-1])
    assert ("size", name) in kinds(folder, quick=True)
    path.write_bytes(data + b"x")
    assert ("size", name) in kinds(folder, quick=True)
    path.unlink()
    assert ("missing", name) in kinds(folder, quick=True)
    path.write_bytes(data)
    assert kinds(folder) == set()


@pytest.mark.parametrize("key", ["layer.0.w", "layer.1.w", "ids"])
def test_verify_names_the_tensor_that_is_damaged(folder, key):
    data = (folder / "__0_0.distcp").read_bytes()
    tensor = tensors()[key]
    values = (tensor[:, :2].contiguous() if key == "layer.0.w" else tensor).reshape(-1).view(torch.uint8).tolist()
    flip_byte(folder / "__0_0.distcp", data.index(bytes(values)))
    (problem,) = tools.verify(folder)["problems"]
    assert (problem["kind"], problem["key"]) == ("checksum", key)


def test_verify_tells_all_damage_not_the_first(folder):
    flip_byte(folder / "__0_0.distcp", 1000)
    (folder / "common.pt").unlink()
    found = tools.verify(folder)
    by_kind = {problem["kind"]: problem for problem in found["problems"]}
    assert by_kind.keys() == {"missing", "checksum"}
    assert "bytes 0:" in by_kind["checksum"]["detail"]


def test_verify_tells_what_a_dead_save_left_beside_a_checkpoint_and_finds_that_whole(folder, capsys):
    """As in a copy of a store, where a save to the place of an older version's checkpoint has died."""
    left = [f"{kind}-00000001-{'a' * 16}/" for kind in ("job", "save")]
    for name in left:
        (folder / name).mkdir()
        (folder / name / ("__0_0.distcp" if name.startswith("save") else "over-00000000")).write_bytes(b"half")
    found = tools.verify(folder)
    assert (found["ok"], found["problems"], found["leftovers"]) == (True, [], left)
    assert main(["verify", str(folder)]) == 0
    assert f"{left[1]} was left by a save that never finished; it may be removed" in capsys.readouterr().out
    (folder / ".metadata").write_bytes(b"damaged")
    found = tools.verify(folder)
    assert not found["ok"] and found["leftovers"] == left


def test_verify_tells_files_of_two_saves_unfinished_saves_and_strays(folder, tmp_path):
    dist_ckpt.save(state(), tmp_path / "d")
    other = (tmp_path / "d" / ".metadata").read_bytes()
    mine = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(other)
    assert ("mixed", ".metadata") in kinds(folder, quick=True)
    (folder / ".metadata").write_bytes(mine)
    shutil.copy(tmp_path / "d" / "__0_0.distcp", folder / "__7_0.distcp")
    assert kinds(folder, quick=True) == {("extra", "__7_0.distcp")}
    (folder / "__7_0.distcp").unlink()
    (folder / "integrity.json").write_text("{}")
    assert ("unreadable", "integrity.json") in kinds(folder)
    (folder / "integrity.json").unlink()
    assert ("missing", "integrity.json") in kinds(folder)
    (folder / "metadata.json").unlink()
    assert ("unfinished", "metadata.json") in kinds(folder)


def test_verify_reads_the_crc_that_torch_ignores(tmp_path):
    dcp.save({"w": torch.arange(5000.0), "v": torch.ones(3)}, checkpoint_id=str(tmp_path / "c"))
    assert kinds(tmp_path / "c") == set()
    (name,) = (path.name for path in (tmp_path / "c").glob("*.distcp"))
    flip_byte(tmp_path / "c" / name, 9000)
    assert kinds(tmp_path / "c") == {("checksum", name)}
    assert [problem["key"] for problem in tools.verify(tmp_path / "c")["problems"]] == ["w"]


def test_verify_tells_a_pickle_that_wants_to_run_code(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "c"))
    (tmp_path / "c" / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert kinds(tmp_path / "c") == {("unsafe", ".metadata")}


def test_verify_raises_only_where_there_is_no_folder(tmp_path):
    with pytest.raises(MismatchError, match="does not exist"):
        tools.verify(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert kinds(tmp_path / "empty") == {("unreadable", ".metadata")}


def test_convert_from_dcp_keeps_every_value(tmp_path):
    values = tensors()
    dcp.save(values | {"step": 5}, checkpoint_id=str(tmp_path / "c"))
    found = tools.convert(tmp_path / "c", tmp_path / "d", to="torch_dist")
    assert (found["tensors"], found["nbytes"]) == (5, sum(tensor.nbytes for tensor in values.values()))
    assert "integrity.json" in found["files"]
    loaded = dist_ckpt.load_plain_tensors(tmp_path / "d")
    assert all(torch.equal(loaded[key], tensor) for key, tensor in values.items())
    assert dist_ckpt.load_common_state_dict(tmp_path / "d") == {"step": 5}
    assert tools.verify(tmp_path / "d")["ok"]


def test_convert_keeps_cuts_objects_and_common_data(folder, tmp_path):
    seen = []
    tools.convert(folder, tmp_path / "d", to="torch_dist", progress=lambda done, total: seen.append((done, total)))
    assert tools.diff(folder, tmp_path / "d")["equal"]
    a, b = tools.inspect(folder), tools.inspect(tmp_path / "d")
    assert all(a[part] == b[part] for part in ("tensors", "objects", "common"))
    assert seen == sorted(seen)
    assert seen[-1] == (a["nbytes"], a["nbytes"])


@pytest.mark.parametrize("to", ["torch_dist", "safetensors"])
def test_convert_refuses_a_target_that_is_not_empty_and_a_damaged_source(folder, tmp_path, to):
    if to == "safetensors":
        pytest.importorskip("safetensors", reason="needs the extra safetensors")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").touch()
    with pytest.raises(StorageError, match="not empty"):
        tools.convert(folder, tmp_path / "d", to=to)
    flip_byte(folder / "__0_0.distcp", 1000)
    with pytest.raises(CheckpointError, match="__0_0"):
        tools.convert(folder, tmp_path / "e", to=to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]


@pytest.mark.parametrize("rows", [None, 50_000])
def test_safetensors_hold_every_value(folder, tmp_path, monkeypatch, rows):
    safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    if rows:
        monkeypatch.setattr("sixfold.dist_ckpt.plans.batches.BATCH_BYTES", rows)
    found = tools.convert(folder, tmp_path / "s", to="safetensors")
    assert found["files"] == ["model.safetensors"]
    loaded = safe.load_file(tmp_path / "s" / "model.safetensors")
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors().items())
    assert all(loaded[key].dtype == tensor.dtype for key, tensor in tensors().items())


def test_safetensors_in_shards_have_the_index_that_hubs_read(folder, tmp_path):
    safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    found = tools.convert(folder, tmp_path / "s", to="safetensors", max_shard_bytes=200, keys="*[!s]")
    assert found["files"] == ["model.safetensors"]  # as transformers calls the only one
    found = tools.convert(folder, tmp_path / "u", to="safetensors", max_shard_bytes=100, keys="*[!s]")
    index = json.loads((tmp_path / "u" / "model.safetensors.index.json").read_text())
    wanted = {key: tensor for key, tensor in tensors().items() if key != "ids"}
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in wanted.values())}
    assert index["weight_map"] == {
        "flag": "model-00001-of-00002.safetensors",
        "layer.0.w": "model-00001-of-00002.safetensors",
        "layer.1.w": "model-00002-of-00002.safetensors",
        "none": "model-00002-of-00002.safetensors",
    }
    tools.convert(folder, tmp_path / "t", to="safetensors", max_shard_bytes=100)
    index = json.loads((tmp_path / "t" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    for key, name in index["weight_map"].items():
        assert torch.equal(safe.load_file(tmp_path / "t" / name)[key], tensors()[key])


def test_diff_finds_keys_shapes_dtypes_values_and_common_data(folder, tmp_path):
    changed = tensors()
    changed["layer.0.w"][2, 1] += 0.5
    changed["layer.0.w"][0, 0] += 0.25
    largest = float((changed["layer.0.w"] - tensors()["layer.0.w"]).double().abs().max())
    changed["ids"] = changed["ids"].int()
    changed["flag"] = torch.tensor([True])
    other = state(**changed)
    del other["model"]["none"]
    other["model"]["new"] = one("new", torch.ones(1))
    other["opt"]["lr"] = 0.25
    other["rng"][1].data = {"seed": 9}
    dist_ckpt.save(other, tmp_path / "d")
    found = tools.diff(folder, tmp_path / "d")
    assert (found["equal"], found["only_in_a"], found["only_in_b"]) == (False, ["none"], ["new"])
    by_key = {entry["key"]: (entry["reason"], entry["count"], entry["max_abs"]) for entry in found["different"]}
    assert by_key == {
        "flag": ("shape", None, None),
        "ids": ("dtype", None, None),
        "layer.0.w": ("values", 2, pytest.approx(largest)),
        "rng/shard_1_2": ("values", None, None),
    }
    assert found["common_differs"] == ["opt.lr"]
    assert tools.diff(folder, tmp_path / "d", keys="layer.*", rtol=1e6)["different"] == []


@pytest.mark.parametrize("to", ["torch_dist", "zarr", "safetensors"])
def test_a_glob_that_matches_nothing_is_told_and_not_taken_for_an_empty_checkpoint(folder, tmp_path, to):
    with pytest.raises(MismatchError, match=r"keys is 'decodr.*', which matches nothing"):
        tools.convert(folder, tmp_path / "out", to=to, keys="decodr.*")
    with pytest.raises(MismatchError, match=r"keys is 'decodr.*', which matches nothing"):
        tools.diff(folder, folder, keys="decodr.*")
    assert not (tmp_path / "out").exists()


def test_diff_against_a_checkpoint_without_common_data_names_the_paths_of_the_other(tmp_path):
    dist_ckpt.save({"w": one("w", torch.ones(2)), "it": 5, "args": {}}, tmp_path / "a")
    dist_ckpt.save({"w": one("w", torch.ones(2))}, tmp_path / "b")
    assert tools.diff(tmp_path / "a", tmp_path / "b")["common_differs"] == ["args", "it"]


def test_diff_compares_arrays_and_namespaces_by_value_beside_unknown_classes(tmp_path):
    numpy = pytest.importorskip("numpy", reason="trainers keep states of its generators")

    def saved(name, last):
        held = {"rng": ("MT19937", numpy.array([1.0, numpy.nan, last])), "args": Namespace(lr=numpy.array([last, 2]))}
        record = ShardedObject("o", held | {"of": Fraction(1, 2)}, (1,), (0,))
        with torch.serialization.safe_globals([Fraction]):
            dist_ckpt.save(held | {"of": Fraction(1, 2), "o": record}, tmp_path / name)
        return tmp_path / name

    assert tools.diff(saved("a", 3), saved("b", 3))["equal"]
    found = tools.diff(tmp_path / "a", saved("c", 4))
    assert [entry["key"] for entry in found["different"]] == ["o/shard_0_1"]
    assert found["common_differs"] == ["args", "rng"]


def test_diff_knows_nan_and_relative_distance(tmp_path):
    x = torch.tensor([1.0, 100.0, torch.nan, torch.inf])
    y = torch.tensor([1.0, 101.0, torch.nan, torch.inf])
    for name, tensor in (("a", x), ("b", y), ("d", y.clone().fill_(torch.nan))):
        dist_ckpt.save({"x": one("x", tensor)}, tmp_path / name)
    assert tools.diff(tmp_path / "a", tmp_path / "a")["equal"]
    assert tools.diff(tmp_path / "a", tmp_path / "b")["different"][0]["max_abs"] == 1.0
    assert tools.diff(tmp_path / "a", tmp_path / "b", rtol=0.01)["equal"]
    assert tools.diff(tmp_path / "a", tmp_path / "d", rtol=0.01)["different"][0]["count"] == 3


def test_exit_statuses_and_json_of_the_command(folder, tmp_path, capsys):
    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, capsys.readouterr().out

    status, out = run("inspect", folder, "--json", "--keys", "ids")
    assert (status, [entry["key"] for entry in json.loads(out)["tensors"]]) == (0, ["ids"])
    assert json.loads(run("verify", folder, "--json")[1]) == tools.verify(folder)
    assert run("convert", folder, tmp_path / "d", "--to", "torch_dist")[0] == 0
    assert run("convert", folder, tmp_path / "d", "--to", "torch_dist")[0] == 2
    assert run("diff", folder, tmp_path / "d") == (0, "equal\n")
    for command in (["inspect"], ["verify"], ["diff", folder]):
        assert run(*command, tmp_path / "none")[0] == 2
    dist_ckpt.save(state(flag=torch.tensor(False)), tmp_path / "d")
    status, out = run("diff", folder, tmp_path / "d")
    assert (status, out) == (1, "flag differs in values: 1 element, by at most 1\n")
    flip_byte(folder / "common.pt", 20)
    assert run("verify", folder)[0] == 1
    assert run("inspect", folder)[0] == 2


@pytest.mark.filterwarnings("ignore:the zarr format")
def test_verify_says_where_a_format_has_no_checksums(folder, tmp_path, capsys):
    dist_ckpt.save({"w": one("w", torch.ones(3))}, tmp_path / "z", ("zarr", 1))
    assert main(["verify", str(tmp_path / "z")]) == 0
    assert "whole (names, sizes and metadata; it has no checksums)" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 0
    assert "by checksum)" in capsys.readouterr().out


def test_the_text_of_inspect_can_be_read(folder, capsys):
    main(["inspect", str(folder), "--keys", "layer*"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("checksums for every byte")
    assert lines[1:4] == [
        "2 tensors, 126 bytes",
        "  layer.0.w  float32   (6, 4)  96 bytes  2 chunks",
        "  layer.1.w  bfloat16  (5, 3)  30 bytes  1 chunk",
    ]


def test_zarr_and_back_keeps_every_value(folder, tmp_path):
    """Chunks that are no regular grid are assembled on the way."""
    uneven = torch.arange(50.0).view(10, 5)
    cuts = [(0, 3), (3, 10)]
    records = [
        ShardedTensor("uneven", uneven[a:b].clone(), uneven.dtype, (b - a, 5), (10, 5), (a, 0), None) for a, b in cuts
    ]
    saved = state()
    del saved["model"]["none"]
    dist_ckpt.save(saved | {"uneven": records}, folder)
    with pytest.warns(match="zarr"):
        tools.convert(folder, tmp_path / "z", to="zarr")
    found = tools.inspect(tmp_path / "z")
    assert (found["backend"], found["version"], found["integrity"]) == ("zarr", 1, False)
    assert {entry["key"]: entry["chunks"] for entry in found["tensors"]}["layer.0.w"] == 2
    assert found["objects"] == [{"key": "rng", "shape": [2]}]
    assert tools.verify(tmp_path / "z")["ok"]
    tools.convert(tmp_path / "z", tmp_path / "back", to="torch_dist")
    for pair in ((folder, tmp_path / "z"), (tmp_path / "z", tmp_path / "back"), (folder, tmp_path / "back")):
        assert tools.diff(*pair)["equal"]
    assert torch.equal(dist_ckpt.load_plain_tensors(tmp_path / "back")["uneven"], uneven)


def test_verify_tells_a_lost_zarr_file(folder, tmp_path):
    with pytest.warns(match="zarr"):
        tools.convert(folder, tmp_path / "z", to="zarr", keys="layer.1*")
    (tmp_path / "z" / "layer.1.w" / ".zarray").write_text("{")
    assert {kind for kind, _ in kinds(tmp_path / "z")} == {"unreadable"}


def test_every_tool_takes_urls(folder, tmp_path):
    pytest.importorskip("fsspec", reason="needs the extra fsspec")
    url = f"memory://{tmp_path.name}/c"
    found = tools.convert(folder, url, to="torch_dist")
    assert found["dst"] == url
    assert sum(name.endswith("/integrity.json") for name in found["files"]) == 1
    assert tools.inspect(url)["tensors"] == tools.inspect(folder)["tensors"]
    assert tools.verify(url)["ok"]
    assert tools.diff(url, folder)["equal"]
    tools.convert(url, tmp_path / "back", to="torch_dist", keys="ids")
    assert torch.equal(dist_ckpt.load_plain_tensors(tmp_path / "back")["ids"], tensors()["ids"])
    with pytest.raises(StorageError):
        tools.convert(folder, url, to="torch_dist")
    with pytest.raises(MismatchError):
        tools.verify(url + "none")


def test_diff_names_a_plain_tensor_that_one_side_does_not_have(tmp_path):
    dist_ckpt.save({"w": one("w", torch.ones(1)), "c": 1}, tmp_path / "a")
    dist_ckpt.save({"w": one("w", torch.ones(1)), "c": 1, "t": torch.ones(2)}, tmp_path / "b")
    one_way, other_way = (tools.diff(tmp_path / x, tmp_path / y) for x, y in ("ab", "ba"))
    assert (one_way["only_in_a"], one_way["only_in_b"], one_way["common_differs"]) == ([], ["t"], [])
    assert (other_way["only_in_a"], other_way["only_in_b"], other_way["common_differs"]) == (["t"], [], [])


def test_diff_tells_a_float_from_one_of_numpy(tmp_path):
    numpy = pytest.importorskip("numpy")
    dist_ckpt.save({"w": one("w", torch.ones(1)), "lr": 0.5}, tmp_path / "a")
    dist_ckpt.save({"w": one("w", torch.ones(1)), "lr": numpy.float64(0.5)}, tmp_path / "b")
    assert tools.diff(tmp_path / "a", tmp_path / "b")["common_differs"] == ["lr"]
    assert tools.diff(tmp_path / "b", tmp_path / "a")["common_differs"] == ["lr"]


def test_diff_compares_tensors_of_every_layout(tmp_path):
    def saved(name, last):
        whole = torch.tensor([[1.0, 0.0], [0.0, last]])
        held = {
            "coo": whole.to_sparse(),
            "csr": whole.to_sparse_csr(),
            "nested": torch.nested.nested_tensor([whole[0]]),
        }
        record = ShardedObject("o", held | {"nested": torch.nested.nested_tensor([whole[1], whole[1, :1]])}, (1,), (0,))
        dist_ckpt.save(held | {"o": record}, tmp_path / name)
        return tmp_path / name

    assert tools.diff(saved("a", 2.0), saved("b", 2.0))["equal"]
    found = tools.diff(tmp_path / "a", saved("c", 3.0))
    assert [entry["key"] for entry in found["different"]] == ["o/shard_0_1"]
    assert found["common_differs"] == ["coo", "csr"]


def test_diff_tells_paths_apart_that_read_alike(tmp_path):
    for name, common in (("a", {"a.b": 1}), ("b", {"a": {"b": 1}}), ("c", {"a.b": 2, "a": {"b": 1}})):
        dist_ckpt.save(common, tmp_path / name)
    for one_side, other in (("a", "b"), ("a", "c"), ("b", "c")):
        assert tools.diff(tmp_path / one_side, tmp_path / other)["common_differs"] == ["a.b"]


@pytest.mark.parametrize("command", ["inspect", "verify", "metadata", "diff", "convert"])
def test_what_the_system_refuses_is_told_by_its_name(folder, tmp_path, capsys, command):
    """A name too long is refused as an unreadable folder above would be, also to root."""
    refused = tmp_path / ("x" * 300)
    places = {"diff": (folder, refused), "convert": (folder, refused, "--to", "torch_dist")}.get(command, (refused,))
    assert main([command, *map(str, places)]) == 2
    assert "sixfold-ckpt: StorageError: File name too long" in capsys.readouterr().err
    function, options = getattr(dist_ckpt.tools, command), {"to": "zarr"} if command == "convert" else {}
    with pytest.raises(StorageError, match="File name too long"):
        function(*places[: 1 + (len(places) > 1)], **options)


@pytest.mark.filterwarnings("ignore:the zarr format")
def test_verify_tells_a_problem_of_a_foreign_format_once_and_minds_no_class_of_the_users(tmp_path):
    with torch.serialization.safe_globals([Fraction]):
        dist_ckpt.save({"w": one("w", torch.ones(3)), "of": Fraction(1, 2)}, tmp_path / "z", ("zarr", 1))
    assert tools.verify(tmp_path / "z")["problems"] == []
    (tmp_path / "z" / "w" / "0").unlink()
    (problem,) = tools.verify(tmp_path / "z")["problems"]
    assert problem["kind"] == "unreadable" and "w/0 is missing" in problem["detail"]


class Hostile:
    def __reduce__(self):
        return os.system, ("true",)


def test_verify_tells_common_data_that_wants_to_run_code(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "c"))
    torch.save({"x": Hostile()}, tmp_path / "c" / "common.pt")
    assert kinds(tmp_path / "c") == {("unsafe", "common.pt")}
    torch.save({"args": Namespace(of=Fraction(1, 2))}, tmp_path / "c" / "common.pt")
    assert kinds(tmp_path / "c") == set()


def test_json_is_json_where_a_distance_is_infinite(tmp_path, capsys):
    for name, value in (("a", 1.0), ("b", torch.nan)):
        dist_ckpt.save({"x": one("x", torch.tensor([value]))}, tmp_path / name)
    assert main(["diff", "--json", str(tmp_path / "a"), str(tmp_path / "b")]) == 1

    def refused(constant):
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refused)
    assert found["different"] == [{"key": "x", "reason": "values", "count": 1, "max_abs": None}]


def test_a_key_cannot_speak_to_the_terminal(tmp_path, capsys):
    key = "w\x1b[2J\udce9\u00e9"
    dist_ckpt.save({"x": one(key, torch.ones(1)), "e": {}}, tmp_path / "c")
    assert main(["inspect", str(tmp_path / "c")]) == 0
    out = capsys.readouterr().out
    out.encode()
    assert "  w\\x1b[2J\\udce9\u00e9  float32" in out


@pytest.mark.slow
def test_a_reader_that_goes_away_and_an_interrupt_change_no_status(folder, tmp_path, monkeypatch):
    command = f"{shlex.quote(sys.executable)} -W ignore -m sixfold.dist_ckpt verify --json {shlex.quote(str(folder))}"
    script = f"trap '' PIPE; {command} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("0\n", "")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(dist_ckpt.tools, "verify", interrupted)
    assert main(["verify", str(folder)]) == 130


@pytest.mark.parametrize("of_ours", [True, False])
def test_verify_tells_a_file_that_cannot_be_read_once_and_goes_on(folder, tmp_path, monkeypatch, of_ours):
    if not of_ours:
        folder = tmp_path / "d"
        dcp.save({f"w{i}": torch.ones(9) for i in range(3)}, checkpoint_id=str(folder))
    name = next(path.name for path in folder.glob("*.distcp"))
    real = Path.open

    def refused(path, *arguments, **options):
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    (problem,) = tools.verify(folder)["problems"]
    assert (problem["kind"], problem["file"]) == ("unreadable", name)
    assert "Permission denied" in problem["detail"]


@pytest.mark.parametrize("index", ["{", '{"weight_map": {"w": "../x"}}', '{"weight_map": {"w": "gone.safetensors"}}'])
def test_verify_tells_a_damaged_index_of_safetensors_as_a_problem(folder, tmp_path, index):
    pytest.importorskip("safetensors", reason="the export needs the library")
    tools.convert(folder, tmp_path / "s", to="safetensors")
    (tmp_path / "s" / "model.safetensors.index.json").write_text(index)
    (problem,) = tools.verify(tmp_path / "s")["problems"]
    assert problem["kind"] == ("unsafe" if ".." in index else "unreadable")


def test_verify_tells_an_index_of_safetensors_that_is_a_folder_as_a_problem(folder, tmp_path):
    pytest.importorskip("safetensors", reason="the export needs the library")
    tools.convert(folder, tmp_path / "s", to="safetensors")
    (tmp_path / "s" / "model.safetensors.index.json").mkdir()
    (problem,) = tools.verify(tmp_path / "s")["problems"]
    assert problem["kind"] == "unreadable"


def test_inspect_and_diff_tell_common_data_that_cannot_be_read(folder, tmp_path):
    tools.convert(folder, tmp_path / "z", to="zarr")
    (tmp_path / "z" / "common.pt").unlink()
    (tmp_path / "z" / "common.pt").mkdir()
    for look in (tools.inspect, lambda path: tools.diff(path, path)):
        with pytest.raises(StorageError, match=r"common\.pt"):
            look(tmp_path / "z")
