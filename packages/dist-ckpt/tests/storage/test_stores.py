"""Stores: whatever keeps bytes is a place for a checkpoint, with the same promises as a folder."""

import inspect
import pickle
import sqlite3
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
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
from sixfold.dist_ckpt.errors import typed
from sixfold.dist_ckpt.plans import plan
from sixfold.dist_ckpt.storage import by_pointer, memory
from sixfold.dist_ckpt.storage import url as urls
from sixfold.dist_ckpt.storage.store import Part, complete
from sixfold.dist_ckpt.stores import ByPointer, LocalStore, MemoryStore, Store, UrlStore, store_at


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
    assert len(store.list_files()) == (6 if store.local_folder else 7), "nothing is left over; one is for torch"
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
    with pytest.raises(CorruptError, match=r"my memory/save-00000001-\w{16}/__0_0\.distcp"):
        dist_ckpt.load(full(0.0), store)


def base_name(name):
    """The name of a file in its save's folder; torch's .metadata lies beside them."""
    return name.rpartition("/")[2] if "/" in name else f"torch's {name}"


STEPS = [
    "__0_0.distcp",
    ".metadata",
    "shard_manifest.pt",
    "common.pt",
    "integrity.json",
    "metadata.json",
    "torch's .metadata",
    "delete",
    "after metadata.json",
]


def meddle(monkeypatch, act):
    """``act`` is told of each file of a store in memory before it is made, after it, and before one is deleted."""
    create, delete, close = MemoryStore.create, MemoryStore.delete, memory._File.close

    def noted_create(self, name, nbytes):
        act(base_name(name))
        return create(self, name, nbytes)

    def noted_close(self):
        close(self)
        act(f"after {base_name(self._name)}")

    def noted_delete(self, name):
        act("delete")
        delete(self, name)

    monkeypatch.setattr(MemoryStore, "create", noted_create)
    monkeypatch.setattr(memory._File, "close", noted_close)
    monkeypatch.setattr(MemoryStore, "delete", noted_delete)


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("at", STEPS)
@pytest.mark.slow
def test_whatever_step_of_a_save_fails_the_older_checkpoint_or_the_newer_is_there(monkeypatch, at, forever):
    store, failing = MemoryStore(), []
    dist_ckpt.save(full(1.0), store)
    before = dict(store.files)

    def fail(step):
        if (failing and forever) or (step == at and not failing):
            failing.append(step)
            raise StorageError("quota")

    with monkeypatch.context() as patch:
        meddle(patch, fail)
        if at == "delete":
            dist_ckpt.save(full(2.0), store)  # committed: what is left over goes the next time
        else:
            with pytest.raises(StorageError, match=r"^quota"):
                dist_ckpt.save(full(2.0), store)
    assert failing
    is_new = at in ("torch's .metadata", "delete", "after metadata.json")
    check(store, 2.0 if is_new else 1.0)
    assert forever or is_new or store.files == before
    dist_ckpt.save(full(3.0), store)
    check(store, 3.0)
    assert len(store.files) == 7


def test_a_kill_of_torch_dcps_writer_leaves_the_older_checkpoint_too(monkeypatch):
    store = MemoryStore()
    dcp.save({"w": torch.ones(4)}, storage_writer=dcp.Writer(store), no_dist=True)

    def fail(step):
        if step != "__0_0.distcp":
            raise StorageError("quota")

    with monkeypatch.context() as patch:
        meddle(patch, fail)
        with pytest.raises(BaseException, match="quota"):  # torch's CheckpointException is one
            dcp.save({"w": torch.zeros(4)}, storage_writer=dcp.Writer(store), no_dist=True)
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, storage_reader=dcp.Reader(store), no_dist=True)
    assert loaded["w"].tolist() == [1.0] * 4


@pytest.mark.parametrize("at", STEPS[:6])
@pytest.mark.slow
def test_another_save_that_commits_meanwhile_loses_nothing_of_what_has_returned(monkeypatch, at):
    """The other began later: its number is higher, or its files are gone."""
    store, others = MemoryStore(), iter([2.0])
    dist_ckpt.save(full(1.0), store)

    def meanwhile(step):
        if step == f"after {at}" and (value := next(others, None)) is not None:
            dist_ckpt.save(full(value), store)
            check(store, 2.0)

    with monkeypatch.context() as patch:
        meddle(patch, meanwhile)
        with pytest.raises(StorageError, match="another save to"):
            dist_ckpt.save(full(3.0), store)
    check(store, 2.0)
    dist_ckpt.save(full(4.0), store)
    check(store, 4.0)
    assert len(store.files) == 7


