"""What a run shows of itself: losses by dataset, timelines, traces, TensorBoard; the same at every layout."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import lines, run_all

from sixfold.blending.order import deal
from sixfold.gpt import GPTModel, global_batches
from sixfold.gpt.config.train_config import RunConfig
from sixfold.gpt.data.token_stream import build_datasets
from sixfold.gpt.observe.timeline import read_timeline, show

LAYOUTS = {
    "alone": (1, ()),
    "pp2": (2, ("parallel.pp=2", "log.timeline_steps=[2]", "log.profile_steps=[1]", "parallel.schedule=zb_h1")),
    "dp2": (2, ("parallel.dp=2", "log.timeline_steps=[2]")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    found = {}
    for name, (ranks, overrides) in LAYOUTS.items():
        config = tiny_config(folder, "train.steps=2", *overrides)
        found[name] = ranks, replace(config, run=RunConfig(dir=str(folder / name), device="cpu", timeout_seconds=120.0))
    run_all(found.values())
    return {name: config for name, (_, config) in found.items()}


def losses_by_dataset_of_the_first_step(config):
    """Mean over the targets of each dataset of plain per-token losses, from where ``locate`` says samples are of."""
    model = GPTModel(config.model)
    model.initialize(config.train.seed)
    batch = next(global_batches(config))
    dataset, _ = build_datasets(config)[0].locate(deal(0, config.train.global_batch_size, 0, 1))
    with torch.no_grad():
        losses = model(batch.tokens, cu_seqlens=batch.cu_seqlens, labels=batch.labels, loss_mask=batch.loss_mask)
    found = {}
    for number, name in enumerate(("wiki", "code")):
        rows = torch.from_numpy(dataset == number)
        found[name] = float(losses[rows].double().sum() / batch.loss_mask[rows].double().sum())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_the_loss_by_dataset_is_that_of_the_samples_which_the_order_takes_from_it(runs, layout):
    expected = losses_by_dataset_of_the_first_step(runs["alone"])
    first = lines(runs[layout], "step")[0]
    assert first["loss_by_dataset"] == pytest.approx(expected, rel=1e-6)
    assert expected["wiki"] != pytest.approx(expected["code"], rel=1e-4), "the data cannot tell the datasets apart"


def test_the_first_rank_says_how_long_it_waited_for_data(runs):
    for config in runs.values():
        assert all(0 <= line["data_seconds"] <= line["seconds"] for line in lines(config, "step"))


@pytest.mark.parametrize(("layout", "ranks"), [("pp2", 2), ("dp2", 1)])
def test_a_timed_step_is_kept_with_what_the_same_program_takes_on_paper(runs, layout, ranks):
    config = runs[layout]
    step, ran = read_timeline(config.run.dir)
    assert step == 2 and {rank for rank, *_ in ran.measured.events} == set(range(ranks))
    [line] = lines(config, "timeline")
    assert (line["step"], Path(line["trace"]).name) == (2, "step-00000002.json")
    assert line["seconds"] == pytest.approx(ran.measured.makespan, rel=1e-6)
    assert line["seconds"] > 0
    assert line["bubble"] == pytest.approx(ran.measured.bubble_over_ideal, abs=1e-6)
    assert line["bubble_on_paper"] == pytest.approx(ran.predicted.bubble_over_ideal, abs=1e-6)
    kinds = {action.kind.name for _, action, *_ in ran.measured.events}
    assert {"F", "I", "W"} <= kinds if layout == "pp2" else {"F", "B"} <= kinds


@pytest.mark.parametrize("ending", [".svg", ".json", ".txt"])
def test_a_timeline_is_drawn_with_both_bubbles_named(runs, tmp_path, ending):
    said = show(runs["pp2"].run.dir, tmp_path / f"step{ending}")
    assert said.startswith("step 2: ") and "measured" in said and "on paper" in said
    text = (tmp_path / f"step{ending}").read_text()
    assert "simulated" in text and "measured" in text
    if ending == ".svg":
        assert " s</text>" in text and ">forward</text>" in text, "an axis with its unit, and what the colours are"
    if ending == ".json":
        assert len({event["pid"] for event in json.loads(text)["traceEvents"]}) == 2


def test_a_profiled_step_leaves_a_trace_of_each_rank(runs):
    folder = Path(runs["pp2"].run.dir) / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [f"step-00000001-rank-{r}.json.gz" for r in (0, 1)]
    for path in folder.iterdir():
        names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {"aten::mm", "aten::embedding"} & names
