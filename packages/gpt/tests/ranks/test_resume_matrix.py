"""Resumes: at every layout x schedule x step bitwise, and between layouts to 1e-6.

nox -s full, or nox -s "ranks(gpt)" -- --resume-matrix      all of them; a sample without it
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gpt_helpers import plain_losses, tiny_config
from run_helpers import assert_same_tensors, final_tensors, lines, losses, run_all, train_all

from sixfold import dist_ckpt
from sixfold.gpt.checkpoints import training_state
from sixfold.gpt.training import loop
from sixfold.pipeline.schedules import registered

STEPS = 4
SAVING = (f"train.steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=9")
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
UNTIED = "model.tie_embeddings=false"
WHOLE = ("parallel.sharding=no_shard", "train.clip_grad=0", UNTIED)  # what versions of weights need
TP, CP, EP, RING = "parallel.tp=2", "parallel.cp=2", "parallel.ep=2", "parallel.cp_comm_type=p2p"
# Without the balance, which is of a microbatch and not of the plain loop's whole batch.
EXPERTS = ("model.num_experts=4", "model.moe_ffn_hidden_size=32", "model.router_aux_loss=0")


def pipelined(name: str, sharding: str) -> tuple[str, ...]:
    """Options of two stages' ranks under the schedule ``name``."""
    entry = next(one for one in registered() if one.name == name)
    options = ["parallel.pp=2", f"parallel.schedule={name}", f"parallel.sharding={sharding}"]
    if entry.chunks != 1:
        options.append("parallel.stages_per_rank=2")
    if not entry.flushed:
        options += [*WHOLE[1:], *(["train.global_batch_size=2"] if name == "pipedream" else [])]
    return tuple(options)


def layouts() -> dict[str, tuple[int, tuple[str, ...]]]:
    """(ranks, options) of every layout, schedule and strategy."""
    found: dict[str, tuple[int, tuple[str, ...]]] = {"alone": (1, ()), "alone muon": (1, ("optimizer.name=muon",))}
    for entry in registered():
        for sharding in SHARDINGS if entry.flushed else ("no_shard",):
            found[f"{entry.name} {sharding}"] = 2, pipelined(entry.name, sharding)
    for sharding in SHARDINGS:
        option = f"parallel.sharding={sharding}"
        found[f"dp2 {sharding}"] = 2, (option,)
        found[f"dp2 bf16 {sharding}"] = 2, (option, "train.precision=bf16")
        found[f"pp2 dp2 {sharding}"] = 4, (option, "parallel.pp=2")
    found["dp2 muon"] = 2, ("optimizer.name=muon",)
    found["zb_v muon bf16"] = 2, (*pipelined("zb_v", "optim"), "optimizer.name=muon", "train.precision=bf16")
    found["dp2 offload"] = 2, ("fsdp.offload=true",)
    found["dp4 hsdp"] = 4, ("parallel.dp_replicate=2",)
    found["pp3 with an empty stage"] = 3, ("parallel.pp=3", "parallel.layers_per_stage=[3, 0, 1]")
    found["pp4"] = 4, ("parallel.pp=4",)
    found["2bw dp2"] = 4, (*pipelined("pipedream_2bw", "no_shard"), "parallel.dp=2")
    found["fp8"] = 2, ("train.precision=fp8",)
    found["tp2"] = 2, (TP,)
    found["tp2 bf16 zb_v"] = 4, (TP, *pipelined("zb_v", "optim_grads_params"), "train.precision=bf16")
    found["pp2 tp2 whole sequence"] = 4, (TP, "parallel.pp=2", "parallel.sequence=false", "parallel.sharding=optim")
    found["cp2"] = 2, (CP,)
    found["cp2 ring"] = 2, (CP, RING, "parallel.sharding=no_shard")
    found["cp2 tp2"] = 4, (CP, TP)
    found["cp2 hsdp"] = 4, (CP, "parallel.dp_replicate=2", "parallel.dp=2")
    found["experts alone"] = 1, EXPERTS
    found["experts ep2"] = 2, (*EXPERTS, EP)
    found["experts tp2"] = 2, (*EXPERTS, TP)
    found["experts ep2 tp2"] = 4, (*EXPERTS, EP, TP, "parallel.sharding=optim")
    found["experts pp2 ep2 bf16"] = 4, (*EXPERTS, EP, "parallel.pp=2", "train.precision=bf16")
    found["experts pp2 ep2"] = 4, (*EXPERTS, EP, "parallel.pp=2")
    found["experts cp2 ep2"] = 2, (*EXPERTS, EP, CP)
    found["plan"] = 2, ("parallel.pp=2", "parallel.schedule=plan", "pipeline.plan_seconds=0.2", UNTIED)
    return found


