"""Loads from stores through a mirror: what is fetched and how often, faults of the store, room, names, its end."""

import os
import random
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import one
from other_frames import of_another_form
from s3_server import Fault

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CorruptError,
    LostPeerError,
    MismatchError,
    StorageError,
    UnsafeError,
    dcp,
    retention,
    tools,
)
from sixfold.dist_ckpt.checkpoint.opening import open_checkpoint
from sixfold.dist_ckpt.formats import integrity
from sixfold.dist_ckpt.formats.integrity import Span
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.mirror import leases, mirror
from sixfold.dist_ckpt.mirror.local_view import viewed
from sixfold.dist_ckpt.mirror.mirror import Mirror
from sixfold.dist_ckpt.plans.plan import plan_load
from sixfold.dist_ckpt.save_load import reader
from sixfold.dist_ckpt.save_load.reader import Reader
from sixfold.dist_ckpt.storage.range_reads import in_flight, ranges_of
from sixfold.dist_ckpt.stores import ByPointer, MemoryStore, UrlStore

WHOLE = torch.arange(3 << 20, dtype=torch.float32).view(1024, 3072)  # 12 MiB: three blocks


@pytest.fixture(autouse=True)
def spool(tmp_path, monkeypatch):
    """Where mirrors of this test lie; nothing is left there."""
    place = tmp_path / "spool"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert [path.name for path in place.iterdir() if path.name.startswith("sixfold")] == []


def rows(count=2):
    return {"w": [shard for n, part in enumerate(WHOLE.chunk(count)) for shard in [cut("w", part, 0, n, count)]]}


def cut(key, part, axis, number, count):
    return dist_ckpt.ShardedTensor.from_rank_offsets(key, part.contiguous(), (axis, number, count))


def loaded_columns(store, **options):
    parts = [cut("w", torch.zeros_like(part), 1, n, 3) for n, part in enumerate(WHOLE.chunk(3, 1))]
    found = dist_ckpt.load({"w": parts, "step": 0}, store, group=None, **options)
    return torch.cat(found["w"], 1), found.get("step")


def damaged(store, at=5_000_000):
    (name,) = [name for name in store.files if name.endswith(".distcp")]
    data = bytearray(store.files[name])
    data[at] ^= 1
    store.files[name] = bytes(data)
    return name


@pytest.fixture
def memory():
    store = MemoryStore("memory of the test")
    dist_ckpt.save({**rows(), "step": 3}, store, group=None)
    return store


