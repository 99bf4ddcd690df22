"""With parallel.grad_sum = "tree" what a run tells has the same bits at any dp, pp and sharding; by default not."""

from __future__ import annotations

from typing import Any

import pytest
from gpt_helpers import tiny_config
from run_helpers import lines, run_all

from sixfold.gpt import TrainConfig

COMMON = (
    "train.steps=3",
    "train.micro_batch_size=1",
    "train.clip_grad=0.5",
    "eval.every=1",
    "eval.batches=2",
    "run.timeout_seconds=100",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "dp 2, no_shard": (2, ("parallel.sharding='no_shard'",)),
    "dp 2, optim_grads_params": (2, ("parallel.sharding='optim_grads_params'",)),
    "dp 4, optim": (4, ("parallel.sharding='optim'",)),
    "dp 4, optim_grads": (4, ("parallel.sharding='optim_grads'",)),
    "dp 4, hybrid": (4, ("parallel.sharding='optim_grads_params'", "parallel.dp_replicate=2")),
    "pp 2": (2, ("parallel.pp=2",)),
    "pp 4": (4, ("parallel.pp=4",)),
    "pp 2, dp 2": (4, ("parallel.pp=2", "parallel.sharding='optim_grads'")),
}
TOLD = ("loss", "grad_norm", "loss_by_dataset", "tokens", "samples")


def told(config: TrainConfig) -> list[tuple[Any, ...]]:
    """What steps and evaluations wrote; floats of a line are those of the run, bit for bit."""
    steps = [tuple(line[key] for key in TOLD) for line in lines(config, "step")]
    return [*steps, *((line["loss"], line["tokens"]) for line in lines(config, "eval"))]


@pytest.mark.slow
def test_losses_norms_and_evaluations_have_the_same_bits_at_any_layout_with_a_tree_and_by_default_not(tmp_path):
    configs = {}
    for grad_sum in ("tree", "backend"):
        for number, (layout, (ranks, options)) in enumerate(LAYOUTS.items()):
            sums = f"parallel.grad_sum='{grad_sum}'"
            name = f"{grad_sum}-{number}"
            configs[grad_sum, layout] = ranks, tiny_config(tmp_path, *COMMON, sums, *options, run=name)
    run_all(configs.values())
    found = {key: told(config) for key, (_, config) in configs.items()}
    expected = found["tree", "one process"]
    assert len(expected) == 6 and all(line[1] > 0.5 for line in expected[:3]), f"nothing was clipped: {expected}"
    different = {layout for (sums, layout), one in found.items() if sums == "tree" and one != expected}
    assert different == set()
    assert len({repr(one) for (sums, _), one in found.items() if sums == "backend"}) > 1


@pytest.mark.slow
def test_by_default_too_losses_of_one_set_of_weights_do_not_depend_on_the_layout(tmp_path):
    """Of the first step, and of an evaluation before anything has moved."""
    configs = [
        (ranks, tiny_config(tmp_path, *COMMON, "train.steps=1", "optimizer.lr=0.0", *options, run=str(number)))
        for number, (ranks, options) in enumerate(LAYOUTS.values())
    ]
    run_all(configs)
    for kind, keys in (("step", ("loss", "loss_by_dataset")), ("eval", ("loss", "tokens"))):
        assert len({repr([[line[key] for key in keys] for line in lines(config, kind)]) for _, config in configs}) == 1
