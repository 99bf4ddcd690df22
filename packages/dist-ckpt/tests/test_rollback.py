"""A run that goes back to an older step: what prune keeps, what latest is, and what discard_after takes away."""

import os
import shutil
import warnings

import pytest

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, MismatchError, retention
from sixfold.dist_ckpt.stores import MemoryStore


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "c"
    dist_ckpt.save({"it": 1}, folder, group=None)
    return folder


def made(root, model, steps):
    """Saved in this order, a minute apart."""
    for minute, step in enumerate(steps):
        place = retention.step_path(root, step)
        shutil.copytree(model, place)
        for path in place.iterdir():
            os.utime(path, (10**9 + 60 * minute,) * 2)


def steps_of(root):
    return [step for step, _ in retention.checkpoints(root)]


def test_prune_keeps_the_newest_save_of_a_run_that_went_back_and_says_what_to_do(tmp_path, model):
    made(tmp_path, model, [100, 200, 150])
    with pytest.warns(UserWarning, match="step 150 was saved after step 200") as told:
        assert retention.prune(tmp_path, keep_last=1) == [retention.step_path(tmp_path, 100)]
    assert "retention.discard_after(root, step)" in str(told[0].message)
    assert steps_of(tmp_path) == [150, 200]


def test_discard_after_takes_away_what_is_above_and_prune_needs_no_word_then(tmp_path, model):
    made(tmp_path, model, [100, 200, 300])
    found = retention.discard_after(tmp_path, 100)
    assert found == [retention.step_path(tmp_path, step) for step in (300, 200)]
    made(tmp_path, model, [150])
    assert retention.latest(tmp_path) == retention.step_path(tmp_path, 150)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert retention.prune(tmp_path, keep_last=1) == [retention.step_path(tmp_path, 100)]
    assert retention.discard_after(tmp_path, 150) == []


def test_discard_after_a_step_that_is_no_checkpoint_deletes_nothing(tmp_path, model):
    made(tmp_path, model, [100, 200])
    (tmp_path / "step-00000150").mkdir()
    for step in (50, 150):
        with pytest.raises(CheckpointError, match="is no complete checkpoint, so nothing after it is deleted"):
            retention.discard_after(tmp_path, step)
    assert steps_of(tmp_path) == [100, 200]
    assert retention.discard_after(tmp_path, 100) == [retention.step_path(tmp_path, 200)]
    assert (tmp_path / "step-00000150").exists()


def test_steps_of_a_store_are_discarded_too(tmp_path):
    root = MemoryStore("a run in memory")
    for step in (1, 2, 3):
        dist_ckpt.save({"it": step}, retention.step_path(root, step), group=None)
    assert len(retention.discard_after(root, 1)) == 2
    assert steps_of(root) == [1]


def test_latest_names_a_checkpoint_that_it_would_not_count_and_finds_it_once_renamed(tmp_path, model):
    shutil.copytree(model, tmp_path / "step-7")
    with pytest.raises(MismatchError, match="step-7 is a checkpoint whose name has other zeros than") as told:
        retention.latest(tmp_path)
    assert "Rename it to step-00000007" in str(told.value)
    (tmp_path / "step-7").rename(tmp_path / "step-00000007")
    assert retention.latest(tmp_path) == tmp_path / "step-00000007"
    shutil.copytree(model, tmp_path / "step-6")  # an older one is no reason to stop
    assert retention.latest(tmp_path) == tmp_path / "step-00000007"
