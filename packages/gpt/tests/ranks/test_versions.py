"""PipeDream and 2BW: what they train beside their definition, and resumes that nothing shows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, lines, losses, run_all

import ranktest
from sixfold import dist_ckpt
from sixfold.gpt import GPTModel, global_batches

VERSIONS = ("parallel.sharding=no_shard", "train.clip_grad=0", "model.tie_embeddings=false", "train.steps=4")
TWO_BW = ("parallel.pp=2", "parallel.schedule=pipedream_2bw", *VERSIONS)
PIPEDREAM = ("parallel.pp=2", "parallel.schedule=pipedream", *VERSIONS, "train.global_batch_size=2")
CASES = {
    "2bw": (2, (*TWO_BW, "eval.every=2", "eval.batches=1")),
    "2bw bf16 muon ramp": (2, (*TWO_BW, "train.precision=bf16", "optimizer.name=muon", "train.batch_ramp=[[3, 4]]")),
    "pipedream": (2, PIPEDREAM),
}
ALONE = ("parallel.pp=1", "parallel.dp=2", "parallel.schedule=pipedream_2bw", *VERSIONS)  # sums of two ranks
CUT = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Of every case a run that saved at steps 2 and 4 and went on, and one that resumed at step 2."""
    folder = tmp_path_factory.mktemp("versions")

    def configs(kind):
        found = {}
        for case, (ranks, options) in CASES.items():
            run = f"{kind} {case}".replace(" ", "-")
            found[case] = ranks, tiny_config(folder, "checkpoint.every=2", *options, run=run)
        return found

    wholes, cuts = configs("whole"), configs("cut")
    shared = tiny_config(folder, *ALONE, run="shared")
    run_all([*wholes.values(), (2, shared)])
    for case, (_, cut) in cuts.items():
        shutil.copytree(wholes[case][1].run.dir, cut.run.dir)
        shutil.rmtree(dist_ckpt.retention.step_path(Path(cut.run.dir) / "checkpoints", 4))
    run_all(cuts.values())
    return {case: (wholes[case][1], cuts[case][1]) for case in CASES} | {"shared": (shared, shared)}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_bitwise_the_run_that_went_on(trained, case):
    whole, cut = trained[case]
    assert [entry["step"] for entry in lines(cut, "resume")] == [CUT]
    assert losses(cut)[4:] == losses(whole)[CUT:]
    assert_same_tensors(final_tensors(whole), final_tensors(cut))


def delayed_losses(config):
    """W(t+1) = W(t) - AdamW(gradient of batch t at W(max(t-1, 0))): arXiv 2006.09503, in one process."""
    model, o = GPTModel(config.model), config.optimizer
    model.initialize(config.train.seed)
    names = dict(model.named_parameters())
    newest = {name: torch.nn.Parameter(p.detach().clone()) for name, p in names.items()}
    older = {name: p.detach().clone() for name, p in newest.items()}
    big = [p for p in newest.values() if p.dim() >= 2]
    small = [p for p in newest.values() if p.dim() < 2]
    groups = [{"params": big, "weight_decay": o.weight_decay}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
    rates = [entry["lr"] for entry in lines(config, "step")]
    found = []
    for step, batch in zip(range(config.train.steps), global_batches(config), strict=False):
        for name, parameter in names.items():
            parameter.data.copy_(older[name] if step else newest[name])
        older = {name: p.detach().clone() for name, p in newest.items()}
        loss = model(batch.tokens, cu_seqlens=batch.cu_seqlens, labels=batch.labels, loss_mask=batch.loss_mask).sum()
        loss = loss / batch.loss_mask.sum()
        found.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, list(names.values()))
        for name, gradient in zip(names, gradients, strict=True):
            newest[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        optimizer.step()
    return found


def test_2bw_trains_as_its_definition_says(trained):
    whole, _ = trained["2bw"]
    assert losses(whole) == pytest.approx(delayed_losses(whole), rel=1e-6)
    assert losses(trained["shared"][0]) == pytest.approx(losses(whole), rel=1e-6)
    assert [entry["step"] for entry in lines(whole, "eval")] == [2, 4], "which left no trace"


def test_there_is_no_norm_of_all_gradients(trained):
    assert {entry["grad_norm"] for entry in lines(trained["pipedream"][0], "step")} == {None}


def test_a_gradient_that_is_not_finite_stops_its_stage_and_is_named(tmp_path):
    config = tiny_config(tmp_path, *TWO_BW, "optimizer.lr=3e38", "checkpoint.every=1")
    with pytest.raises(
        ranktest.RankFailed, match=r"step 2: rank 1 .*the gradient of head\.weight \(stage 1\) is not finite"
    ):
        run_all([(2, config)])
    assert [step for step, _ in dist_ckpt.retention.checkpoints(Path(config.run.dir) / "checkpoints")] == [1, 2]
