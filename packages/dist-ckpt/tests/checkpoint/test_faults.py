"""Damaged, foreign and unfinished folders: one typed error each, before anything is returned."""

import errno
import os
import pickle
import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import flip_byte, folder_bytes, one
from torch.distributed.checkpoint.api import CheckpointException

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointError,
    CorruptError,
    MismatchError,
    ShardedObject,
    ShardingError,
    StorageError,
    UnsafeError,
    dcp,
    tools,
)
from sixfold.dist_ckpt.formats import integrity
from sixfold.dist_ckpt.storage import local as storage


def state(fill=1.0):
    return {
        "w": one("w", torch.full((40, 30), fill)),
        "v": one("v", torch.full((7,), fill)),
        "o": ShardedObject("o", {"x": fill}, (1,), (0,)),
        "it": int(fill),
    }


@pytest.fixture
def folder(tmp_path):
    dist_ckpt.save(state(), tmp_path / "c")
    return tmp_path / "c"


def load_all(path, **options):
    return dist_ckpt.load(state(0.0), path, **options)


@pytest.mark.slow
def test_every_sampled_flip_of_every_file_is_found_and_named(folder):
    rng = random.Random(0)
    intact = folder_bytes(folder)
    for name, data in intact.items():
        for position in rng.sample(range(len(data)), min(25, len(data))):
            flip_byte(folder / name, position)
            with pytest.raises(CorruptError, match=name.replace(".", r"\.")):
                load_all(folder)
            (folder / name).write_bytes(data)
    load_all(folder)


def test_a_flip_in_values_names_the_tensors_of_the_block_that_it_hit_and_no_other(folder):
    data = (folder / "__0_0.distcp").read_bytes()
    for name, values in (("w", torch.ones(40, 30)), ("v", torch.ones(7))):
        run = bytes(values.untyped_storage())
        flip_byte(folder / "__0_0.distcp", data.index(run) if name == "w" else data.rindex(run))
        with pytest.raises(CorruptError, match=f"__0_0.*; damaged: {name}$"):
            load_all(folder)
        (folder / "__0_0.distcp").write_bytes(data)


@pytest.mark.parametrize("change", ["truncated", "longer", "missing", "zeroed"])
@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata", "metadata.json", "integrity.json"])
def test_other_damage_of_every_file_is_found(folder, name, change):
    path = folder / name
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[:-1], "longer": data + b"x", "zeroed": bytes(len(data))}[change])
    with pytest.raises(CorruptError):
        load_all(folder)


def test_missing_and_short_files_are_found_before_a_tensor_is_touched(folder):
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)
    asked = state(5.0)
    with pytest.raises(CorruptError, match="has 100 bytes"):
        dist_ckpt.load(asked, folder)
    assert bool((asked["w"].data == 5.0).all())


def test_a_data_file_of_another_save_is_found(folder, tmp_path):
    dist_ckpt.save(state(2.0), tmp_path / "d")
    shutil.copy(tmp_path / "d" / "__0_0.distcp", folder / "__0_0.distcp")
    with pytest.raises(CorruptError, match="__0_0"):
        load_all(folder)


def test_a_metadata_file_of_another_save_is_found(folder, tmp_path):
    dist_ckpt.save(state(2.0), tmp_path / "d")
    shutil.copy(tmp_path / "d" / ".metadata", folder / ".metadata")
    with pytest.raises(CorruptError, match=r"files of two saves|not those that were saved"):
        load_all(folder)
    assert load_all(folder, verify="off")["it"] == 1.0, "the manifest of this save is looked at, and no other"
    shutil.copy(tmp_path / "d" / "shard_manifest.pt", folder / "shard_manifest.pt")
    with pytest.raises(CorruptError, match="files of two saves"):
        load_all(folder, verify="off")


def test_touched_checks_what_is_read_full_everything_and_off_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(integrity, "BLOCK_BYTES", 4096)
    first = {"a": one("a", torch.ones(30_000)), "b": one("b", torch.ones(30_000))}
    dist_ckpt.save(first, tmp_path / "c")
    flip_byte(tmp_path / "c" / "__0_0.distcp", 200_000)  # inside b
    only_a = {"a": one("a", torch.zeros(30_000))}
    assert bool((dist_ckpt.load(only_a, tmp_path / "c")["a"] == 1).all())
    with pytest.raises(CorruptError, match="bytes 196608:200704"):
        dist_ckpt.load(only_a, tmp_path / "c", verify="full")
    with pytest.raises(CorruptError, match="bytes 196608:200704"):
        dist_ckpt.load(first, tmp_path / "c")
    assert not bool((dist_ckpt.load(first, tmp_path / "c", verify="off")["b"] == 1).all())


