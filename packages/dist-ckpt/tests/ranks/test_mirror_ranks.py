"""Ranks of one host load from a store together: each block is fetched by one of them, and each loss is told."""

import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from s3_server import Fault, S3Server

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardedTensor, dcp
from sixfold.dist_ckpt.formats import integrity
from sixfold.dist_ckpt.mirror import mirror
from sixfold.dist_ckpt.mirror.mirror import Mirror
from sixfold.dist_ckpt.stores import ByPointer, MemoryStore
from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy

RANKS_IMPORT = ("s3fs",)

WHOLE = torch.arange(6 << 20, dtype=torch.float32).view(2048, 3072)  # 24 MiB: six blocks
DATA = "*.distcp"
PASSING = ("error", "truncate", "stall_body")  # all of them: test_mirror.py


def cut(key, part, axis, number, count):
    return ShardedTensor.from_rank_offsets(key, part.contiguous(), (axis, number, count))


def rows():
    return {"w": [cut("w", part, 0, n, 4) for n, part in enumerate(WHOLE.chunk(4))], "step": 3}


@pytest.fixture
def spool(tmp_path):
    """Where mirrors lie; at the end there are none."""
    place = tmp_path / "spool"
    place.mkdir()
    yield place
    assert not list(place.iterdir())


def loaded(rank, ranks, place, axis=1, **options):
    """True if the values are right, or the error, its words and how long it took."""
    part, start = WHOLE.chunk(ranks, axis)[rank], time.monotonic()
    try:
        found = dist_ckpt.load({"w": cut("w", torch.zeros_like(part), axis, rank, ranks)}, place, **options)
    except CheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return torch.equal(found["w"], part) and found["step"] == 3


def load_through_faults(rank, ranks, environment, spool, url, port):
    """One job for all: each rank needs a second to import the client of S3."""
    os.environ.update(environment)
    tempfile.tempdir, s3, found = str(spool), S3Server(port), {}

    def case(name, axis=1, faults=(), **options):
        dist.barrier()
        if rank == 0:
            s3.set(faults=faults)
        dist.barrier()
        result = loaded(rank, ranks, url, axis, **options)
        dist.barrier()
        keys = [key.rpartition("/")[2] for kind, key, *_ in s3.log() if kind in ("get", "range")]
        found[name] = result, s3.counts()["range"]["bytes_out"], keys

    case("rows", 0)
    case("columns")
    case("off", verify="off")
    case("full", 0, verify="full")
    for what in PASSING:
        case(what, faults=[Fault(what=what, kind="range", key=DATA, times=3)], timeout_s=16.0)
    case("for ever", faults=[Fault(what="error", kind="range", key=DATA, after=2)], timeout_s=3.0)
    return found


@pytest.mark.slow
def test_a_host_fetches_each_byte_once_and_faults_that_pass_are_seen_by_no_rank(s3, spool):
    url = f"s3://{s3.bucket()}/run/c"
    dist_ckpt.save(rows(), url, group=None)
    results = run_ranks(load_through_faults, 2, s3.environment(), spool, url, s3.port)
    for found in results:
        kind, text, _ = found.pop("for ever")[0]
        assert kind == "StorageError"
        assert text.startswith(url)
        assert "failed" in text
        assert {name: result for name, (result, *_) in found.items()} == dict.fromkeys(found, True)
        for name in ("rows", "columns", "off", "full"):
            _, nbytes, keys = found[name]
            assert WHOLE.nbytes <= nbytes <= 1.05 * WHOLE.nbytes, name
            assert [keys.count(small) for small in ("metadata.json", "common.pt")] == [1, 1], "once per host"


class Folder(ByPointer):
    """A store that all ranks see and that needs no client: files of a folder, which the engine knows nothing of."""

    def __init__(self, path):
        self.path = path

    @property
    def name(self):
        return "folder://store"

    def list_files(self):
        files = (path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}

    def read(self, name, start=0, stop=None):
        return (self.path / name).read_bytes()[start:stop]

    def create(self, name, nbytes):
        raise AssertionError("nothing is saved here")

    def delete(self, name):
        raise AssertionError("nothing is deleted here")