LAYOUTS = layouts()
SAMPLE = [("zb_v optim_grads_params", 2), ("dp2 muon", 1)]
NODES = (
    "alone", "one_f_one_b optim", "zb_v optim_grads_params", "interleaved no_shard", "dp2 optim_grads_params",
    "pp2 dp2 optim", "pp4",
)  # fmt: skip
SPLIT = ("tp2", "pp2 tp2 whole sequence", "cp2", "cp2 ring", "cp2 tp2", "cp2 hsdp")  # inside a stage
OF_EXPERTS = ("experts alone", "experts ep2", "experts tp2", "experts ep2 tp2", "experts pp2 ep2", "experts cp2 ep2")
PAIRS = [
    *[(a, b) for a in NODES for b in NODES if a != b],
    *[(a, b) for a in SPLIT for b in SPLIT if a != b],
    *[pair for a in SPLIT for b in ("alone", "zb_v optim_grads_params") for pair in ((a, b), (b, a))],
    *[(a, b) for a in OF_EXPERTS for b in OF_EXPERTS if a != b],
]
SAMPLE_PAIRS = [  # a pipeline's, as sharded data parallel: test_layouts.py
    ("tp2", "cp2"),
    ("experts ep2", "experts tp2"),
]


def cases(config: pytest.Config) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
    """(layout, step of the cut), and pairs of layouts."""
    if config.getoption("--resume-matrix"):
        return [(name, cut) for name in LAYOUTS for cut in range(1, STEPS)], PAIRS
    return SAMPLE, SAMPLE_PAIRS


def params_of(request: pytest.FixtureRequest) -> list[dict[str, object]]:
    """The parameters of the tests that this command runs (``-k``)."""
    return [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]


def chosen(request: pytest.FixtureRequest) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
    """As ``cases``, of the tests that this command runs."""
    of_tests = params_of(request)
    cuts = [(found["layout"], found["cut"]) for found in of_tests if "cut" in found]
    return cuts, [(found["source"], found["to"]) for found in of_tests if "to" in found]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cuts, pairs = cases(metafunc.config)
    if "cut" in metafunc.fixturenames:
        metafunc.parametrize(("layout", "cut"), cuts)
    if "to" in metafunc.fixturenames:
        metafunc.parametrize(("source", "to"), pairs)
    if "planned" in metafunc.fixturenames:
        skipped = pytest.param("", marks=pytest.mark.skip(reason="test_planned.py has it in small; --resume-matrix"))
        metafunc.parametrize("planned", ["plan" if metafunc.config.getoption("--resume-matrix") else skipped])


def test_the_matrix_is_as_large_as_it_says():
    assert len(LAYOUTS) * (STEPS - 1) >= 200
    of_each = {axis: [pair for pair in PAIRS if any(axis in name for name in pair)] for axis in ("tp2", "cp2", "ep2")}
    assert all(len(pairs) >= 24 for pairs in of_each.values()), {axis: len(pairs) for axis, pairs in of_each.items()}


