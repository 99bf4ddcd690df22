"""Retention: only complete checkpoints count, and pruning keeps what the rule says."""

import errno
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import flip_byte, one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, MismatchError, StorageError, retention, strategies, tools
from sixfold.dist_ckpt.strategies import base


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "c"
    dist_ckpt.save({"it": 1}, folder)
    return folder


def make(root, model, steps):
    for step in steps:
        shutil.copytree(model, retention.step_path(root, step))


def steps_of(root):
    return [step for step, _ in retention.checkpoints(root)]


@pytest.mark.parametrize("step", [-1, "7", 1.0, True])
def test_a_step_is_an_integer_from_zero_on(tmp_path, step):
    with pytest.raises(dist_ckpt.CheckpointError, match=r"step is .*; it is an integer >= 0"):
        retention.step_path(tmp_path, step)


def test_step_paths_have_eight_digits_and_more_if_need_be(tmp_path):
    assert retention.step_path("root", 1000).as_posix() == "root/step-00001000"
    assert retention.step_path(tmp_path, 10**9).name == "step-1000000000"
    with pytest.raises(CheckpointError):
        retention.step_path("root", -1)


def test_checkpoints_are_sorted_by_step_and_latest_is_the_last(tmp_path, model):
    make(tmp_path, model, [100, 5, 10**9])
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes.txt").touch()
    assert retention.checkpoints(tmp_path) == [(s, retention.step_path(tmp_path, s)) for s in (5, 100, 10**9)]
    assert retention.latest(tmp_path) == retention.step_path(tmp_path, 10**9)


def test_no_root_and_an_empty_one_have_none(tmp_path):
    assert retention.checkpoints(tmp_path / "none") == []
    assert retention.latest(tmp_path) is None
    assert retention.prune(tmp_path, keep_last=1) == []


@pytest.mark.parametrize("lost", ["metadata.json", ".metadata", "common.pt", "integrity.json"])
def test_incomplete_folders_are_not_listed_and_not_pruned(tmp_path, model, lost):
    make(tmp_path, model, [1, 2, 3])
    (retention.step_path(tmp_path, 3) / lost).unlink()
    assert steps_of(tmp_path) == [1, 2]
    assert retention.latest(tmp_path) == retention.step_path(tmp_path, 2)
    assert retention.prune(tmp_path, keep_last=1) == [retention.step_path(tmp_path, 1)]
    assert retention.step_path(tmp_path, 3).exists()


def test_digests_are_not_looked_at(tmp_path, model):
    make(tmp_path, model, [1])
    flip_byte(retention.step_path(tmp_path, 1) / "common.pt", 100)
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, None, [60]),
        (3, None, [40, 50, 60]),
        (9, None, [10, 20, 30, 40, 50, 60]),
        (1, 20, [20, 40, 60]),
        (2, 30, [30, 50, 60]),
        (0, 30, [30, 60]),
    ],
)
def test_prune_keeps_the_last_and_the_multiples(tmp_path, model, keep_last, keep_every, kept):
    steps = [10, 20, 30, 40, 50, 60]
    make(tmp_path, model, steps)
    deleted = retention.prune(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert deleted == [retention.step_path(tmp_path, s) for s in steps if s not in kept]
    assert steps_of(tmp_path) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{s:08d}" for s in kept]


def test_what_a_killed_prune_left_is_removed_by_the_next(tmp_path, model):
    make(tmp_path, model, [1])
    (tmp_path / ".step-00000000.gone-0123abcd").mkdir()
    assert retention.prune(tmp_path, keep_last=1) == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_a_killed_prune_leaves_is_no_step_for_trainers_that_look_by_torchtitans_rule(tmp_path, model, monkeypatch):
    make(tmp_path, model, [1, 2])
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    retention.prune(tmp_path, keep_last=1)
    monkeypatch.undo()
    found = [re.search(r"step-(\d+)", path.parent.name) for path in tmp_path.glob("*/.metadata")]
    assert [int(match.group(1)) for match in found if match] == [2]
    assert len(list(tmp_path.iterdir())) == 2
    retention.prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_folders_of_the_user_that_only_begin_like_ours_are_left_alone(tmp_path, model):
    make(tmp_path, model, [1, 2])
    ends = ("mine", "2024", "before-the-change", "0123456789abcdef0", "0123")
    theirs = [f".step-00000001.{kind}-{end}" for kind in ("old", "tmp", "job", "gone") for end in ends]
    theirs += [".step.00000001.gone-mine", ".step.00000009.gone-mine"]
    for name in theirs:
        (tmp_path / name / "notes").mkdir(parents=True)
        age(tmp_path / name, 100)
    assert retention.prune(tmp_path, keep_last=1) == [retention.step_path(tmp_path, 1)]
    assert retention.checkpoints(tmp_path) == [(2, retention.step_path(tmp_path, 2))]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*theirs, "step-00000002"])