@pytest.mark.parametrize("first_id", ["0" * 16, "f" * 16])
def test_of_two_saves_that_began_at_once_one_that_has_returned_is_never_lost(monkeypatch, first_id):
    store, ids = MemoryStore(), iter([first_id, "7" * 16])
    monkeypatch.setattr("sixfold.dist_ckpt.save_load.saving.secrets.token_hex", lambda n: next(ids, "1" * 16))
    plain, at_once = MemoryStore.begin, iter([1.0])

    def begin(self, save_id, *arguments, **options):
        save = plain(self, save_id, *arguments, **options)
        if (value := next(at_once, None)) is not None:
            dist_ckpt.save(full(value), self)  # has the same number: nothing of the first is there yet
        return save

    monkeypatch.setattr(MemoryStore, "begin", begin)
    if first_id[0] == "f":
        dist_ckpt.save(full(2.0), store)
    else:
        with pytest.raises(StorageError, match="another save to"):
            dist_ckpt.save(full(2.0), store)
    check(store, 2.0 if first_id[0] == "f" else 1.0)


def test_requests_of_a_dead_save_that_land_late_change_nothing(monkeypatch):
    store, late = MemoryStore(), {}
    dist_ckpt.save(full(1.0), store)
    with monkeypatch.context() as patch:
        meddle(patch, lambda step: late.update(store.files) if step.startswith("after") else None)
        dist_ckpt.save(full(2.0), store)
    for number in (3.0, 4.0):
        dist_ckpt.save(full(number), store)
        store.files.update(late)  # all that the first two ever wrote
        store.files.pop(".metadata")
        check(store, number)


def test_a_save_removes_what_dead_saves_and_their_boards_left_and_nothing_of_a_later_one():
    store = MemoryStore()
    dist_ckpt.save(full(1.0), store)
    dead, live = f"save-00000001-{'0' * 16}/__0_0.distcp", f"save-00000009-{'0' * 16}/__0_0.distcp"
    boards = f"job-00000001-{'0' * 16}/board", f"job-00000009-{'0' * 16}/alive-0"
    store.files.update(dict.fromkeys([dead, boards[0]], b"left"))
    begun = store.begin("a" * 16, 0)
    store.files.update(dict.fromkeys([live, boards[1]], b"lives"))
    for name in ("metadata.json", "integrity.json"):
        store.write(begun, name, b"{}")
    store.commit(begun, b"{}")
    assert dead not in store.files and boards[0] not in store.files
    assert live in store.files and boards[1] in store.files


def test_checkpoints_that_lie_in_the_place_itself_load_and_are_replaced():
    """As older versions and torch write them."""
    store = MemoryStore()
    dist_ckpt.save(full(1.0), store)
    store.files = {name.rpartition("/")[2]: data for name, data in store.files.items() if "/" in name}
    check(store, 1.0)
    dist_ckpt.save(full(2.0), store)
    check(store, 2.0)
    assert sum(name.endswith(".distcp") for name in store.files) == 1


def test_a_copy_of_a_store_in_a_folder_is_the_checkpoint(tmp_path):
    store = MemoryStore()
    dist_ckpt.save(full(1.0), store)
    for name, data in store.files.items():
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / name).write_bytes(data)
    check(tmp_path / "c", 1.0)
    assert dist_ckpt.tools.verify(tmp_path / "c")["ok"]
    loaded = {"w": torch.zeros(200_000)}
    torch_dcp.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(loaded["w"], torch.arange(200_000.0) + 1)
    dist_ckpt.save(full(2.0), tmp_path / "c")
    check(tmp_path / "c", 2.0)
    assert len(list((tmp_path / "c").iterdir())) == 6


def test_a_user_stores_own_errors_name_the_store_and_the_file(tmp_path):
    store = Rows(tmp_path / "base")
    dist_ckpt.save(full(1.0), store)
    store.path = tmp_path / "none" / "base"
    with pytest.raises(StorageError, match=r"^rows of .*base: OperationalError: unable to open"):
        dist_ckpt.load(full(0.0), store)
    store.path = tmp_path / "base"

    class Broken(Row):
        def write(self, data):
            raise sqlite3.OperationalError("disk full")

    store.create = lambda name, nbytes: by_pointer._NamingSink(Broken(store, name), store, name)
    with pytest.raises(StorageError, match=r"^rows of .*base/save-.*: OperationalError: disk full"):
        dist_ckpt.save(full(2.0), store)
    del store.create
    check(store, 1.0)