@pytest.fixture(scope="module")
def bucket(s3_process):
    """A checkpoint in the S3 server, made once: ``WHOLE`` in rows."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_process.environment().items():
            patch.setenv(name, value)
        s3_process.set()
        url = f"s3://{s3_process.bucket()}/run/c"
        dist_ckpt.save({**rows(), "step": 3}, url, group=None)
    return url


@pytest.mark.slow
def test_a_resharded_load_fetches_each_byte_once(s3, bucket):
    s3.set()
    values, step = loaded_columns(bucket)
    assert torch.equal(values, WHOLE)
    assert step == 3
    counts, touched = s3.counts(), WHOLE.nbytes
    assert touched <= counts["range"]["bytes_out"] <= 1.05 * touched
    keys = [key.rpartition("/")[2] for kind, key, *_ in s3.log() if kind in ("get", "range")]
    assert [keys.count(name) for name in ("metadata.json", "common.pt", "integrity.json")] == [1, 1, 1]
    assert counts["list"]["requests"] == 1


def test_blocks_of_frames_that_nobody_wants_are_not_fetched(s3, bucket):
    s3.set()
    top = dist_ckpt.ShardedTensor("w", torch.zeros(64, 3072), torch.float32, (64, 3072), (1024, 3072), (0, 0), None)
    dist_ckpt.load({"w": top}, bucket, group=None, validate_access_integrity=False)
    assert torch.equal(top.data, WHOLE[:64])
    assert s3.counts()["range"]["bytes_out"] < 1.05 * 2 * integrity.BLOCK_BYTES, "two of three: one frame of two"


def test_ranges_that_are_near_are_one_request(monkeypatch):
    store, fetched = MemoryStore("many small ones"), []
    dist_ckpt.save({f"t{n}": one(f"t{n}", torch.full((500,), float(n))) for n in range(300)}, store, group=None)
    plain = store.read_ranges
    monkeypatch.setattr(store, "read_ranges", lambda ranges: fetched.extend(ranges) or plain(ranges))
    wanted = {f"t{n}": one(f"t{n}", torch.zeros(500)) for n in range(0, 300, 5)}
    loaded = dist_ckpt.load(wanted, store, group=None)
    assert all(bool((loaded[key] == int(key[1:])).all()) for key in wanted)
    assert len([part for part in fetched if part.file.endswith(".distcp")]) == 1, "not sixty"


def test_sixteen_ranges_are_in_flight(s3, bucket):
    store = UrlStore(bucket)
    (name,) = [name for name in store.list_files() if name.endswith(".distcp")]
    whole = store.read(name)
    s3.set(latency_ms=300)  # more than sixteen requests take to leave a busy machine
    ranges = [ByteRange(name, at * 1000, 700) for at in range(40)]
    found = dict(store.read_ranges(ranges))
    assert s3.counts()["range"]["most_in_flight"] >= 16
    assert all(found[part] == whole[part.offset : part.offset + part.length] for part in ranges)


def test_requests_that_hang_keep_no_interpreter_from_its_end():
    before, over = set(threading.enumerate()), threading.Event()

    def read(part):
        if part.offset:
            over.wait(20)
        raise StorageError("no")

    with pytest.raises(StorageError, match="no"):
        list(in_flight(read, [ByteRange("f", at, 1) for at in range(9)]))
    hanging = set(threading.enumerate()) - before
    over.set()
    assert len(hanging) >= 8 and all(thread.daemon for thread in hanging)


@pytest.mark.parametrize("what", ["error", "reset", "truncate", "stall", "stall_body"])
@pytest.mark.slow
def test_a_fault_that_passes_is_not_seen(s3, bucket, what):
    s3.set(faults=[Fault(what=what, kind="range", key="*.distcp", times=2)])
    values, _ = loaded_columns(bucket, timeout_s=8.0)  # a quarter of its half is what a stalled range may take
    assert torch.equal(values, WHOLE)


@pytest.mark.parametrize(("kind", "key"), [("list", "*"), ("range", "*common.pt"), ("range", "*/c/.metadata")])
def test_a_request_that_stands_still_is_asked_again_whatever_it_is(s3, bucket, kind, key):
    s3.set(faults=[Fault(what="stall", kind=kind, key=key, times=1)])
    start = time.monotonic()
    assert torch.equal(loaded_columns(bucket, timeout_s=8.0)[0], WHOLE)
    assert time.monotonic() - start < 40, "the client alone waits for 60 s"
    assert s3.report()["total"]["faults"] == 1


def test_a_fault_that_does_not_pass_is_told_with_how_often_and_how_long(s3, bucket):
    s3.set(faults=[Fault(what="stall_body", kind="range", key="*.distcp")])
    start = time.monotonic()
    with pytest.raises(StorageError, match=rf"{bucket}.*reading .* failed \d+ times in [\d.]+ s; timeout_s=2"):
        loaded_columns(bucket, timeout_s=4.0)
    assert time.monotonic() - start < 6


def test_a_store_that_gives_nothing_and_no_error_ends_the_load(memory, monkeypatch):
    over = threading.Event()

    def silent(ranges):
        data = [(part, memory.read(part.file, part.offset, part.offset + part.length)) for part in ranges]
        if any(part.file.endswith(".distcp") for part in ranges):
            over.wait(20)
        yield from data

    monkeypatch.setattr(memory, "read_ranges", silent)
    with pytest.raises(StorageError, match=r"memory of the test gave nothing for 1 s of timeout_s=1 "):
        loaded_columns(memory, timeout_s=1.0)
    over.set()


def test_an_older_mixture_is_never_loaded_where_a_save_overtakes_the_load(memory, monkeypatch):
    plain, once = memory.read_ranges, iter([True])

    def overtaken(ranges):
        for part, data in plain(ranges):
            yield part, data
            if part.file.endswith(".distcp") and next(once, False):
                dist_ckpt.save({"w": one("w", WHOLE + 1), "step": 4}, MemoryOf(memory.files), group=None)

    monkeypatch.setattr(memory, "read_ranges", overtaken)
    with pytest.raises(StorageError, match=r"memory of the test.* was replaced or removed while it was read"):
        loaded_columns(memory)


class MemoryOf(MemoryStore):
    """Another view of the same files."""

    def __init__(self, files):
        super().__init__()
        self.files = files


def test_damage_is_told_with_the_store_and_the_key(memory):
    name = damaged(memory)
    with pytest.raises(CorruptError, match=rf"memory of the test/{name}: bytes .* damaged: w"):
        loaded_columns(memory)
    values, _ = loaded_columns(memory, verify="off")
    assert not torch.equal(values, WHOLE)


def test_full_looks_at_blocks_that_nobody_asks_for(memory):
    dist_ckpt.save({**rows(), "v": one("v", torch.ones(3 << 20)), "step": 3}, memory, group=None)
    damaged(memory, at=20_000_000)  # in v
    assert torch.equal(loaded_columns(memory)[0], WHOLE)
    with pytest.raises(CorruptError, match="damaged: v"):
        loaded_columns(memory, verify="full")


@pytest.mark.parametrize("name", ["../x", "a//b", "/etc/x", "a/../../x", "a\0b", "./x"])
def test_a_name_that_leaves_the_folder_is_refused_before_anything_is_written(memory, spool, name):
    memory.files[name] = b"x"
    with pytest.raises(UnsafeError, match="leaves the folder"):
        loaded_columns(memory)
    assert not list(spool.iterdir())


def test_room_is_asked_for_before_anything_is_fetched(memory, monkeypatch):
    fetched, plain = [], memory.read_ranges
    monkeypatch.setattr(memory, "read_ranges", lambda ranges: fetched.extend(ranges) or plain(ranges))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(mirror.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(StorageError, match=r"ENOSPC: 12\d{6} bytes of memory .* where 1000000 are free; TMPDIR"):
        loaded_columns(memory)
    with pytest.raises(StorageError, match="ENOSPC"):
        tools.verify(memory)
    assert [part.file for part in fetched if part.file.endswith(".distcp")] == []


def test_a_disk_that_fills_up_on_the_way_is_told(memory, monkeypatch):
    plain = os.pwrite

    def full(handle, data, at):
        if at > 1 << 20:
            raise OSError(28, "No space left on device")
        return plain(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"ENOSPC: .* of memory of the test"):
        loaded_columns(memory)


def test_a_dead_processs_mirror_goes_with_the_next_load_and_a_living_ones_stays(memory, spool):
    child = os.fork()
    if not child:
        Mirror(memory).create()
        os.kill(os.getpid(), 9)
    assert os.waitpid(child, 0)[1] == 9
    dead = set(spool.iterdir())
    assert len(dead) == 1
    living = Mirror(memory)
    living.create()
    foreign = spool / f"sixfold-mirror-00000000-{'0' * 16}"  # of another host
    foreign.mkdir()
    (foreign / "alive-0").touch()
    loaded_columns(memory)
    assert set(spool.iterdir()) == {living.folder.parent, foreign}
    living.close()
    shutil.rmtree(foreign)


def test_a_forked_process_that_drops_a_reader_leaves_its_parents_mirror(memory, spool):
    """As a worker of a DataLoader that is started while a load goes on."""
    reader = dcp.Reader(memory)
    reader.read_metadata()
    (root,) = spool.iterdir()
    if not (child := os.fork()):
        try:
            del reader
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (root / "checkpoint").exists()
    assert leases.is_held(leases.lock_path(root, 0))
    del reader
    assert not root.exists()


def test_who_has_waited_for_a_rank_that_hangs_waits_for_no_other_block_of_it(memory, spool):
    waiting = Mirror(memory, timeout_s=0.4)
    waiting.create()
    mates = leases.hold(waiting.folder.parent, 1)
    (path,) = waiting.folder.glob("*.distcp")
    waiting.start({0: [], 1: [Span(path.name, 0, 3)]}, integrity.BLOCK_BYTES)
    started, ends = time.monotonic(), []
    for at in (0, integrity.BLOCK_BYTES, 1):
        with pytest.raises(LostPeerError, match="rank 1 has fetched nothing"):
            waiting.arrives(path)(at, at + 1)
        ends.append(time.monotonic() - started)
    os.close(mates)
    waiting.close()
    assert ends[0] >= 0.4
    assert ends[-1] - ends[0] < 0.2, "a deadline for each of them would be 0.8 s"


@pytest.mark.parametrize("holds_lock", [False, True])
def test_a_mirror_without_a_lock_goes_after_an_error_at_once_and_after_a_kill_with_a_later_load(
    memory, spool, monkeypatch, holds_lock
):
    mirror = Mirror(memory)

    def fail(*args):
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(*(Path, "rename", fail) if holds_lock else ("sixfold.dist_ckpt.mirror.mirror.hold", fail))
        with pytest.raises(StorageError):
            mirror.create()
    mirror.close()
    assert not set(spool.iterdir())
    begun = mirror.folder.parent
    begun.mkdir()
    if holds_lock:
        (begun / ".alive-0").touch()
    leases.remove_dead(spool)
    assert begun.exists(), "it may be about to be held"
    os.utime(begun, (0, 0))
    leases.remove_dead(spool)
    assert not begun.exists()


def test_a_rank_that_held_its_lock_once_is_told_from_one_that_holds_it(tmp_path):
    assert not leases.is_held(leases.lock_path(tmp_path, 0))
    handle = leases.hold(tmp_path, 0)
    assert leases.is_held(leases.lock_path(tmp_path, 0))
    os.close(handle)
    assert not leases.is_held(leases.lock_path(tmp_path, 0))


def test_a_frame_of_our_length_that_is_not_ours_is_read_by_its_own_directory(memory):
    """Of another writer, or of a version before: only the head tells, and it arrives after reads are planned."""
    (name,) = [name for name in memory.files if name.endswith(".distcp")]
    data = bytearray(memory.files[name])
    at = data.index(b"PK\3\4")
    data[at + 10 : at + 14] = b"\x21\x43\x21\x43"  # the time of a zip entry, which no reader looks at
    memory.files[name] = bytes(data)
    folder, _, file = name.rpartition("/")
    known = integrity.decode(name, memory.files[f"{folder}/integrity.json"])
    known.files[file] = integrity.digest_of(bytes(data))
    memory.files[f"{folder}/integrity.json"] = known.encode()
    assert torch.equal(loaded_columns(memory)[0], WHOLE)


@pytest.mark.slow
def test_a_folder_of_torch_dcp_in_an_object_store_loads(s3, tmp_path):
    """Without integrity.json: the same fetch, the frames' own checksums."""
    with pytest.warns(UserWarning, match="single process"):
        torch_dcp.save({"w": WHOLE}, storage_writer=torch_dcp.FileSystemWriter(tmp_path / "c"), no_dist=True)
    store = UrlStore(f"s3://{s3.bucket()}/c")
    fs, root = store._connection()
    for path in (tmp_path / "c").iterdir():
        fs.put_file(str(path), f"{root}/{path.name}")
    s3.set()
    values, _ = loaded_columns(store, strict="log_unexpected")
    assert torch.equal(values, WHOLE)
    assert s3.counts()["range"]["bytes_out"] <= 1.05 * WHOLE.nbytes


