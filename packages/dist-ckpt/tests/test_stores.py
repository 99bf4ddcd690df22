"""Stores: whatever keeps bytes is a place for a checkpoint, with the same promises as a folder."""

import errno
import pickle
import sqlite3
import threading
import time
from contextlib import closing

import pytest
import torch
from dist_ckpt_helpers import flat_shards, names, one, random_cut, state

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointError,
    CorruptError,
    MismatchError,
    ShardedObject,
    ShardingError,
    StorageError,
    dcp,
)
from sixfold.dist_ckpt.plans import plan
from sixfold.dist_ckpt.stores import ByPointer, LocalStore, MemoryStore, Store, UrlStore, store_at
from sixfold.dist_ckpt.stores import url as urls


class Rows(ByPointer):
    """A user's own store: a checkpoint as rows of a data base."""

    def __init__(self, path):
        self.path = path
        self._ask("CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, data BLOB)")

    @property
    def name(self):
        return f"rows of {self.path}"

    def list_files(self):
        return dict(self._ask("SELECT name, length(data) FROM files"))

    def read(self, name, start=0, stop=None):
        found = self._ask("SELECT data FROM files WHERE name = ?", name)
        if not found:
            raise FileNotFoundError(name)
        return found[0][0][start:stop]

    def create(self, name, nbytes):
        return Row(self, name)

    def delete(self, name):
        self._ask("DELETE FROM files WHERE name = ?", name)

    def _ask(self, text, *values):
        with closing(sqlite3.connect(self.path)) as base, base:
            return base.execute(text, values).fetchall()


class Row(bytearray):
    def __init__(self, store, name):
        self.store, self.name = store, name

    write = bytearray.extend

    def close(self):
        self.store._ask("INSERT OR REPLACE INTO files VALUES (?, ?)", self.name, bytes(self))

    def discard(self):
        self.clear()


STORES = {"memory": lambda path: MemoryStore(), "of a user": lambda path: Rows(path / "base"), "folder": LocalStore.at}


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return STORES[request.param](tmp_path / "c" if request.param == "folder" else tmp_path)


def full(value):
    return {
        "w": one("w", torch.arange(200_000.0) + value),  # a large frame and a small one
        "v": one("v", torch.full((3, 5), value)),
        "o": ShardedObject("o", {"v": value}, (1,), (0,)),
        "step": value,
    }


def check(store, value):
    loaded = dist_ckpt.load(full(0.0), store)
    assert torch.equal(loaded["w"], torch.arange(200_000.0) + value)
    assert (loaded["v"].tolist(), loaded["o"], loaded["step"]) == ([[value] * 5] * 3, {"v": value}, value)


def test_every_store_keeps_a_checkpoint_and_every_function_reads_it(store):
    assert isinstance(store, Store)
    dist_ckpt.save(full(1.0), store, content_metadata="text")
    check(store, 1.0)
    dist_ckpt.save(full(2.0), store)
    check(store, 2.0)
    assert len(store.list_files()) == 6, "nothing is left over"
    assert dist_ckpt.load_tensors_metadata(store)["w"].global_shape == (200_000,)
    assert sorted(dist_ckpt.load_sharded_metadata(store)) == ["o/shard_0_1", "v", "w"]
    assert dist_ckpt.load_common_state_dict(store)["step"] == 2.0
    assert dist_ckpt.load_plain_tensors(store)["v"].tolist() == [[2.0] * 5] * 3
    assert dist_ckpt.check_is_distributed_checkpoint(store)
    with pytest.raises(StorageError, match="if_exists is 'error'"):
        dist_ckpt.save(full(3.0), store, if_exists="error")


