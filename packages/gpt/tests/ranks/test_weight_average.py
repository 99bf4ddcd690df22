"""Runs with an average of weights: at every layout that of the run's own weights, through resumes and evaluations."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gpt_helpers import tiny_config
from kept_alive_helpers import Fault, run_kept_alive
from run_helpers import assert_same_tensors, final_tensors, lines, losses, run, run_all

from sixfold import dist_ckpt
from sixfold.gpt import ConfigError, train
from sixfold.gpt.checkpoints.trained_model import load_model
from sixfold.gpt.commands.sample import open_run, sample, sample_run
from sixfold.gpt.data.token_stream import TokenStream, build_datasets
from sixfold.gpt.training import loop

KEYS = (
    "optimizer.ema_decay=0.4", "train.steps=4", "checkpoint.every=1", "checkpoint.keep=9", "eval.every=4",
    "eval.batches=1", "checkpoint.save_initial=true",
)  # fmt: skip
TREE = ("parallel.grad_sum='tree'", "train.micro_batch_size=1", "schedule.shape=constant")
LAYOUTS = {
    "one process": (1, ()),
    "dp 2": (2, ()),
    "optim": (2, ("parallel.sharding='optim'",)),
    "no_shard": (2, ("parallel.sharding='no_shard'",)),
    "pp 2": (2, ("parallel.pp=2",)),
    "tp 2": (2, ("parallel.tp=2",)),
    "two stages, offload": (1, ("parallel.schedule=interleaved", "parallel.stages_per_rank=2", "fsdp.offload=true")),
    "muon": (2, ("optimizer.name='muon'",)),
    "frozen": (2, ("train.frozen=['embedding', 'layers.0']",)),
    "ep 2": (2, ("parallel.ep=2", "model.num_experts=4", "parallel.dp=2")),
}  # fmt: skip


def tensors_of(config, step):
    return dist_ckpt.load_plain_tensors(Path(config.run.dir) / "checkpoints" / f"step-{step:08d}")


def averages(config, steps, first=0):
    """By name, from the weights of the run's own checkpoints."""
    found = {k: v.numpy().copy() for k, v in tensors_of(config, first).items() if k.startswith("model.")}
    for step in range(first + 1, steps + 1):
        share = np.float32(1 - min(0.4, (1 + step) / (10 + step)))
        weights = tensors_of(config, step)
        for name, average in found.items():
            average += (weights[name].numpy() - average) * share
    return {f"ema.{name}": torch.from_numpy(average) for name, average in found.items()}


def kept(config):
    return {name: one for name, one in final_tensors(config).items() if name.startswith("ema.")}


@pytest.mark.slow
def test_at_every_layout_it_is_the_average_of_the_runs_own_weights(tmp_path):
    configs = {
        name: (n, tiny_config(tmp_path, *KEYS, *keys, run=name.replace(" ", "-")))
        for name, (n, keys) in LAYOUTS.items()
    }
    run_all(configs.values())
    for name, (_, config) in configs.items():
        assert len(kept(config)) > 10, name
        assert_same_tensors(kept(config), averages(config, 4))


@pytest.mark.slow
def test_a_tree_gives_the_same_bits_at_every_layout_and_through_a_resume_at_another(tmp_path):
    places = {"one": (1, ()), "dp": (2, ()), "pp": (2, ("parallel.pp=2",))}
    configs = {n: (r, tiny_config(tmp_path, *KEYS, *TREE, *keys, run=n)) for n, (r, keys) in places.items()}
    half = tiny_config(tmp_path, *KEYS, *TREE, "train.steps=2", "parallel.pp=2", run="cut")
    run_all([*configs.values(), (2, half)])
    cut = tiny_config(tmp_path, *KEYS, *TREE, run="cut")
    run(cut, 2)
    whole = configs["one"][1]
    for config in (configs["dp"][1], configs["pp"][1], cut):
        assert_same_tensors(kept(config), kept(whole))
        assert lines(config, "eval_ema")[-1]["loss"] == lines(whole, "eval_ema")[-1]["loss"]