@pytest.fixture
def folder(tmp_path):
    memory = MemoryStore()
    dist_ckpt.save(rows(), memory, group=None)
    place = tmp_path / "store"
    place.mkdir()
    for name, data in memory.files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(data)
    return place


def load_and_fall(rank, ranks, place, spool, number):
    """Rank 1 stops or dies when it begins to fetch; the other wakes it when it has its error."""
    tempfile.tempdir = str(spool)
    pid = place.parent / "pid"
    if rank == 1:
        pid.write_text(str(os.getpid()))
        Mirror.start = lambda *_: os.kill(os.getpid(), number)
    found = loaded(rank, ranks, Folder(place), timeout_s=1.5)
    if rank == 0:
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGCONT)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_a_rank_that_falls_while_others_wait_for_its_blocks_is_named(folder, spool, number):
    kind, text, _ = run_ranks(load_and_fall, 2, folder, spool, number, allow_exit=(1,))[0]
    assert kind == "LostPeerError"
    assert "rank 1" in text


def load_on_two_hosts(rank, ranks, place, spool):
    """What tells hosts apart here is the folder of temporary files."""
    tempfile.tempdir = str(spool.parent / f"host-{rank}")
    os.mkdir(tempfile.tempdir)
    return loaded(rank, ranks, Folder(place), verify="full"), os.listdir(tempfile.tempdir)


@pytest.mark.slow
def test_ranks_of_two_hosts_have_a_mirror_each(folder, spool):
    assert run_ranks(load_on_two_hosts, 2, folder, spool) == [(True, [])] * 2


def load_from_folder(rank, ranks, place, spool, free_bytes, axis=1):
    tempfile.tempdir = str(spool)
    if free_bytes and rank == 0:
        plain = shutil.disk_usage
        shutil.disk_usage = lambda path: plain(path)._replace(free=free_bytes)
    return loaded(rank, ranks, Folder(place), axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.slow
def test_damage_is_told_on_all_ranks_by_the_stores_own_name(folder, spool, axis):
    """In rows it lies in the one block that both ranks want: who hashes it looks at blocks that the other one holds."""
    assert run_ranks(load_from_folder, 2, folder, spool, None, axis) == [True] * 2
    (path,) = folder.rglob(DATA)
    data = bytearray(path.read_bytes())
    data[13_000_000] ^= 1
    path.write_bytes(data)
    for kind, text, _ in run_ranks(load_from_folder, 2, folder, spool, None, axis):
        assert kind == "CorruptError"
        assert text.startswith(f"folder://store/{path.parent.name}/{path.name}")
        assert "damaged: w" in text


def test_room_for_all_ranks_of_a_host_is_asked_for_before_any_fetches(folder, spool):
    for kind, text, _ in run_ranks(load_from_folder, 2, folder, spool, 5_000_000):
        assert kind == "StorageError"
        assert "ENOSPC: 25" in text, "bytes of both ranks"
        assert "5000000 are free" in text


def load_with_an_error_of_one_rank(rank, ranks, place, spool):
    tempfile.tempdir = str(spool)

    def progress(done, total):
        if rank == 1:
            raise OSError("the terminal is gone")

    return loaded(rank, ranks, Folder(place), timeout_s=8.0, progress=progress)


@pytest.mark.slow
def test_a_rank_that_fails_before_it_fetches_is_not_waited_for(folder, spool):
    for kind, text, seconds in run_ranks(load_with_an_error_of_one_rank, 2, folder, spool):
        assert (kind, text.partition(" raised")[0]) == ("CheckpointError", f"progress(0, {WHOLE.nbytes // 2})")
        assert seconds < 6.0


def load_for_each_other_with_an_error_of_one_rank(rank, ranks, place, spool, failing):
    tempfile.tempdir = str(spool)

    def progress(done, total):
        if rank == failing:
            raise OSError("the terminal is gone")

    loader, start = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()), time.monotonic()
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros_like(WHOLE), replica_id=rank)}
    with pytest.raises(CheckpointError) as caught:
        dist_ckpt.load(wanted, Folder(place), loader, timeout_s=12.0, progress=progress)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.slow