def test_every_method_of_a_users_store_that_fails_is_told_with_its_name():
    public = {name for base in (Store, ByPointer) for name, value in vars(base).items() if inspect.isfunction(value)}
    public = {name for name in public if not name.startswith("_")}
    assert {"list_files", "read", "read_ranges", "create", "delete", "marks", "replace", "write_part"} <= public

    def fail(self, *arguments):
        raise KeyError("a client's own")

    def fail_later(self, *arguments):
        raise KeyError("a client's own")
        yield

    for action in (fail, fail_later):
        store = type("Failing", (MemoryStore,), dict.fromkeys(public, action))()
        for name in public:
            with pytest.raises(StorageError, match=r"^this store in memory.*: KeyError: .*a client's own"):
                list(getattr(store, name)())


@pytest.mark.parametrize("stalled", ["list_files", "integrity.json", "distcp"])
def test_a_store_that_never_answers_ends_a_load_within_its_deadline(stalled):
    class Stalls(MemoryStore):
        stalled = ""

        def list_files(self):
            time.sleep(5 if self.stalled == "list_files" else 0)
            return super().list_files()

        def read(self, name, start=0, stop=None):
            time.sleep(5 if self.stalled and self.stalled in name else 0)
            return super().read(name, start, stop)

    store = Stalls()
    dist_ckpt.save(full(1.0), store)
    store.stalled, begun = stalled, time.monotonic()
    with pytest.raises(StorageError, match="this store in memory gave nothing for"):
        dist_ckpt.load(full(0.0), store, timeout_s=0.5)
    assert time.monotonic() - begun < 4


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
    with pytest.raises(CheckpointError, match=r"a str or a Path, or a store \(stores.ByPointer\)"):
        store_at(5)
    poor = type("Poor", (), {"name": "p", "list_files": dict, "delete": print})()
    with pytest.raises(CheckpointError, match=r"derives from stores.ByPointer; Poor has no read, create$"):
        dist_ckpt.save(state(1), poor)


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
    counts = plan.file_counts(sizes, streams)
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
    fs = fsspec.filesystem("memory")
    fs.store.clear()
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
    parts = [name for name in fs.find("/run/many") if name.endswith(".distcp")]
    assert 2 < len(parts) <= UrlStore.streams and most > 2
    loaded = dist_ckpt.load_plain_tensors("memory://run/many")
    assert all(torch.equal(loaded[f"t{i}"], tensor) for i, tensor in enumerate(tensors))
    fs.store.clear()


def test_a_broken_upload_is_begun_anew_and_a_store_that_stays_away_is_one_error(monkeypatch):
    fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")
    fs = fsspec.filesystem("memory")
    fs.store.clear()
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
    fs.store.clear()


@pytest.mark.parametrize("kind", ["memory", "of a user", "folder", "url"])
@pytest.mark.slow
def test_a_part_of_another_save_can_be_taken_over(kind, tmp_path):
    """As ranks with a kept plan write for a save of their own (dcp.Writer)."""
    if kind == "url":
        pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")
        store = UrlStore(f"memory://{tmp_path.name}/c")
    else:
        store = STORES[kind](tmp_path / "c" if kind == "folder" else tmp_path)
    mine, other = store.begin("a" * 16, 0), store.begin("b" * 16, 0)
    data = bytes(range(256)) * 70_000
    digest = store.write_part(other, Part(name="__1_0.distcp", fill=lambda file: file.append(data)))
    store.take_over(other, mine, "__1_0.distcp")
    store.abandon(other)
    complete(store, mine, {"__1_0.distcp": digest}, {"common.pt": b"c"}, b"{}")
    (name,) = [name for name in store.list_files() if name.endswith("__1_0.distcp")]
    assert store.read(name) == data
    assert store.holds("a" * 16) and not store.holds("b" * 16)


