"""The same run at every layout: losses, initial weights, resume, and a change of layout in between."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt_helpers import plain_losses, tiny_config

import ranktest
from sixfold import dist_ckpt
from sixfold.gpt import TrainConfig
from sixfold.gpt.launch import World

SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def train_rank(rank: int, ranks: int, text: str) -> tuple[int, float | None, str]:
    """One rank of a training job; the result is (step, loss, reason)."""
    from sixfold.gpt.loop import train_in

    store = ranktest.store() if ranks > 1 else None
    world = World(rank=rank, size=ranks, local_rank=rank, store=store, device=torch.device("cpu"))
    result = train_in(TrainConfig.from_text(text), world)
    return result.step, result.loss, result.reason


def run(config: TrainConfig, ranks: int, **options: object) -> list[tuple[int, float | None, str] | None]:
    """Train on ``ranks`` ranks; one rank runs in this process."""
    if ranks == 1:
        return [train_rank(0, 1, config.to_toml())]
    return ranktest.run_ranks(train_rank, ranks, config.to_toml(), **options)


def lines(config: TrainConfig, kind: str) -> list[dict]:
    text = (Path(config.run.dir) / "metrics.jsonl").read_text()
    return [entry for entry in map(json.loads, text.splitlines()) if entry["kind"] == kind]


def losses(config: TrainConfig) -> list[float]:
    return [entry["loss"] for entry in lines(config, "step")]


def final_tensors(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, whole."""
    return dist_ckpt.load_plain_tensors(dist_ckpt.retention.latest(Path(config.run.dir) / "checkpoints"))


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, f"{len(different)} of {len(a)} tensors differ, first {different[:3]}"


def test_one_process_trains_as_a_plain_torch_loop(tmp_path):
    config = tiny_config(tmp_path)
    run(config, 1)
    assert losses(config) == pytest.approx(plain_losses(config, 6), rel=1e-6)


LAYOUTS = [
    (2, ("parallel.pp=2",)),
    (2, ("parallel.pp=2", "parallel.schedule=gpipe")),
    (2, ("parallel.pp=2", "parallel.schedule=naive", "model.tie_embeddings=false")),
    (2, ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.stages_per_rank=2")),
    *[(2, (f"parallel.sharding={sharding}",)) for sharding in SHARDINGS],
    (4, ("parallel.pp=2", "parallel.dp=2")),
]


@pytest.mark.parametrize(("ranks", "overrides"), LAYOUTS, ids=lambda v: ",".join(v) if isinstance(v, tuple) else str(v))
def test_losses_do_not_depend_on_the_layout(tmp_path, ranks, overrides):
    config = tiny_config(tmp_path, *overrides)
    run(config, ranks)
    assert losses(config) == pytest.approx(plain_losses(config, 6), rel=1e-6)


def test_initial_weights_are_bitwise_the_same_at_every_layout(tmp_path):
    def initial(ranks: int, *overrides: str) -> dict[str, torch.Tensor]:
        name = f"run{ranks}{len(overrides)}"
        config = tiny_config(tmp_path, "train.steps=0", "checkpoint.save_initial=true", *overrides, run=name)
        run(config, ranks)
        return final_tensors(config)

    alone = initial(1)
    assert_same_tensors(alone, initial(2, "parallel.pp=2"))
    assert_same_tensors(alone, initial(2))


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ()),
        (2, ("parallel.pp=2",)),
        (2, ("parallel.sharding=optim_grads_params",)),
        (2, ("parallel.sharding=optim",)),
    ],
    ids=["single", "pp2", "zero3", "zero1"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tmp_path, ranks, overrides, precision):
    options = (f"train.precision={precision}", "checkpoint.every=3", *overrides)
    whole = tiny_config(tmp_path, *options, run="whole")
    run(whole, ranks)
    cut = tiny_config(tmp_path, *options, run="cut")
    run(cut, ranks)
    newest = dist_ckpt.retention.step_path(Path(cut.run.dir) / "checkpoints", 6)
    newest.rename(tmp_path / "gone")  # as if the run had died after step 3's checkpoint
    run(cut, ranks)
    assert [entry["step"] for entry in lines(cut, "resume")] == [3]
    assert losses(cut)[6:] == losses(whole)[3:]
    assert_same_tensors(final_tensors(whole), final_tensors(cut))


def killed_after_save(rank: int, ranks: int, text: str) -> None:
    """Train; rank 1 kills itself with SIGKILL at its first step after the checkpoint of step 3."""
    import sixfold.gpt.loop as loop

    step = loop.Run.step

    def dying(self: loop.Run, stop: bool) -> bool:
        if rank == 1 and self.progress.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, stop)

    loop.Run.step = dying  # type: ignore[method-assign]
    train_rank(rank, ranks, text)


def test_killed_as_a_pipeline_and_resumed_as_sharded_data_parallel(tmp_path):
    config = tiny_config(tmp_path, "parallel.pp=2", "checkpoint.every=3", "run.timeout_seconds=8")
    with pytest.raises(ranktest.RankFailed, match="rank 1"):
        ranktest.run_ranks(killed_after_save, 2, config.to_toml(), timeout=60)
    assert len(losses(config)) == 4
    resumed = replace(config, parallel=replace(config.parallel, pp=1, dp=2))
    assert run(resumed, 2)[0][0] == 6
    assert [entry["step"] for entry in lines(config, "resume")] == [3]
    expected = plain_losses(config, 6)
    assert losses(config) == pytest.approx(expected[:4] + expected[3:], rel=1e-6)


def test_evaluation_leaves_no_trace_in_training(tmp_path):
    without = tiny_config(tmp_path, "parallel.pp=2", run="without")
    run(without, 2)
    evaluated = tiny_config(tmp_path, "parallel.pp=2", "eval.every=2", "eval.batches=2", run="with")
    run(evaluated, 2)
    assert losses(evaluated) == losses(without)
    assert [entry["step"] for entry in lines(evaluated, "eval")] == [2, 4, 6]
    assert all(entry["tokens"] == 2 * 8 * 32 for entry in lines(evaluated, "eval"))


def test_a_batch_ramp_continues_the_same_order_of_samples(tmp_path):
    config = tiny_config(tmp_path, "train.batch_ramp=[[2, 4], [4, 8]]", "parallel.pp=2")
    run(config, 2)
    assert [entry["samples"] for entry in lines(config, "step")] == [8, 16, 20, 24, 32, 40]
    assert losses(config) == pytest.approx(plain_losses(config, 6), rel=1e-6)


def test_a_non_finite_loss_stops_before_the_optimizer_and_names_the_module(tmp_path):
    config = tiny_config(tmp_path, "parallel.pp=2", "optimizer.lr=3e38", "train.clip_grad=0", "checkpoint.every=1")
    with pytest.raises(ranktest.RankFailed, match="not finite"):
        run(config, 2)
    (entry,) = lines(config, "nonfinite")
    assert entry["where"], entry
    assert entry["step"] == len(losses(config))
