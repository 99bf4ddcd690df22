"""The manager of a run's checkpoints: when it saves, what it keeps, what it restores, and what it refuses."""

import logging
import math
import random
import shutil

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CheckpointManager, CorruptError, retention


def state(step):
    return {"weight": torch.full((4,), float(step)), "step": step}


def managed(root, **options):
    return CheckpointManager(root, group=None, **({"background": False} | options))


def test_it_saves_at_multiples_and_by_force_and_restores_the_newest(tmp_path):
    manager = managed(tmp_path / "run", every=10)
    assert manager.restore(state(0)) is None
    saved = [step for step in range(1, 26) if manager.save(step, state(step), {"loss": 1 / step})]
    assert saved == [10, 20] == manager.steps()
    assert manager.save(25, state(25), force=True)
    mine = state(0)
    found = manager.restore(mine)
    assert found.step == found.state["step"] == 25 and found.metrics == {}
    assert mine["weight"].tolist() == [25.0] * 4, "filled in place"
    found = manager.restore(state(0), step=20)
    assert found.step == 20 and found.state["weight"].tolist() == [20.0] * 4 and found.metrics == {"loss": 0.05}


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.slow
def test_what_stays_is_what_the_rules_say_after_each_save(tmp_path, mode):
    """An oracle of sets: the last, the multiples, the best so far among those that are there."""
    draw = random.Random(f"manager {mode}")
    losses = [draw.choice([draw.random(), 0.5, math.nan, None]) for _ in range(24)]
    rules = {"keep_last": 2, "keep_every": 7, "best": "loss", "mode": mode}
    manager, there, step, needed = managed(tmp_path, **rules), {}, 0, False
    for loss in losses:
        step += draw.randint(1, 4)
        manager.save(step, state(step), {} if loss is None else {"loss": loss})
        there[step] = loss
        finite = {s: value for s, value in there.items() if value is not None and not math.isnan(value)}
        target = (min if mode == "min" else max)(finite.values(), default=None)
        best = max((s for s, value in finite.items() if value == target), default=None)
        there = {s: value for s, value in there.items() if s in sorted(there)[-2:] or s % 7 == 0 or s == best}
        needed |= best is not None and best % 7 != 0 and best not in sorted(there)[-2:]
        assert manager.steps() == sorted(there)
        assert manager.best() == best == managed(tmp_path, **rules).best(), "read again from the folders"
    assert needed, "no step stayed by the rule of the best alone"


def files_of(manager, step):
    return {path.stat().st_ino for path in (manager.root / f"step-{step:08d}").glob("*.distcp")}


def test_a_save_that_passes_a_multiple_of_full_every_has_files_of_its_own_also_after_a_restart(tmp_path):
    frozen = {"weight": torch.arange(50_000.0)}
    options = {"every": 2, "incremental": True, "full_every": 5, "keep_last": 20}
    for step in range(1, 17):
        manager = managed(tmp_path, **options)  # each step of another process
        manager.save(step, frozen)
    shared = {step: bool(files_of(manager, step) & files_of(manager, step - 2)) for step in range(4, 17, 2)}
    assert shared == {4: True, 6: False, 8: True, 10: False, 12: True, 14: True, 16: False}
    damaged = next((tmp_path / "step-00000014").glob("*.distcp"))
    with damaged.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff" * 512)
    with pytest.raises(CorruptError):
        manager.restore({"weight": torch.zeros(50_000)}, 12)
    restored = manager.restore({"weight": torch.zeros(50_000)}, 16)
    assert torch.equal(restored.state["weight"], frozen["weight"]), "a fault of the disk stays between full saves"


@pytest.mark.slow
def test_a_save_in_the_background_is_there_after_wait_and_its_removals_too(tmp_path):
    with CheckpointManager(tmp_path, keep_last=1, group=None) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        assert 1 in manager.steps(), "the only whole one stays until the next is"
        manager.wait()
        assert manager.steps() == [2]
        manager.save(3, state(3))
    assert manager.steps() == [3]


@pytest.mark.slow
def test_an_error_of_a_background_save_is_raised_by_the_next_call_and_the_older_one_stays(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1, group=None)
    manager.save(1, state(1))
    manager.wait()

    def progress(done, total):
        raise ValueError("a bar without a terminal")

    manager._options = {"progress": progress}
    manager.save(2, state(2))
    with pytest.raises(CheckpointError, match="a bar without a terminal"):
        manager.save(3, state(3))
    assert manager.steps() == [1]
    manager._options = {}
    assert manager.save(3, state(3))
    manager.close()
    assert manager.steps() == [3]


