"""Files of a run in one domain, in one process: records, listings, locks, and what is removed."""

import fcntl
import multiprocessing
import os
import pickle
import random

import pytest
import torch
from forked_worker import Forked

from sixfold.dist_ckpt import (
    CheckpointError,
    CorruptError,
    MemoryTier,
    ShardedObject,
    ShardingError,
    StorageError,
    UnsafeError,
)
from sixfold.dist_ckpt.background import worker_process
from sixfold.dist_ckpt.formats.integrity import crc32
from sixfold.dist_ckpt.memory_tier import record as records
from sixfold.dist_ckpt.memory_tier.domain_folder import DomainFolder
from sixfold.dist_ckpt.memory_tier.record import Record


@pytest.fixture(autouse=True)
def _workers(monkeypatch):
    monkeypatch.setattr(worker_process, "_start_worker", Forked)


def state(step):
    return {
        "w": torch.full((100_000,), float(step)),
        "o": ShardedObject("o", {"step": step}, (1,), (0,)),
        "lr": 0.5,
        "empty": torch.zeros(0, 3),
    }


def tier(folder, **options):
    return MemoryTier(folder, "run", domain="here", replicas=0, group=None, timeout_s=20, **options)


def saved(folder, steps=(1,)):
    """The folder of the last generation, and its record."""
    with tier(folder) as own:
        for step in steps:
            own.save(step, state(step))
    (path,) = folder.glob("sixfold-memory-run/attempt-*")
    return path, path / "rank-0"


def test_one_process_saves_and_restores_tensors_objects_and_numbers(shm):
    saved(shm, (1, 2, 3))
    with tier(shm) as own:
        found = own.restore(state(0))
    assert (found.step, found.place, found.sources, found.skipped) == (3, "memory", {"here": {0: "here"}}, ())
    assert torch.equal(found.state["w"], torch.full((100_000,), 3.0))
    assert found.state["o"] == {"step": 3} and found.state["lr"] == 0.5


def test_a_record_says_all_that_was_written(shm):
    path, name = saved(shm)
    record = Record.decode(name.read_bytes(), name)
    assert Record.decode(record.encode(), "again") == record
    assert record.generation.name == path.name and (record.rank, record.ranks) == (0, 1)
    assert record.file_bytes == {"__0_0.distcp": (path / "__0_0.distcp").stat().st_size}
    assert records.crc_of(record.written.files["__0_0.distcp"]) == crc32((path / "__0_0.distcp").read_bytes())


def test_any_changed_byte_of_a_record_is_found(shm):
    _, name = saved(shm)
    data = name.read_bytes()
    for at in [*range(40), *random.Random(0).sample(range(len(data)), 300)]:
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(CorruptError, match="does not match its own digest"):
            Record.decode(bytes(changed), name)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-record",)


@pytest.mark.parametrize(
    "content", [{"generation": Runs()}, {"generation": [1, 2]}, 7, {"generation": [1, 2, "x"], "table": 3}]
)
def test_a_record_of_another_content_is_refused_and_runs_nothing(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = pickle.dumps(content)
    with pytest.raises((CorruptError, UnsafeError)):
        Record.decode(records._MAGIC + crc32(body).to_bytes(4, "little") + body, "x")
    assert os.listdir(tmp_path) == []


def test_a_record_under_the_name_of_another_rank_or_generation_is_damage(shm):
    path, name = saved(shm)
    name.rename(path / "rank-1")
    folder = DomainFolder(shm, "run")
    (generation,) = folder.generations()
    assert folder.listing()[generation].parts[1].problem == "has a damaged record"
    with pytest.raises(CorruptError, match="is of rank 0 of 1"):
        folder.record(generation, 1)


def test_what_others_have_put_into_the_folders_stays(shm):
    path, _ = saved(shm)
    for place in (path / "notes.txt", path.parent / "attempt-1-step-2-x", path.parent / "notes", path / "rank-x"):
        place.write_text("mine")
    with tier(shm) as own:
        own.restore(state(0))
        own.save(2, state(2))
        own.save(3, state(3))
        own.discard()
    left = sorted(str(found.relative_to(shm)) for found in shm.rglob("*") if found.is_file())
    root = "sixfold-memory-run"
    assert left == [
        f"{root}/attempt-1-step-2-x",
        f"{root}/{path.name}/notes.txt",
        f"{root}/{path.name}/rank-x",
        f"{root}/notes",
    ]


@pytest.mark.parametrize("how", ["open", "link", "file"])
def test_a_folder_that_others_could_write_to_is_refused(shm, how):
    root = shm / "sixfold-memory-run"
    if how == "open":
        root.mkdir()
        root.chmod(0o777)
    elif how == "link":
        (shm / "elsewhere").mkdir(mode=0o700)
        root.symlink_to(shm / "elsewhere")
    else:
        root.write_text("")
    with pytest.raises(UnsafeError, match="is no folder of this user alone"):
        tier(shm).save(1, state(1))


def holds_lock(path, told, ends):
    handle = os.open(path, os.O_RDWR)
    fcntl.lockf(handle, fcntl.LOCK_EX)
    told.set()
    ends.wait(20)


def test_another_job_of_the_same_run_is_refused_until_that_has_ended(shm):
    path, _ = saved(shm)
    context = multiprocessing.get_context("fork")
    told, ends = context.Event(), context.Event()
    other = context.Process(target=holds_lock, args=(path.parent / "lock", told, ends))
    other.start()
    try:
        assert told.wait(20)
        with pytest.raises(StorageError, match="is in use by another process"):
            tier(shm).save(2, state(2))
    finally:
        ends.set()
        other.join()
    with tier(shm) as own:
        assert own.restore(state(0)).step == 1


def test_a_bad_state_is_an_error_of_the_call_and_leaves_no_generation(shm):
    with tier(shm) as own:
        own.save(1, state(1)).wait()
        with pytest.raises(ShardingError):
            own.save(2, {"w": torch.zeros(3, device="meta")})
        assert own.steps() == [1]
        own.save(2, state(2))
        own.wait()
        assert own.steps()[-1] == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"replicas": -1}, "replicas is -1; it is an integer >= 0"),
        ({"drain_every": True}, "drain_every is True; it is an integer >= 0"),
        ({"drain_every": 3}, "drain_every is 3, and drain_to None; name the folder or URL"),
        ({"domain": ""}, "domain is ''; it is the name of what fails together"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options, text):
    with pytest.raises(CheckpointError, match=text):
        MemoryTier("/dev/shm", "run", group=None, **options)


def test_a_step_is_a_number_and_a_folder_is_local(shm):
    with pytest.raises(CheckpointError, match="folder is 's3://bucket/run'; it is a folder in a tmpfs of this host"):
        MemoryTier("s3://bucket/run", "run", group=None)
    with tier(shm) as own, pytest.raises(CheckpointError, match=r"step is 1.5; it is an integer >= 0"):
        own.save(1.5, state(1))


def test_fewer_other_domains_than_copies_are_told_once(shm):
    own = MemoryTier(shm, "run", domain="here", replicas=2, group=None, timeout_s=20)
    with pytest.warns(UserWarning, match="replicas is 2, and there are 0 other domains"):
        handle = own.save(1, state(1))
    handle.wait()
    assert handle.unreplicated is None and repr(handle) == "Snapshot(step=1, done)"
    own.save(2, state(2)).wait()
    own.close()
    own.close()
