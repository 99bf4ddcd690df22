"""What is suggested and ranked fits, is in order, and is what ``plan`` says of the same overrides; and the verb."""

from __future__ import annotations

import json

import pytest
from config_helpers import MINIMAL, config_with

from sixfold.gpt.commands.cli import main
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.machine.devices import DEVICES, device_named
from sixfold.gpt.plan.plan import PlannedConfig, plan_layout
from sixfold.gpt.plan.report import run
from sixfold.gpt.plan.search import _all, changed, search, suggestions

H100 = device_named("h100")
BIG = (
    "model.num_layers=32",
    "model.hidden_size=4096",
    "model.num_attention_heads=32",
    "model.ffn_hidden_size=11008",
    "model.vocab_size=32000",
    "data.seq_length=4096",
    "train.global_batch_size=64",
    "train.micro_batch_size=4",
    "run.device=cuda",
)


def big(*overrides: str) -> PlannedConfig:
    return PlannedConfig.from_text(MINIMAL, (*BIG, *overrides))


def test_suggestions_fit_where_what_is_given_does_not():
    planned = plan_layout(big(), 8, H100)
    assert not planned.fits
    found = suggestions(planned)
    assert found and all(one.planned.fits for one in found)
    assert [one.order for one in found] == sorted(one.order for one in found)
    first = plan_layout(changed(big(), found[0].changes), 8, H100)
    assert first.peak_bytes == found[0].planned.peak_bytes and first.step_s == found[0].planned.step_s


@pytest.mark.slow
def test_a_search_ranks_what_fits_and_misses_nothing_better_that_was_tried_by_hand():
    found = search(big(), 8, H100, most=5, time_limit_s=300.0)
    assert found.complete and 0 < found.planned < found.candidates
    times = [one.planned.step_s for one in found.best]
    assert len(times) == 5 and times == sorted(times) and all(one.planned.fits for one in found.best)
    for overrides in (
        ("train.recompute=full",),
        ("parallel.pp=2", "train.micro_batch_size=1"),
        ("train.micro_batch_size=1",),
    ):
        by_hand = plan_layout(big(*overrides), 8, H100)
        assert not by_hand.fits or by_hand.step_s >= times[0]
    tight = search(big(), 8, H100, memory_bytes=20 * 10**9, most=2, time_limit_s=300.0)
    assert all(one.planned.peak_bytes <= 20e9 for one in tight.best)
    assert tight.best[0].planned.step_s >= times[0]


@pytest.mark.slow
def test_a_search_tries_tensor_context_and_expert_parallelism_within_a_node():
    experts = big("model.num_experts=8", "model.moe_ffn_hidden_size=2048", "model.num_layers=4")
    axes = [f"parallel.{axis}" for axis in ("tp", "cp", "ep")]
    tried = {tuple(one.get(axis, 1) for axis in axes) for one in _all(experts, 16, 8)}
    assert {(1, 1, 1), (8, 1, 1), (2, 4, 1), (1, 1, 8), (2, 2, 4)} <= tried
    assert all(max(tp * cp, tp * ep) <= 8 for tp, cp, ep in tried)
    assert (8, 2, 1) not in tried and (16, 1, 1) not in tried
    narrow = big("model.num_query_groups=2", "model.num_layers=4")  # rules.py: tp divides the groups
    assert {one.get("parallel.tp", 1) for one in _all(narrow, 8, 8)} == {1, 2}
    long = big("data.seq_length=32768", "train.micro_batch_size=1", "model.num_layers=4")
    tight = 6 * 10**9  # less than a whole row takes in one layer
    best = search(long, 8, H100, memory_bytes=tight, most=3, time_limit_s=300.0).best
    assert best and all(one.changes.get("parallel.tp", 1) * one.changes.get("parallel.cp", 1) > 1 for one in best)