def test_the_folder_of_a_run_is_told_with_the_checkpoints_in_it(folder):
    folder.rename(folder.with_name("step-00000007"))
    shutil.copytree(folder.with_name("step-00000007"), folder.with_name("step-00000012"))
    with pytest.raises(MismatchError, match=r"is not a distributed checkpoint.*name one, such as .*/step-00000012$"):
        load_all(folder.parent)
    (problem,) = tools.verify(folder.parent)["problems"]
    assert problem["detail"].endswith("step-00000012"), "verify says which folder to name, as a load does"


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(MismatchError, match="does not exist"):
        load_all(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MismatchError, match="not a distributed checkpoint"):
        load_all(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(MismatchError, match="is a file"):
        load_all(tmp_path / "file")
    assert not any(map(dist_ckpt.check_is_distributed_checkpoint, (tmp_path / n for n in ("none", "empty", "file"))))


@pytest.mark.parametrize(
    "lost", [["metadata.json"], ["metadata.json", "integrity.json"], [".metadata", "metadata.json"]]
)
def test_a_save_that_never_finished_is_refused(folder, lost):
    for name in lost:
        (folder / name).unlink()
    with pytest.raises(CorruptError):
        load_all(folder)
    assert not dist_ckpt.check_is_distributed_checkpoint(folder)


def test_a_lost_integrity_file_is_damage(folder):
    (folder / "integrity.json").unlink()
    with pytest.raises(CorruptError, match=r"integrity\.json is missing"):
        load_all(folder)


class _Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_nothing_in_a_file_is_run(tmp_path, name):
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "c"))
    evil = _Evil(tmp_path / "ran")
    if name == ".metadata":
        (tmp_path / "c" / name).write_bytes(pickle.dumps(evil))
    else:
        torch.save({"x": evil}, tmp_path / "c" / name)
    with pytest.raises(UnsafeError, match="mkdir"):
        dist_ckpt.load({"w": one("w", torch.zeros(2))}, tmp_path / "c")
    assert not (tmp_path / "ran").exists()


class _Settings:
    def __init__(self, rate=0.0):
        self.rate = rate


def test_safe_globals_admit_a_class_of_the_caller(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "c"))
    torch.save({"settings": _Settings(0.5)}, tmp_path / "c" / "common.pt")
    with pytest.raises(UnsafeError, match="_Settings"):
        dist_ckpt.load_common_state_dict(tmp_path / "c")
    assert dist_ckpt.load_common_state_dict(tmp_path / "c", safe_globals=[_Settings])["settings"].rate == 0.5


def test_a_target_with_other_files_is_left_untouched(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    before = folder_bytes(tmp_path / "home")
    with pytest.raises(StorageError, match=r"home holds files.*thesis\.txt"):
        dist_ckpt.save(state(), tmp_path / "home")
    assert folder_bytes(tmp_path / "home") == before
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    "files",
    [
        ["metadata.json"],
        ["metadata.json", "common.pt"],
        ["shard_0.pt", "more/shard_1.pt"],
        ["cats/0", "cats/1"],
        *([name] for name in (".metadata", "integrity.json", "shard_manifest.pt", "x.distcp", "__0_0.distcp")),
        [".metadata", "__0_0.distcp", "integrity.json", "metadata.json"],
    ],
)
def test_files_that_only_have_names_of_a_checkpoint_are_left_untouched(tmp_path, files):
    """Data sets have such names too."""
    home = tmp_path / "home"
    for name in files:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text('{"mine": 1}')
    for save in (lambda: dist_ckpt.save(state(), home), lambda: dcp.save({"w": torch.ones(2)}, checkpoint_id=home)):
        with pytest.raises((StorageError, CheckpointException), match=rf"home holds files.*{files[0]}"):
            save()
    assert {name: (home / name).read_text() for name in files} == dict.fromkeys(files, '{"mine": 1}')
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_what_others_put_into_a_checkpoint_is_named_and_the_remedy_works(folder, tmp_path):
    (folder / "config.json").write_text("{}")
    with pytest.raises(StorageError, match=r"is a checkpoint with other files in it \(config\.json\).*Move them"):
        dist_ckpt.save(state(2.0), folder)
    assert load_all(folder)["it"] == 1
    (folder / "config.json").rename(tmp_path / "config.json")
    dist_ckpt.save(state(2.0), folder)
    assert load_all(folder)["it"] == 2


