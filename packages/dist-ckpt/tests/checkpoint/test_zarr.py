"""The deprecated zarr format: megatron-core 0.12's folder reads, ours is the same bytes, damage is named."""

import contextlib
import errno
import importlib.util
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CorruptError,
    MismatchError,
    ShardedObject,
    ShardedTensor,
    ShardingError,
    StorageError,
    UnsafeError,
)

GOLDEN = Path(__file__).parents[1] / "golden"
_spec = importlib.util.spec_from_file_location("make_megatron_012", GOLDEN / "make_megatron_012.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)
FOLDER = GOLDEN / "megatron-0.12-zarr"


def save_as_megatron_did(path):
    state = {f"rank{rank}": make.plain(dist_ckpt, rank) for rank in range(4)}
    with pytest.warns(UserWarning, match="deprecated"):
        dist_ckpt.save({**state, "iteration": 12, "args": {"lr": 0.5, "sizes": [1, 2]}}, path, ("zarr", 1))


def test_megatrons_folder_is_listed_and_read():
    plain = dist_ckpt.load_plain_tensors(FOLDER)
    assert all(torch.equal(plain[key], tensor) for key, tensor in make.golden_tensors().items())
    assert plain["layers.w"].tolist() == [[float(rank)] * 3 for rank in range(4)]
    found = dist_ckpt.load_sharded_metadata(FOLDER)
    assert sorted(key for key in found if "rng" in key) == [f"rng/state/shard_{rank}_4" for rank in range(4)]
    assert dist_ckpt.load_common_state_dict(FOLDER) == {"iteration": 12, "args": {"lr": 0.5, "sizes": [1, 2]}}
    assert dist_ckpt.check_is_distributed_checkpoint(FOLDER)


def test_megatrons_folder_loads_at_another_layout_flattened_or_not():
    whole = make.golden_tensors()["matrix"]
    rows = [ShardedTensor.from_rank_offsets("matrix", torch.zeros(2, 8), (0, i, 3)) for i in range(3)]
    loaded = dist_ckpt.load({"rows": rows, "rng": ShardedObject("rng/state", None, (4,), (2,))}, FOLDER,
                            validate_access_integrity=False)  # fmt: skip
    assert torch.equal(torch.cat(loaded["rows"]), whole)
    assert loaded["rng"] == {"rank": 2}
    flat = ShardedTensor.from_rank_offsets_flat("matrix", torch.zeros(17), (6, 8), flattened_range=slice(5, 22))
    loaded = dist_ckpt.load({"flat": flat}, FOLDER, validate_access_integrity=False)
    assert torch.equal(loaded["flat"], whole.flatten()[5:22])


def test_what_we_write_is_byte_for_byte_what_megatron_wrote(tmp_path):
    save_as_megatron_did(tmp_path / "c")

    def files(root):
        return {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file() and path.suffix != ".pt"  # torch.save names the file inside, and versions differ
        }

    ours, theirs = files(tmp_path / "c"), files(FOLDER)
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == data for name, data in theirs.items() if not name.endswith(".zarray"))
    headers = [name for name in theirs if name.endswith(".zarray")]
    assert all(json.loads(ours[name]) == json.loads(theirs[name]) for name in headers)


def test_objects_that_are_lists_of_one_and_odd_shapes_come_back(tmp_path):
    state = {
        "o": ShardedObject("o", ["only"], (1,), (0,)),
        "scalar": one("scalar", torch.tensor(2.5)),
        "empty": one("a/b", torch.empty(0, 3)),
        "mask": one("mask", torch.tensor([True, False])),
        "complex": one("complex", torch.tensor([1 + 2j])),
    }
    with pytest.warns(UserWarning, match="deprecated"):
        dist_ckpt.save(state, tmp_path / "c", ("zarr", 1))
    loaded = dist_ckpt.load(state, tmp_path / "c")
    assert loaded["o"] == ["only"]
    assert loaded["scalar"].item() == 2.5
    assert tuple(dist_ckpt.load_tensors_metadata(tmp_path / "c")["a/b"].global_shape) == (0, 3)
    assert loaded["mask"].tolist() == [True, False]
    assert loaded["complex"].tolist() == [1 + 2j]


def test_a_save_replaces_the_other_format_whole_and_never_foreign_files(tmp_path):
    target = tmp_path / "c"
    save_as_megatron_did(target)
    dist_ckpt.save({"w": one("w", torch.ones(2))}, target)
    assert not (target / "matrix").exists()
    save_as_megatron_did(target)
    assert not list(target.glob("*.distcp"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    (target / "matrix" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="notes"):
        dist_ckpt.save({"w": one("w", torch.ones(2))}, target)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (ShardedTensor("w", torch.ones(2), torch.float32, (2,), (5,), (0,), None), "equal parts only"),
        (ShardedTensor.from_rank_offsets_flat("w", torch.ones(2), (2,), flattened_range=slice(0, 2)), "flattened"),
        (one("w", torch.ones(2).to(torch.float8_e5m2)), "no name for"),
    ],
)
def test_what_zarr_cannot_hold_is_refused(tmp_path, record, message):
    rest = ShardedTensor("w", torch.ones(3), torch.float32, (3,), (5,), (2,), None)
    state = [record, rest] if "equal" in message else [record]
    with pytest.raises(ShardingError, match=message), pytest.warns(UserWarning, match="deprecated"):
        dist_ckpt.save({"w": state}, tmp_path / "c", ("zarr", 1))
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_leaves_the_folder_is_refused(tmp_path):
    with pytest.raises(UnsafeError, match="leaves the folder"), pytest.warns(UserWarning, match="deprecated"):
        dist_ckpt.save({"w": one("../w", torch.ones(2))}, tmp_path / "c", ("zarr", 1))


