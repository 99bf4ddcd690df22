"""A value that is not finite, deep in a model that is cut: its module, rank and step are named, and nothing changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import JOB_S, lines, train_rank

import ranktest
from sixfold.dist_ckpt import retention
from sixfold.gpt.engine.step import NonFinite
from sixfold.gpt.model import decoder as model
from sixfold.gpt.training import loop


def spoilt_rank(rank: int, ranks: int, text: str, layer: int, value: float, spoilt: int) -> None:
    """Train; from the third step on the ffn of one layer puts ``value`` into what it returns."""
    forward, seen = model.GPTModel.forward, []

    def stepping(self, *args, **options):
        seen.append(1)
        block = dict(self.layers.items()).get(str(layer))
        if block is not None and rank == spoilt and len(seen) == 2 * 2 + 1:  # two microbatches in a step
            block.ffn.register_forward_hook(lambda module, inputs, output: output * value)
        return forward(self, *args, **options)

    def kept(rank, *args, **options):
        before = [parameter.detach().clone() for _, parameter in rank.model.main_parameters()]
        outcome = step(rank, *args, **options)
        if isinstance(outcome, NonFinite):
            after = [parameter for _, parameter in rank.model.main_parameters()]
            assert all(map(torch.equal, before, after)), "the weights are those before the step"
        return outcome

    model.GPTModel.forward, step, loop.train_step = stepping, loop.train_step, kept
    train_rank(rank, ranks, text)


@pytest.mark.parametrize(
    ("layout", "layer", "value", "rank"),
    [
        ("parallel.pp=2", 3, torch.nan, 1),
        ("parallel.pp=2", 1, torch.inf, 0),
        ("parallel.tp=2", 1, torch.nan, 1),  # rank 0 has it from rank 1, a module later
    ],
    ids=["nan in the last stage", "inf in the first", "nan of a part of the sequence"],
)
@pytest.mark.slow
def test_the_module_the_rank_and_the_step_are_named_and_nothing_is_saved_after(tmp_path, layout, layer, value, rank):
    config = tiny_config(tmp_path, "train.global_batch_size=4", "checkpoint.every=1", layout)
    where = rf"step 3, rank {rank}: .* The first value that is not finite is the output of layers\.{layer}\.ffn\."
    with pytest.raises(ranktest.RankFailed, match=where):
        ranktest.run_ranks(spoilt_rank, 2, config.to_toml(), layer, value, rank, timeout=JOB_S)
    [entry] = lines(config, "nonfinite")
    assert (entry["step"], entry["rank"], entry["where"], entry["what"]) == (3, rank, f"layers.{layer}.ffn", "output")
    assert [saved["step"] for saved in lines(config, "save")] == [1, 2]
    assert lines(config, "end")[-1]["reason"] == "error"
    root = Path(config.run.dir) / "checkpoints"
    assert [step for step, _ in retention.checkpoints(root)] == [1, 2]
