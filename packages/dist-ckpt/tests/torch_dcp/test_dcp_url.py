"""``dcp.Writer`` and ``dcp.Reader`` with a URL that fsspec opens; torch's fsspec reader and writer are the oracle."""

import errno
import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import Meddling, blank, contents, dcp_load, dcp_save, everything, quiet, same
from torch.distributed.checkpoint import CheckpointException

from sixfold.dist_ckpt import CorruptError, StorageError, dcp, tools
from sixfold.dist_ckpt.mirror import mirror
from sixfold.dist_ckpt.storage import url

fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter  # noqa: E402

URL = "memory://doors/c"


@pytest.fixture(autouse=True)
def memory():
    store = fsspec.filesystem("memory")
    yield store
    if store.exists("/doors"):
        store.rm("/doors", recursive=True)


def test_torchs_fsspec_reader_finds_what_was_saved(memory):
    dcp_save(contents(), dcp.Writer(URL))
    assert same(everything(FsspecReader(URL)), contents())
    assert tools.verify(URL)["ok"]


def test_what_torchs_fsspec_writer_saved_is_read(memory):
    memory.makedirs("/doors", exist_ok=True)
    dcp_save(contents(), FsspecWriter(URL))
    assert same(dcp_load(blank(), dcp.Reader(URL)), contents())


def test_checkpoint_id_may_be_a_url_and_a_writer_goes_from_step_to_step():
    writer, reader = dcp.Writer(URL), dcp.Reader(URL)
    for step in (1, 2):
        dcp_save(contents(step), writer, checkpoint_id=f"memory://doors/step-{step}")
    for step in (1, 2):
        assert same(dcp_load(blank(), reader, checkpoint_id=f"memory://doors/step-{step}"), contents(step))


def test_a_background_save_goes_to_a_url():
    with quiet():
        torch_dcp.async_save(contents(), storage_writer=dcp.Writer(URL)).result(30)
    assert same(dcp_load(blank(), dcp.Reader(URL)), contents())


def test_a_failed_save_leaves_the_old_checkpoint():
    def broken():
        raise OSError(5, "the card is on fire")

    dcp_save(contents(1), dcp.Writer(URL))
    with pytest.raises(CheckpointException, match="the card is on fire"):
        dcp_save(contents(2), dcp.Writer(URL), planner=Meddling(broken, 5))
    assert same(dcp_load(blank(), dcp.Reader(URL)), contents(1))
    dcp_save(contents(3), dcp.Writer(URL))
    assert same(dcp_load(blank(), dcp.Reader(URL)), contents(3))


