"""parallel.schedule = "plan": the bits of a known schedule, one line about what was found, and what a resume takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, lines, run_all

from sixfold.gpt import ConfigError
from sixfold.gpt.engine.searched_schedule import assumed_costs, in_words, layout_of, microbatch_counts, reusable, search
from sixfold.pipeline import Program, verify

OPTIONS = (
    "parallel.pp=2",
    "train.steps=2",
    "schedule.shape=constant",
    "model.tie_embeddings=false",
    "fsdp.grad_reduce=last",
)
PLANNED = ("parallel.schedule=plan", "pipeline.plan_seconds=0.2")
CASES = {
    "measured": ("parallel.schedule=one_f_one_b", ("pipeline.plan_steps=1",)),
    "two stages a rank": (
        "parallel.schedule=hanayo",
        ("parallel.stages_per_rank=2", "pipeline.plan_steps=0", "pipeline.memory_cap=2", "train.batch_ramp=[[1, 12]]"),
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Of each case the known schedule and the plan, which stops after a step and is resumed."""
    folder = tmp_path_factory.mktemp("planned")
    configs = {}  # of a cosine the halves below would fall to its floor at their own last step
    for case, (known, options) in CASES.items():
        shared = [one for one in options if not one.startswith("pipeline")]
        name = case.replace(" ", "-")
        configs[case] = (
            tiny_config(folder, *OPTIONS, known, *shared, run=f"known-{name}"),
            tiny_config(folder, *OPTIONS, *PLANNED, *options, run=f"plan-{name}"),
        )
    halves = [replace(plan, train=replace(plan.train, steps=1)) for _, plan in configs.values()]
    run_all([*((2, known) for known, _ in configs.values()), *((2, half) for half in halves)])
    run_all((2, plan) for _, plan in configs.values())
    return configs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_plan_trains_the_bits_of_a_known_schedule(trained, case):
    known, plan = trained[case]
    steps = [[(line["loss"], line["grad_norm"], line["lr"]) for line in lines(run, "step")] for run in (plan, known)]
    assert steps[0] == steps[1] and len(steps[0]) == 2
    assert_same_tensors(final_tensors(plan), final_tensors(known))
    assert [entry["source"] for entry in lines(plan, "plan")][1:] == ["checkpoint"]


@pytest.mark.parametrize("case", CASES)
def test_metrics_say_what_was_found(trained, case):
    _, plan = trained[case]
    first, second = lines(plan, "plan")
    assert first["source"] == ("measured" if case == "measured" else "model")
    assert first["peak_activations"] <= first["memory_cap"] + 1e-9
    assert first["bubble_over_ideal"] >= 0 and first["gap"] >= 0
    assert {key: first[key] for key in ("microbatches", "gap")} == {key: second[key] for key in ("microbatches", "gap")}


def test_costs_of_the_model_and_the_search_keep_a_cap(tmp_path):
    config = tiny_config(
        tmp_path, *OPTIONS, *PLANNED, "parallel.dp=1", "parallel.stages_per_rank=2", "pipeline.memory_cap=2",
        "train.batch_ramp=[[1, 12]]", "model.num_layers=6", "parallel.layers_per_stage=[2, 2, 1, 1]",
    )  # fmt: skip
    placement = (0, 1, 1, 0)
    costs = assumed_costs(config, "cpu")
    assert sum(costs.activation) == pytest.approx(2), "a rank holds 1 in the mean"
    assert costs.activation[1] == pytest.approx(2 * costs.activation[2], rel=0.1), "twice as many layers"
    assert costs.forward[3] > costs.forward[2] and costs.backward_input[0] > costs.backward_weight[0]
    assert microbatch_counts(config) == [4, 6]
    found = search(config, costs, microbatch_counts(config), placement)
    for microbatches, text in found["programs"].items():
        program = Program.parse(text)
        assert (program.microbatches, program.placement) == (int(microbatches), placement)
        assert max(verify(program, memory_cap=2.0, costs=costs).peak_activations) <= 2.0
    assert "at 6 microbatches" in in_words(found | {"source": "model"})
    stored = found | layout_of(config)
    assert reusable(config, stored)
    assert not reusable(config, None) and not reusable(config, stored | {"pp": 3})
    with pytest.raises(ConfigError, match=r"pipeline\.memory_cap is 0\.1: "):
        search(replace(config, pipeline=replace(config.pipeline, memory_cap=0.1)), costs, [4], placement)