def test_a_store_that_is_empty_or_holds_other_things(store, tmp_path):
    with pytest.raises(MismatchError, match="does not exist"):
        dist_ckpt.load(full(0.0), store)
    assert not dist_ckpt.check_is_distributed_checkpoint(store)
    if isinstance(store, LocalStore):
        store.path.mkdir()
        (store.path / "thesis.txt").write_text("years of work")
    else:
        with closing(store.create("thesis.txt", 0)) as file:
            file.write(b"years of work")
    before = store.list_files()
    with pytest.raises(StorageError, match=r"thesis\.txt"):
        dist_ckpt.save(full(1.0), store)
    assert store.list_files() == before


def test_any_cut_goes_through_memory_to_any_other():
    import random

    rng, whole, store = random.Random(1), torch.randn(6, 5, 4), MemoryStore()
    before, after = random_cut((6, 5, 4), rng), random_cut((6, 5, 4), rng)
    dist_ckpt.save({"t": flat_shards("t", whole, before, fill=True)}, store)
    loaded = dist_ckpt.load({"t": flat_shards("t", whole, after, fill=False)}, store)["t"]
    expected = [shard.data for shard in flat_shards("t", whole, after, fill=True)]
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


def test_damage_in_a_store_is_named_by_the_stores_name():
    store = MemoryStore("my memory")
    dist_ckpt.save(full(1.0), store)
    (name,) = [name for name in store.files if name.endswith(".distcp")]
    data = bytearray(store.files[name])
    data[5000] ^= 1
    store.files[name] = bytes(data)
    with pytest.raises(CorruptError, match=r"my memory/__0_0\..*distcp"):
        dist_ckpt.load(full(0.0), store)


@pytest.mark.parametrize("dies_at", ["create", ".metadata", "integrity.json", "metadata.json", "delete"])
def test_a_save_that_ends_anywhere_leaves_the_old_or_the_new_or_one_that_is_refused(monkeypatch, dies_at):
    store = MemoryStore()
    dist_ckpt.save(full(1.0), store)
    create, delete = MemoryStore.create, MemoryStore.delete

    def create_until(self, name, nbytes):
        if dies_at in ("create", name):
            raise OSError(errno.EIO, "gone")
        return create(self, name, nbytes)

    def delete_until(self, name):
        if dies_at == "delete" and name.endswith(".distcp"):
            raise StorageError("gone")
        delete(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "create", create_until)
        patch.setattr(MemoryStore, "delete", delete_until)
        if dies_at == "delete":
            dist_ckpt.save(full(2.0), store)  # committed: what is left over goes the next time
        else:
            told = "gone" if dies_at == "create" else r"gone.*could not be put back.*gone"
            with pytest.raises(StorageError, match=told):
                dist_ckpt.save(full(2.0), store)
    if dies_at in ("create", "delete"):
        check(store, 1.0 if dies_at == "create" else 2.0)
    else:
        with pytest.raises(CorruptError):
            dist_ckpt.load(full(0.0), store)
    dist_ckpt.save(full(3.0), store)
    check(store, 3.0)
    assert sum(name.endswith(".distcp") for name in store.files) == 1


STEPS = [
    ".metadata",
    "shard_manifest.pt",
    "common.pt",
    "integrity.json",
    "metadata.json",
    "delete",
    "after integrity.json",
]


@pytest.mark.parametrize(
    ("at", "most_kept"), [*((step, 64 << 20) for step in STEPS), ("integrity.json", 0), ("metadata.json", 0)]
)
def test_an_error_at_any_step_of_the_commit_leaves_the_older_checkpoint(monkeypatch, at, most_kept):
    """Files above ``most_kept`` bytes are kept as copies in the store."""
    monkeypatch.setattr("sixfold.dist_ckpt.stores.store._MOST_KEPT_BYTES", most_kept)
    store, errors = MemoryStore(), iter([1])
    dist_ckpt.save(full(1.0), store)
    before = dict(store.files)
    create, delete, write = MemoryStore.create, MemoryStore.delete, MemoryStore.write

    def fail_once(step):
        if step == at and next(errors, None):
            raise StorageError("quota")

    def create_or_fail(self, name, nbytes):
        fail_once(name)
        return create(self, name, nbytes)

    def delete_or_fail(self, name):
        fail_once("delete")
        delete(self, name)

    def write_and_fail(self, save, name, data):
        digest = write(self, save, name, data)
        fail_once(f"after {name}")
        return digest

    monkeypatch.setattr(MemoryStore, "create", create_or_fail)
    monkeypatch.setattr(MemoryStore, "delete", delete_or_fail)
    monkeypatch.setattr(MemoryStore, "write", write_and_fail)
    with pytest.raises(StorageError, match=r"^quota$"):
        dist_ckpt.save(full(2.0), store)
    assert next(errors, None) is None
    check(store, 1.0)
    assert store.files == before
    dist_ckpt.save(full(3.0), store)
    check(store, 3.0)
    assert len(store.list_files()) == 6