def test_what_goes_is_told_before_it_goes_and_is_what_to_remove_says(tmp_path, caplog):
    keeps_all = managed(tmp_path)
    for step in (1, 2, 3, 4):
        keeps_all.save(step, state(step), {"loss": abs(step - 2)})
    assert keeps_all.to_remove() == []
    manager = managed(tmp_path, keep_last=1, best="loss")
    assert manager.to_remove() == [1, 3]
    with caplog.at_level(logging.INFO, logger="sixfold.dist_ckpt.retention"):
        manager.save(5, state(5))
    assert f"{tmp_path}: removing steps 1, 3, 4" in caplog.text
    assert manager.steps() == [2, 5]


def test_nothing_else_in_the_root_is_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "plan.txt").write_text("mine too")
    manager = managed(tmp_path, keep_last=1)
    for step in (1, 3, 4):
        manager.save(step, state(step))
    assert manager.steps() == [4]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step-00000002" / "plan.txt").read_text() == "mine too"


def test_a_run_that_went_back_saves_only_after_it_has_discarded_what_came_after(tmp_path):
    manager = managed(tmp_path, keep_last=5)
    for step in (100, 200, 300):
        manager.save(step, state(step))
    restored = manager.restore(state(0), step=100)
    with pytest.raises(
        CheckpointError, match=r"has steps 200, 300, later than step 150.* calls discard_after\(N\) first"
    ):
        manager.save(150, state(150))
    assert manager.steps() == [100, 200, 300], "nothing is lost by the refusal"
    assert manager.discard_after(restored.step) == [300, 200], "the remedy"
    manager.save(150, state(150))
    assert manager.restore(state(0)).step == 150


def test_metrics_are_numbers_of_any_kind_and_come_with_a_folder_that_is_copied(tmp_path):
    np = pytest.importorskip("numpy", reason="needs numpy, whose numbers users have; the package does not")
    manager = managed(tmp_path / "a", best="loss")
    metrics = {"loss": torch.tensor(0.25), "accuracy": np.float32(0.5), "tokens": 7}
    manager.save(1, state(1), metrics)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = managed(tmp_path / "b", best="loss")
    assert copied.best() == 1
    assert copied.restore(state(0), "best").metrics == {"loss": 0.25, "accuracy": 0.5, "tokens": 7.0}
    for wrong in ({"loss": "low"}, {"loss": "0.5"}, {"loss": b"1"}, {"loss": torch.ones(2)}, {"loss": None}, {3: 1.0}):
        with pytest.raises(CheckpointError, match="metrics are numbers by name"):
            manager.save(2, state(2), wrong)
    assert manager.steps() == [1]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    manager = managed(tmp_path, best="loss")
    manager.save(1, state(1))
    manager.save(3, state(3))
    (tmp_path / "step-00000002").mkdir()
    for step in (7, 2):
        with pytest.raises(CheckpointError, match=rf"no whole checkpoint of step {step}; it has steps 1, 3"):
            manager.restore(state(0), step=step)
    for step in ("newest", True, -1, 1.0):
        with pytest.raises(CheckpointError, match="it is an integer >= 0, 'best', or None for the newest"):
            manager.restore(state(0), step=step)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint with a finite 'loss'; it has steps 1, 3"):
        manager.restore(state(0), step="best")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is 0; it is an integer >= 1"),
        ({"every": 2.5}, "every is 2.5"),
        ({"keep_last": 0}, "keep_last is 0; it is an integer >= 1"),
        ({"keep_last": True}, "keep_last is True"),
        ({"keep_every": 10}, "keep_every is 10 and keep_last None, which keeps all"),
        ({"full_every": 10}, "full_every is 10 and incremental False: each save is full"),
        ({"full_every": 0, "incremental": True}, "full_every is 0; it is an integer >= 1"),
        ({"mode": "lowest"}, "best is None, mode 'lowest'; .* 'min' or 'max'"),
        ({"best": True}, "best is True, mode 'min'; the name of a metric"),
        ({"best": ["loss"]}, r"best is \['loss'\], mode 'min'; the name of a metric"),
        ({"content_metadata": {"mine": 1}}, "content_metadata is no option of a manager"),
        ({"check_finit": True}, "check_finit is no option of a manager; those of save are .*check_finite"),
    ],
)
def test_rules_that_mean_nothing_are_refused(tmp_path, options, words):
    with pytest.raises(CheckpointError, match=words):
        CheckpointManager(tmp_path, **options)


