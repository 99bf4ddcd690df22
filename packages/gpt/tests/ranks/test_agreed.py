"""What one rank decides for all: the newest checkpoint; and what all must have alike: the configuration."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from run_helpers import JOB_S, final_tensors, lines, losses, run, train_rank

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.dist_ckpt import retention
from sixfold.gpt.checkpoints import training_state
from sixfold.gpt.training import loop


def late_rank(rank: int, ranks: int, text: str, behind: tuple[int, ...]) -> tuple[int, float | None, str]:
    """Train; the file system shows the ranks ``behind`` one checkpoint less than there is."""
    latest = retention.latest

    def older(root):
        newest = latest(root)
        return newest and retention.step_path(root, int(newest.name.removeprefix("step-")) - 1)

    if rank in behind:
        retention.latest = older
    return train_rank(rank, ranks, text)


def clock_rank(rank: int, ranks: int, text: str) -> tuple[int, float | None, str]:
    """Train; by rank 0's clock a save is due from the second step on, by rank 1's at the third and never again."""
    due = {0: lambda step: step >= 2, 1: lambda step: step == 3}[rank]
    loop.Run.save_is_due = lambda run: due(run.progress.step + 1)
    return train_rank(rank, ranks, text)


@pytest.mark.parametrize("layout", ["pp", "dp", "tp"])
@pytest.mark.slow
def test_ranks_with_different_clocks_save_by_time_at_one_step(tmp_path, layout):
    config = tiny_config(tmp_path, "model.num_layers=2", "train.steps=5", f"parallel.{layout}=2")
    ranktest.run_ranks(clock_rank, 2, config.to_toml(), timeout=JOB_S)
    assert [entry["step"] for entry in lines(config, "save")] == [3, 5]


@pytest.mark.slow
def test_the_newest_checkpoint_is_chosen_by_rank_0_for_all(tmp_path):
    first = tiny_config(tmp_path, "train.steps=2", "checkpoint.every=1")
    run(first, 1)
    config = tiny_config(tmp_path, "train.steps=3", "checkpoint.every=1")
    found = ranktest.run_ranks(late_rank, 2, config.to_toml(), (1,), timeout=JOB_S)
    assert [step for step, _, _ in found] == [3, 3]
    assert [entry["step"] for entry in lines(config, "resume")] == [2]
    assert final_tensors(config)


@pytest.mark.slow
def test_init_from_is_resolved_by_rank_0_for_all(tmp_path):
    source = tiny_config(tmp_path, "train.steps=2", "checkpoint.every=1", run="source")
    run(source, 1)
    options = ("train.steps=1", f"checkpoint.init_from={source.run.dir}")
    alone, late = (tiny_config(tmp_path, *options, run=name) for name in ("alone", "late"))
    run(alone, 1)
    ranktest.run_ranks(late_rank, 2, late.to_toml(), (1,), timeout=JOB_S)
    assert lines(late, "step")[0]["loss"] == pytest.approx(lines(alone, "step")[0]["loss"], rel=1e-6)


@pytest.mark.slow
def test_bytes_that_one_rank_finds_damaged_send_all_ranks_to_the_checkpoint_before(tmp_path):
    config = tiny_config(tmp_path, "train.steps=2", "checkpoint.every=1", "train.global_batch_size=4")
    run(config, 1)
    folder = retention.step_path(Path(config.run.dir) / "checkpoints", 2)
    for path in folder.glob("*.distcp"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    found = run(tiny_config(tmp_path, "train.steps=2", "parallel.pp=2", "train.global_batch_size=4"), 2)
    assert [step for step, _, _ in found] == [2, 2]
    assert [entry["step"] for entry in lines(config, "resume")] == [1]
    assert [entry["step"] for entry in lines(config, "damaged")] == [2]
    assert losses(config)[2] == pytest.approx(losses(config)[1], rel=1e-6)


def hidden_rank(rank: int, ranks: int, text: str) -> None:
    """Train; rank 1 never sees what rank 0 chose."""
    training_state.SEEN_S = 0.2
    if rank == 1:
        training_state.dist_ckpt.check_is_distributed_checkpoint = lambda path: False
    train_rank(rank, ranks, text)


@pytest.mark.slow
def test_a_rank_that_never_sees_the_chosen_checkpoint_is_named_within_the_deadline(tmp_path):
    run(tiny_config(tmp_path, "train.steps=1"), 1)
    with pytest.raises(ranktest.RankFailed, match=r"rank 1 does not see .*step-00000001, which rank 0 chose"):
        ranktest.run_ranks(hidden_rank, 2, tiny_config(tmp_path, "train.steps=2").to_toml(), timeout=JOB_S)


def odd_rank(rank: int, ranks: int, text: str) -> None:
    train_rank(rank, ranks, text.replace("lr = 0.003", "lr = 0.004") if rank == 1 else text)


def test_ranks_with_different_configurations_are_refused_with_the_key(tmp_path):
    config = tiny_config(tmp_path, "train.steps=1")
    with pytest.raises(ranktest.RankFailed, match=r"optimizer\.lr is 0\.003 on rank 0 and 0\.004 on rank 1"):
        ranktest.run_ranks(odd_rank, 2, config.to_toml(), timeout=JOB_S)


def rank_on_a_full_disk(rank: int, ranks: int, text: str) -> None:
    """Train; from the save of step 4 on rank 1 can write no file of more than 20 kB."""
    save = training_state.save

    def limited(model, folder, progress, *args, **options):
        if rank == 1 and progress.step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return save(model, folder, progress, *args, **options)

    training_state.save = limited
    train_rank(rank, ranks, text)


@pytest.mark.slow
def test_a_disk_that_is_full_on_one_rank_ends_the_run_and_leaves_the_older_checkpoint_whole(tmp_path):
    config = tiny_config(tmp_path, "train.steps=5", "checkpoint.every=2")
    with pytest.raises(ranktest.RankFailed, match=r"File too large: this rank needs \d+ bytes.*run/checkpoints"):
        ranktest.run_ranks(rank_on_a_full_disk, 2, config.to_toml(), timeout=JOB_S)
    assert [step for step, _ in retention.checkpoints(Path(config.run.dir) / "checkpoints")] == [2]
    assert lines(config, "end")[-1]["reason"] == "error"
    assert [entry["step"] for entry in lines(config, "save")] == [2]
    assert run(config, 2)[0][0] == 5
    assert [entry["step"] for entry in lines(config, "resume")] == [2]
