"""A checkpoint that was damaged after it was saved: the run goes on from the one before, and says so in one line."""

import shutil
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, lines, losses

from sixfold.dist_ckpt import CorruptError, StorageError, retention
from sixfold.gpt import ConfigError, TrainError, train
from sixfold.gpt.checkpoints import starting_point as start
from sixfold.gpt.checkpoints import training_state

STEPS = ("train.steps=3", "checkpoint.every=1", "checkpoint.keep=3", "train.global_batch_size=4")


def flip(path, place):
    """Change every bit of the byte at a share ``place`` of a file."""
    data = bytearray(path.read_bytes())
    at = int(place * (len(data) - 1))
    data[at] ^= 0xFF
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "a truncated file": lambda folder: cut(tensors(folder)),
    "flipped bytes of tensors": lambda folder: flip(tensors(folder), 0.5),
    "flipped bytes of common data": lambda folder: flip(folder / "common.pt", 0.5),
    "flipped bytes of the index": lambda folder: flip(folder / ".metadata", 0.5),
    "a missing file": lambda folder: tensors(folder).unlink(),
    "missing metadata": lambda folder: (folder / ".metadata").unlink(),
    "missing metadata.json": lambda folder: (folder / "metadata.json").unlink(),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("?")),
}


DEEP = ("flipped bytes of tensors",)  # told by the checksums of a load alone


def tensors(folder):
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three steps with a checkpoint of each."""
    config = tiny_config(tmp_path_factory.mktemp("whole"), *STEPS)
    train(config)
    return config


@pytest.fixture
def copy(whole, tmp_path):
    """The same run elsewhere, to be damaged; its folder of checkpoints."""
    config = tiny_config(tmp_path, *STEPS)
    shutil.copytree(whole.run.dir, config.run.dir)
    return config, Path(config.run.dir) / "checkpoints"


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name not in DEEP])
@pytest.mark.slow
def test_damage_is_seen_at_the_start_with_the_file_that_has_it(copy, damage):
    _, root = copy
    folder = retention.step_path(root, 3)
    assert start._damage(folder) == ""
    DAMAGE[damage](folder)
    assert "step-00000003" in start._damage(folder)


@pytest.mark.parametrize("damage", ["a truncated file", "a file in its place", *DEEP])
@pytest.mark.slow
def test_the_run_goes_on_from_the_checkpoint_before_and_ends_as_it_would_have(copy, whole, damage, capsys):
    config, root = copy
    DAMAGE[damage](retention.step_path(root, 3))
    result = train(config)
    assert result.step == 3
    [resume] = lines(config, "resume")
    [damaged] = lines(config, "damaged")
    assert (resume["step"], damaged["step"]) == (2, 3)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("sixfold: the checkpoint of step 3 is damaged and was renamed to damaged-step-00000003-")
    assert line.endswith("; the run goes on from step 2") and "step-00000003" in damaged["why"]
    assert losses(config)[-1] == losses(whole)[-1]
    assert_same_tensors(final_tensors(config), final_tensors(whole))
    assert Path(damaged["checkpoint"]).exists(), "nothing is deleted"


@pytest.mark.slow
def test_what_was_loaded_in_part_leaves_no_trace_in_initial_weights_without_optimizer_state(tmp_path, whole):
    config = tiny_config(tmp_path, *STEPS, "checkpoint.save_initial=true")
    train(tiny_config(tmp_path, *STEPS, "checkpoint.save_initial=true", "train.steps=1"))
    DAMAGE["flipped bytes of tensors"](retention.step_path(Path(config.run.dir) / "checkpoints", 1))
    train(config)
    assert [entry["step"] for entry in lines(config, "resume")] == [0]
    assert losses(config)[1:] == losses(whole)


@pytest.mark.slow
def test_two_damaged_checkpoints_are_two_lines(copy, capsys):
    config, root = copy
    DAMAGE["flipped bytes of tensors"](retention.step_path(root, 3))
    DAMAGE["a truncated file"](retention.step_path(root, 2))
    assert train(config).step == 3
    assert [entry["step"] for entry in lines(config, "damaged")] == [3, 2]
    assert [entry["step"] for entry in lines(config, "resume")] == [1]
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.slow
def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(copy):
    config, root = copy
    DAMAGE["flipped bytes of tensors"](retention.step_path(root, 3))
    assert train(tiny_config(Path(config.run.dir).parent, *STEPS, "train.steps=4", "checkpoint.keep=1")).step == 4
    assert [step for step, _ in retention.checkpoints(root)] == [4]


@pytest.mark.parametrize("damage", ["a missing file", "flipped bytes of tensors"])
@pytest.mark.slow
def test_without_a_good_checkpoint_nothing_is_begun_anew(copy, damage):
    config, root = copy
    for step in (1, 2, 3):
        DAMAGE[damage](retention.step_path(root, step))
    before = sorted(root.iterdir())
    with pytest.raises(TrainError, match=r"holds no whole checkpoint; the newest is damaged: .*step-00000003 away"):
        train(config)
    assert sorted(root.iterdir()) == before


def test_an_error_that_blames_no_file_and_a_system_that_lets_nobody_see_set_nothing_aside(copy, monkeypatch):
    config, root = copy
    before = sorted(root.iterdir())

    def refuse(error):
        def call(*args, **options):
            raise error

        return call

    with monkeypatch.context() as patch:
        patch.setattr(
            training_state, "load", refuse(CorruptError("the ranks see different checkpoints under this path"))
        )
        with pytest.raises(CorruptError, match="the ranks see different"):
            train(config)
    monkeypatch.setattr(start.dist_ckpt, "load_tensors_metadata", refuse(StorageError("Stale file handle", 116)))
    with pytest.raises(StorageError, match="Stale"):
        train(config)
    assert sorted(root.iterdir()) == before


def test_never_sees_a_damaged_checkpoint_too(copy):
    config, root = copy
    for step in (1, 2):
        shutil.rmtree(retention.step_path(root, step))
    DAMAGE["a missing file"](retention.step_path(root, 3))
    with pytest.raises(ConfigError, match=r'"never" and .*step-00000003 is there'):
        train(tiny_config(Path(config.run.dir).parent, *STEPS, "checkpoint.resume=never"))
