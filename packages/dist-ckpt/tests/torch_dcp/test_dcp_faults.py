"""What goes wrong inside ``dcp.save`` and ``dcp.load``: named, and nothing of the old checkpoint is lost."""

import os
import pickle
import re
import shutil
import signal
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import Meddling, blank, contents, dcp_load, dcp_save, same, step_of
from dist_ckpt_helpers import flip_byte, folder_bytes, in_child, names
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from sixfold.dist_ckpt import CheckpointError, CorruptError, LostPeerError, StorageError, dcp, tools


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "c"
    dcp_save(contents(), dcp.Writer(path))
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "c")


def the_error(caught):
    """What rank 0 raised, inside torch's CheckpointException."""
    (error, _) = caught.value.failures[0]
    return error


def place_of(folder, key):
    """File, first and last byte of a key's frame; of torch's own reading."""
    data = FileSystemReader(folder).read_metadata().storage_data
    (info,) = [info for index, info in data.items() if index.fqn == key]
    return info.relative_path, info.offset, info.offset + info.length


def byte_of_the_values(folder, key):
    """A place among the raw values of a tensor, found by zipfile."""
    name, start, stop = place_of(folder, key)
    frame = (folder / name).read_bytes()[start:stop]
    values = bytes(contents()["model"][key.removeprefix("model.")].contiguous().view(torch.uint8).flatten().tolist())
    return name, start + frame.index(values) + len(values) // 2


@pytest.mark.parametrize("key", ["model.w", "model.half"])
def test_a_flipped_bit_of_a_tensor_is_named_with_file_and_key(folder, key):
    name, position = byte_of_the_values(folder, key)
    flip_byte(folder / name, position)
    with pytest.raises(CheckpointException) as caught:
        dcp_load(blank(), dcp.Reader(folder))
    assert isinstance(the_error(caught), CorruptError)
    assert name in str(the_error(caught))
    assert key in str(the_error(caught))


