"""Blocks that one rank alone wants go from a store to its tensors without a file: which do, and no byte differs."""

import ctypes
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dist_ckpt_helpers import EXAMPLES, one
from other_frames import of_another_form

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, StorageError
from sixfold.dist_ckpt.checkpoint.opening import open_checkpoint
from sixfold.dist_ckpt.formats import frame as frames
from sixfold.dist_ckpt.formats import integrity
from sixfold.dist_ckpt.formats.integrity import Span
from sixfold.dist_ckpt.mirror import mirror
from sixfold.dist_ckpt.mirror.local_view import viewed
from sixfold.dist_ckpt.mirror.mirror import Mirror
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.save_load import loading
from sixfold.dist_ckpt.stores import MemoryStore

BLOCK = integrity.BLOCK_BYTES
WHOLE = torch.arange(4 << 20, dtype=torch.float32).view(1024, 4096)  # 16 MiB


@pytest.fixture(autouse=True)
def spool(tmp_path, monkeypatch):
    """Where mirrors of this test lie; nothing is left there."""
    place = tmp_path / "spool"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert list(place.iterdir()) == []


class Seen:
    """What loads of this test fetch of files of data, and write to the files of their mirrors: where bytes lie."""

    def __init__(self, monkeypatch):
        self.fetched, self.written = [], []
        plain_read, plain_write = MemoryStore.read, os.pwrite

        def read(store, name, start=0, stop=None):
            data = plain_read(store, name, start, stop)
            if name.endswith(".distcp"):
                self.fetched.append((start, start + len(data)))
            return data

        def pwrite(handle, data, at):
            self.written.append((at, at + len(data)))
            return plain_write(handle, data, at)

        monkeypatch.setattr(MemoryStore, "read", read)
        monkeypatch.setattr(os, "pwrite", pwrite)

    def clear(self):
        self.fetched.clear()
        self.written.clear()


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


def stored(**named):
    store = MemoryStore("memory of the test")
    dist_ckpt.save({key: one(key, value) for key, value in named.items()}, store, group=None)
    return store


def data_file(store):
    (name,) = [name for name in store.files if name.endswith(".distcp")]
    return name