def copied(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "c")
    return tmp_path / "c"


def test_missing_short_and_odd_files_are_named_before_a_tensor_is_read(tmp_path):
    folder = copied(tmp_path)
    (folder / "matrix" / "0.1").unlink()
    with pytest.raises(CorruptError, match=r"matrix/0\.1 is missing"):
        dist_ckpt.load_plain_tensors(folder)
    (folder / "matrix" / "0.1").write_bytes(b"short")
    with pytest.raises(CorruptError, match=r"0\.1 has 5 bytes; a chunk of matrix has 96"):
        dist_ckpt.load_plain_tensors(folder)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"zarr_format": 3}, MismatchError, "zarr format 3"),
        ({"dtype": "<V2"}, MismatchError, "dtype '<V2'"),
        ({"dtype": ["<f4"]}, MismatchError, "dtype"),
        ({"shape": [6]}, CorruptError, "shape"),
        ({"shape": [-6, 8]}, CorruptError, "shape"),
        ({"shape": [10**15, 10**15]}, CorruptError, "names .* chunks"),
        ({"chunks": [0, 8]}, CorruptError, "chunks"),
        ({"shape": None}, CorruptError, "damaged"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, change, kind, message):
    folder = copied(tmp_path)
    path = folder / "matrix" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(kind, match=message):
        dist_ckpt.load_plain_tensors(folder)
    path.write_text("{")
    with pytest.raises(CorruptError, match="damaged"):
        dist_ckpt.load_plain_tensors(folder)


def test_padded_edges_read_as_zarr_says(tmp_path):
    folder = copied(tmp_path)
    shutil.rmtree(folder / "matrix")
    (folder / "matrix").mkdir()
    whole = torch.arange(15.0).view(5, 3)
    header = json.loads((FOLDER / "matrix" / ".zarray").read_text())
    header |= {"shape": [5, 3], "chunks": [2, 2]}
    (folder / "matrix" / ".zarray").write_text(json.dumps(header))
    padded = torch.zeros(6, 4)
    padded[:5, :3] = whole
    for i in range(3):
        for j in range(2):
            block = padded[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            (folder / "matrix" / f"{i}.{j}").write_bytes(bytes(block.contiguous().view(torch.uint8).flatten().tolist()))
    assert torch.equal(dist_ckpt.load_plain_tensors(folder)["matrix"], whole)


def test_arrays_that_the_zarr_library_wrote_are_read(tmp_path):
    zarr = pytest.importorskip("zarr", reason="needs the zarr library")
    folder = copied(tmp_path)
    shutil.rmtree(folder / "matrix")
    whole = torch.arange(48, dtype=torch.float32).view(6, 8)
    version = {"zarr_format": 2} if zarr.__version__ >= "3" else {}
    stored = zarr.open_array(str(folder / "matrix"), mode="w", shape=(6, 8), chunks=(4, 4), dtype="<f4", **version)
    stored[:] = whole.numpy()
    assert torch.equal(dist_ckpt.load_plain_tensors(folder)["matrix"], whole)


@pytest.mark.parametrize("name", ["matrix/.zarray", "metadata.json", "common.pt", "rng/state/shard_1_4.pt"])
def test_a_mangled_file_gives_our_error_or_a_result_never_another_exception(tmp_path, name, mangled):
    folder, rng = copied(tmp_path), random.Random(name)
    data = (folder / name).read_bytes()
    asked = {"w": one("matrix", torch.zeros(6, 8)), "o": ShardedObject("rng/state", None, (4,), (1,))}
    options = {"strict": "ignore_all", "validate_access_integrity": False}  # one cell of four is asked for
    for _ in range(mangled):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(len(data))] = rng.choice(
                b'\x00\xff{}[],:"0123456789-<>.eE' + bytes([rng.randrange(256)])
            )
        (folder / name).write_bytes(bytes(broken[: rng.choice([len(data), rng.randrange(len(data))])]))
        with contextlib.suppress(dist_ckpt.CheckpointError):
            dist_ckpt.load(asked, folder, **options)
    (folder / name).write_bytes(data)
    found = dist_ckpt.load(asked, folder, **options)  # unharmed, it loads
    assert torch.equal(found["w"], make.golden_tensors()["matrix"])


def test_what_torch_saves_over_it_is_not_passed_over(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "c")
    torch_dcp.save({"w": torch.zeros(8)}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CorruptError, match="two saves are mixed"):
        dist_ckpt.load_plain_tensors(tmp_path / "c")


def test_a_folder_that_may_not_be_looked_into_is_an_error_and_no_folder_without_tensors(tmp_path, monkeypatch):
    """Before, its tensors were passed over: `convert` made a checkpoint without them, and said nothing."""
    folder, scandir = copied(tmp_path), os.scandir

    def refuse(place):
        if Path(place).name == "matrix":
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorageError, match=r"Permission denied.*matrix"):
        dist_ckpt.load_plain_tensors(folder)