def test_a_flipped_bit_of_a_value_that_is_no_tensor_is_named(folder):
    name, start, stop = place_of(folder, "text")
    flip_byte(folder / name, (start + stop) // 2)
    with pytest.raises(CheckpointException) as caught:
        dcp_load(blank(), dcp.Reader(folder))
    assert isinstance(the_error(caught), CorruptError)
    assert name in str(the_error(caught))


def test_a_bit_of_a_block_that_is_not_touched_is_found_by_verify_full_alone(tmp_path):
    state = {"a": torch.zeros(3_000_000), "b": torch.ones(3_000_000)}  # 12 MB each: blocks are 4 MiB
    dcp_save(state, dcp.Writer(tmp_path / "c"))
    name, start, stop = place_of(tmp_path / "c", "b")
    flip_byte(tmp_path / "c" / name, (start + stop) // 2)
    assert dcp_load({"a": torch.ones(3_000_000)}, dcp.Reader(tmp_path / "c"))["a"].sum() == 0
    with pytest.raises(CheckpointException) as caught:
        dcp_load({"a": torch.ones(3_000_000)}, dcp.Reader(tmp_path / "c", verify="full"))
    assert isinstance(the_error(caught), CorruptError)


@pytest.mark.parametrize("damage", ["shorter", "longer", "gone"])
def test_a_short_long_or_missing_file_is_named_before_a_tensor_is_touched(folder, damage):
    name, _, _ = place_of(folder, "model.w")
    whole = (folder / name).read_bytes()
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(whole[:-5] if damage == "shorter" else whole + b"1")
    state = blank()
    with pytest.raises(CheckpointException) as caught:
        dcp_load(state, dcp.Reader(folder))
    assert name in str(caught.value)
    assert same(state["model"], blank()["model"])


def test_damaged_metadata_is_said_to_be_damaged(folder):
    size = (folder / ".metadata").stat().st_size
    flip_byte(folder / ".metadata", size // 2)
    with pytest.raises(CorruptError, match=r"\.metadata"):
        dcp.Reader(folder).read_metadata()
    with pytest.raises(CheckpointException, match=r"\.metadata"):
        dcp_load(blank(), dcp.Reader(folder))


def test_torchs_own_files_are_checked_by_the_digests_of_their_zip_records(tmp_path):
    dcp_save(contents(), torch_dcp.FileSystemWriter(tmp_path / "c"))
    name, position = byte_of_the_values(tmp_path / "c", "model.w")
    flip_byte(tmp_path / "c" / name, position)
    silent = dcp_load(blank(), torch_dcp.FileSystemReader(tmp_path / "c"))
    assert not same(silent["model"]["w"], contents()["model"]["w"])  # torch itself notices nothing
    with pytest.raises(CheckpointException) as caught:
        dcp_load(blank(), dcp.Reader(tmp_path / "c"))
    assert isinstance(the_error(caught), CorruptError)
    assert "model.w" in str(the_error(caught))


def test_a_file_of_another_save_of_the_same_size_is_found(folder, tmp_path):
    dcp_save(contents(2), dcp.Writer(tmp_path / "d"))
    name, _, _ = place_of(folder, "model.w")
    assert (folder / name).stat().st_size == (tmp_path / "d" / name).stat().st_size
    shutil.copy(tmp_path / "d" / name, folder / name)
    with pytest.raises(CheckpointException) as caught:
        dcp_load(blank(), dcp.Reader(folder))
    assert isinstance(the_error(caught), CorruptError)


def test_frames_can_be_checked_by_an_ordinary_unzip(saved, tmp_path):
    name, start, stop = place_of(saved, "model.w")
    (tmp_path / "frame.zip").write_bytes((saved / name).read_bytes()[start:stop])
    with zipfile.ZipFile(tmp_path / "frame.zip") as archive:
        assert archive.testzip() is None


def broken():
    raise OSError(5, "the card is on fire")


@pytest.mark.parametrize("at", [1, 4, 12])
def test_an_error_in_mid_write_leaves_the_old_checkpoint_as_it_was(folder, at):
    before = folder_bytes(folder)
    with pytest.raises(CheckpointException, match="the card is on fire"):
        dcp_save(contents(2), dcp.Writer(folder), planner=Meddling(broken, at))
    assert folder_bytes(folder) == before
    assert same(dcp_load(blank(), dcp.Reader(folder)), contents(1))
    dcp_save(contents(3), dcp.Writer(folder))  # the next save works and clears up
    assert step_of(folder) == 3
    assert names(folder.parent) == ["c"]


def test_a_writer_whose_save_failed_serves_the_next_one(tmp_path):
    writer = dcp.Writer(tmp_path / "c")
    with pytest.raises(CheckpointException):
        dcp_save(contents(1), writer, planner=Meddling(broken))
    assert not (tmp_path / "c").exists()
    dcp_save(contents(2), writer)
    assert step_of(tmp_path / "c") == 2
    assert tools.verify(tmp_path / "c")["ok"]
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("at", [1, 5, 14])
def test_a_killed_save_leaves_the_old_checkpoint_whole(folder, at):
    before = folder_bytes(folder)
    kill = Meddling(lambda: os.kill(os.getpid(), signal.SIGKILL), at)
    with pytest.raises((AssertionError, EOFError)):
        in_child(lambda: dcp_save(contents(2), dcp.Writer(folder), planner=kill))
    assert folder_bytes(folder) == before
    assert tools.verify(folder)["ok"]
    dcp_save(contents(3), dcp.Writer(folder))
    assert names(folder.parent) == ["c"]  # what the dead save left is gone


def test_a_killed_first_save_is_no_checkpoint(tmp_path):
    kill = Meddling(lambda: os.kill(os.getpid(), signal.SIGKILL), 9)
    with pytest.raises((AssertionError, EOFError)):
        in_child(lambda: dcp_save(contents(2), dcp.Writer(tmp_path / "c"), planner=kill))
    with pytest.raises(CheckpointException):
        dcp_load(blank(), dcp.Reader(tmp_path / "c"))


def titans_step(root):
    """The newest step that torchtitan's manager finds: any name that holds step-N and has a .metadata within."""
    found = [(re.search(r"step-(\d+)", path.name), path / ".metadata") for path in root.iterdir()]
    return max((int(match.group(1)) for match, probe in found if match and probe.is_file()), default=-1)


def count_syncs(root, kill_at=None):
    """Save step-2 in a child that dies at the n-th file it makes durable; how many there were."""
    count, real = 0, os.fsync

    def fsync(file):
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(file)

    def save():
        os.fsync = os.fdatasync = fsync
        dcp_save(contents(2), dcp.Writer(root / "step-2"))
        return count

    return in_child(save)


@pytest.mark.slow
def test_what_a_dead_save_leaves_is_taken_for_no_step_by_torchtitans_search(tmp_path):
    (tmp_path / "whole").mkdir()
    syncs = count_syncs(tmp_path / "whole")
    assert syncs >= 2  # files, then the folder
    for kill_at in {1, syncs - 2, syncs - 1, syncs} - {0}:
        root = tmp_path / f"at-{kill_at}"
        dcp_save(contents(1), dcp.Writer(root / "step-1"))
        with pytest.raises((AssertionError, EOFError)):
            count_syncs(root, kill_at)
        step = titans_step(root)
        assert step in (1, 2)
        assert step_of(root / f"step-{step}") == step  # it is there, and whole


def test_two_jobs_on_one_target_are_told_and_no_mixture_stays(folder):
    def other_job():
        dcp_save(contents(5), dcp.Writer(folder))

    with pytest.raises(CheckpointException) as caught:
        dcp_save(contents(2), dcp.Writer(folder), planner=Meddling(other_job, at=6))
    error = the_error(caught)
    if isinstance(error, CheckpointException):  # the other job's may be the one that is refused
        (error, _) = error.failures[0]
    assert isinstance(error, StorageError)
    assert "another save" in str(error)
    assert str(folder) in str(error)
    assert step_of(folder) in (1, 2, 5)
    assert tools.verify(folder)["ok"]


def test_a_load_that_a_save_overtakes_is_no_mixture(folder):
    class Slow(torch_dcp.DefaultLoadPlanner):
        left = 2

        def resolve_tensor(self, read_item):
            self.left -= 1
            if self.left == 0:
                dcp_save(contents(2), dcp.Writer(folder))
            return super().resolve_tensor(read_item)

    state, failures = blank(), {}
    try:
        dcp_load(state, dcp.Reader(folder), planner=Slow())
    except CheckpointException as caught:
        failures = caught.failures
    if failures:
        assert isinstance(failures[0][0], CheckpointError)
    else:
        assert same(state, contents(1)) or same(state, contents(2))


def test_the_errors_travel_between_ranks():
    for kind in (CheckpointError, CorruptError, LostPeerError):  # torch pickles what a rank raised to send it on
        again = pickle.loads(pickle.dumps(kind("w: block 3 differs")))
        assert (type(again), str(again)) == (kind, "w: block 3 differs")
    full = pickle.loads(pickle.dumps(StorageError("ENOSPC: full", 28)))
    assert (type(full), str(full), full.errno) == (StorageError, "ENOSPC: full", 28)