@pytest.mark.parametrize("name", ["best", "step-00000006"])
@pytest.mark.parametrize("to", ["relative", "absolute", "by another"])
def test_a_step_that_a_link_leads_to_stays(tmp_path, model, name, to):
    make(tmp_path, model, [1, 2, 3, 4])
    where = {"relative": "step-00000001", "absolute": tmp_path / "step-00000001", "by another": "step-00000002"}[to]
    (tmp_path / name).symlink_to(where)
    if to == "by another":
        shutil.rmtree(tmp_path / "step-00000002")
        (tmp_path / "step-00000002").symlink_to("step-00000001")
    (tmp_path / "elsewhere").symlink_to("/")
    retention.prune(tmp_path, keep_last=1)
    assert dist_ckpt.load({"it": 0}, tmp_path / name) == {"it": 1}
    assert not (tmp_path / "step-00000003").exists()


def test_a_link_to_a_folder_that_is_gone_keeps_nothing_and_hinders_nothing(tmp_path, model):
    make(tmp_path, model, [1, 2])
    (tmp_path / "moved").symlink_to("/no/such/run/step-00000001")
    assert [path.name for path in retention.prune(tmp_path, keep_last=1)] == ["step-00000001"]
    assert (tmp_path / "moved").is_symlink()


def test_an_old_step_that_is_a_link_goes_and_keeps_nothing(tmp_path, model):
    make(tmp_path, model, [1, 3])
    (tmp_path / "step-00000002").symlink_to("step-00000001")
    deleted = retention.prune(tmp_path, keep_last=1)
    assert [path.name for path in deleted] == ["step-00000001", "step-00000002"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


DEAD = "00000000deadbeef"  # a save id


def age(folder, hours):
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 3600 * hours,) * 2)