def test_torch_dcps_writer_puts_the_older_checkpoint_back_too(monkeypatch):
    store, create, errors = MemoryStore(), MemoryStore.create, iter([1])
    dcp.save({"w": torch.ones(4)}, storage_writer=dcp.Writer(store), no_dist=True)

    def fail_once(self, name, nbytes):
        if name == "common.pt" and next(errors, None):
            raise StorageError("quota")
        return create(self, name, nbytes)

    monkeypatch.setattr(MemoryStore, "create", fail_once)
    with pytest.raises(BaseException, match="quota"):  # torch's CheckpointException is one
        dcp.save({"w": torch.zeros(4)}, storage_writer=dcp.Writer(store), no_dist=True)
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, storage_reader=dcp.Reader(store), no_dist=True)
    assert loaded["w"].tolist() == [1.0] * 4


@pytest.mark.parametrize("at", [".metadata", "integrity.json", "metadata.json"])
def test_two_saves_that_commit_at_once_are_told_and_never_loaded_as_one(monkeypatch, at):
    store, others = MemoryStore(), iter([2.0])
    dist_ckpt.save(full(1.0), store)
    create = MemoryStore.create

    def meanwhile(self, name, nbytes):
        if name == at and (value := next(others, None)) is not None:
            dist_ckpt.save(full(value), store)
        return create(self, name, nbytes)

    monkeypatch.setattr(MemoryStore, "create", meanwhile)
    with pytest.raises(StorageError, match="another save to"):
        dist_ckpt.save(full(3.0), store)
    try:
        check(store, 2.0)
    except CorruptError:
        pass
    dist_ckpt.save(full(4.0), store)
    check(store, 4.0)


def test_two_jobs_into_one_folder_are_told(tmp_path, monkeypatch):
    plain, others = LocalStore.write_part, iter([2.0])

    def meanwhile(*arguments):
        if (value := next(others, None)) is not None:
            dist_ckpt.save(full(value), tmp_path / "c")
        return plain(*arguments)

    monkeypatch.setattr(LocalStore, "write_part", meanwhile)
    with pytest.raises(StorageError, match="another save to the same folder has ended"):
        dist_ckpt.save(full(3.0), tmp_path / "c")
    check(tmp_path / "c", 2.0)
    assert names(tmp_path) == ["c"]


def test_memory_of_one_process_is_refused_where_others_must_see_it():
    with pytest.raises(CheckpointError, match="memory of one process"):
        dist_ckpt.async_save(state(1), MemoryStore())
    with pytest.raises(StorageError, match="memory of one process"):
        pickle.dumps(MemoryStore())
    with pytest.raises(CheckpointError, match="is the class MemoryStore"):
        dist_ckpt.save(state(1), MemoryStore)
    with pytest.raises(CheckpointError, match="a str or a Path"):
        store_at(5)


def test_strategies_that_write_by_themselves_go_to_folders_only(tmp_path):
    with pytest.raises(CheckpointError, match="local folders"):
        dist_ckpt.save(state(1), MemoryStore(), ("zarr", 1))
    with pytest.raises(ShardingError, match="is a int"):
        dist_ckpt.save(5, MemoryStore())


