"""Who draws initial values: each shard its own elements, a resumed run none."""

from __future__ import annotations

import pytest
from gpt_helpers import tiny_config
from run_helpers import JOB_S, assert_same_tensors, final_tensors, run, train_rank

import ranktest
import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.gpt.model import initial_weights


def drawing_rank(rank: int, ranks: int, text: str) -> int:
    """Train; how many elements this rank drew from the generator."""
    drawn, block = [0], initial_weights._normal_block

    def counted(key, number):
        drawn[0] += initial_weights.BLOCK
        return block(key, number)

    initial_weights._normal_block = counted
    try:
        train_rank(rank, ranks, text)
    finally:
        initial_weights._normal_block = block
    return drawn[0]


def drawn_by(ranks, config):
    if ranks == 1:
        return [drawing_rank(0, 1, config.to_toml())]
    return ranktest.run_ranks(drawing_rank, ranks, config.to_toml(), timeout=JOB_S)


# Matrices of many blocks, so that the block that two shards share weighs little.
WIDE = ("model.num_layers=1", "model.hidden_size=256", "model.ffn_hidden_size=1024", "train.steps=0")


@pytest.mark.slow
def test_a_shard_draws_its_own_elements_and_a_resumed_run_none(tmp_path):
    options = (*WIDE, "checkpoint.save_initial=true")
    alone = tiny_config(tmp_path, *options, run="alone")
    [whole] = drawn_by(1, alone)
    assert whole >= 256 * (257 + 256 + 128 + 128 + 256 + 3 * 1024)
    for ranks, layout in (
        (2, "parallel.sharding=optim"),
        (2, "parallel.dp=2"),
        (4, "parallel.dp_replicate=2"),
    ):
        config = tiny_config(tmp_path, *options, layout, run=layout)
        assert all(whole * 0.4 < drawn < whole * 0.6 for drawn in drawn_by(ranks, config))
        assert_same_tensors(final_tensors(config), final_tensors(alone))
    assert drawn_by(2, alone) == [0, 0]


def test_weights_from_another_run_are_read_and_not_drawn(tmp_path):
    source = tiny_config(tmp_path, *WIDE, "checkpoint.save_initial=true", run="source")
    run(source, 1)
    config = tiny_config(tmp_path, *WIDE, f"checkpoint.init_from={source.run.dir}", run="other")
    assert drawn_by(1, config) == [0]