def test_what_dead_saves_of_older_steps_left_is_removed(tmp_path, model):
    make(tmp_path, model, (2, 4, 6))
    for step in (1, 3, 5, 7):
        for kind in ("tmp", "job"):
            (tmp_path / f".step-{step:08d}.{kind}-{DEAD}").mkdir()
            age(tmp_path / f".step-{step:08d}.{kind}-{DEAD}", 1.1)
    retention.prune(tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".step-00000005.job-{DEAD}",
        f".step-00000005.tmp-{DEAD}",
        f".step-00000007.job-{DEAD}",
        f".step-00000007.tmp-{DEAD}",
        "step-00000004",
        "step-00000006",
    ], "a save of step 5 or 7 may be in flight"
    for folder in tmp_path.glob(".*"):
        age(folder, 24.1)
    retention.prune(tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("alive", ["__0_0.distcp", "checkpoint/__1_0.distcp", None])
def test_a_save_of_an_earlier_step_whose_files_or_board_move_is_left_alone(tmp_path, model, alive):
    make(tmp_path, model, (2, 4))
    staging, board = tmp_path / f".step-00000001.tmp-{DEAD}", tmp_path / f".step-00000001.job-{DEAD}"
    for folder, name in ((staging, "checkpoint/x"), (staging, "__0_0.distcp"), (board, "alive-0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    if alive is not None:
        (staging / alive).touch()
    age(staging, 2)
    age(board, 2)
    os.utime(board / "alive-0" if alive is None else staging / alive)
    retention.prune(tmp_path, keep_last=1)
    assert staging.exists()
    assert board.exists()
    age(staging, 2)
    age(board, 2)
    retention.prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("step", [5, 10])
def test_a_prune_in_the_middle_of_a_save_leaves_it_alone(tmp_path, model, step):
    make(tmp_path, model, (8, 9))
    pruned = []

    def progress(done, total):
        pruned.append(retention.prune(tmp_path, keep_last=2))

    dist_ckpt.save({"w": one("w", torch.ones(9))}, retention.step_path(tmp_path, step), group=None, progress=progress)
    assert pruned
    assert steps_of(tmp_path) == sorted([step, 8, 9])


def test_checkpoints_of_a_registered_format_count_and_are_pruned(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_registered", dict(base._registered))
    strategies.register("save_sharded", "texts", 1, SaveTexts("texts", 1))
    strategies.register("load_sharded", "texts", 1, LoadTexts())
    for number in (1, 2):
        dist_ckpt.save({"it": number}, retention.step_path(tmp_path, number), ("texts", 1), group=None)
    assert steps_of(tmp_path) == [1, 2]
    assert retention.latest(tmp_path) == retention.step_path(tmp_path, 2)
    found = tools.verify(retention.latest(tmp_path))
    assert (found["ok"], found["checked"], found["checked_bytes"]) == (True, False, 0)
    (retention.step_path(tmp_path, 2) / "whole").unlink()
    assert steps_of(tmp_path) == [1]
    assert retention.prune(tmp_path, keep_last=0) == [retention.step_path(tmp_path, 1)]


class SaveTexts(strategies.SaveShardedStrategy):
    def save(self, sharded_state_dict, checkpoint_dir):
        (checkpoint_dir / "whole").touch()


class LoadTexts(strategies.LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend):
        pass

    def check_version_compatibility(self, loaded_version):
        pass

    def load(self, sharded_state_dict, checkpoint_dir):
        return {}

    def load_tensors_metadata(self, checkpoint_dir):
        if not (checkpoint_dir / "whole").exists():
            raise dist_ckpt.CorruptError(f"{checkpoint_dir}/whole is missing")
        return {}


def test_a_step_whose_replacement_was_cut_short_still_counts(tmp_path, model):
    make(tmp_path, model, [1, 2])
    retention.step_path(tmp_path, 2).rename(tmp_path / ".step-00000002.old-0123456789abcdef")
    assert steps_of(tmp_path) == [1, 2]
    assert dist_ckpt.load_common_state_dict(retention.latest(tmp_path)) == {"it": 1}
    assert len(retention.prune(tmp_path, keep_last=0)) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_newer_folder_of_a_replacement_that_was_cut_short_stays_while_the_step_opens_by_it(tmp_path, model):
    """Where the system cannot swap two folders: both renames of a commit, and a kill between them."""
    make(tmp_path, model, [1, 5])
    step = retention.step_path(tmp_path, 5)
    old, staging = (tmp_path / f".step-00000005.{kind}-0123456789abcdef" for kind in ("old", "tmp"))
    dist_ckpt.save({"it": 2}, staging / "checkpoint", group=None)
    step.rename(old)
    age(staging, 48)
    age(old, 49)
    assert dist_ckpt.load_common_state_dict(step) == {"it": 2}
    retention.prune(tmp_path, keep_last=1)
    assert dist_ckpt.load_common_state_dict(step) == {"it": 2}
    make(tmp_path, model, [5])
    retention.prune(tmp_path, keep_last=1)
    assert not staging.exists()


@pytest.mark.parametrize("step", [1, 9])
def test_a_folder_that_the_system_does_not_let_us_look_into_is_not_taken_for_an_old_one(
    tmp_path, model, monkeypatch, step
):
    make(tmp_path, model, [5])
    staging = tmp_path / f".step-{step:08d}.tmp-0123456789abcdef"
    (staging / "checkpoint").mkdir(parents=True)
    plain = os.scandir

    def refuse(path):
        if path == str(staging) or path == staging:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", refuse)
    retention.prune(tmp_path, keep_last=1)
    monkeypatch.undo()
    assert (staging / "checkpoint").exists()


def test_a_folder_that_cannot_be_moved_is_a_typed_error_and_stays(tmp_path, model, monkeypatch):
    make(tmp_path, model, [1, 2])

    def refuse(source, target):
        raise PermissionError(errno.EACCES, "Permission denied", str(source))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StorageError, match=r"Permission denied: .*step-00000001"):
        retention.prune(tmp_path, keep_last=1)
    assert steps_of(tmp_path) == [1, 2]


def test_a_system_that_fails_while_a_prune_looks_at_what_is_left_is_a_typed_error(tmp_path, model, monkeypatch):
    make(tmp_path, model, [1])
    (tmp_path / ".step-00000002.job-00000000deadbeef").mkdir()
    age(tmp_path / ".step-00000002.job-00000000deadbeef", 48)

    def fail(folder, pattern):
        raise OSError(errno.EIO, "Input/output error", str(folder))

    monkeypatch.setattr(Path, "glob", fail)
    with pytest.raises(StorageError, match=r"Input/output error: .*\.step-00000002\.job-00000000deadbeef"):
        retention.prune(tmp_path, keep_last=1)
    assert (tmp_path / ".step-00000002.job-00000000deadbeef").exists()


@pytest.mark.parametrize(
    "options",
    [{"keep_last": -1}, {"keep_last": 1.5}, {"keep_last": True}, {"keep_last": "1"}]
    + [{"keep_last": 1, "keep_every": wrong} for wrong in (0, 2.5, True, "2")],
)
def test_rules_that_cannot_work_are_refused(tmp_path, options):
    with pytest.raises(CheckpointError):
        retention.prune(tmp_path, **options)


def test_a_step_of_a_strategy_that_is_not_registered_is_an_error_of_latest_and_no_none(tmp_path):
    """Before, ``latest`` gave the step below, or None: a run whose script lacks an import began anew."""
    for step in (1, 2):
        dist_ckpt.save({"w": 1}, retention.step_path(tmp_path, step))
    config = retention.step_path(tmp_path, 2) / "metadata.json"
    config.write_text(config.read_text().replace("torch_dist", "mine"))
    with pytest.raises(MismatchError, match=r"step-00000002 is of a strategy that is not registered here: .*mine"):
        retention.latest(tmp_path)
    dist_ckpt.save({"w": 1}, retention.step_path(tmp_path, 3))
    assert retention.latest(tmp_path) == retention.step_path(tmp_path, 3)  # nobody asks below it
    assert [step for step, _ in retention.checkpoints(tmp_path)] == [1, 3]
    retention.prune(tmp_path, keep_last=1)
    assert config.exists()


def test_what_another_library_wrote_under_a_name_of_the_run_is_read_and_never_deleted(tmp_path, model, caplog):
    state = {"w": torch.ones(2)}
    torch_dcp.save(state, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    for step in (2, 3):
        dist_ckpt.save(state, retention.step_path(tmp_path, step))
    torch_dcp.save(state, checkpoint_id=tmp_path / "step-00000004", no_dist=True)
    assert retention.latest(tmp_path) == tmp_path / "step-00000004"
    assert retention.prune(tmp_path, keep_last=1) == [tmp_path / "step-00000002", tmp_path / "step-00000003"]
    assert "step 1 stays: another library wrote it" in caplog.text
    with pytest.raises(CheckpointError, match="step 4 after step 1 was written by another library"):
        retention.discard_after(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]
