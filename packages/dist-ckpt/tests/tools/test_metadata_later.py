"""``.metadata`` added to a checkpoint that was saved without it: whatever happens, it is the same checkpoint."""

import fcntl
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import folder_bytes, names, state, value_of
from torch.distributed.checkpoint import FileSystemReader

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, MismatchError, StorageError, stores, tools
from sixfold.dist_ckpt.checkpoint.opening import open_checkpoint
from sixfold.dist_ckpt.storage import local
from sixfold.dist_ckpt.strategies import base
from sixfold.dist_ckpt.tools import added_metadata


@pytest.fixture
def folder(tmp_path):
    dist_ckpt.save(state(1.0), tmp_path / "c", metadata="compact")
    return tmp_path / "c"


@pytest.mark.parametrize("written", [0, 1])
def test_what_is_cut_short_leaves_a_checkpoint_that_loads_and_is_done_by_the_next_call(folder, monkeypatch, written):
    before, plain, calls = folder_bytes(folder), local.write_file, []

    def cut_short(*arguments):
        if len(calls) == written:
            raise OSError(5, "Input/output error")
        calls.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(local, "write_file", cut_short)
    with pytest.raises(StorageError, match="Input/output error"):
        tools.metadata(folder)
    monkeypatch.undo()
    now = folder_bytes(folder)
    assert {name: now[name] for name in before} == before
    assert now.keys() - before.keys() == ({".metadata"} if written else set())
    assert value_of(folder) == 1.0 and dist_ckpt.check_is_distributed_checkpoint(folder)
    assert tools.metadata(folder)["written"]
    assert tools.verify(folder)["ok"] and value_of(folder) == 1.0
    assert names(folder) == sorted([*before, ".metadata"])


def test_a_load_that_goes_on_meanwhile_is_not_disturbed(folder):
    opened = open_checkpoint(folder)
    assert tools.metadata(folder)["written"]
    opened.check_unchanged()


def test_a_save_that_replaces_the_checkpoint_meanwhile_stays_whole(folder, monkeypatch):
    plain, once = local.write_file, ["once"]

    def overtaken(*arguments):
        digest = plain(*arguments)
        if once:
            once.pop()
            dist_ckpt.save(state(2.0), folder, metadata="compact")
        return digest

    monkeypatch.setattr(local, "write_file", overtaken)
    with pytest.raises(StorageError, match="replaced while it was read"):
        tools.metadata(folder)
    assert value_of(folder) == 2.0 and ".metadata" not in names(folder) and tools.verify(folder)["ok"]


def test_one_process_at_a_time(folder):
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="another process"):
            tools.metadata(folder)
    finally:
        os.close(handle)
    assert ".metadata" not in names(folder)


def test_damage_in_what_was_added_is_found(folder):
    tools.metadata(folder)
    data = bytearray((folder / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CorruptError, match=r"\.metadata"):
        value_of(folder)


@pytest.fixture
def store():
    made = stores.MemoryStore()
    dist_ckpt.save(state(1.0), made, metadata="compact", group=None)
    return made


def test_in_a_store_it_is_written_too_and_nothing_else_changes(store, tmp_path):
    before = dict(store.files)
    found = tools.metadata(store)
    assert found == {"path": store.name, "written": True, "nbytes": len(store.files[".metadata"])}
    assert {n for n in store.files if store.files[n] != before.get(n)} == {".metadata"}
    assert tools.verify(store)["problems"] == [] and value_of(store) == 1.0
    assert tools.metadata(store) == {**found, "written": False}
    for name, data in store.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found = {"w": torch.zeros_like(state(0.0)["w"].data)}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(found["w"], state(1.0)["w"].data)


def test_a_save_that_replaces_the_checkpoint_of_a_store_meanwhile_is_told_and_stays(store, monkeypatch):
    plain = added_metadata.compact_manifest.index_of

    def overtaken(index):
        dist_ckpt.save(state(2.0), store, group=None)
        return plain(index)

    monkeypatch.setattr(added_metadata.compact_manifest, "index_of", overtaken)
    with pytest.raises(StorageError, match="was replaced while its"):
        tools.metadata(store)
    assert value_of(store) == 2.0 and tools.verify(store)["problems"] == []


@pytest.mark.filterwarnings("ignore:the zarr format")
def test_a_format_without_metadata_is_told(tmp_path):
    dist_ckpt.save(state(1.0), tmp_path / "z", ("zarr", 1))
    with pytest.raises(MismatchError, match=r"without \.metadata"):
        tools.metadata(tmp_path / "z")


def test_an_older_version_knows_the_manifests_name_as_a_checkpoints():
    """0.1.0 refuses to replace a folder with other files: its list is closed, but for ``shard_*.pt``."""
    assert base.owns_file("shard_manifest.pt")
