"""``sixfold plan``: sizes by closed forms, bubbles by theirs, the reference slides' case, and no torch."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
from config_helpers import config_with
from llama_helpers import H100, LLAMA_70B, llama

import sixfold.pipeline as pipeline
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.machine.devices import DEVICES
from sixfold.gpt.plan import stage_times as times
from sixfold.gpt.plan.activation_bytes import BLOCKS_LONGEST, QUERY_BLOCK
from sixfold.gpt.plan.layout import Layout, compute_costs
from sixfold.gpt.plan.plan import as_json, bubbles, plan_layout, plan_program, say_plan, schedule_for
from sixfold.gpt.plan.stage_times import overlapped_s


def test_parameters_are_those_of_the_model_and_bytes_follow_the_strategies():
    config = llama()
    params = 80 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672 + 2 * 8192) + 8192 + 2 * 128256 * 8192
    expected = {
        "no_shard": (2, 4, 12),
        "optim": (2, 4, 12 / 64),
        "optim_grads": (2, 4 / 64, 12 / 64),
        "optim_grads_params": (2 / 64, 4 / 64, 12 / 64),
    }
    for sharding, (weights, gradients, optimizer) in expected.items():
        found = as_json(plan_layout(llama(f"parallel.sharding={sharding}"), 64, H100))
        [stage] = found["stages"]
        assert found["parameters"] == stage["parameters"] == params == config.model.num_parameters
        assert stage["parameter_bytes"] == pytest.approx(weights * params, rel=0.01)
        assert stage["gradient_bytes"] == pytest.approx(gradients * params, rel=0.01)
        assert stage["optimizer_bytes"] == pytest.approx(optimizer * params, rel=0.01)


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 2), ("muon", 1)])
@pytest.mark.parametrize(("sharding", "parts"), [("no_shard", 1), ("optim", 64)])
def test_an_average_of_weights_is_stored_and_saved_as_main_weights_are(optimizer, moments, sharding, parts):
    keys = (f"parallel.sharding={sharding}", f"optimizer.name={optimizer}")
    without, having = (
        plan_layout(llama(*keys, *more), 64, H100).stages[0].stored.optimizer
        for more in ((), ("optimizer.ema_decay=0.999",))
    )
    assert having - without == pytest.approx(4 * llama().model.num_parameters / parts, rel=0.01)
    offload = () if optimizer == "muon" else ("fsdp.offload=true",)
    away, kept = (
        plan_layout(llama(*keys, *offload, *more), 64, H100).stages[0].stored.optimizer
        for more in ((), ("optimizer.ema_decay=0.999",))
    )
    assert kept - away == having - without, "offload takes the moments away, and not the average"


def test_json_has_the_keys_of_the_contract_and_stages_hold_every_layer_once():
    found = as_json(plan_layout(config_with("parallel.pp=4", "train.global_batch_size=128"), 8, DEVICES["cpu"]))
    assert {
        "world", "layout", "schedule", "microbatches", "parameters", "bubble_over_ideal", "fits", "stages",
        "communication",
    } <= found.keys()  # fmt: skip
    assert found["layout"] == {"pp": 4, "dp": 2, "cp": 1, "tp": 1, "ep": 1}
    assert found["microbatches"] == 16
    assert {key for stage in found["stages"] for key in stage} == {
        "stage", "rank", "layers", "parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes",
        "activation_bytes_per_microbatch", "microbatches_held", "peak_bytes",
    }  # fmt: skip
    assert [layer for stage in found["stages"] for layer in stage["layers"]] == [0, 1, 2, 3]
    assert [stage["microbatches_held"] for stage in found["stages"]] == [4, 3, 2, 1]
    assert sum(stage["parameters"] for stage in found["stages"]) == found["parameters"]
    assert found["communication"].keys() == {"dp_bytes", "tp_bytes", "pp_bytes", "cp_bytes", "ep_bytes"}
    # Three edges carry a microbatch's hidden states forward and their gradient back; a middle rank sends both ways.
    assert found["communication"]["pp_bytes"] == 2 * 16 * (4 * 32 * 64 * 2)
    assert json.loads(json.dumps(found)) == found


def test_bubble_is_the_closed_form_where_stages_are_equal_and_large_programs_are_continued():
    even = ("model.num_layers=64", "model.vocab_size=1", "model.vocab_multiple=1")
    for pp, batch in ((4, 32), (8, 4096)):
        config = config_with(f"parallel.pp={pp}", f"train.global_batch_size={batch * 4}", *even)
        found = plan_layout(config, pp, DEVICES["cpu"])
        assert found.microbatches == batch
        assert found.bubble_over_ideal == pytest.approx((pp - 1) / batch, rel=0.01)
    assert found.stages[0].microbatches_held == 8


def test_bubbles_of_all_schedules_of_a_cut():
    planned = plan_layout(config_with("parallel.pp=4", "train.global_batch_size=64"), 4, DEVICES["cpu"])
    found = bubbles(planned, seconds=60.0)
    assert {"gpipe", "one_f_one_b", "eager_one_f_one_b", "zb_h1", "zb_h2", "naive"} <= found.keys()
    assert found["zb_h1"] < found["one_f_one_b"] <= found["naive"]
    assert found["one_f_one_b"] == pytest.approx(planned.bubble_over_ideal)


# ---- the reference slides' case: Llama-3-70B on 64 devices of 80 GB, sequence 8192, micro-batch 1, batch 128

RING = ("parallel.cp_comm_type=p2p",)  # as Megatron-Core does if it is told nothing else
CASES = {
    "no recompute": ((), False, None),
    "cp 2, recompute": ((*RING, "parallel.cp=2", "train.recompute=full"), True, 427),
    "cp 4": ((*RING, "parallel.cp=4"), True, 379),
    "cp 8": ((*RING, "parallel.cp=8"), True, 226),
}


def test_fit_and_order_of_the_slides_case_come_out_of_the_model():
    found = {case: plan_layout(llama(*overrides), 64, H100, fused=True) for case, (overrides, _, _) in CASES.items()}
    assert {case: plan.fits for case, plan in found.items()} == {case: fits for case, (_, fits, _) in CASES.items()}
    measured = {case: tflops for case, (_, _, tflops) in CASES.items() if tflops}
    planned = {case: (found[case].flops_per_rank or 0.0) / 1e12 for case in measured}
    assert sorted(planned, key=planned.__getitem__) == sorted(measured, key=measured.__getitem__)
    assert planned == pytest.approx(measured, rel=0.05)
    # Activations there: above 70 GB without recomputation (more than there is), above 50 at cp 4, about 25 at cp 8.
    activations = {case: plan.ranks[0].activations / 1e9 for case, plan in found.items()}
    assert activations["no recompute"] > 70 and 50 < activations["cp 4"] < 60 and 25 < activations["cp 8"] < 30
    weights = found["cp 4"].ranks[0].stored
    assert 5e9 < weights.parameters + weights.gradients < 10e9


def rates_of_the_slides_case():
    return {
        case: plan_layout(llama(*o), 64, H100, fused=True).flops_per_rank
        for case, (o, _, tflops) in CASES.items()
        if tflops
    }


@pytest.mark.parametrize("link_loss", [0.5, 0.6, 0.7])
@pytest.mark.parametrize("compute_loss", [0.0, 0.15, 0.3])
def test_the_order_of_the_slides_case_rests_on_no_fitted_digit(monkeypatch, compute_loss, link_loss):
    monkeypatch.setattr(times, "COMPUTE_LOSS", compute_loss)
    monkeypatch.setattr(times, "LINK_LOSS", link_loss)
    found = rates_of_the_slides_case()
    assert sorted(found, key=found.__getitem__) == ["cp 8", "cp 4", "cp 2, recompute"]


def test_the_fit_of_the_slides_case_needs_no_fitted_value_and_the_order_does(monkeypatch):
    monkeypatch.setattr(times, "COMPUTE_LOSS", 0.0)
    monkeypatch.setattr(times, "LINK_LOSS", 0.0)
    found = {
        case: plan_layout(llama(*overrides), 64, H100, fused=True).fits for case, (overrides, _, _) in CASES.items()
    }
    assert found == {case: fits for case, (_, fits, _) in CASES.items()}
    rates = {case: (rate or 0.0) / 1e12 for case, rate in rates_of_the_slides_case().items()}
    assert max(rates, key=rates.__getitem__) == "cp 4", "not as measured, which the guide says"
    assert rates["cp 8"] < rates["cp 2, recompute"]


def test_overlap_takes_the_longer_of_two_and_what_they_take_from_each_other():
    assert overlapped_s(1.0, 0.0) == 1.0
    assert overlapped_s(0.0, 1.0) == 1.0
    for compute, communication in ((1.0, 0.5), (1.0, 1.0), (0.5, 1.0)):
        together = overlapped_s(compute, communication)
        assert max(compute, communication) < together < compute + communication
    assert overlapped_s(2.0, 1.0) == pytest.approx(2 * overlapped_s(1.0, 0.5))


# ---- schedule = "plan"


def test_a_searched_schedule_is_no_longer_than_1f1b_within_its_memory_and_says_what_it_found():
    config = config_with("parallel.pp=4", "train.global_batch_size=32")
    layout = Layout(config, replace(config.parallel, dp=1), "cuda")
    costs = compute_costs(layout)
    plain = pipeline.simulate(pipeline.one_f_one_b(4, 8), costs)
    found = plan_program(config, time_limit_s=0.5)
    assert found.program.microbatches == 8 and len(found.program.ranks) == 4
    assert found.timeline.makespan <= plain.makespan
    assert max(found.timeline.peak_activations) <= max(plain.peak_activations) * (1 + 1e-9)
    pipeline.verify(found.program)
    assert f"bubble {found.timeline.bubble_over_ideal:.1%}" in say_plan(found)


def test_measured_costs_and_a_cap_in_bytes_are_what_the_search_keeps():
    config = config_with("parallel.pp=2", "train.global_batch_size=32")
    layout = Layout(config, replace(config.parallel, dp=1), "cuda")
    measured = pipeline.Costs([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], hop=0.1)
    cap = 1.5 * max(layout.held_bytes(stage) for stage in range(2))
    program = schedule_for(config, measured, cap, time_limit_s=0.2)
    held = [layout.held_bytes(stage) for stage in range(2)]
    assert max(pipeline.simulate(program, replace(measured, activation=held)).peak_activations) <= cap
    with pytest.raises(pipeline.ScheduleError, match="least"):
        schedule_for(config, measured, 0.5 * max(held), time_limit_s=0.2)
    again = schedule_for(config, measured, cap, microbatches=3, placement=program.placement, time_limit_s=0.2)
    assert again.microbatches == 3 and again.placement == program.placement


def test_older_weights_and_activations_on_the_host_are_counted_where_they_lie():
    two = ("parallel.pp=2", "parallel.sharding=no_shard", "train.clip_grad=0", "model.tie_embeddings=false")
    flushed = plan_layout(config_with(*two), 2, H100)
    double = plan_layout(config_with(*two, "parallel.schedule=pipedream_2bw"), 2, H100)
    assert [rank.older for rank in flushed.ranks] == [0, 0]
    assert [rank.older for rank in double.ranks] == [rank.stored.parameters for rank in double.ranks]
    assert double.step_s == pytest.approx(flushed.step_s, rel=0.3) and double.step_s < flushed.step_s
    away = plan_layout(llama("train.offload_activations=true"), 64, H100)
    here = plan_layout(llama(), 64, H100)
    assert (
        away.ranks[0].host == here.ranks[0].activations and away.ranks[0].activations < here.ranks[0].activations / 30
    )


def test_a_layout_whose_schedule_is_searched_is_planned_within_its_base_schedules_memory():
    config = config_with("parallel.pp=2", "parallel.schedule=plan", "train.global_batch_size=32")
    found = plan_layout(config, 2, H100)
    base = plan_layout(config_with("parallel.pp=2", "parallel.schedule=zb_h1", "train.global_batch_size=32"), 2, H100)
    assert found.bubble_over_ideal <= base.bubble_over_ideal + 1e-9
    assert max(r.activations for r in found.ranks) <= max(r.activations for r in base.ranks) * 1.01


# ---- what plan rests on


def test_constants_are_those_of_attention_and_loss():
    pytest.importorskip("torch")
    from sixfold.gpt.model import attention, loss
    from sixfold.gpt.plan import activation_bytes as activations

    assert (QUERY_BLOCK, BLOCKS_LONGEST) == (attention.QUERY_BLOCK, attention.BLOCKS_LONGEST)
    assert activations._LOSS_CHUNK == loss._CHUNK_ELEMENTS
    assert activations._LOSS_CHUNK_ELSEWHERE == loss._CHUNK_ELEMENTS_ELSEWHERE


def test_degrees_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="does not divide the world"):
        plan_layout(config_with("parallel.pp=4"), 6, H100)


def cpu_seconds_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_planning_a_thousand_ranks_loads_no_torch_and_takes_little_time():
    code = f"""
import sys
from sixfold.gpt.machine.devices import device_named
from sixfold.gpt.plan.plan import PlannedConfig, as_json, plan_layout
config = PlannedConfig.from_text({LLAMA_70B!r}, ("parallel.pp=16", "parallel.tp=4", "train.global_batch_size=4096"))
found = as_json(plan_layout(config, 1024, device_named("h100")))
assert found["layout"]["dp"] == 16 and found["microbatches"] == 256, found
assert "torch" not in sys.modules
"""
    began = cpu_seconds_of_children()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert 0.0 < cpu_seconds_of_children() - began < 5.0
