"""The slides' numbers, as the specification quotes them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sixfold.fsdp import FsdpError, cost_model

BANDWIDTH = 8 * 400e9 / 8 * 0.85


def test_bandwidth_is_340_gigabytes_per_second():
    assert cost_model.node_bandwidth() == pytest.approx(340e9)


@pytest.mark.parametrize(
    ("tp", "forward", "backward"), [(1, 1765, 2647), (2, 3529, 5294), (4, 7059, 10588), (8, 14118, 21176)]
)
def test_token_thresholds_are_those_of_the_slides(tp, forward, backward):
    assert round(cost_model.tokens_to_hide_forward(600e12, BANDWIDTH, tp=tp)) == forward
    assert round(cost_model.tokens_to_hide_backward(600e12, BANDWIDTH, tp=tp)) == backward


def test_experts_and_recompute_scale_the_backward_threshold():
    plain = cost_model.tokens_to_hide_backward(600e12, BANDWIDTH)
    assert cost_model.tokens_to_hide_backward(600e12, BANDWIDTH, experts=64, ep=8, top_k=4) == pytest.approx(2 * plain)
    assert cost_model.tokens_to_hide_backward(600e12, BANDWIDTH, recompute=True) == pytest.approx(plain * 4 / 6)


@pytest.mark.parametrize(
    ("strategy", "gigabytes", "collectives"),
    [
        ("no_shard", 120.0, (0, 0, 1)),
        ("optim", 31.41, (1, 1, 0)),
        ("optim_grads", 16.64, (1, 4, 0)),
        ("optim_grads_params", 1.875, (8, 4, 0)),
    ],
)
def test_memory_and_traffic_by_strategy(strategy, gigabytes, collectives):
    assert cost_model.memory_bytes(strategy, 7.5e9, 64) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert tuple(cost_model.collectives(strategy, 4).values()) == collectives


def test_the_command_prints_the_same_as_json_and_as_text(capsys):
    assert cost_model.main(["--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert set(tables) == {"bandwidth_bytes_per_s", "forward_tokens", "backward_tokens", "memory_bytes", "collectives"}
    assert tables["bandwidth_bytes_per_s"] == {"1": 340e9, "2": 170e9, "4": 85e9, "8": 42.5e9}
    assert list(tables["forward_tokens"]) == ["1", "2", "4", "8"]
    assert tables["collectives"]["optim_grads"] == {"all_gather": 1, "reduce_scatter": 4, "all_reduce": 0}
    assert cost_model.main([]) == 0
    assert "21176" in capsys.readouterr().out


def test_bad_numbers_are_refused():
    with pytest.raises(FsdpError, match="strategy is 'zero4'"):
        cost_model.collectives("zero4")
    with pytest.raises(FsdpError, match="bandwidth is 0"):
        cost_model.tokens_to_hide_forward(1.0, 0)


def test_the_cost_model_needs_no_torch():
    names = "sixfold.fsdp.cost_model, sixfold.fsdp.cost.terms, sixfold.fsdp.cost.command"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