def whole_blocks(store, key="w"):
    """Numbers of the blocks that hold values of one frame only, and of all blocks."""
    with viewed(store) as folder:
        checkpoint = open_checkpoint(folder, verify="off")
        (chunk,) = checkpoint.manifest.tensors[key].chunks
    data = store.files[data_file(store)]
    layout = frames.parse(memoryview(data)[chunk.frame.offset : chunk.frame.offset + chunk.frame.length])
    start = chunk.frame.offset + layout.data_start
    stop = start + layout.data_bytes
    return list(range(-(-start // BLOCK), stop // BLOCK)), range(-(-len(data) // BLOCK))


def blocks_in(places):
    return [number for start, stop in places for number in range(start // BLOCK, -(-stop // BLOCK))]


@pytest.mark.parametrize("verify", ["touched", "full", "off"])
def test_whole_blocks_never_go_to_a_file_and_are_fetched_once(seen, monkeypatch, verify):
    store = stored(w=WHOLE)
    whole, every = whole_blocks(store)
    assert len(whole) == 3
    seen.clear()
    moved, plain = [], Meter.add
    monkeypatch.setattr(Meter, "add", lambda meter, nbytes: moved.append(nbytes) or plain(meter, nbytes))
    wanted = {"w": one("w", torch.zeros_like(WHOLE))}
    found = dist_ckpt.load(wanted, store, group=None, verify=verify, progress=lambda done, total: None)
    assert torch.equal(found["w"], WHOLE)
    assert not set(blocks_in(seen.written)) & set(whole)
    assert sorted(blocks_in(seen.fetched)) == list(every), "each once"
    assert sum(moved) == WHOLE.nbytes, "each byte is counted once"


@pytest.mark.parametrize("second", ["same", "part", "converted", "strided"])
@pytest.mark.parametrize("verify", ["touched", "off"])
@pytest.mark.slow
def test_what_two_targets_want_is_fetched_once(seen, second, verify):
    store = stored(w=WHOLE)
    other = {
        "same": one("w", torch.zeros_like(WHOLE)),
        "part": dist_ckpt.ShardedTensor.from_rank_offsets("w", torch.zeros(256, 4096), (0, 1, 4)),
        "converted": one("w", torch.zeros(1024, 4096, dtype=torch.float64)),
        "strided": dist_ckpt.ShardedTensor.from_rank_offsets("w", torch.zeros(1024, 1024), (1, 2, 4)),
    }[second]
    seen.clear()
    found = dist_ckpt.load(
        {"a": one("w", torch.zeros_like(WHOLE)), "b": other}, store, group=None, verify=verify,
        validate_access_integrity=False,
    )  # fmt: skip
    expected = {"part": WHOLE[256:512], "converted": WHOLE.double(), "strided": WHOLE[:, 2048:3072]}.get(second, WHOLE)
    assert torch.equal(found["a"], WHOLE)
    assert torch.equal(found["b"], expected)
    assert sorted(blocks_in(seen.fetched)) == list(range(5))


@pytest.mark.slow
def test_a_damaged_block_that_was_taken_is_told_with_its_key_and_fetches_nothing_again(seen):
    store = stored(v=WHOLE + 1, w=WHOLE)
    name, (first, *_) = data_file(store), whole_blocks(store)[0]
    data = bytearray(store.files[name])
    data[first * BLOCK + 5] ^= 1
    store.files[name] = bytes(data)
    seen.clear()
    with pytest.raises(CorruptError, match=rf"{name}: bytes {first * BLOCK}:{(first + 1) * BLOCK} .*; damaged: w$"):
        dist_ckpt.load({key: one(key, torch.zeros_like(WHOLE)) for key in "vw"}, store, group=None)
    assert len(blocks_in(seen.fetched)) == len(set(blocks_in(seen.fetched)))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.slow
def test_damage_at_a_border_is_told_also_where_the_store_gives_nothing_again(seen, monkeypatch, fails):
    """To tell which keys are damaged their frames are looked at as a whole: blocks that were taken come again."""
    store = stored(w=WHOLE, x=WHOLE + 1)
    name, whole = data_file(store), whole_blocks(store)[0]
    data = bytearray(store.files[name])
    data[(whole[-1] + 1) * BLOCK + 100] ^= 1  # the end of w and the begin of x, hashed after what was taken
    store.files[name] = bytes(data)
    plain, fetched = MemoryStore.read, set()

    def read(self, file, start=0, stop=None):
        if fails and (file, start) in fetched:
            raise StorageError("gone")
        fetched.add((file, start))
        return plain(self, file, start, stop)

    monkeypatch.setattr(loading, "WINDOW_BYTES", BLOCK)
    monkeypatch.setattr(MemoryStore, "read", read)
    with pytest.raises(CorruptError, match=rf"{name}: bytes .* differs\){'' if fails else '; damaged: w'}$"):
        dist_ckpt.load({"w": one("w", torch.zeros_like(WHOLE))}, store, group=None)


@pytest.mark.slow
def test_what_is_fetched_again_is_hashed_again(monkeypatch):
    """Of another writer's frame, taken for ours: the values stand elsewhere, and blocks that were taken come anew."""
    store = stored(t=torch.ones(2000), w=WHOLE)
    name, (first, *_) = data_file(store), whole_blocks(store)[0]
    with viewed(store) as folder:
        frame = open_checkpoint(folder, verify="off").manifest.tensors["w"].chunks[0].frame
    data = bytearray(store.files[name])
    end = frame.offset + frame.length
    data[frame.offset : end] = of_another_form(memoryview(bytes(data)), frame, WHOLE.dtype, WHOLE.shape)
    store.files[name] = bytes(data)
    (place,) = [file for file in store.files if file.endswith("integrity.json")]
    known = integrity.decode(place, store.files[place])
    known.files[name.rpartition("/")[2]] = integrity.digest_of(bytes(data))
    store.files[place] = known.encode()
    wanted = {"t": one("t", torch.zeros(2000)), "w": one("w", torch.zeros_like(WHOLE))}
    found = dist_ckpt.load(wanted, store, group=None)
    assert torch.equal(found["w"], WHOLE)
    plain, times = MemoryStore.read, []

    def read(self, file, start=0, stop=None):
        found = plain(self, file, start, stop)
        if file == name and start <= first * BLOCK < start + len(found):
            times.append(start)
            if len(times) > 1:  # sound at first, another byte at the second time
                found = bytearray(found)
                found[first * BLOCK - start + 5] ^= 1
        return bytes(found)

    monkeypatch.setattr(MemoryStore, "read", read)
    with pytest.raises(CorruptError, match=r"distcp: w.*are not those that were saved"):
        dist_ckpt.load(wanted, store, group=None)
    assert len(times) == 2
    dist_ckpt.load(wanted, store, group=None, verify="off")


def started(store, blocks, *, block_bytes=BLOCK, alone=True):
    """A mirror whose only rank fetches the first blocks of the file of data, and what takes a block of it."""
    found = Mirror(store, timeout_s=5.0)
    found.create()
    (path,) = found.folder.glob("*.distcp")
    found.start({0: [Span(path.name, 0, blocks, alone)]}, block_bytes)
    found._fetched.result()

    def taken(start, nbytes):
        into = ctypes.create_string_buffer(nbytes)
        return into.raw if found.take(path, start, memoryview(into).cast("B")) else None

    return found, path, taken


def values_at(found, path, start, stop):
    found.arrives(path)(start, stop)
    return path.read_bytes()[start:stop]


@pytest.fixture
def large():
    store = MemoryStore("large")
    dist_ckpt.save({"w": one("w", torch.arange(40 << 18, dtype=torch.float32))}, store, group=None)  # 40 MiB
    return store, store.files[data_file(store)]


def test_a_block_is_taken_whole_and_once_and_is_in_the_file_for_who_looks_there(large):
    store, data = large
    found, path, taken = started(store, 4)
    try:
        assert taken(0, BLOCK - 1) is None, "a part"
        assert taken(100, BLOCK) is None, "of two blocks"
        assert taken(4 * BLOCK, BLOCK) is None, "of a block that nobody was to fetch"
        assert taken(-(-len(data) // BLOCK) * BLOCK, BLOCK) is None, "behind the end"
        assert taken(BLOCK, BLOCK) == data[BLOCK : 2 * BLOCK]
        assert taken(BLOCK, BLOCK) is None, "the second time"
        assert path.read_bytes()[: 4 * BLOCK] == bytes(4 * BLOCK), "nothing of it was written"
        assert values_at(found, path, 100, 3 * BLOCK) == data[100 : 3 * BLOCK], "held, fetched again, held"
        assert taken(0, BLOCK) is None, "it is in the file"
        assert taken(3 * BLOCK, BLOCK) == data[3 * BLOCK : 4 * BLOCK]
    finally:
        found.close()


def test_the_last_short_block_is_taken_and_no_more_than_it(large):
    store, data = large
    last = len(data) // BLOCK
    found, _, taken = started(store, last + 1)
    try:
        assert taken(last * BLOCK, BLOCK) is None
        assert taken(last * BLOCK, len(data) % BLOCK) == data[last * BLOCK :]
        assert found._in_memory
    finally:
        found.close()
    assert not found._in_memory


def test_blocks_that_others_want_too_are_not_held(large):
    store, data = large
    found, path, taken = started(store, 4, alone=False)
    try:
        assert taken(0, BLOCK) is None
        assert path.read_bytes()[: 4 * BLOCK] == data[: 4 * BLOCK]
    finally:
        found.close()


def test_small_files_which_are_there_before_any_block_is_are_not_taken(large):
    store, _ = large
    found = Mirror(store, timeout_s=0.5)
    found.create()
    try:
        found.start({0: [Span("common.pt", 0, 1, True)]}, BLOCK)
        path = found.folder / "common.pt"
        into = memoryview(bytearray(path.stat().st_size))
        assert not found.take(path, 0, into), "nor waited for"
        assert not found.take(found.folder / "unknown", 0, into)
    finally:
        found.close()


@pytest.mark.slow
def test_many_threads_that_look_for_a_taken_block_fetch_it_once(large, seen, monkeypatch):
    store, data = large
    found, path, taken = started(store, 4)
    try:
        assert taken(0, BLOCK) == data[:BLOCK]
        seen.clear()
        plain = store.read_ranges
        monkeypatch.setattr(store, "read_ranges", lambda ranges: time.sleep(0.2) or plain(ranges))
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(lambda _: values_at(found, path, 5, 9) == data[5:9], range(64)))
        assert seen.fetched == [(0, BLOCK)]
    finally:
        found.close()


def test_a_rank_that_has_given_up_calls_nothing_there_that_is_not(large):
    store, data = large
    found, path, taken = started(store, 4)
    other = Mirror(store, found.token, 1, timeout_s=5.0)
    try:
        other.attach()
        other.start({0: [Span(path.name, 0, 4, True)]}, BLOCK)
        assert taken(0, BLOCK) == data[:BLOCK]
        found.give_up(StorageError("the reader failed"))
        found.arrives(path)(0, BLOCK)
        assert values_at(other, path, 0, 2 * BLOCK) == data[: 2 * BLOCK], "taken, held: another rank fetches them"
    finally:
        other.close()
        found.close()


@pytest.mark.parametrize("block_bytes", [1 << 12, 1 << 17, 3_000_000, BLOCK, 2 * BLOCK])
@pytest.mark.slow
def test_what_is_held_is_bounded_also_while_a_part_of_a_range_is_left(large, monkeypatch, block_bytes):
    store, data = large
    monkeypatch.setattr(mirror, "_MEMORY_BYTES", 10 << 20)
    blocks = -(-len(data) // block_bytes)
    left = []  # ranges stay in memory as long as any of their blocks

    def look(self, part, data, keep=Mirror._keep):
        keep(self, part, data)
        for index in list(self._in_memory):
            if index + 1 in self._in_memory and self._in_memory[index + 1][0] is self._in_memory[index][0]:
                del self._in_memory[index]  # as if it had been taken
        left.append(sum({id(whole): len(whole) for whole, _ in self._in_memory.values()}.values()))

    monkeypatch.setattr(Mirror, "_keep", look)
    found, path, _ = started(store, blocks, block_bytes=block_bytes)
    try:
        assert max(left) <= 10 << 20
        assert bool(max(left)) == (block_bytes >= 1 << 16), "shorter ones nobody takes"
        assert values_at(found, path, 0, len(data)) == data
        assert not found._in_memory
    finally:
        found.close()
        assert not found._in_memory


@pytest.mark.slow
def test_what_a_store_may_use_again_is_written_at_once(large):
    store, _ = large

    def read_ranges(ranges):
        buffer = bytearray(8 << 20)
        for part in ranges:
            buffer[: part.length] = store.files[part.file][part.offset : part.offset + part.length]
            yield part, memoryview(buffer)[: part.length]

    store.read_ranges = read_ranges
    wanted = one("w", torch.zeros(40 << 18))
    assert torch.equal(dist_ckpt.load({"w": wanted}, store, group=None)["w"], torch.arange(40.0 * (1 << 18)))


def test_a_safetensors_file_of_a_store_loads_to_its_last_byte(seen):
    save = pytest.importorskip("safetensors.torch", reason="the extra safetensors").save

    store = MemoryStore("hub")
    whole = torch.arange(5_000_001, dtype=torch.float32)
    store.files["model.safetensors"] = save({"w": whole})
    found = dist_ckpt.load({"w": one("w", torch.zeros_like(whole))}, store, group=None, strict="log_unexpected")
    assert torch.equal(found["w"], whole)
    assert max(stop for _, stop in seen.written) <= BLOCK, "what holds the header"


def a_part(rng, key, whole):
    """Any box of a tensor, its values, and as which dtype."""
    size = [rng.choice([n, rng.randint(1, n)]) for n in whole.shape]
    start = [rng.randint(0, n - k) for n, k in zip(whole.shape, size, strict=True)]
    values = whole[tuple(slice(s, s + k) for s, k in zip(start, size, strict=True))]
    dtype = rng.choice([whole.dtype] * 4 + [torch.float64])
    shape = tuple(size)
    data = torch.zeros(shape, dtype=dtype)
    return dist_ckpt.ShardedTensor(key, data, dtype, shape, tuple(whole.shape), tuple(start), None), values.to(dtype)


@pytest.mark.parametrize("seed", range(max(8, EXAMPLES // 3)))
@pytest.mark.slow
def test_loads_of_any_layout_give_what_slicing_gives(monkeypatch, seed):
    """Blocks of 64 KiB, so that a few MiB have many, and room for a few of them."""
    rng = random.Random(seed)
    block_bytes = rng.choice([1 << 16, 100_000, 1 << 17])
    monkeypatch.setattr(integrity, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(mirror, "_MEMORY_BYTES", rng.choice([0, 1 << 20, 5 << 20, 1 << 26]))
    shapes = {f"t{n}": (rng.randint(1, 700), rng.randint(1, 700)) for n in range(rng.randint(1, 5))}
    wholes = {key: torch.rand(shape) for key, shape in shapes.items()}
    store = stored(**wholes)
    for _ in range(4):
        wanted = [a_part(rng, key, wholes[key]) for key in rng.choices(list(wholes), k=rng.randint(1, 8))]
        found = dist_ckpt.load(
            {"all": [record for record, _ in wanted]}, store, group=None,
            verify=rng.choice(["touched", "full", "off"]), validate_access_integrity=False,
        )  # fmt: skip
        for got, (_, values) in zip(found["all"], wanted, strict=True):
            assert torch.equal(got, values)
