"""URLs: save to and load from a store that fsspec opens and that has no rename."""

import random

import pytest
import torch
from dist_ckpt_helpers import expected_values, flat_shards, one, random_cut

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CorruptError, MismatchError, ShardedObject, StorageError
from sixfold.dist_ckpt.stores import UrlStore
from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy

fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")


@pytest.fixture
def memory():
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield store
    store.store.clear()


def names(store):
    return {path.removeprefix("/run/c/") for path in store.find("/run/c")}


def state(value):
    return {
        "w": one("w", torch.full((700, 300), value)),
        "o": ShardedObject("o", {"v": value}, (1,), (0,)),
        "step": value,
    }


def test_a_checkpoint_goes_to_a_store_and_comes_back(memory):
    dist_ckpt.save(state(1.0), "memory://run/c", content_metadata="text")
    loaded = dist_ckpt.load(state(0.0), "memory://run/c")
    assert bool((loaded["w"] == 1.0).all())
    assert (loaded["o"], loaded["step"]) == ({"v": 1.0}, 1.0)
    assert dist_ckpt.load_tensors_metadata("memory://run/c")["w"].global_shape == (700, 300)
    assert sorted(dist_ckpt.load_sharded_metadata("memory://run/c")) == ["o/shard_0_1", "w"]
    assert dist_ckpt.load_content_metadata("memory://run/c") == "text"
    assert torch.equal(dist_ckpt.load_plain_tensors("memory://run/c")["w"], torch.full((700, 300), 1.0))
    assert dist_ckpt.check_is_distributed_checkpoint("memory://run/c")
    assert not dist_ckpt.check_is_distributed_checkpoint("memory://run/d")


@pytest.mark.parametrize("seed", range(4))
def test_any_layout_loads_at_any_other_from_a_store(memory, seed):
    rng = random.Random(seed)
    whole = torch.randn(6, 5, 4)
    before, after = random_cut((6, 5, 4), rng), random_cut((6, 5, 4), rng)
    dist_ckpt.save({"t": flat_shards("t", whole, before, fill=True)}, "memory://run/c")
    loaded = dist_ckpt.load({"t": flat_shards("t", whole, after, fill=False)}, "memory://run/c")["t"]
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected_values(whole, after), strict=True))


def test_only_the_blocks_that_are_wanted_are_fetched(memory, monkeypatch):
    big = {f"t{i}": one(f"t{i}", torch.full((1 << 20,), float(i))) for i in range(6)}  # 4 MiB each
    dist_ckpt.save(big, "memory://run/c")
    fetched = []
    cat_file = type(memory).cat_file

    def counted(self, path, start=None, end=None, **options):
        data = cat_file(self, path, start=start, end=end, **options)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(type(memory), "cat_file", counted)
    loaded = dist_ckpt.load({"t3": one("t3", torch.zeros(1 << 20))}, "memory://run/c")
    assert bool((loaded["t3"] == 3.0).all())
    assert sum(fetched) < 3 * (4 << 20)


def test_metadata_json_is_written_last_and_an_older_checkpoint_goes_whole(memory, monkeypatch):
    order = []
    pipe_file = type(memory).pipe_file

    def noted(self, path, value, **options):
        order.append(path.rpartition("/")[2])
        return pipe_file(self, path, value, **options)

    monkeypatch.setattr(type(memory), "pipe_file", noted)
    dist_ckpt.save(state(1.0), "memory://run/c")
    assert order[-1] == "metadata.json", "but for what is there for torch, which is streamed"
    first = names(memory)
    dist_ckpt.save(state(2.0), "memory://run/c")
    second = names(memory)
    assert len(second) == len(first) == 7
    assert first & second == {".metadata"}, "all files of a save have names of their own"
    assert dist_ckpt.load_common_state_dict("memory://run/c") == {"step": 2.0}


@pytest.mark.parametrize("dies_at", ["integrity.json", "common.pt", "metadata.json", "data"])
def test_a_save_that_dies_leaves_the_old_checkpoint(memory, monkeypatch, dies_at):
    dist_ckpt.save(state(1.0), "memory://run/c")

    pipe_file = type(memory).pipe_file

    def pipe_until(self, path, *args, **options):
        if path.rpartition("/")[2] == dies_at:
            raise OSError("the store is gone")
        return pipe_file(self, path, *args, **options)

    def no_open(self, path, mode="rb", **options):
        raise OSError("the store is gone")

    monkeypatch.setattr(type(memory), "pipe_file", pipe_until)
    if dies_at == "data":
        monkeypatch.setattr(type(memory), "open", no_open)
    with pytest.raises(StorageError, match=r"memory://run/c: OSError: the store is gone"):
        dist_ckpt.save(state(2.0), "memory://run/c")
    monkeypatch.undo()
    assert dist_ckpt.load(state(0.0), "memory://run/c")["step"] == 1.0
    dist_ckpt.save(state(3.0), "memory://run/c")
    assert dist_ckpt.load(state(0.0), "memory://run/c")["step"] == 3.0
    assert len(names(memory)) == 7