def test_saves_and_loads_in_a_thread_end_well_while_the_interpreter_ends(tmp_path, monkeypatch):
    """As of torch's async_save at the end of a script: Python has stopped all pools, and waits for that thread."""
    large, again = {"w": one("w", torch.arange(2_000_000.0)), "step": 1.0}, {"w": one("w", torch.zeros(2_000_000))}
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.thread._shutdown", True)
        dist_ckpt.save(large, tmp_path / "c")
        assert torch.equal(dist_ckpt.load(again, tmp_path / "c")["w"], torch.arange(2_000_000.0))
        dcp.save({"w": torch.ones(9)}, storage_writer=dcp.Writer(tmp_path / "d"), no_dist=True)
    loaded = dist_ckpt.load({"w": one("w", torch.zeros(2_000_000))}, tmp_path / "c")
    assert torch.equal(loaded["w"], torch.arange(2_000_000.0))
    assert dist_ckpt.check_is_distributed_checkpoint(tmp_path / "d")


def test_what_needs_a_thread_that_python_does_not_start_says_so(tmp_path, monkeypatch):
    store = MemoryStore()
    dist_ckpt.save(full(1.0), store)
    ends = SimpleNamespace(is_alive=lambda: False)

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(CheckpointError, match=r"no thread can be started \(can't start new thread\): .*ulimit -u"):
            dist_ckpt.load(full(0.0), store)
        with pytest.raises(CheckpointError, match="before the interpreter ends, not in an atexit handler"):
            dist_ckpt.load_plain_tensors(store)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "main_thread", lambda: ends)
        with pytest.raises(CheckpointError, match=r"/c is asked for while the interpreter ends.*; or use save"):
            dist_ckpt.async_save(full(1.0), tmp_path / "c", group=None)
    with pytest.raises(RuntimeError, match=r"^of a user$"):
        typed(lambda: (_ for _ in ()).throw(RuntimeError("of a user")))
    check(store, 1.0)


@pytest.mark.parametrize("at", ["__0_0.distcp", "after metadata.json"])
def test_a_foreign_file_that_came_during_a_save_stays(monkeypatch, at):
    store = MemoryStore()
    dist_ckpt.save(full(1.0), store)

    def put(step):
        if step == at:
            store.files["thesis.txt"] = b"years of work"

    with monkeypatch.context() as patch:
        meddle(patch, put)
        if at == "after metadata.json":
            dist_ckpt.save(full(2.0), store)
        else:
            with pytest.raises(StorageError, match=r"thesis\.txt.*nothing was touched"):
                dist_ckpt.save(full(2.0), store)
    assert store.files["thesis.txt"] == b"years of work"
    check(store, 2.0 if at == "after metadata.json" else 1.0)


def test_if_exists_error_holds_for_what_came_during_a_save(monkeypatch):
    store, ids = MemoryStore(), iter(["f" * 16, "0" * 16])
    monkeypatch.setattr("sixfold.dist_ckpt.save_load.saving.secrets.token_hex", lambda n: next(ids, "1" * 16))
    plain, at_once = MemoryStore.begin, iter([1.0])

    def begin(self, save_id, *arguments, **options):
        save = plain(self, save_id, *arguments, **options)
        if (value := next(at_once, None)) is not None:
            dist_ckpt.save(full(value), self, if_exists="error")
        return save

    monkeypatch.setattr(MemoryStore, "begin", begin)
    with pytest.raises(StorageError, match="if_exists is 'error'"):
        dist_ckpt.save(full(2.0), store, if_exists="error")
    check(store, 1.0)


def test_a_file_that_others_have_deleted_is_no_error_of_a_save():
    class Told(MemoryStore):
        def delete(self, name):
            super().delete(name)
            raise FileNotFoundError(name)

    store = Told()
    dist_ckpt.save(full(1.0), store)
    dist_ckpt.save(full(2.0), store)
    check(store, 2.0)
    assert len(store.files) == 7


def test_a_look_while_a_save_replaces_what_torch_reads_sees_a_checkpoint():
    class Meddled(MemoryStore):
        act = None

        def read(self, name, start=0, stop=None):
            if self.act is not None and name == "step-00000002/.metadata":
                act, self.act = self.act, None
                act()
            return super().read(name, start, stop)

    root, more = Meddled(), {f"w{i}": one(f"w{i}", torch.ones(3)) for i in range(200)}  # its .metadata is longer
    for step in (1, 2):
        dist_ckpt.save(full(float(step)), dist_ckpt.retention.step_path(root, step))
    root.act = lambda: dist_ckpt.save(more, dist_ckpt.retention.step_path(root, 2))
    assert dist_ckpt.retention.latest(root).name.endswith("step-00000002")
    assert root.act is None