@pytest.fixture(scope="module")
def wholes(request, tmp_path_factory):
    """Of each layout a run that never stopped, with a checkpoint of every step."""
    cuts, pairs = chosen(request)
    folder = tmp_path_factory.mktemp("wholes")
    planned = {found["planned"] for found in params_of(request) if found.get("planned")}
    names = sorted({name for name, _ in cuts} | {source for source, _ in pairs} | planned)
    found = {
        name: (LAYOUTS[name][0], tiny_config(folder, *SAVING, *LAYOUTS[name][1], run=name.replace(" ", "-")))
        for name in names
    }
    run_all(found.values())
    return folder, found


def cut_copy(folder, whole, step, options, run):
    """The folder of ``whole`` as if the run had died behind its checkpoint of ``step``, to go on by ``options``.

    It has that checkpoint alone, and saves at its end alone: except with pipedream, whose trajectory depends on saves.
    """
    kept = dist_ckpt.retention.step_path(Path("checkpoints"), step)
    source, target = Path(whole.run.dir), folder / run
    shutil.copytree(source / kept, target / kept)
    for name in ("config.toml", "metrics.jsonl"):
        shutil.copy(source / name, target)
    saving = () if any("=pipedream" in option for option in options) else ("checkpoint.every=0",)
    return tiny_config(folder, *SAVING, *options, *saving, run=run)


def train_and_save_again(rank, ranks, texts):
    """As ``train_all``; what was loaded is saved as it is, beside the run's own checkpoints."""
    restore = loop.restore

    def kept(run, start, source):
        restore(run, start, source)
        data = run.train_data.state_dict(run.progress.samples)
        folder = Path(run.config.run.dir) / "again"
        training_state.save(run.rank, folder, run.progress, data, run.versions, background=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "restore", kept)
        train_all(rank, ranks, texts)


@pytest.fixture(scope="module")
def resumed(request, wholes):
    folder, found = wholes
    cuts, pairs = chosen(request)
    same, other = {}, {}
    for name, step in cuts:
        ranks, options = LAYOUTS[name]
        same[name, step] = ranks, cut_copy(folder, found[name][1], step, options, f"{name}-{step}".replace(" ", "-"))
    for source, to in pairs:
        ranks, options = LAYOUTS[to]
        other[source, to] = ranks, cut_copy(folder, found[source][1], 2, options, f"{source}-to-{to}".replace(" ", "-"))
    run_all(same.values())
    run_all(other.values(), train_and_save_again)
    return {key: config for key, (_, config) in (same | other).items()}


@pytest.mark.slow
def test_a_resume_is_bitwise_the_run_that_never_stopped(wholes, resumed, layout, cut):
    whole, again = wholes[1][layout][1], resumed[layout, cut]
    assert [entry["step"] for entry in lines(again, "resume")] == [cut]
    assert losses(again)[STEPS:] == losses(whole)[cut:]
    assert_same_tensors(final_tensors(whole), final_tensors(again))


def test_a_plan_is_bitwise_a_known_schedule(wholes, planned):
    folder, found = wholes
    known = tiny_config(folder, *SAVING, "parallel.pp=2", "parallel.schedule=one_f_one_b", UNTIED, run="known")
    run_all([(2, known)])
    assert losses(found[planned][1]) == losses(known)
    assert_same_tensors(final_tensors(found[planned][1]), final_tensors(known))


@pytest.mark.slow
def test_a_resume_at_another_layout_trains_as_one_process(wholes, resumed, source, to):
    again, whole = resumed[source, to], wholes[1][source][1]
    saved = dist_ckpt.retention.step_path(Path(whole.run.dir) / "checkpoints", 2)
    loaded = dist_ckpt.load_plain_tensors(Path(again.run.dir) / "again")
    assert_same_tensors(dist_ckpt.load_plain_tensors(saved), loaded)
    assert [entry["step"] for entry in lines(again, "resume")] == [2]
    expected = plain_losses(again, STEPS)
    assert losses(again) == pytest.approx(expected + expected[2:], rel=1e-6)