def test_a_rank_that_fails_before_it_fetches_is_not_waited_for_by_those_that_it_reads_for(folder, spool, failing):
    for text, seconds in run_ranks(load_for_each_other_with_an_error_of_one_rank, 2, folder, spool, failing):
        assert text.startswith("progress(0, ")
        assert seconds < 9.0


SHAPES = {f"t{n}": (300 + 57 * n, 260 + 31 * n) for n in range(6)}  # some 0.5 MiB each


def a_box(rng, shape):
    size = [rng.choice([n, rng.randint(1, n)]) for n in shape]
    return size, [rng.randint(0, n - k) for n, k in zip(shape, size, strict=True)]


def load_any_layout(rank, ranks, place, spool, room):
    """The same parts of the same tensors from the store and from its files as a folder; what differs, and the takes."""
    tempfile.tempdir, mirror._MEMORY_BYTES = str(spool), room
    taken, wrong, plain = [], [], Mirror.take

    def take(*args):
        taken.append(plain(*args))
        return taken[-1]

    Mirror.take = take
    for seed in range(6):
        verify = random.Random(seed).choice(["touched", "full", "off"])
        found = []
        for where in (Folder(place), place):
            rng = random.Random(100 * seed + rank)
            wanted = []
            for key in rng.choices(list(SHAPES), k=rng.randint(0, 4)):
                size, start = a_box(rng, SHAPES[key])
                data = torch.zeros(size, dtype=rng.choice([torch.float32] * 3 + [torch.float64]))
                wanted.append(ShardedTensor(key, data, data.dtype, tuple(size), SHAPES[key], tuple(start), None))
            loaded = dist_ckpt.load({"all": wanted}, where, verify=verify, validate_access_integrity=False)
            found.append(loaded.get("all", []))
        wrong += [(seed, n) for n, (a, b) in enumerate(zip(*found, strict=True)) if not torch.equal(a, b)]
    direct, taken[:] = sum(taken), []
    for seed in range(3):  # torch's own load, where each rank had made a mirror of its own before
        keys = random.Random(100 * seed + rank).sample(list(SHAPES), 2)
        found = []
        for where in (Folder(place), place):
            state = {key: torch.zeros(SHAPES[key]) for key in sorted(keys)}
            torch_dcp.load(state, storage_reader=dcp.Reader(where))
            found.append(state)
        wrong += [(seed, key) for key in keys if not torch.equal(found[0][key], found[1][key])]
    return wrong, direct, sum(taken)


@pytest.mark.parametrize("room", [0, 1 << 20, 1 << 26])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.slow
def test_loads_of_any_layout_from_a_store_give_what_its_files_give(tmp_path, spool, monkeypatch, ranks, room):
    monkeypatch.setattr(integrity, "BLOCK_BYTES", 1 << 16)
    generator = torch.Generator().manual_seed(1)
    memory = MemoryStore()
    wholes = {key: torch.rand(shape, generator=generator) for key, shape in SHAPES.items()}
    dist_ckpt.save({key: ShardedTensor.from_rank_offsets(key, value) for key, value in wholes.items()}, memory,
                   group=None)  # fmt: skip
    for name, data in memory.files.items():
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    results = run_ranks(load_any_layout, ranks, tmp_path / "store", spool, room)
    assert [wrong for wrong, _, _ in results] == [[]] * ranks
    assert bool(sum(direct for _, direct, _ in results)) == bool(room), "blocks were taken by load"
    assert bool(sum(by_reader for _, _, by_reader in results)) == bool(room), "by dcp.Reader"