def test_a_save_by_torch_that_was_cut_short_is_replaced(tmp_path):
    """It leaves files of data and no .metadata."""
    torch_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    dist_ckpt.save(state(1.0), tmp_path / "c")
    torch_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "d", no_dist=True)
    (tmp_path / "d" / ".metadata").unlink()
    dist_ckpt.save(state(1.0), tmp_path / "d")
    assert load_all(tmp_path / "c")["it"] == load_all(tmp_path / "d")["it"] == 1


@pytest.mark.parametrize("kind", ["old", "tmp", "job"])
def test_hidden_folders_of_the_user_beside_the_target_are_left_untouched(tmp_path, kind):
    theirs = [tmp_path / f".c.{kind}-{end}" for end in ("2024", "backup", "before the change", "0123456789abcdef0")]
    for folder in theirs:
        dist_ckpt.save(state(5.0), folder)
    assert not dist_ckpt.check_is_distributed_checkpoint(tmp_path / "c")
    for value in (1.0, 2.0):
        dist_ckpt.save(state(value), tmp_path / "c")
    assert sorted(tmp_path.iterdir()) == sorted([*theirs, tmp_path / "c"])


def test_a_folder_that_is_named_like_a_checkpoint_file_is_left_untouched(folder):
    (folder / "mine.distcp").mkdir()
    (folder / "mine.distcp" / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match=r"mine\.distcp"):
        dist_ckpt.save(state(2.0), folder)
    assert (folder / "mine.distcp" / "thesis.txt").exists()


def test_files_that_others_put_into_the_target_during_a_save_are_left_untouched(folder, monkeypatch):
    def write_file(*arguments, plain=storage.write_file):
        (folder / "notes.txt").write_text("just now")
        return plain(*arguments)

    monkeypatch.setattr(storage, "write_file", write_file)
    with pytest.raises(StorageError, match=r"notes\.txt"):
        dist_ckpt.save(state(2.0), folder)
    assert (folder / "notes.txt").exists()
    assert load_all(folder)["it"] == 1


@pytest.mark.parametrize("bad", [None, [1], "state"])
def test_a_state_dict_that_is_none_is_refused(folder, bad):
    with pytest.raises(ShardingError, match=f"is a {type(bad).__name__}; it is a dict"):
        dist_ckpt.save(bad, folder)
    with pytest.raises(ShardingError, match=f"is a {type(bad).__name__}; it is a dict"):
        dist_ckpt.load(bad, folder)


@pytest.mark.parametrize("data", [torch.ones(2, device="meta"), torch.ones(2).to_sparse()])
def test_tensors_without_plain_values_are_refused(folder, data):
    with pytest.raises(ShardingError, match=r"dense and holds values|on the meta device and holds no values"):
        dist_ckpt.save({"w": one("w", data)}, folder)


def test_if_exists_error_refuses_a_non_empty_target(folder):
    before = folder_bytes(folder)
    with pytest.raises(StorageError, match="if_exists is 'error'"):
        dist_ckpt.save(state(2.0), folder, if_exists="error")
    assert folder_bytes(folder) == before
    dist_ckpt.save(state(2.0), folder.parent / "new", if_exists="error")


def test_a_full_disk_is_told_before_the_first_byte(folder, monkeypatch):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"ENOSPC: the checkpoint needs \d+ bytes, 1000 are free") as caught:
        dist_ckpt.save(state(2.0), folder)
    assert caught.value.errno == errno.ENOSPC
    assert load_all(folder)["it"] == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
def test_a_disk_that_fills_midway_leaves_the_old_checkpoint(folder, monkeypatch, code):
    def full(*_):
        raise OSError(code, "No space left on device", "__0_0.distcp")

    monkeypatch.setattr(storage.FrameFile, "finish", full)
    with pytest.raises(
        StorageError, match=rf"{errno.errorcode[code]}: No space left.* needs \d+ bytes, \d+ are free"
    ) as caught:
        dist_ckpt.save(state(2.0), folder)
    assert caught.value.errno == code
    assert [path.name for path in folder.parent.iterdir()] == ["c"]
    assert load_all(folder)["it"] == 1


@pytest.mark.parametrize(
    "options",
    [{"verify": "maybe"}, {"dtype_policy": "wild"}, {"timeout_s": 0}, {"timeout_s": float("nan")}, {"group": "moon"}],
)
def test_options_that_do_not_exist_are_refused(folder, options):
    (value,) = options.values()
    with pytest.raises(CheckpointError, match=str(value)):
        load_all(folder, **options)
