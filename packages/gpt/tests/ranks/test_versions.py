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
from sixfold.blending.order import deal
from sixfold.gpt import GPTModel, global_batches
from sixfold.gpt.data.token_stream import build_datasets

VERSIONS = ("parallel.sharding=no_shard", "train.clip_grad=0", "model.tie_embeddings=false", "train.steps=4")
TWO_BW = ("parallel.pp=2", "parallel.schedule=pipedream_2bw", *VERSIONS)
PIPEDREAM = ("parallel.pp=2", "parallel.schedule=pipedream", *VERSIONS, "train.global_batch_size=2")
CASES = {
    "2bw": (2, (*TWO_BW, "eval.every=2", "eval.batches=1")),
    "2bw bf16 muon ramp": (2, (*TWO_BW, "train.precision=bf16", "optimizer.name=muon", "train.batch_ramp=[[3, 4]]")),
    "pipedream": (2, PIPEDREAM),
}
ALONE = ("parallel.pp=1", "parallel.dp=2", "parallel.schedule=pipedream_2bw", *VERSIONS)  # sums of two ranks
RAMP = (
    "train.batch_ramp=[[2, 4], [4, 12]]", "data.changes=[{at = 20, weights = [0.0, 1.0]}]", "train.steps=5",
    "checkpoint.every=0",
)  # fmt: skip
STASH = ("train.steps=6", "checkpoint.every=0", "schedule.warmup_steps=6")  # never flushed, a rate of its own each step
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
    ramp = tiny_config(folder, *TWO_BW, *RAMP, run="ramp")
    stash = tiny_config(folder, *PIPEDREAM, *STASH, run="stash")
    run_all([*wholes.values(), (2, shared), (2, ramp), (2, stash)])
    for case, (_, cut) in cuts.items():
        shutil.copytree(wholes[case][1].run.dir, cut.run.dir)
        shutil.rmtree(dist_ckpt.retention.step_path(Path(cut.run.dir) / "checkpoints", 4))
    run_all(cuts.values())
    return {case: (wholes[case][1], cuts[case][1]) for case in CASES} | {
        "shared": (shared, shared),
        "ramp": (ramp, ramp),
        "stash": (stash, stash),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_run_that_went_on(trained, case):
    whole, cut = trained[case]
    assert [entry["step"] for entry in lines(cut, "resume")] == [CUT]
    assert losses(cut)[4:] == losses(whole)[CUT:]
    assert_same_tensors(final_tensors(whole), final_tensors(cut))


def lag_2bw(name, step, settled):
    """W(t + 1) = W(t) - AdamW(gradient of batch t at W(max(t - 1, 0))): arXiv 2006.09503."""
    return min(step, 1)


def lag_pipedream(name, step, settled):
    """Stage s of p has p - 1 - s updates to come as batch t passes, none from before a flush: arXiv 1806.03377."""
    first_stage = name.startswith(("embedding.", "layers.0.", "layers.1."))
    return min(step - settled, 1) if first_stage else 0


def stashed_losses(config, lag, flushes=()):
    """(loss, {dataset: loss}) of each batch, forward and backward with the weights of ``lag`` updates before.

    One process and plain torch: all versions of the weights are kept. ``lag`` is told the batch at which the pipeline
    was empty last, of those in ``flushes``.
    """
    model, o = GPTModel(config.model), config.optimizer
    model.initialize(config.train.seed)
    names = dict(model.named_parameters())
    newest = {name: torch.nn.Parameter(p.detach().clone()) for name, p in names.items()}
    versions = [{name: p.detach().clone() for name, p in newest.items()}]
    big = [p for p in newest.values() if p.dim() >= 2]
    small = [p for p in newest.values() if p.dim() < 2]
    groups = [{"params": big, "weight_decay": o.weight_decay}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)
    rates = [entry["lr"] for entry in lines(config, "step")]
    data, samples, found = build_datasets(config)[0], 0, []
    for step, batch in zip(range(config.train.steps), global_batches(config), strict=False):
        settled = max((flush for flush in flushes if flush <= step), default=0)
        for name, parameter in names.items():
            parameter.data.copy_(versions[step - lag(name, step, settled)][name])
        nats = model(batch.tokens, cu_seqlens=batch.cu_seqlens, labels=batch.labels, loss_mask=batch.loss_mask)
        loss = nats.sum() / batch.loss_mask.sum()
        dataset, _ = data.locate(deal(samples, samples := samples + len(batch.tokens), 0, 1))
        rows = {name: torch.from_numpy(dataset == number) for number, name in enumerate(data.names)}
        sources = {
            name: float(nats[mine].detach().double().sum() / batch.loss_mask[mine].sum())
            for name, mine in rows.items()
            if batch.loss_mask[mine].any()
        }
        found.append((float(loss.detach()), sources))
        gradients = torch.autograd.grad(loss, list(names.values()))
        for name, gradient in zip(names, gradients, strict=True):
            newest[name].grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        optimizer.step()
        versions.append({name: p.detach().clone() for name, p in newest.items()})
    return found


def assert_as_defined(config, lag, flushes=()):
    """Losses of each step, whole and by dataset, are those of the definition."""
    expected = stashed_losses(config, lag, flushes)
    assert losses(config) == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    for entry, (_, sources) in zip(lines(config, "step"), expected, strict=True):
        assert entry["loss_by_dataset"] == pytest.approx(sources, rel=1e-6), entry["step"]


def test_2bw_trains_as_its_definition_says(trained):
    whole, _ = trained["2bw"]
    assert_as_defined(whole, lag_2bw)
    assert losses(trained["shared"][0]) == pytest.approx(losses(whole), rel=1e-6)
    assert [entry["step"] for entry in lines(whole, "eval")] == [2, 4], "which left no trace"


def test_2bw_with_a_ramp_of_the_batch_and_another_blend_trains_as_its_definition_says(trained):
    config = trained["ramp"][0]
    assert [entry["batch_size"] for entry in lines(config, "step")] == [8, 8, 4, 4, 12]
    assert [set(entry["loss_by_dataset"]) for entry in lines(config, "step")][3:] == [{"code"}, {"code"}]
    assert_as_defined(config, lag_2bw)


@pytest.mark.parametrize(("case", "flushes"), [("pipedream", (2,)), ("stash", ())])
@pytest.mark.slow
def test_pipedream_trains_as_its_definition_says(trained, case, flushes):
    config = trained[case][0]
    rates = [entry["lr"] for entry in lines(config, "step")]
    assert len(set(rates)) == len(rates) - (case == "pipedream"), "a rate of another batch would show"
    assert_as_defined(config, lag_pipedream, flushes)
    flushed = [loss for loss, _ in stashed_losses(config, lambda *_: 0)]
    assert losses(config)[1:] != pytest.approx(flushed[1:], rel=1e-4), "what it trains is no flushed schedule's"


def test_there_is_no_norm_of_all_gradients(trained):
    assert {entry["grad_norm"] for entry in lines(trained["pipedream"][0], "step")} == {None}


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_stops_its_stage_and_is_named(tmp_path):
    config = tiny_config(tmp_path, *TWO_BW, "optimizer.lr=3e38", "checkpoint.every=1")
    with pytest.raises(
        ranktest.RankFailed, match=r"step 3: rank 1 .*the gradient of head\.weight \(stage 1\) is not finite"
    ):
        run_all([(2, config)])
    assert [step for step, _ in dist_ckpt.retention.checkpoints(Path(config.run.dir) / "checkpoints")] == [1, 2]