@pytest.mark.slow
def test_an_evaluation_with_it_is_that_of_the_loaded_model_and_training_does_not_notice(tmp_path):
    without = tiny_config(tmp_path, *KEYS[1:], run="without")
    config = tiny_config(tmp_path, *KEYS, "parallel.pp=2", "parallel.dp=1", run="with")
    run_all([(1, without), (2, config)])
    alone = tiny_config(tmp_path, *KEYS, run="alone")
    train(alone)
    assert losses(alone) == losses(without)
    assert [e["loss"] for e in lines(alone, "eval")] == [e["loss"] for e in lines(without, "eval")]
    [line] = lines(config, "eval_ema")
    batch = TokenStream(build_datasets(config)[1], config).microbatch(0, 8)
    for ema, found in ((True, line), (False, lines(config, "eval")[0])):
        with torch.no_grad():
            expected = float(load_model(config.run.dir, ema=ema)(batch.tokens, **batch.kwargs).sum()) / batch.targets
        assert found["loss"] == pytest.approx(expected, rel=1e-6) and found["tokens"] == batch.targets
    assert line["loss"] != lines(config, "eval")[0]["loss"]
    how = {"tokens": 30, "temperature": 1.0, "seed": 1}
    texts = {ema: sample_run(config.run.dir, "a", ema=ema, **how) for ema in (True, False)}
    opened = open_run(config.run.dir)
    for ema, text in texts.items():
        model = load_model(config.run.dir, ema=ema)
        assert text == sample(model, opened.tokenizer, "a", context=opened.context, **how)
    assert texts[True] != texts[False]


@pytest.mark.slow
def test_a_stop_in_an_evaluation_with_it_saves_weights_and_average_in_their_places(tmp_path, monkeypatch):
    keys = (*KEYS, "eval.every=2", "eval.batches=3", "checkpoint.every=0", "train.steps=3")
    whole, config = (tiny_config(tmp_path, *keys, run=name) for name in ("whole", "run"))
    train(whole)
    asked, any_rank = [], loop.any_rank

    def stop_at_the_fifth(control, mine):
        asked.append(True)
        if len(asked) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return any_rank(control, mine or len(asked) >= 5)

    monkeypatch.setattr(loop, "any_rank", stop_at_the_fifth)
    assert train(config).reason == "sigterm"
    assert (len(lines(config, "eval")), len(lines(config, "eval_ema"))) == (1, 0)
    monkeypatch.undo()
    assert train(config).reason == "finished"
    assert_same_tensors(final_tensors(config), final_tensors(whole))
    for kind in ("eval", "eval_ema"):
        assert [(e["step"], e["loss"]) for e in lines(config, kind)] == [
            (e["step"], e["loss"]) for e in lines(whole, kind)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("lazy", ["false", "true"])
def test_a_lost_rank_takes_nothing_of_it_with_it(tmp_path, lazy):
    keys = (*KEYS, "checkpoint.every=0", "eval.every=1", "parallel.dp=2", f"elastic.memory_lazy={lazy}")
    whole, config = (
        tiny_config(tmp_path, *keys, "elastic.hung_after_seconds=5.0", run=name) for name in ("whole", "run")
    )
    run_all([(2, whole)])
    run_kept_alive(config, 2, Fault("in a forward", 1, "SIGKILL"))
    assert lines(config, "recovery")[0]["source"] == "memory"
    assert_same_tensors(final_tensors(config), final_tensors(whole))
    assert [e["loss"] for e in lines(config, "eval_ema")] == [e["loss"] for e in lines(whole, "eval_ema")]


@pytest.mark.slow
def test_a_run_that_had_none_begins_one_with_the_weights_of_its_checkpoint(tmp_path, capfd):
    options = ("schedule.shape=constant", "checkpoint.keep=9")
    train(tiny_config(tmp_path, *KEYS[1:], *options, "train.steps=2"))
    with pytest.raises(ConfigError, match=r"has no average of weights"):
        load_model(tmp_path / "run", ema=True)
    config = tiny_config(tmp_path, *KEYS, *options)
    train(config)
    assert "it begins with those of step 2" in capfd.readouterr().err
    assert_same_tensors(kept(config), averages(config, 4, first=2))
    again = replace(config, train=replace(config.train, steps=5), optimizer=replace(config.optimizer, ema_decay=0.0))
    train(again)
    assert not kept(again) and "is left there" in capfd.readouterr().err


@pytest.mark.slow
def test_export_writes_the_average(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors, an extra")
    from sixfold.gpt.huggingface.convert import export_model

    config = tiny_config(tmp_path, *KEYS, "train.steps=2")
    train(config)
    for ema, prefix in ((True, "ema.model."), (False, "model.")):
        out = export_model(config.run.dir, tmp_path / prefix, ema=ema)
        table = safetensors.load_file(out / "model.safetensors")["model.embed_tokens.weight"]
        assert table.equal(final_tensors(config)[f"{prefix}embedding.weight"][:257])