@pytest.mark.slow
def test_the_verb_prints_a_page_and_one_json_object(tmp_path, capsys):
    path = tmp_path / "big.toml"
    path.write_text(big().to_toml())
    assert main(["plan", str(path), "--world", "16", "parallel.pp=2"]) == 0
    page = capsys.readouterr().out
    assert "pp 2 x dp 8" in page and "DOES NOT FIT" in page and "time on h100" in page and "refused" not in page
    assert main(["plan", str(path), "parallel.tp=2", "--world", "16", "--json", "--memory-gb", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["layout"]["tp"] == 2 and found["communication"]["tp_bytes"] > 0
    assert not found["refused"]
    assert found["step_seconds"] > 0 and 0 < found["mfu"] < 1
    assert main(["plan", str(path), "--world", "16", "--tflops", "300", "--gbps", "100", "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert main(["plan", str(path), "--world", "16", "--json"]) == 0
    assert slow["step_seconds"] > json.loads(capsys.readouterr().out)["step_seconds"]


def test_a_laptop_is_planned_without_a_time_and_mistakes_are_usage(tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    path.write_text(config_with("run.device=cpu").to_toml())
    assert main(["plan", str(path)]) == 0
    page = capsys.readouterr().out
    assert "time: not known for cpu" in page and "no bound is known" in page
    for arguments, words in (
        (["--world", "3", "parallel.pp=2"], "does not divide the world"),
        (["--device", "h300"], "there is no device 'h300'"),
        (["--machine", str(path)], "sixfold doctor"),
        (["--memory-gb", "0"], "no number > 0"),
        (["optimizer.learning_rate=1"], "the nearest is optimizer.lr"),
    ):
        assert main(["plan", str(path), *arguments]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_of_a_searched_schedule_says_what_was_found(tmp_path, capsys):
    path = tmp_path / "planned.toml"
    path.write_text(big("parallel.pp=2", "parallel.schedule=plan", "train.micro_batch_size=2").to_toml())
    assert main(["plan", str(path), "--world", "8"]) == 0
    page = capsys.readouterr().out
    assert "planned schedule: bubble" in page and "split backwards" in page and "fits:" in page
    assert "parallel.schedule=plan" not in page


def test_a_machine_file_changes_the_rates(tmp_path):
    from sixfold.gpt.errors import ConfigError
    from sixfold.gpt.machine.devices import device_of_machine

    path = tmp_path / "machine.json"
    machine = {"device": "cpu", "flops": 5e10, "memory_bytes": 8 * 10**9, "near_bytes_per_s": 2e9, "latency_s": 1e-4}
    path.write_text(json.dumps({"machine": machine}))
    found = device_of_machine(path)
    assert (found.flops, found.memory_bytes, found.near_bytes_per_s) == (5e10, 8 * 10**9, 2e9)
    assert found.memory_bytes_per_s == DEVICES["cpu"].memory_bytes_per_s
    assert plan_layout(config_with("run.device=cpu"), 4, found).step_s is not None
    path.write_text(json.dumps({"machine": machine | {"flops": -1}}))
    with pytest.raises(ConfigError, match="flops is not a number > 0"):
        device_of_machine(path)


@pytest.mark.slow
def test_a_search_goes_on_where_the_layout_that_is_given_cannot_be(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(config_with("train.global_batch_size=16", "train.micro_batch_size=4").to_toml())
    with pytest.raises(ConfigError, match=r"global_batch_size is 16 .* 4 \* 8 = 32"):
        run(PlannedConfig.from_toml(path), world=8, device="h100")
    text = run(PlannedConfig.from_toml(path), world=8, device="h100", look_further=True)
    assert text.startswith("as given: train.global_batch_size is 16") and "\n   1. " in text
    found = json.loads(run(PlannedConfig.from_toml(path), world=8, device="h100", look_further=True, as_object=True))
    assert "global_batch_size is 16" in found["refused"][0]
    best = found["search"]["best"][0]["overrides"]
    micro = best.get("train.micro_batch_size", 4)
    assert 16 % (micro * best["parallel.dp"]) == 0, "a layout that can be"


@pytest.mark.slow
def test_a_ranked_layout_is_written_as_overrides_that_lead_to_it(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(big().to_toml())
    lines = run(PlannedConfig.from_toml(path), world=8, device="h100", look_further=True).splitlines()
    best = next(line for line in lines if line.startswith("   1. "))
    overrides = [word for word in best.split() if "=" in word]
    assert not any("()" in word for word in overrides)
    again = run(PlannedConfig.from_toml(path, overrides), world=8, device="h100").splitlines()
    peak = best.split("bubble")[0].split()[-2:]
    assert any(line.startswith("fits: peak " + " ".join(peak)) for line in again)
