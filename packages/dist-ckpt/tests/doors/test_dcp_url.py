"""``dcp.Writer`` and ``dcp.Reader`` with a URL that fsspec opens; torch's fsspec reader and writer are the oracle."""

import errno
import gc

import pytest
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_door_helpers import Meddling, blank, contents, dcp_load, dcp_save, everything, quiet, same
from torch.distributed.checkpoint import CheckpointException

from sixfold.dist_ckpt import CorruptError, StorageError, dcp, tools
from sixfold.dist_ckpt.stores import mirror

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
    monkeypatch.setattr(mirror.Mirror, "free_bytes", 10)
    with pytest.raises(CheckpointException, match="TMPDIR names another place") as caught:
        dcp_load(blank(), dcp.Reader(URL))
    failure = caught.value.failures[0][0]
    assert isinstance(failure, StorageError)
    assert failure.errno == errno.ENOSPC
