"""Folders named as users name them: the steps of a run are found, kept and removed under its own names, and no others.

The oracle is the listing of the folder: what stands there, by the names that the trainers of others give.
"""

import os
import shutil

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CheckpointManager, MismatchError, StorageError, retention
from sixfold.dist_ckpt.storage.step_names import StepNames
from sixfold.dist_ckpt.stores import MemoryStore

NAMES = {
    "step-{step}": "step-100",
    "step_{step}": "step_100",
    "iter_{step:07d}": "iter_0000100",
    "checkpoint-{step}": "checkpoint-100",
    "global_step{step}": "global_step100",
    "{step}": "100",
    "run2-{step:03}.ckpt": "run2-100.ckpt",
    "epoch={step:d}-step={step:d}": "epoch=100-step=100",
}


def by_epoch(step):
    return f"epoch{step // 40}-step{step}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "c"
    dist_ckpt.save({"it": 1}, folder, group=None)
    return folder


def state(step):
    return {"weight": torch.full((2,), float(step))}


def managed(root, **options):
    return CheckpointManager(root, group=None, background=False, **options)


@pytest.mark.parametrize(("name", "folder"), [*NAMES.items(), (by_epoch, "epoch2-step100")])
def test_a_run_is_saved_kept_and_restored_under_the_names_that_the_user_gives(tmp_path, model, name, folder):
    for other in ("best-model", "step-99x", "notes", f"{folder}-old", f"x{folder}"):
        shutil.copytree(model, tmp_path / other)
    theirs = set(os.listdir(tmp_path))
    manager = managed(tmp_path, name=name, keep_last=1, keep_every=100)
    for step in (7, 99, 100, 1234, 123_456_789):
        manager.save(step, state(step))
    names = StepNames(name)
    assert set(os.listdir(tmp_path)) - theirs == {folder, names.of(123_456_789)}
    assert theirs <= set(os.listdir(tmp_path)), "nothing of another name is touched"
    assert manager.steps() == [100, 123_456_789] and manager.latest() == 123_456_789
    assert manager.restore(state(0), 100).state["weight"].tolist() == [100.0, 100.0]
    assert manager.discard_after(100) == [123_456_789]
    assert retention.latest(tmp_path, name=name) == retention.step_path(tmp_path, 100, name=name) == tmp_path / folder


def test_what_a_killed_save_and_a_killed_prune_leave_is_removed_under_other_names_too(tmp_path, model):
    shutil.copytree(model, tmp_path / "checkpoint-3")
    end = "0123456789abcdef"
    left = [f".checkpoint-2.tmp-{end}", f".checkpoint-2.job-{end}", ".checkpoint.1.gone-01234567"]
    theirs = [
        f".step-00000002.tmp-{end}",
        f".checkpoint-02.tmp-{end}",
        ".checkpoint-1.backup",
        f".checkpoint.2.tmp-{end}",
    ]
    for folder in (*left, *theirs):
        (tmp_path / folder).mkdir()
        os.utime(tmp_path / folder, (10**9, 10**9))
    retention.prune(tmp_path, keep_last=1, name="checkpoint-{step}")
    assert sorted(os.listdir(tmp_path)) == sorted(["checkpoint-3", *theirs])


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_two_folders_of_one_step_are_an_error_before_anything_is_saved_or_removed(tmp_path, kind):
    root = tmp_path if kind == "folder" else MemoryStore(f"twice {tmp_path}")
    manager = managed(root, name="step_{step}", keep_last=1)
    manager.save(7, state(7))
    other = retention.step_path(root, 7, name="step_{step:06d}")
    dist_ckpt.save(state(70), other, group=None)
    calls = [
        lambda: manager.save(8, state(8)),
        lambda: manager.restore(state(0)),
        lambda: manager.discard_after(7),
        manager.steps,
        lambda: retention.prune(root, keep_last=1, name="step_{step}"),
    ]
    for call in calls:
        with pytest.raises(MismatchError, match="has step 7 twice, in step_7 and in step_000007"):
            call()
    assert dist_ckpt.check_is_distributed_checkpoint(other)
    if kind == "folder":
        assert sorted(os.listdir(tmp_path)) == ["step_000007", "step_7"]
        (tmp_path / "step_000007").rename(tmp_path / "kept")  # the remedy
        assert manager.restore(state(0)).step == 7


def test_a_link_of_another_padding_is_the_same_checkpoint_and_keeps_it(tmp_path, model):
    for step in (1, 2, 3):
        shutil.copytree(model, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-0001").symlink_to("checkpoint-1")
    assert retention.prune(tmp_path, keep_last=1, name="checkpoint-{step}") == [tmp_path / "checkpoint-2"]


@pytest.mark.parametrize("name", ["step-{step:08d}", "step-{step}"])
def test_a_later_step_of_another_padding_is_no_reason_to_go_on_from_an_older_one(tmp_path, model, name):
    shutil.copytree(model, tmp_path / StepNames(name).of(5))
    shutil.copytree(model, tmp_path / "step-007")
    with pytest.raises(MismatchError, match=r"step-007 is a checkpoint whose name has other zeros than step-"):
        managed(tmp_path, name=name).restore(state(0))


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_run_that_begins_beside_checkpoints_of_other_names_is_told_and_finds_them_by_name(tmp_path, kind):
    root = tmp_path if kind == "folder" else MemoryStore(f"other {tmp_path}")
    dist_ckpt.save(state(500), retention.step_path(root, 500, name="checkpoint-{step}"), group=None)
    with pytest.warns(UserWarning, match=r"but checkpoint-500 is one.*name='checkpoint-\{step\}'"):
        assert managed(root).restore(state(0)) is None
    assert managed(root, name="checkpoint-{step}").restore(state(0)).step == 500


def test_a_root_that_is_a_checkpoint_itself_is_told(tmp_path, model):
    shutil.copytree(model, tmp_path / "step-00000007")
    with pytest.warns(UserWarning, match="but the folder itself is one"):
        assert retention.latest(tmp_path / "step-00000007") is None


WRONG = [
    "step-%08d", "step", "", "{step", "{}", "{epoch}-{step}", "runs/{step}", ".{step}", "v2{step}", "{step:x}",
    "{step:,}", "{step:.2e}", "step-{step:08.1}", 7, None, b"step-{step}", lambda step: "last", lambda step: step,
    lambda step: f"step-{step % 1000}", lambda step: f"a/{step}", lambda step: {}[step],
]  # fmt: skip


@pytest.mark.parametrize("name", WRONG, ids=lambda name: name if isinstance(name, str) else type(name).__name__)
def test_a_name_from_which_no_step_can_be_read_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"name is .*; it is a text with \{step\} in it, such as"):
        managed(tmp_path, name=name).save(123_456, state(1))
    with pytest.raises(CheckpointError, match=r"name is .*; it is a text with \{step\} in it, such as"):
        retention.step_path(tmp_path, 123_456, name=name)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_other_files_under_a_name_of_the_run_is_neither_counted_nor_written_over(tmp_path):
    theirs = tmp_path / "checkpoint-500"
    theirs.mkdir()
    (theirs / "trainer_state.json").write_text("{}")
    manager = managed(tmp_path, name="checkpoint-{step}", keep_last=1)
    assert manager.restore(state(0)) is None
    manager.save(499, state(499))
    with pytest.raises(StorageError, match=r"trainer_state\.json"):
        manager.save(500, state(500))
    manager.save(501, state(501))
    assert manager.steps() == [501] and (theirs / "trainer_state.json").read_text() == "{}"