def test_a_flipped_bit_is_named(memory):
    dcp_save(contents(), dcp.Writer(URL))
    (name,) = [path for path in memory.find("/doors") if path.endswith(".distcp")]
    data = bytearray(memory.cat(name))
    data[len(data) // 2] ^= 0x10
    memory.pipe(name, bytes(data))
    with pytest.raises(CheckpointException) as caught:
        dcp_load(blank(), dcp.Reader(URL, verify="full"))
    assert isinstance(caught.value.failures[0][0], CorruptError)
    assert name.rpartition("/")[2] in str(caught.value)


@pytest.mark.slow
def test_a_save_over_torchs_checkpoint_that_dies_leaves_the_old_or_the_new(memory, monkeypatch):
    memory.makedirs("/doors", exist_ok=True)
    writes = [0]
    for at in range(40):
        with quiet():
            if memory.exists("/doors/c"):
                memory.rm("/doors/c", recursive=True)
            memory.makedirs("/doors/c", exist_ok=True)
            dcp_save(contents(1), FsspecWriter(URL))
        left = iter(range(at))

        def until(self, path, *arguments, plain=None, left=left, **options):
            if next(left, None) is None:
                raise StorageError("gone")
            return plain(self, path, *arguments, **options)

        with monkeypatch.context() as patch:
            for name in ("pipe_file", "_open", "rm_file"):
                patch.setattr(type(memory), name, partialmethod(until, plain=getattr(type(memory), name)))
            try:
                dcp_save(contents(2), dcp.Writer(URL))
            except CheckpointException:
                pass
            writes = [*writes, next(left, None)]
        found = dcp_load(blank(), dcp.Reader(URL))
        assert same(found, contents(1)) or same(found, contents(2)), at
        torchs = everything(FsspecReader(URL))
        assert same(torchs, contents(1)) or same(torchs, contents(2)), at
        if writes[-1] is not None:
            break
    assert same(found, contents(2)) and same(torchs, contents(2)) and at > 8


def mirrors_alive():
    gc.collect()
    return sum(type(found) is mirror.Mirror for found in gc.get_objects())


def test_loads_by_one_reader_leave_no_mirror():
    before = mirrors_alive()
    dcp_save(contents(), dcp.Writer(URL))
    reader = dcp.Reader(URL)
    for _ in range(3):
        dcp_load(blank(), reader)
    assert mirrors_alive() <= before


def test_room_is_asked_for_before_anything_is_fetched(monkeypatch):
    dcp_save(contents(), dcp.Writer(URL))
    monkeypatch.setattr(mirror.Mirror, "room", lambda self: ("here", 10))
    with pytest.raises(CheckpointException, match="TMPDIR names another place") as caught:
        dcp_load(blank(), dcp.Reader(URL))
    failure = caught.value.failures[0][0]
    assert isinstance(failure, StorageError)
    assert failure.errno == errno.ENOSPC


def ranks_of_one_host(state, verify):
    """Two ranks of a load in one process: what each reads, by a Reader of its own; and all ranges that were fetched."""
    fetched, real = [], url.UrlStore.read_ranges

    def read_ranges(self, ranges):
        fetched.extend((part.file, part.offset, part.length) for part in ranges)
        return real(self, ranges)

    readers, planners = [dcp.Reader(URL, verify=verify) for _ in range(2)], []
    states, wishes = [{key: torch.zeros_like(value) for key, value in state.items()} for _ in readers], []
    for reader, own in zip(readers, states, strict=True):
        planner = torch_dcp.DefaultLoadPlanner()
        planner.set_up_planner(own, reader.read_metadata(), is_coordinator=not planners)
        planners.append(planner)
        wishes.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = readers[0].prepare_global_plan(wishes)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(url.UrlStore, "read_ranges", read_ranges)
        work = [pool.submit(r.read_data, plan, p) for r, plan, p in zip(readers, plans, planners, strict=True)]
        errors = [future.exception() for future in work]
    return states, errors, fetched


@pytest.mark.parametrize("verify", ["touched", "off", "full"])
def test_ranks_of_a_host_fetch_each_block_once_and_leave_nothing(memory, verify, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(tmp_path))
    state = {f"t{n}": torch.arange(600_000.0) + n for n in range(9)}
    dcp_save(state, dcp.Writer(URL))
    states, errors, fetched = ranks_of_one_host(state, verify)
    assert errors == [None, None]
    assert all(same(found, state) for found in states)
    assert len(set(fetched)) == len(fetched)
    (size,) = [memory.size(path) for path in memory.find("/doors") if path.endswith(".distcp")]
    assert sum(length for file, _, length in fetched if file.endswith(".distcp")) == size
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_one_rank_of_a_host_finds_damaged_ends_its_load_and_leaves_nothing(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(tmp_path))
    state = {f"t{n}": torch.arange(600_000.0) + n for n in range(9)}
    dcp_save(state, dcp.Writer(URL))
    (name,) = [path for path in memory.find("/doors") if path.endswith(".distcp")]
    data = bytearray(memory.cat(name))
    data[len(data) // 2] ^= 0x10
    memory.pipe(name, bytes(data))
    _, errors, _ = ranks_of_one_host(state, "touched")
    found = [error for error in errors if error is not None]
    assert {type(error) for error in found} == {CorruptError}
    assert all(URL in str(error) and "sixfold-mirror" not in str(error) for error in found)
    assert list(tmp_path.iterdir()) == []