def test_best_without_a_metric_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="make it with best='loss'"):
        managed(tmp_path).best()


def test_a_checkpoint_under_another_name_is_no_reason_to_begin_anew(tmp_path):
    dist_ckpt.save(state(7), tmp_path / "step-7", group=None)
    with pytest.raises(CheckpointError, match="whose name has other zeros than step-00000007"):
        managed(tmp_path).restore(state(0))


@pytest.mark.slow
def test_an_exception_in_the_block_passes_and_the_save_is_not_lost(tmp_path):
    with pytest.raises(ZeroDivisionError), CheckpointManager(tmp_path, group=None) as manager:
        manager.save(1, state(1))
        1 / 0  # noqa: B018
    manager.wait()
    assert manager.steps() == [1]


def test_a_symlink_keeps_its_step_and_prune_takes_further_steps_to_keep(tmp_path):
    manager = managed(tmp_path)
    for step in range(1, 7):
        manager.save(step, state(step))
    (tmp_path / "good").symlink_to("step-00000002")
    for wrong in (["4"], [4.0], [True], 4, "4"):
        with pytest.raises(CheckpointError, match=r"keep is .*it holds steps, integers >= 0"):
            retention.prune(tmp_path, keep_last=1, keep=wrong)
    assert manager.steps() == [1, 2, 3, 4, 5, 6]
    assert retention.prune(tmp_path, keep_last=1, keep=[4]) == [retention.step_path(tmp_path, s) for s in (1, 3, 5)]
    assert manager.steps() == [2, 4, 6]


def test_a_relative_root_stays_where_it_was_when_the_process_goes_to_another_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    manager = managed("run", keep_last=1)
    manager.save(1, state(1))
    monkeypatch.chdir(tmp_path / "elsewhere")
    manager.save(2, state(2))
    assert manager.steps() == [2] and manager.restore(state(0)).step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "run"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_best_is_looked_up_again_where_another_process_went_back_and_saved_the_same_step(tmp_path):
    watching, trainer = managed(tmp_path, best="loss"), managed(tmp_path)
    for step, loss in ((1, 0.5), (2, 0.1)):
        trainer.save(step, state(step), {"loss": loss})
    assert watching.best() == 2
    trainer.discard_after(1)
    trainer.save(2, state(2), {"loss": 0.9})
    assert watching.best() == 1 and watching.restore(state(0), "best").metrics == {"loss": 0.5}


def test_options_reach_the_save(tmp_path):
    manager = managed(tmp_path, check_finite=True)
    with pytest.raises(CheckpointError, match="weight"):
        manager.save(1, {"weight": torch.tensor([math.nan])})
    assert manager.steps() == []


def test_what_restore_returns_can_be_saved_again(tmp_path):
    manager = managed(tmp_path)
    manager.save(1, state(1), {"loss": 0.5})
    restored = manager.restore(state(0))
    assert restored.state.keys() == {"weight", "step"} and restored.metrics == {"loss": 0.5}
    assert manager.save(2, restored.state)


@pytest.mark.parametrize("metrics", [torch.tensor(0.5), torch.ones(2), 0.5, 0, [("loss", 0.5)], {"loss": 10**400}])
def test_metrics_that_are_no_numbers_by_name_are_a_typed_error(tmp_path, metrics):
    with pytest.raises(CheckpointError, match="metrics are numbers by name"):
        managed(tmp_path).save(1, state(1), metrics)


def test_a_loss_with_a_graph_and_arrays_of_one_element_are_numbers(tmp_path, recwarn):
    np = pytest.importorskip("numpy", reason="needs numpy, whose numbers users have; the package does not")
    manager = managed(tmp_path)
    loss = torch.nn.Parameter(torch.tensor(3.0)) * 0.5
    manager.save(np.int64(1), state(1), {"loss": loss, "norm": np.array([0.5]), "scale": torch.full((1, 1), 0.25)})
    assert manager.restore(state(0)).metrics == {"loss": 1.5, "norm": 0.5, "scale": 0.25}
    assert dist_ckpt.load_content_metadata(tmp_path / "step-00000001")["step"].__class__ is int
    assert not recwarn.list


def test_metrics_without_the_one_that_is_best_are_told(tmp_path):
    manager = managed(tmp_path, best="val_loss", keep_last=1)
    with pytest.warns(UserWarning, match="metrics without 'val_loss': such a checkpoint is never the best"):
        manager.save(1, state(1), {"loss": 0.5})


