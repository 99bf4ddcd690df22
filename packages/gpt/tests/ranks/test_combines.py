"""Each key with tensor, context or expert parallelism, beside one process: docs/guide/gpt-parallelism.md has the table.

nox -s full, or nox -s "ranks(gpt)" -- --random-layouts 1       all of them; some without it
"""

from __future__ import annotations

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import JOB_S, final_tensors, lines, losses, run_all, train_all, train_rank

import ranktest
from sixfold.gpt.engine.step import StepOutcome
from sixfold.gpt.launch.stop_signals import StopFlag
from sixfold.gpt.training.loop import Run

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
SHARED = ("model.shared_ffn_hidden_size=64", "model.shared_expert_gate=true")
FP8 = ("train.precision=fp8",)
EVALUATED = ("train.batch_ramp=[[1, 2]]", "eval.every=1", "eval.batches=1")

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
    "ramp and evaluation, cp, tp": (4, ("parallel.cp=2", "parallel.tp=2"), EVALUATED),
    "versions of weights, cp": (4, ("parallel.cp=2",), VERSIONS),  # beside their own pipeline: batches read older ones
    "fp8, tp": (2, ("parallel.tp=2",), FP8),
    "fp8, cp": (2, ("parallel.cp=2",), FP8),
    "fp8, ep": (2, ("parallel.ep=2",), (*EXPERTS, *FP8)),
    "fp8, ep, tp, shared": (4, ("parallel.ep=2", "parallel.tp=2"), (*EXPERTS, *SHARED, *FP8)),
    "compiled, tp": (2, ("parallel.tp=2", "train.compile=true"), ()),
    "compiled, cp": (2, ("parallel.cp=2", "train.compile=true"), ()),
    "compiled, ep": (2, ("parallel.ep=2", "train.compile=true"), EXPERTS),
}  # fmt: skip

SAMPLE = ("split backwards, cp, ep", "ramp and evaluation, cp, tp")


def train_compiled_eagerly(rank: int, ranks: int, texts: list[str]) -> None:
    """As ``train_all``; of what is compiled graphs are made, and no code, which takes a minute on a CPU."""
    compiling = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: compiling(function, backend="eager"))
        train_all(rank, ranks, texts)


def cases(config: pytest.Config) -> dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]]:
    return {case: CASES[case] for case in (CASES if config.getoption("--random-layouts") else SAMPLE)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(metafunc.config))


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("combines")
    found, alone = {}, {}
    for number, (case, (_, layout, shared)) in enumerate(cases(request.config).items()):
        if shared not in alone:
            alone[shared] = tiny_config(folder, *STEPS, *shared, run=f"alone{number}")
        found[case] = tiny_config(folder, *STEPS, *shared, *layout, run=f"run{number}"), alone[shared]
    run_all([(CASES[case][0], config) for case, (config, _) in found.items()], train_compiled_eagerly)
    run_all([(config.parallel.world, config) for config in alone.values()])
    return found


@pytest.mark.slow
def test_it_trains_as_one_process(trained, case):
    config, alone = trained[case]
    # Products are bfloat16's, and a matrix in parts has a scale for each of them: other bytes stand for its weights.
    same = 1e-3 if "fp8" in case else 1e-6
    assert losses(config) == pytest.approx(losses(alone), rel=same)
    for mine, of_one in zip(lines(config, "step"), lines(alone, "step"), strict=True):
        assert mine["loss_by_dataset"] == pytest.approx(of_one["loss_by_dataset"], rel=same)
        assert (mine["tokens"], mine["samples"]) == (of_one["tokens"], of_one["samples"])
    evaluated = [[(one["tokens"], one["loss"]) for one in lines(each, "eval")] for each in (config, alone)]
    assert len(evaluated[0]) == len(evaluated[1])
    for mine, of_one in zip(*evaluated, strict=True):
        assert mine == pytest.approx(of_one, rel=1e-6)
    found, expected = final_tensors(config), final_tensors(alone)
    for key, value in expected.items():
        off = float((found[key] - value).abs().max() / value.abs().max())
        # Muon makes its matrices orthogonal in bfloat16.
        within = 2e-3 if "muon" in case else (5e-2 if "fp8" in case else 1e-4)
        assert off < within or ("fp8" in case and "exp_avg" in key), f"{key} is off by {off:.1e}"


def asked_once(rank: int, ranks: int, text: str) -> tuple[int, float | None, str]:
    """Train; the last rank is asked to stop behind its second step."""
    arm, step, flags = StopFlag.arm, Run.step, []

    def armed(self: StopFlag) -> None:
        arm(self)
        flags.append(self)

    def stepped(self: Run, stop: bool) -> StepOutcome:
        outcome = step(self, stop)
        flags[0].asked = rank == ranks - 1 and self.progress.step == 2
        return outcome

    StopFlag.arm, Run.step = armed, stepped  # type: ignore[method-assign]
    return train_rank(rank, ranks, text)


@pytest.mark.slow
def test_a_stop_that_one_rank_is_asked_for_is_agreed_by_those_that_share_its_stage(tmp_path):
    config = tiny_config(tmp_path, *STEPS, "train.steps=9", "parallel.cp=2", "parallel.tp=2")
    found = ranktest.run_ranks(asked_once, 4, config.to_toml(), timeout=JOB_S)
    assert [(step, reason) for step, _, reason in found] == [(3, "sigterm")] * 4
    assert [saved["step"] for saved in lines(config, "save")] == [3]
    assert all(entry["memory_bytes"] > 2**20 for entry in lines(config, "step"))
