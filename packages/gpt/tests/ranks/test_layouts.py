"""The same run at every layout: losses, initial weights, resume, and a change of layout in between."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt_helpers import plain_losses, plain_run, tiny_config
from run_helpers import JOB_S, assert_same_tensors, final_tensors, lines, losses, run, run_all, train_rank

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold import dist_ckpt
from sixfold.gpt import TrainConfig
from sixfold.gpt.training.loop import Run

SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@pytest.mark.slow
def test_one_process_trains_as_a_plain_torch_loop(tmp_path):
    config = tiny_config(tmp_path, "train.steps=20")
    run(config, 1)
    assert losses(config) == pytest.approx(plain_losses(config, 20), rel=1e-6)


# Without its balance, which is of a microbatch and not of the plain loop's whole batch; test_sums.py has it.
EXPERTS = ("model.num_experts=4", "model.moe_ffn_hidden_size=32", "model.router_aux_loss=0", "model.dense_layers=1")
# Of layouts that split a stage: each microbatch has dozens of collectives, which is what they cost.
SHORT = ("train.steps=2", "train.micro_batch_size=1", "train.global_batch_size=4", "model.num_layers=2")

LAYOUTS = [
    (2, ("parallel.pp=2", "pipeline.lookahead=0", "pipeline.dynamic_shapes=true")),
    (2, ("parallel.pp=2", "parallel.schedule=gpipe")),
    (2, ("parallel.pp=2", "parallel.schedule=naive", "model.tie_embeddings=false")),
    (2, ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.stages_per_rank=2")),
    (2, ("parallel.pp=2", "parallel.schedule=eager_one_f_one_b")),
    (2, ("parallel.pp=2", "parallel.schedule=looped_bfs", "parallel.stages_per_rank=2")),
    (2, ("parallel.pp=2", "parallel.schedule=hanayo", "parallel.stages_per_rank=2")),
    (2, ("parallel.pp=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2")),
    *[(2, (f"parallel.sharding={sharding}",)) for sharding in SHARDINGS],
    (2, (*SHORT, "parallel.tp=2", "model.qk_norm=true", "model.qkv_bias=true")),
    (2, (*SHORT, "parallel.tp=2", "parallel.sequence=false", "model.qk_norm=true", "train.recompute=selective")),
    (4, ("parallel.pp=2", "parallel.dp=2")),
    (4, (*SHORT[:3], "parallel.pp=2", "parallel.tp=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2")),
    (4, ("parallel.dp=4", "parallel.dp_replicate=2")),
    (2, (*EXPERTS, *SHORT, "parallel.ep=2", "parallel.sharding=optim", "model.shared_ffn_hidden_size=32")),
    (4, (*EXPERTS, *SHORT, "parallel.ep=2", "parallel.tp=2", "parallel.dp=2")),
    (2, (*SHORT, "parallel.cp=2", "parallel.cp_comm_type=p2p", "train.recompute=full")),
    (4, (*SHORT, "parallel.cp=2", "parallel.tp=2", "parallel.sharding=optim_grads")),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, chosen):
    """The run of every layout."""
    folder, wanted = tmp_path_factory.mktemp("layouts"), chosen("ranks", "overrides")
    found = {
        layout: tiny_config(folder, *layout[1], run=f"run{n}") for n, layout in enumerate(LAYOUTS) if layout in wanted
    }
    run_all((ranks, config) for (ranks, _), config in found.items())
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("ranks", "overrides"), LAYOUTS, ids=lambda v: ",".join(v) if isinstance(v, tuple) else str(v))
@pytest.mark.slow
def test_losses_and_norms_do_not_depend_on_the_layout(trained, ranks, overrides):
    config = trained[ranks, overrides]
    expected_losses, expected_norms = zip(*plain_run(config, config.train.steps), strict=True)
    assert min(expected_norms) > config.train.clip_grad, "a norm that clips nothing would hide a wrong one"
    assert losses(config) == pytest.approx(expected_losses, rel=1e-6)
    assert [entry["grad_norm"] for entry in lines(config, "step")] == pytest.approx(expected_norms, rel=2e-6)


@pytest.mark.slow
def test_a_rank_without_parameters_trains_and_writes_what_all_ranks_know(tmp_path):
    config = tiny_config(tmp_path, "parallel.pp=3", "parallel.layers_per_stage=[2, 0, 2]", "train.steps=2")
    run(config, 3)
    assert losses(config) == pytest.approx(plain_losses(config, 2), rel=1e-6)
    newest = dist_ckpt.retention.latest(Path(config.run.dir) / "checkpoints")
    options = dist_ckpt.load_common_state_dict(newest)["optimizer"]["options"]
    weights = {key.removeprefix("model.") for key in final_tensors(config) if key.startswith("model.")}
    assert options.keys() == weights
    decay = {name: found["weight_decay"] for name, found in options.items()}
    assert decay == {name: 0.0 if "norm" in name else 0.1 for name in weights}


@pytest.mark.slow
def test_initial_weights_of_stages_are_bitwise_those_of_the_whole_model(tmp_path):
    def initial(ranks: int, *overrides: str) -> dict[str, torch.Tensor]:
        name = f"run{ranks}{len(overrides)}"
        config = tiny_config(tmp_path, "train.steps=0", "checkpoint.save_initial=true", *overrides, run=name)
        run(config, ranks)
        return final_tensors(config)

    alone = initial(1)
    assert_same_tensors(alone, initial(2, "parallel.pp=2"))


INTERLEAVED = ("parallel.pp=2", "parallel.schedule=interleaved", "parallel.stages_per_rank=2")


RESUMED = [
    (1, ("train.precision=bf16",)),
    (2, ("train.precision=bf16", "parallel.pp=2")),
    (2, ("train.precision=bf16", *INTERLEAVED)),
    (2, ("train.precision=bf16", "parallel.sharding=optim_grads_params")),
    (2, ("train.precision=fp32", "parallel.sharding=optim_grads_params")),
    (2, ("train.precision=bf16", "parallel.sharding=optim")),
]


@pytest.fixture(scope="module")
def whole_and_cut(tmp_path_factory, chosen):
    """Of every layout a run that never stopped, and one that went on after the checkpoint of step 2.

    A pipeline goes on over other edges, and without hearing whether shapes changed: no bit may know.
    """
    folder, wanted = tmp_path_factory.mktemp("resumed"), chosen("ranks", "overrides")
    layouts = [layout for layout in RESUMED if layout in wanted]

    def configs(name: str, *of_pipelines: str) -> list[TrainConfig]:
        return [
            tiny_config(
                folder,
                "checkpoint.every=2",
                *options,
                *(of_pipelines if "parallel.pp=2" in options else ()),
                run=f"{name}{n}",
            )
            for n, (_, options) in enumerate(layouts)
        ]

    other = "pipeline.edges=one", "pipeline.dynamic_shapes=announced"
    ranks, wholes, cuts = [ranks for ranks, _ in layouts], configs("whole"), configs("cut", *other)
    run_all(zip(ranks, wholes, strict=True))
    for whole, cut in zip(wholes, cuts, strict=True):
        shutil.copytree(whole.run.dir, cut.run.dir)
        # As if the run had died after the checkpoint of step 2.
        shutil.rmtree(dist_ckpt.retention.step_path(Path(cut.run.dir) / "checkpoints", 4))
    run_all(zip(ranks, cuts, strict=True))
    return dict(zip(layouts, zip(wholes, cuts, strict=True), strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "overrides"), RESUMED, ids=lambda v: ",".join(v) if isinstance(v, tuple) else str(v))
@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(whole_and_cut, ranks, overrides):
    whole, cut = whole_and_cut[ranks, overrides]
    assert [entry["step"] for entry in lines(cut, "resume")] == [2]
    assert losses(cut)[4:] == losses(whole)[2:]
    assert_same_tensors(final_tensors(whole), final_tensors(cut))


def killed_after_save(rank: int, ranks: int, text: str) -> None:
    """Train; rank 1 kills itself with SIGKILL at its second step after the checkpoint of step 2."""
    step = Run.step

    def dying(self: Run, stop: bool) -> bool:
        if rank == 1 and self.progress.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, stop)

    Run.step = dying  # type: ignore[method-assign]
    train_rank(rank, ranks, text)


@pytest.mark.slow
def test_killed_as_a_pipeline_and_resumed_as_sharded_data_parallel(tmp_path):
    config = tiny_config(tmp_path, "parallel.pp=2", "checkpoint.every=2")
    with pytest.raises(ranktest.RankFailed, match="rank 1"):
        ranktest.run_ranks(killed_after_save, 2, config.to_toml(), timeout=JOB_S)
    assert len(losses(config)) == 3
    resumed = replace(config, parallel=replace(config.parallel, pp=1, dp=2))
    assert run(resumed, 2)[0][0] == 4
    assert [entry["step"] for entry in lines(config, "resume")] == [2]
    expected = plain_losses(config, 4)
    assert losses(config) == pytest.approx(expected[:3] + expected[2:], rel=1e-6)


@pytest.mark.slow
def test_evaluation_leaves_no_trace_in_training(tmp_path):
    without = tiny_config(tmp_path, "parallel.pp=2", run="without")
    evaluated = tiny_config(tmp_path, "parallel.pp=2", "eval.every=2", "eval.batches=2", run="with")
    run_all([(2, without), (2, evaluated)])
    assert losses(evaluated) == losses(without)
    assert [entry["step"] for entry in lines(evaluated, "eval")] == [2, 4]
    assert all(entry["tokens"] == 2 * 8 * 32 for entry in lines(evaluated, "eval"))


@pytest.mark.slow
def test_a_batch_ramp_continues_the_same_order_of_samples(tmp_path):
    config = tiny_config(tmp_path, "train.batch_ramp=[[1, 4], [3, 8]]", "parallel.pp=2")
    run(config, 2)
    assert [entry["samples"] for entry in lines(config, "step")] == [8, 12, 16, 24]
    assert losses(config) == pytest.approx(plain_losses(config, 4), rel=1e-6)


@pytest.mark.slow
def test_a_non_finite_loss_stops_before_the_optimizer_and_names_the_module(tmp_path):
    config = tiny_config(tmp_path, "parallel.pp=2", "optimizer.lr=3e38", "train.clip_grad=0", "checkpoint.every=1")
    with pytest.raises(ranktest.RankFailed, match="not finite"):
        run(config, 2)
    (entry,) = lines(config, "nonfinite")
    assert entry["where"], entry
    assert entry["step"] == len(losses(config)) + 1