def test_to_remove_leaves_out_what_a_symlink_keeps(tmp_path):
    keeps_all = managed(tmp_path)
    for step in (1, 2, 3):
        keeps_all.save(step, state(step))
    (tmp_path / "good").symlink_to("step-00000001")
    manager = managed(tmp_path, keep_last=1)
    assert manager.to_remove() == [2]
    manager.save(4, state(4))
    assert manager.steps() == [1, 4]


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def test_a_checkpoint_whose_metrics_are_damaged_stays_and_the_run_goes_on(tmp_path):
    first = managed(tmp_path, best="loss")
    for step in (1, 2):
        first.save(step, state(step), {"loss": 1 / step})
    flipped(tmp_path / "step-00000001" / "common.pt")
    manager = managed(tmp_path, best="loss", keep_last=1)
    for step in (3, 4):
        with pytest.warns(UserWarning, match="step 1 stays, since its metrics cannot be read: .*crc32"):
            manager.save(step, state(step), {"loss": 1.0})
    assert manager.steps() == [1, 2, 4]
    for ask in (manager.best, lambda: manager.restore(state(0), "best")):
        with pytest.raises(CheckpointError, match=r"step-00000001/common\.pt.*crc32"):
            ask()


class Args:
    """What a trainer keeps beside its tensors."""


def test_classes_that_restore_is_given_do_for_the_metrics_beside_them(tmp_path):
    saved = state(1) | {"args": Args()}
    with torch.serialization.safe_globals([Args]):
        for step in (1, 2):
            managed(tmp_path).save(step, saved, {"loss": step})
    manager = managed(tmp_path, best="loss", keep_last=1)
    restored = manager.restore(state(0), safe_globals=[Args])
    assert restored.step == 2 and restored.metrics == {"loss": 2.0}
    manager.save(3, state(3), {"loss": 3.0})
    assert manager.steps() == [1, 3]


def test_a_newest_folder_that_lost_a_file_is_told_when_an_older_one_is_restored(tmp_path, caplog):
    manager = managed(tmp_path)
    for step in (1, 2):
        manager.save(step, state(step))
    (tmp_path / "step-00000002" / "common.pt").unlink()
    assert manager.restore(state(0)).step == 1
    assert "step 2 is no whole checkpoint, and is passed over" in caplog.text


def test_a_run_whose_only_checkpoints_are_damaged_does_not_begin_anew(tmp_path):
    manager = managed(tmp_path)
    for step in (1, 2):
        manager.save(step, {"w": torch.ones(5)})
    for data in tmp_path.rglob("common.pt"):
        data.unlink()
    for look in (manager.latest, lambda: manager.restore({"w": torch.zeros(5)})):
        with pytest.raises(CorruptError, match=r"no whole checkpoint, and step 2 was one: .*move the folder away"):
            look()
    for folder in list(tmp_path.iterdir()):
        folder.rename(tmp_path.parent / f"away-{folder.name}")
    assert manager.latest() is None


def test_a_run_goes_on_saving_though_all_that_it_could_link_is_damaged(tmp_path):
    manager = managed(tmp_path, incremental=True)
    for step in (1, 2):
        manager.save(step, state(step))
    for data in tmp_path.rglob("common.pt"):
        data.unlink()
    manager.save(3, state(3))
    assert manager.steps() == [3]
    assert manager.restore(state(0)).step == 3


def test_a_folder_of_hugging_face_under_a_name_of_the_run_is_not_removed(tmp_path):
    tensors = pytest.importorskip("safetensors.torch", reason="needs safetensors, as the trainers of others write")
    theirs = tmp_path / "checkpoint-500"
    theirs.mkdir()
    tensors.save_file({"weight": torch.ones(4)}, theirs / "model.safetensors")
    for name in ("config.json", "trainer_state.json", "optimizer.pt"):
        (theirs / name).write_text("{}")
    manager = managed(tmp_path, name="checkpoint-{step}", keep_last=1)
    for step in (600, 700):
        manager.save(step, state(step))
    assert manager.steps() == [700]
    assert len(list(theirs.iterdir())) == 4


def test_a_root_by_way_of_a_folder_that_is_not_there_is_where_it_was_saved(tmp_path):
    manager = managed(tmp_path / "logs" / ".." / "run", keep_last=1)
    for step in (1, 2):
        manager.save(step, state(step))
    assert manager.restore(state(0)).step == 2 and manager.steps() == [2]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]
