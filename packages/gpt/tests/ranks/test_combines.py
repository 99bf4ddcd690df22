"""The table of README "What combines": each key beside tensor, context or expert parallelism, as one process trains."""

from __future__ import annotations

import pytest
from gpt_helpers import tiny_config
from run_helpers import final_tensors, losses, run_all

STEPS = (
    "train.steps=2",
    "model.num_layers=2",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "optimizer.eps=1e-3",
)
EXPERTS = ("model.num_experts=4", "model.moe_ffn_hidden_size=32")
VERSIONS = (
    "parallel.pp=2", "parallel.schedule=pipedream_2bw", "parallel.sharding=no_shard", "train.clip_grad=0",
    "model.tie_embeddings=false",
)  # fmt: skip

# Ranks, the layout, and what both it and the single process have.
CASES = {
    "muon, ep": (2, ("parallel.ep=2",), (*EXPERTS, "optimizer.name=muon")),
    "muon, cp": (2, ("parallel.cp=2",), ("optimizer.name=muon",)),
    "offload, ep": (2, ("parallel.ep=2", "fsdp.offload=true"), EXPERTS),
    "hsdp, ep": (4, ("parallel.ep=2", "parallel.dp=4", "parallel.dp_replicate=2"), EXPERTS),
    "hsdp, cp": (4, ("parallel.cp=2", "parallel.dp=2", "parallel.dp_replicate=2"), ()),
    "cp, tp, ep": (4, ("parallel.cp=2", "parallel.tp=2", "parallel.ep=2"), EXPERTS),
    "budget, tp": (2, ("parallel.tp=2", "fsdp.gathered_bytes=100000"), ()),
    "split backwards, cp, ep": (
        4, ("parallel.pp=2", "parallel.cp=2", "parallel.ep=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2"),
        (*EXPERTS, "model.num_layers=4"),
    ),
    "ramp and evaluation, cp": (2, ("parallel.cp=2", "eval.every=1", "eval.batches=1"), ("train.batch_ramp=[[1, 2]]",)),
    "versions of weights, cp": (4, ("parallel.cp=2",), VERSIONS),  # beside their own pipeline: batches read older ones
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("combines")
    found, alone = {}, {}
    for number, (case, (_, layout, shared)) in enumerate(CASES.items()):
        if shared not in alone:
            alone[shared] = tiny_config(folder, *STEPS, *shared, run=f"alone{number}")
        found[case] = tiny_config(folder, *STEPS, *shared, *layout, run=f"run{number}"), alone[shared]
    run_all([(CASES[case][0], config) for case, (config, _) in found.items()])
    run_all([(config.parallel.world, config) for config in alone.values()])
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_one_process(trained, case):
    config, alone = trained[case]
    assert losses(config) == pytest.approx(losses(alone), rel=1e-6)
    found, expected = final_tensors(config), final_tensors(alone)
    for key, value in expected.items():
        off = float((found[key] - value).abs().max() / value.abs().max())
        # Muon makes its matrices orthogonal in bfloat16.
        assert off < (2e-3 if "muon" in case else 1e-4), f"{key} is off by {off:.1e}"
