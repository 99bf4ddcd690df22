"""Dropout in runs: one loss at every layout, the same bits under a tree and after a resume, none in evaluations."""

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, lines, losses, run, run_all

from sixfold.gpt.checkpoints.trained_model import load_model
from sixfold.gpt.data.token_stream import TokenStream, build_datasets

KEYS = ("train.hidden_dropout=0.2", "train.embedding_dropout=0.1", "train.steps=3", "eval.every=3", "eval.batches=1")
LAYOUTS = {
    "dp 2": (2, ()),
    "one row at a time": (1, ("train.micro_batch_size=1",)),
    "pp 2": (2, ("parallel.pp=2",)),
    "tp 2": (2, ("parallel.tp=2",)),
    "tp 2, whole sequence": (2, ("parallel.tp=2", "parallel.sequence=false")),
    "cp 2": (2, ("parallel.cp=2",)),
    "cp 2, a ring, tp 2": (4, ("parallel.cp=2", "parallel.tp=2", "parallel.cp_comm_type=p2p")),
    "full": (1, ("train.recompute=full",)),
    "selective": (2, ("train.recompute=selective", "parallel.pp=2")),
}


@pytest.mark.slow
def test_losses_and_weights_are_those_of_one_process_at_every_layout(tmp_path):
    alone = tiny_config(tmp_path, *KEYS, run="alone")
    configs = {n: (r, tiny_config(tmp_path, *KEYS, *k, run=n.replace(" ", "-"))) for n, (r, k) in LAYOUTS.items()}
    without = tiny_config(tmp_path, "train.steps=3", run="without")
    run_all([(1, alone), (1, without), *configs.values()])
    assert abs(losses(alone)[0] - losses(without)[0]) > 1e-4, "something is dropped"
    weights = final_tensors(alone)
    for name, (_, config) in configs.items():
        assert losses(config) == pytest.approx(losses(alone), rel=1e-6), name
        assert lines(config, "eval")[0]["loss"] == pytest.approx(lines(alone, "eval")[0]["loss"], rel=1e-6), name
        found = final_tensors(config)
        assert all(found[k].allclose(w, atol=1e-4) for k, w in weights.items() if k.startswith("model.")), name
    batch = TokenStream(build_datasets(alone)[1], alone).microbatch(0, 8)
    with torch.no_grad():
        nats = float(load_model(alone.run.dir)(batch.tokens, **batch.kwargs).sum()) / batch.targets
    assert lines(alone, "eval")[0]["loss"] == pytest.approx(nats, rel=1e-6), "an evaluation drops nothing"


@pytest.mark.slow
def test_under_a_tree_bits_are_the_same_at_every_layout_and_through_a_resume_at_another(tmp_path):
    tree = (*KEYS, "parallel.grad_sum='tree'", "train.micro_batch_size=1", "schedule.shape=constant")
    places = {"one": (1, ()), "dp": (2, ()), "pp": (2, ("parallel.pp=2",)), "full": (1, ("train.recompute=full",))}
    configs = {n: (r, tiny_config(tmp_path, *tree, *k, run=n)) for n, (r, k) in places.items()}
    run_all([*configs.values(), (2, tiny_config(tmp_path, *tree, "train.steps=1", "parallel.pp=2", run="cut"))])
    cut = tiny_config(tmp_path, *tree, run="cut")
    run(cut, 2)
    for config in (*(one for _, one in configs.values()), cut):
        assert_same_tensors(final_tensors(config), final_tensors(configs["one"][1]))
        assert losses(config) == losses(configs["one"][1])