class Own(ByPointer):
    """A store of a user: the five methods, and what was read."""

    name = "own://store"

    def __init__(self):
        self.inner, self.read_bytes = MemoryStore(), 0

    def list_files(self):
        return self.inner.list_files()

    def read(self, name, start=0, stop=None):
        data = self.inner.read(name, start, stop)
        if name.endswith(".distcp"):
            self.read_bytes += len(data)
        return data

    def create(self, name, nbytes):
        return self.inner.create(name, nbytes)

    def delete(self, name):
        self.inner.delete(name)


def test_retention_and_tools_work_on_a_users_store_and_listings_read_no_data():
    root = Own()
    for step in (1, 2, 3):
        dist_ckpt.save({"w": one("w", torch.full((300, 300), float(step))), "it": step},
                       retention.step_path(root, step), group=None)  # fmt: skip
    root.inner.files["step-00000004/__0_0.0123456789abcdef.distcp"] = b"of a save that died"
    last = retention.latest(root)
    assert last.name == "own://store/step-00000003"
    assert [step for step, _ in retention.checkpoints(root)] == [1, 2, 3]
    assert dist_ckpt.load_tensors_metadata(last)["w"].global_shape == (300, 300)
    assert dist_ckpt.check_is_distributed_checkpoint(last)
    assert dist_ckpt.load_common_state_dict(last) == {"it": 3}
    assert tools.inspect(last)["path"] == "own://store/step-00000003"
    assert root.read_bytes == 0
    assert [place.name for place in retention.prune(root, keep_last=1)] == [
        "own://store/step-00000001", "own://store/step-00000002"]  # fmt: skip
    assert tools.verify(last)["ok"]
    assert not tools.diff(last, last)["different"]
    copy = MemoryStore()
    tools.convert(last, copy, to="torch_dist")
    assert torch.equal(dist_ckpt.load_plain_tensors(copy)["w"], torch.full((300, 300), 3.0))
    with pytest.raises(MismatchError, match="own://store/step-00000001 does not exist"):
        dist_ckpt.load({}, retention.step_path(root, 1), group=None)


