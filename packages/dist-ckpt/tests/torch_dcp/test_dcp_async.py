"""``torch.distributed.checkpoint.async_save`` through ``dcp.Writer``, in a thread: the values are those at the call."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import Meddling, contents, quiet, step_of
from dist_ckpt_helpers import folder_bytes, names
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from sixfold.dist_ckpt import dcp, retention, tools

BLOCKING = StagingOptions(False, False, False, False)


def async_save(state, writer, **options):
    with quiet():
        return torch_dcp.async_save(state, storage_writer=writer, **options)


def ended(response, timeout_s=30):
    """A future, or with a stager that goes on after the call torch's pair of them."""
    with quiet():
        return getattr(response, "upload_completion", response).result(timeout_s)


def test_it_gives_a_future_and_what_lies_there_afterwards_is_whole(tmp_path):
    response = async_save(contents(), dcp.Writer(tmp_path / "c"))
    response.result(30)  # the usual code waits so
    assert step_of(tmp_path / "c") == 1
    assert tools.verify(tmp_path / "c")["ok"]


@pytest.mark.parametrize("kind", ["torch's default", "blocking", "a kept one"])
def test_the_values_are_those_at_the_call_whoever_stages_them(tmp_path, kind):
    stager = {
        "torch's default": lambda: None,
        "blocking": BlockingAsyncStager,
        "a kept one": lambda: DefaultStager(BLOCKING),
    }[kind]()
    state, go_on = contents(), threading.Event()
    waits = Meddling(lambda: go_on.wait(30), at=1)
    response = async_save(state, dcp.Writer(tmp_path / "c"), planner=waits, async_stager=stager)
    for tensor in (state["model"]["w"], state["model"]["half"], state["model"]["layers"][0]["b"]):
        tensor.zero_()
    assert not (tmp_path / "c").exists()
    go_on.set()
    ended(response)
    assert step_of(tmp_path / "c") == 1  # of all leaves alike
    if stager is not None:
        stager.close()


def test_the_old_checkpoint_lies_there_until_the_new_one_does(tmp_path):
    ended(async_save(contents(1), dcp.Writer(tmp_path / "c")))
    before, go_on = folder_bytes(tmp_path / "c"), threading.Event()
    response = async_save(contents(2), dcp.Writer(tmp_path / "c"), planner=Meddling(lambda: go_on.wait(30), at=9))
    assert folder_bytes(tmp_path / "c") == before
    go_on.set()
    ended(response)
    assert step_of(tmp_path / "c") == 2
    assert names(tmp_path) == ["c"]


def test_one_writer_and_one_stager_serve_step_after_step(tmp_path):
    writer, stager = dcp.Writer(tmp_path / "unused"), DefaultStager(BLOCKING)
    for step in (1, 2, 3):
        path = retention.step_path(tmp_path, step)
        ended(async_save(contents(step), writer, checkpoint_id=str(path), async_stager=stager))
    stager.close()
    assert [step_of(path) for _, path in retention.checkpoints(tmp_path)] == [1, 2, 3]


def test_an_error_in_the_thread_comes_out_of_the_future(tmp_path):
    def broken():
        raise OSError(5, "the card is on fire")

    response = async_save(contents(), dcp.Writer(tmp_path / "c"), planner=Meddling(broken))
    with pytest.raises(torch_dcp.CheckpointException, match="the card is on fire"):
        ended(response)
    assert not (tmp_path / "c").exists()
    ended(async_save(contents(2), dcp.Writer(tmp_path / "c")))
    assert step_of(tmp_path / "c") == 2


def test_two_saves_at_once_to_two_folders_do_not_meet(tmp_path):
    go_on = threading.Event()
    first = async_save(contents(1), dcp.Writer(tmp_path / "a"), planner=Meddling(lambda: go_on.wait(30), at=4))
    second = async_save(contents(2), dcp.Writer(tmp_path / "b"))
    ended(second)
    assert step_of(tmp_path / "b") == 2
    go_on.set()
    ended(first)
    assert (step_of(tmp_path / "a"), step_of(tmp_path / "b")) == (1, 2)


def test_a_tensor_that_lies_at_two_places_is_saved_at_both(tmp_path):
    tied = torch.arange(6.0)
    response = async_save({"embed": tied, "head": tied, "rows": tied[2:4]}, dcp.Writer(tmp_path / "c"))
    tied.zero_()
    ended(response)
    found = {"embed": torch.zeros(6), "head": torch.zeros(6), "rows": torch.zeros(2)}
    with quiet():
        torch_dcp.load(found, checkpoint_id=str(tmp_path / "c"))
    assert [found[key].tolist() for key in ("embed", "head", "rows")] == [[0, 1, 2, 3, 4, 5]] * 2 + [[2, 3]]
