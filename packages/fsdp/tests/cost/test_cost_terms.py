"""The terms that the slides leave out: each recomputed by hand here, and without them the slides' own closed forms."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sixfold.fsdp import FsdpError, ShardingStrategy, cost_model
from sixfold.fsdp.cost import command as cost_command
from sixfold.fsdp.cost.terms import Cluster, Model, Run, backward, exposed_s, forward, groups, memory, traffic

H = 4096
FLAT = Cluster(gpus=64, ring=False, node_bytes_per_s=340e9, nvlink_bytes_per_s=1e15)
SLIDES = Model(layers=1, hidden=H, output_projection=False)


@pytest.mark.parametrize(
    ("tp", "ahead", "back"), [(1, 1.8e3, 2.6e3), (2, 3.5e3, 5.3e3), (4, 7.1e3, 10.6e3), (8, 14.1e3, 21.2e3)]
)
def test_without_further_terms_a_layer_has_the_thresholds_of_the_slides(tp, ahead, back):
    run = Run(tp=tp)
    assert forward(SLIDES, FLAT, run).tokens == pytest.approx(600e12 * tp / 340e9, rel=1e-12)
    assert backward(SLIDES, FLAT, run).tokens == pytest.approx(1.5 * 600e12 * tp / 340e9, rel=1e-12)
    assert round(forward(SLIDES, FLAT, run).tokens, -2) == ahead
    assert round(backward(SLIDES, FLAT, run).tokens, -2) in (back, back + 100)  # the slides cut 2,647 to 2.6K


def test_params_of_a_layer_are_those_that_the_slides_count():
    assert SLIDES.dense_params == (3 + 4 + 4) * H**2
    assert replace(SLIDES, output_projection=True).dense_params == 12 * H**2
    grouped = Model(layers=2, hidden=H, ffn=14336, heads=32, kv_heads=8, vocab=128_256, gated=True)
    by_hand = 2 * (H * H * 2 + 2 * H * 1024 + 3 * H * 14336) + 2 * 128_256 * H
    assert grouped.params == by_hand


def test_llama_3_70b_has_its_published_size():
    assert cost_command.LLAMA_70B.params == pytest.approx(70.55e9, rel=1e-3)


def test_the_forward_of_the_expert_layers_is_the_slides_where_expert_groups_do_not_share_links():
    experts, ep, top_k = 64, 8, 4
    only_experts = Model(layers=1, hidden=H, experts=experts, top_k=top_k)
    # The slides' layer is the feed-forward part alone: take attention out of both sides.
    run = Run(ep=ep, experts_share_links=False)
    moved = 6 * (8 * H**2) * experts / ep / 340e9
    computed = 4 * (8 * H**2) * top_k / 600e12
    assert moved / computed == pytest.approx(
        cost_model.tokens_to_hide_backward(600e12, 340e9, experts=experts, ep=ep, top_k=top_k)
    )
    attention = 4 * H**2
    assert backward(only_experts, FLAT, run).communication_s == pytest.approx(moved + 6 * attention / 340e9)
    assert backward(only_experts, FLAT, run).compute_s == pytest.approx(computed + 4 * attention / 600e12)
    shared = backward(only_experts, FLAT, replace(run, experts_share_links=True))
    assert shared.communication_s == pytest.approx(8 * moved + 6 * attention / 340e9)


def test_ring_factor_and_latency():
    run = Run()
    plain = forward(SLIDES, FLAT, run).communication_s
    assert forward(SLIDES, replace(FLAT, ring=True), run).communication_s == pytest.approx(plain * 63 / 64)
    assert forward(SLIDES, replace(FLAT, latency_s=2e-5), run).communication_s == pytest.approx(plain + 2e-5)
    assert backward(SLIDES, replace(FLAT, latency_s=2e-5), run).communication_s == pytest.approx(plain * 3 + 4e-5)


def test_inside_a_node_nvlink_carries_everything():
    cluster = Cluster(gpus=8, ring=False, nvlink_bytes_per_s=100e9)
    assert forward(SLIDES, cluster, Run()).communication_s == pytest.approx(2 * 11 * H**2 / 100e9)
    spread = Cluster(gpus=16, ring=False, nvlink_bytes_per_s=100e9)
    assert forward(SLIDES, spread, Run()).communication_s == pytest.approx(2 * 11 * H**2 / 100e9), (
        "the slower of the two"
    )


def test_attention_adds_flops_that_hide_more():
    run = Run(seq_length=8192, causal=False)
    per_token = 2 * 11 * H**2 + 4 * H * 8192
    assert forward(SLIDES, FLAT, run).compute_s == pytest.approx(per_token / 600e12)
    causal = forward(SLIDES, FLAT, replace(run, causal=True)).compute_s
    assert causal == pytest.approx((2 * 11 * H**2 + 2 * H * 8192) / 600e12)


def test_recompute_runs_the_forward_again():
    without, with_it = backward(SLIDES, FLAT, Run()), backward(SLIDES, FLAT, Run(recompute=True))
    assert with_it.tokens == pytest.approx(without.tokens * 4 / 6)
    assert with_it.tokens == pytest.approx(cost_model.tokens_to_hide_backward(600e12, 340e9, recompute=True))


def test_fp8_halves_the_gather_and_doubles_the_flops():
    low = Run(fp8=True)
    assert forward(SLIDES, FLAT, low).tokens == pytest.approx(forward(SLIDES, FLAT, Run()).tokens)
    assert backward(SLIDES, FLAT, low).tokens == pytest.approx(2 * 5 / 6 * backward(SLIDES, FLAT, Run()).tokens)


def test_replicas_sum_shards_over_nodes_and_gather_inside():
    cluster = Cluster(gpus=64, ring=False, nvlink_bytes_per_s=400e9)
    run = Run(replicas=8)
    assert groups(cluster, run) == (8, 64)
    params = 11 * H**2
    inside = (2 + 4) * params / 400e9
    # Each of a node's 8 devices sums its eighth over 8 nodes: 2 * 7/8 of 4 bytes, all through the node's links.
    across = 2 * 7 / 8 * 4 * params / 340e9
    assert backward(SLIDES, cluster, run).communication_s == pytest.approx(inside + across)
    assert forward(SLIDES, cluster, run).communication_s == pytest.approx(2 * params / 400e9)


def test_what_each_strategy_moves_in_a_layers_backward():
    gradients, weights = 4 * 11 * H**2 / 340e9, 2 * 11 * H**2 / 340e9
    for strategy, seconds in (
        ("no_shard", 2 * gradients),
        ("optim", gradients),
        ("optim_grads", gradients),
        ("optim_grads_params", gradients + weights),
    ):
        run = Run(strategy=ShardingStrategy(strategy))
        assert backward(SLIDES, FLAT, run).communication_s == pytest.approx(seconds), strategy
        assert forward(SLIDES, FLAT, run).communication_s == pytest.approx(0 if strategy == "no_shard" else weights)


def test_exposed_time_counts_each_collective_of_a_step():
    model = replace(SLIDES, layers=3)
    run = Run(seq_length=1024, micro_batch=1, accumulate=4, causal=False)
    ahead, back = forward(model, FLAT, run), backward(model, FLAT, run)
    late = ahead.communication_s - 1024 * ahead.compute_s, back.communication_s - 1024 * back.compute_s
    assert min(late) > 0
    assert exposed_s(model, FLAT, run) == pytest.approx(3 * 4 * (late[0] + late[1]))
    second = replace(run, strategy=ShardingStrategy.optim)
    once = forward(model, FLAT, second).exposed_s(1024) + backward(model, FLAT, second).exposed_s(1024)
    assert exposed_s(model, FLAT, second) == pytest.approx(3 * once)
    assert exposed_s(model, FLAT, Run()) is None


def test_memory_is_the_formula_with_slots_and_pool_beside_it():
    model = Model(layers=10, hidden=H, vocab=128_000)
    psi, layer = 10 * 12 * H**2 + 2 * 128_000 * H, 12 * H**2
    for strategy, formula in (
        ("no_shard", 18 * psi),
        ("optim", (6 + 12 / 64) * psi),
        ("optim_grads", (2 + 16 / 64) * psi),
        ("optim_grads_params", 18 / 64 * psi),
    ):
        found = memory(model, FLAT, Run(strategy=ShardingStrategy(strategy)))
        beside = found["slots"] + found["pool"]
        assert found["total"] - beside == pytest.approx(formula), strategy
        assert found["slots"] == (2 * (128_000 * H + layer) if strategy == "optim_grads_params" else 0)
        assert found["pool"] == (8 * layer if strategy in ("optim_grads", "optim_grads_params") else 0)


def test_experts_are_sharded_over_their_own_mesh():
    model = Model(layers=2, hidden=H, experts=16)
    dense, expert = 2 * 4 * H**2, 2 * 16 * 8 * H**2
    found = memory(model, FLAT, Run(ep=8))
    assert found["weights"] + found["gradients"] + found["optimizer"] == pytest.approx(
        18 * dense / 64 + 18 * (expert / 8) / 8
    )
    assert traffic(model, FLAT, Run(ep=8))["all_gather"] == pytest.approx(2 * 2 * (dense + expert / 8))


def test_the_case_study_of_the_slides_is_hidden_and_exposed_as_it_was_measured():
    by_name = {name: there > needed for name, there, needed, _ in cost_command.case_study()}
    assert by_name == {"cp 2, recompute": True, "cp 8": False, "cp 4": False}


FLAGS = ["--layers", "80", "--hidden", "8192", "--ffn", "28672", "--heads", "64", "--kv-heads", "8", "--swiglu"]


def test_the_command_tells_a_model_on_a_cluster_as_text_and_as_json(capsys):
    flags = [*FLAGS, "--gpus", "64", "--no-ring-factor", "--seq-length", "8192", "--micro-batch", "1", "--cp", "4"]
    assert cost_model.main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["strategies"]) == ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    assert found["tokens"] == 2048
    params = 8192**2 * 2.25 + 3 * 8192 * 28672
    per_token = 2 * params + 2 * 8192 * 8192
    whole = found["strategies"]["optim_grads_params"]
    assert whole["forward_tokens"] == pytest.approx(2 * params / 340e9 / (per_token / 600e12))
    assert whole["backward_tokens"] == pytest.approx(6 * params / 340e9 / (2 * per_token / 600e12))
    assert cost_model.main(flags) == 0
    assert f"{whole['backward_tokens']:.0f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--layers", "2"], "--layers, --hidden and --gpus together"),
        (["--layers", "2", "--hidden", "8"], "--layers, --hidden and --gpus together"),
        ([*FLAGS, "--gpus", "64", "--tp", "7"], "tp is 7; it divides 64"),
        ([*FLAGS, "--gpus", "0"], "gpus is 0; it is >= 1"),
        ([*FLAGS, "--gpus", "8", "--experts", "4", "--top-k", "5"], "top_k is 5; it is at most experts, 4"),
        ([*FLAGS, "--gpus", "8", "--replicas", "3"], "replicas is 3; it divides 8"),
    ],
)
def test_values_that_cannot_be_end_the_command_with_one_line(flags, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        cost_model.main(flags)
    assert says in capsys.readouterr().err


def test_a_config_names_the_value_that_cannot_be():
    with pytest.raises(FsdpError, match=r"flops is 0\.0; it is > 0"):
        Cluster(gpus=8, flops=0.0)
    with pytest.raises(FsdpError, match="kv_heads is 3; it divides heads, which is 8"):
        Model(layers=1, hidden=64, heads=8, kv_heads=3)