def test_shares_become_few_large_ranges_that_cover_them(memory):
    part = Mirror(memory)
    part._sizes = {"a": 100 << 20, "b": 10}
    rng = random.Random(0)
    for block_bytes in (1 << 18, 1 << 22, 1 << 23):
        part._block_bytes = block_bytes
        blocks = -(-(100 << 20) // block_bytes)
        first = rng.randrange(blocks)
        spans = [
            integrity.Span("a", 0, max(1, first // 2)),
            integrity.Span("a", first, blocks),
            integrity.Span("b", 0, 1),
        ]
        ranges = ranges_of(spans, part._sizes, block_bytes)
        wanted = {at for span in spans if span.file == "a" for at in range(span.first * block_bytes,
                  min(span.stop * block_bytes, 100 << 20), 1 << 18)}  # fmt: skip
        got = {at for r in ranges if r.file == "a" for at in range(r.offset, r.offset + r.length, 1 << 18)}
        assert got == wanted
        assert max(r.length for r in ranges) <= 8 << 20
        assert part.nbytes_of(spans, block_bytes) == sum(r.length for r in ranges)


SMALL = {f"t{n}": torch.full((100 + n,), 1.0 + n) for n in range(4)}


@pytest.fixture
def folder(tmp_path):
    records = {key: one(key, value) for key, value in SMALL.items()}
    dist_ckpt.save({**rows(), **records}, tmp_path / "c", group=None)
    return tmp_path / "c"


@pytest.fixture
def mistaken_frames(monkeypatch):
    """Where bytes arrive, each frame is taken for one whose values begin 64 bytes later than they do."""
    plain = reader.frames.template

    def shifted(*arguments, **options):
        found = plain(*arguments, **options)
        *before, last = found.head
        return found._replace(head=(*before, last + bytes(64)), head_bytes=found.head_bytes + 64)

    monkeypatch.setattr(reader.frames, "template", shifted)


def test_a_record_is_told_of_once_and_when_its_values_are_right(folder, mistaken_frames):
    checkpoint = open_checkpoint(folder)
    checkpoint.arrives = lambda path: lambda start, stop: None
    wanted = [cut("w", torch.zeros_like(part), 1, n, 3) for n, part in enumerate(WHOLE.chunk(3, 1))]
    wanted += [one(key, torch.zeros_like(value)) for key, value in SMALL.items()]
    told = []
    plan = plan_load(wanted, checkpoint.manifest, dtype_policy="exact")
    Reader(checkpoint, "exact", 2).run(
        wanted, plan, [], lambda index: told.append((index, wanted[index].data.double().sum().item()))
    )
    sums = [part.double().sum().item() for part in (*WHOLE.chunk(3, 1), *SMALL.values())]
    assert sorted(told) == list(enumerate(sums))


def test_values_are_right_where_frames_were_mistaken(memory, mistaken_frames):
    values, _ = loaded_columns(memory)
    assert torch.equal(values, WHOLE)
    wide = one("w", torch.zeros(1024, 3072, dtype=torch.float64))
    assert torch.equal(dist_ckpt.load({"w": wide}, memory, group=None)["w"], WHOLE.double()), "converted, exactly"


def with_two_writers(store, keys):
    """Frames of these keys are another writer's, but for the first of several of a key; digests fit."""
    with viewed(store) as folder:
        manifest = open_checkpoint(folder, verify="off").manifest
    (name,) = [name for name in store.files if name.endswith(".distcp")]
    data = bytearray(store.files[name])
    for key in keys:
        chunks = manifest.tensors[key].chunks
        for chunk in chunks[len(chunks) > 1 :]:
            frame = chunk.frame
            made = of_another_form(memoryview(bytes(data)), frame, manifest.tensors[key].dtype, chunk.box.size)
            data[frame.offset : frame.offset + frame.length] = made
    store.files[name] = bytes(data)
    (place,) = [name for name in store.files if name.endswith("integrity.json")]
    known = integrity.decode(Path(place), store.files[place])
    files = dict(known.files) | {name.rpartition("/")[2]: integrity.digest_of(bytes(data))}
    store.files[place] = integrity.Integrity(save_id=known.save_id, files=files).encode()
    return name


@pytest.fixture
def two_writers():
    store = MemoryStore("memory of the test")
    dist_ckpt.save({**rows(4), **{key: one(key, value) for key, value in SMALL.items()}}, store, group=None)
    keys = [*list(SMALL)[1::2], "w"]
    return store, with_two_writers(store, keys)


@pytest.mark.parametrize("verify", ["touched", "full", "off"])
@pytest.mark.slow
def test_frames_of_another_writer_among_ours_give_their_own_values(two_writers, verify):
    store, _ = two_writers
    values, _ = loaded_columns(store, verify=verify)
    assert torch.equal(values, WHOLE), "strided"
    wanted = {key: one(key, torch.zeros_like(value)) for key, value in SMALL.items()} | rows(2)
    for shard in wanted["w"]:
        shard.data.zero_()
    told = []
    found = dist_ckpt.load(wanted, store, group=None, verify=verify, progress=lambda done, total: told.append(done))
    assert all(torch.equal(found[key], value) for key, value in SMALL.items())
    assert torch.equal(torch.cat(found["w"]), WHOLE), "runs of bytes"
    assert told == sorted(set(told)), "nothing is counted twice"
    wide = wanted | {"w": one("w", torch.zeros(1024, 3072, dtype=torch.float64))}
    assert torch.equal(dist_ckpt.load(wide, store, group=None, verify=verify)["w"], WHOLE.double()), (
        "converted, exactly"
    )


def test_a_record_of_another_writers_frame_is_told_of_when_its_values_are_right(two_writers):
    store, _ = two_writers
    with viewed(store, whole=True) as folder:
        checkpoint = open_checkpoint(folder)
        checkpoint.arrives = lambda path: lambda start, stop: None
        wanted = [one(key, torch.zeros_like(value)) for key, value in SMALL.items()]
        wanted += [one("w", torch.zeros_like(WHOLE))]
        plan, told = plan_load(wanted, checkpoint.manifest, dtype_policy="exact"), []
        reader = Reader(checkpoint, "exact", 2, window_bytes=1 << 22)
        reader.run(wanted, plan, [], lambda n: told.append((n, wanted[n].data.double().sum().item())))
    assert sorted(told) == [(n, value.double().sum().item()) for n, value in enumerate([*SMALL.values(), WHOLE])]


@pytest.mark.slow
def test_damage_in_a_frame_of_another_writer_among_ours_is_told_as_damage(two_writers):
    store, name = two_writers
    sound = store.files[name]
    with viewed(store) as folder:
        frame = open_checkpoint(folder, verify="off").manifest.tensors["w"].chunks[-1].frame
    wanted = {key: one(key, torch.zeros_like(value)) for key, value in SMALL.items()} | rows(1)
    for at in (0, 14, 40, 200, 5_000, frame.length - 5):
        data = bytearray(sound)
        data[frame.offset + at] ^= 1
        store.files[name] = bytes(data)
        with pytest.raises(CorruptError, match=r"distcp.*w"):
            dist_ckpt.load(wanted, store, group=None)
