"""Float8 products on several ranks, torchao's part by definition: layouts beside one process."""

from __future__ import annotations

import pytest
from float8_helpers import train_all_by_definition
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, losses, run_all

ON = (
    "train.precision=bf16",
    "run.device=auto",
    "train.steps=2",
    "train.float8_products=true",
    "model.num_query_groups=4",
)
# Layout --> relative distance of losses. With tp and cp an operand is a part, which has a scale of its own.
LAYOUTS = {
    "parallel.dp=2 parallel.sharding=optim_grads_params": 1e-5,
    "parallel.pp=2 parallel.schedule=zb_h1": 1e-5,
    "parallel.tp=2": 5e-3,
    "parallel.tp=2 parallel.tp_overlap=true": 5e-3,
    "parallel.cp=2": 5e-3,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float8")
    alone = tiny_config(folder, *ON, run="alone")
    found = {
        layout: tiny_config(folder, *ON, *layout.split(), run=f"run{number}") for number, layout in enumerate(LAYOUTS)
    }
    run_all([(1, alone), *((2, config) for config in found.values())], train_all_by_definition)
    return alone, found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_losses_are_near_those_of_one_process(trained, layout):
    alone, found = trained
    assert losses(found[layout]) == pytest.approx(losses(alone), rel=LAYOUTS[layout])
    of_alone, of_layout = final_tensors(alone), final_tensors(found[layout])
    assert {key: t.shape for key, t in of_layout.items()} == {key: t.shape for key, t in of_alone.items()}


@pytest.mark.slow
def test_gathered_weights_have_the_bits_of_whole_ones(trained, tmp_path):
    _, found = trained
    sharded = found["parallel.dp=2 parallel.sharding=optim_grads_params"]
    whole = tiny_config(tmp_path, *ON, "parallel.dp=2", "parallel.sharding=no_shard", run="whole")
    run_all([(2, whole)], train_all_by_definition)
    assert losses(sharded) == losses(whole)
    assert_same_tensors(final_tensors(sharded), final_tensors(whole))