def test_stores_travel_to_other_processes_by_their_place(tmp_path):
    for store in (LocalStore.at(tmp_path / "c"), Rows(tmp_path / "base"), UrlStore("memory://run", 5.0)):
        twin = pickle.loads(pickle.dumps(store))
        assert twin.name == store.name and twin.list_files() == {}


@pytest.mark.parametrize("sizes", [[1 << 27] * 8, [1 << 31, 5, 5, 1 << 27], [100] * 50, [], [3 << 30] * 3])
@pytest.mark.parametrize("streams", [1, 8])
def test_files_of_a_rank_are_even_and_hold_whole_frames(sizes, streams):
    writes = [type("W", (), {"nbytes": size})() for size in sizes]
    counts = plan.file_counts(writes, streams)
    assert sum(counts) == len(sizes)
    assert len(counts) == 1 or (streams > 1 and min(counts) > 0)
    at, files = 0, []
    for count in counts:
        files.append(sum(sizes[at : at + count]))
        at += count
    if len(counts) > 1:
        assert max(files) <= max(max(sizes), sum(sizes) / len(counts) + max(sizes))
    if sizes == [1 << 27] * 8 and streams == 8:
        assert files == [1 << 27] * 8


def small_files(monkeypatch):
    monkeypatch.setattr(plan, "_LEAST_FILE_BYTES", 1 << 19)


def test_files_of_a_rank_are_uploaded_side_by_side(monkeypatch):
    fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    small_files(monkeypatch)
    together, running, most = threading.Lock(), 0, 0
    plain = UrlStore.create

    def create(self, name, nbytes):
        nonlocal running, most
        sink = plain(self, name, nbytes)
        close = sink.close

        def close_later():
            nonlocal running
            time.sleep(0.05)
            close()
            with together:
                running -= 1

        with together:
            running += 1
            most = max(most, running)
        sink.close = close_later
        return sink

    monkeypatch.setattr(UrlStore, "create", create)
    tensors = [torch.randn(1 << 17) for _ in range(8)] + [torch.randn(100, 100).t(), torch.randn(700, 700).t()]
    saved = {f"t{i}": one(f"t{i}", tensor) for i, tensor in enumerate(tensors)}
    dist_ckpt.save(saved | {"o": ShardedObject("o", 5, (1,), (0,))}, "memory://run/many")
    parts = [name for name in memory.find("/run/many") if name.endswith(".distcp")]
    assert 2 < len(parts) <= UrlStore.streams and most > 2
    loaded = dist_ckpt.load_plain_tensors("memory://run/many")
    assert all(torch.equal(loaded[f"t{i}"], tensor) for i, tensor in enumerate(tensors))
    memory.store.clear()


def test_a_broken_upload_is_begun_anew_and_a_store_that_stays_away_is_one_error(monkeypatch):
    fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    monkeypatch.setattr(urls, "_FIRST_PAUSE_S", 0.01)
    plain, left = urls._Upload.write, [2]

    def breaks(self, data):
        plain(self, data[: len(data) // 2])
        if left[0]:
            left[0] -= 1
            raise ConnectionResetError("reset by peer")
        plain(self, data[len(data) // 2 :])

    monkeypatch.setattr(urls._Upload, "write", breaks)
    counted = []
    dist_ckpt.save(full(1.0), "memory://run/c", progress=lambda done, total: counted.append((done, total)))
    check("memory://run/c", 1.0)
    assert left == [0] and counted == sorted(counted) and counted[-1][0] == counted[-1][1]
    left[0] = 1000
    with pytest.raises(StorageError, match=r"memory://run/c: .*reset by peer \(uploading __0_0.* failed \d+ times in "):
        dist_ckpt.save(full(2.0), "memory://run/c", timeout_s=0.2)
    monkeypatch.undo()
    check("memory://run/c", 1.0)
    memory.store.clear()