def test_damage_in_a_store_is_named_with_its_url(memory):
    dist_ckpt.save(state(1.0), "memory://run/c")
    (path,) = [path for path in memory.find("/run/c") if path.endswith(".distcp")]
    data = bytearray(memory.cat_file(path))
    data[5000] ^= 1
    memory.pipe_file(path, bytes(data))
    with pytest.raises(CorruptError, match=r"memory://run/c/save-.*/__0_0\.distcp"):
        dist_ckpt.load(state(0.0), "memory://run/c")
    memory.pipe_file(path, bytes(data[:-1]))
    with pytest.raises(CorruptError, match=r"memory://run/c"):
        dist_ckpt.load(state(0.0), "memory://run/c")


def test_a_save_that_another_one_to_the_same_url_overtakes_says_so(memory, monkeypatch):
    plain, others = UrlStore.write_part, iter([lambda: dist_ckpt.save(state(2.0), "memory://run/c", group=None)])

    def upload(*arguments):
        written = plain(*arguments)
        next(others, lambda: None)()
        return written

    monkeypatch.setattr(UrlStore, "write_part", upload)
    with pytest.raises(StorageError, match=r"memory://run/c were removed .* another save to the same folder has ended"):
        dist_ckpt.save(state(3.0), "memory://run/c", group=None)
    assert dist_ckpt.load_common_state_dict("memory://run/c") == {"step": 2.0}
    assert len(names(memory)) == 7


def test_what_a_url_refuses(memory):
    with pytest.raises(MismatchError, match="memory://run/none does not exist"):
        dist_ckpt.load(state(0.0), "memory://run/none")
    memory.pipe_file("/run/c/notes.txt", b"mine")
    with pytest.raises(StorageError, match="notes"):
        dist_ckpt.save(state(1.0), "memory://run/c")
    dist_ckpt.save(state(1.0), "memory://run/d")
    with pytest.raises(StorageError, match="not empty"):
        dist_ckpt.save(state(1.0), "memory://run/d", if_exists="error")
    with pytest.raises(CheckpointError, match="only torch_dist goes to a URL"):
        dist_ckpt.save(state(1.0), "memory://run/d", ("zarr", 1))
    with pytest.raises(StorageError, match="nosuch"):
        dist_ckpt.save(state(1.0), "nosuch://run/d")


def test_file_urls_are_local_folders(tmp_path):
    dist_ckpt.save(state(1.0), f"file://{tmp_path}/c")
    assert (tmp_path / "c" / "metadata.json").exists()
    assert dist_ckpt.load(state(0.0), f"file://{tmp_path}/c")["step"] == 1.0
    assert dist_ckpt.load_common_state_dict(f"file://{tmp_path}/c") == {"step": 1.0}


def test_the_parallel_wrapper_loads_from_a_store(memory):
    dist_ckpt.save(state(1.0), "memory://run/c")
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    assert bool((dist_ckpt.load(state(0.0), "memory://run/c", loader)["w"] == 1.0).all())


def test_without_the_library_a_url_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(StorageError, match=r"sixfold-dist-ckpt\[fsspec\]"):
        dist_ckpt.load(state(0.0), "memory://run/c")


@pytest.mark.parametrize("inner", ["file", "memory"])
def test_a_chain_of_a_folder_over_another_file_system_is_a_place_too(tmp_path, memory, inner):
    """``dir::`` makes a folder the root of a file system: the path must not be named twice."""
    root = tmp_path if inner == "file" else "/run"
    place = f"dir::{inner}://{root}/c"
    dist_ckpt.save(state(1.0), place, group=None)
    dist_ckpt.save(state(2.0), place, group=None)
    loaded = dist_ckpt.load(state(0.0), place, group=None)
    assert (loaded["step"], bool((loaded["w"] == 2.0).all())) == (2.0, True)
    direct = dist_ckpt.load(state(0.0), f"{inner}://{root}/c" if inner == "memory" else tmp_path / "c", group=None)
    assert direct["step"] == 2.0
