"""Copies of shards that are compared during a run: a bit that turns over on one rank is found, and its rank named."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from replica_helpers import Flip, train_with_flips, undisturbed_runs
from run_helpers import JOB_S, assert_same_tensors, final_tensors, lines, run

import ranktest
from sixfold.gpt import ConfigError
from sixfold.gpt.errors import ReplicasDifferAgainError, ReplicasDifferError
from sixfold.gpt.observe.metrics import read_metrics

KEYS = ("train.steps=4", "checkpoint.every=1", "train.micro_batch_size=1", "train.global_batch_size=12")
EVERY = "elastic.compare_replicas_every=1"
COPIES = "parallel.sharding=no_shard"
LAYOUTS = {
    "dp2": (2, COPIES),
    "dp3": (3, COPIES),
    "dp4": (4, COPIES),
    "fsdp3": (3,),
    "hybrid": (4, "parallel.dp=4", "parallel.dp_replicate=2"),
    "dp2pp2": (4, "parallel.dp=2", "parallel.pp=2", COPIES),
    "fsdp2pp2": (4, "parallel.dp=2", "parallel.pp=2"),
    "dp2tp2": (4, "parallel.dp=2", "parallel.tp=2", COPIES),
}
UP, NORM, TABLE = "layers.1.ffn.up.weight", "layers.1.ffn_norm.weight", "embedding.weight"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_runs(tmp_path_factory, KEYS, LAYOUTS)


def attempt(config, ranks, *flips):
    """Train; what the error says that all ranks raise, None where the run ends well."""
    first, *others = ranktest.run_ranks(train_with_flips, ranks, config.to_toml(), flips, timeout=JOB_S)
    assert all(other == first for other in others), "all ranks raise alike"
    return first


def setting(folder, layout, *overrides):
    ranks, *keys = LAYOUTS[layout]
    return tiny_config(folder, *KEYS, EVERY, *keys, *overrides), ranks


def assert_same_run(config, other):
    mine, others = (
        [(one["step"], one["loss"], one["grad_norm"]) for one in read_metrics(job.run.dir) if one["kind"] == "step"]
        for job in (config, other)
    )
    assert mine == others
    assert_same_tensors(final_tensors(config), final_tensors(other))


def results(config):
    return [(line["step"], line["result"], line["ranks"]) for line in lines(config, "replicas")]


MAJORITY = [
    (layout, rank, name, key)
    for layout, rank, name in [
        *(("dp3", rank, UP) for rank in range(3)),
        *(("dp4", rank, UP) for rank in range(4)),
        *(("dp2pp2", rank, TABLE) for rank in range(4)),
        *(("dp2tp2", rank, NORM) for rank in range(4)),
    ]
    for key in ("param", "exp_avg", "exp_avg_sq")
]


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("layout", "rank", "name", "key"), MAJORITY)
def test_a_rank_with_another_bit_than_the_majority_is_named_and_the_next_start_goes_on_before_it(
    tmp_path, undisturbed, layout, rank, name, key
):
    config, ranks = setting(tmp_path, layout)
    error = attempt(config, ranks, Flip(rank, 3, name, key))
    assert (error["kind"], error["ranks"], error["step"]) == (ReplicasDifferError, (rank,), 3)
    assert error["tensor"] == (name if key == "param" else f"{key} of {name}")
    assert error["text"].startswith(f"rank {rank} has other bits of {error['tensor']} after step 3 than")
    assert [line["step"] for line in lines(config, "save")] == [1, 2], "the state that is wrong is not saved"
    assert attempt(config, ranks) is None
    assert_same_run(config, undisturbed(layout))
    assert results(config)[3:5] == [(3, "differ", [rank]), (2, "agree", [])]


UNDECIDED = [
    ("dp2", 1, UP, (0, 1)),
    ("hybrid", 1, None, (1, 3)),
    ("hybrid", 2, None, (0, 2)),
    ("dp2pp2", 0, UP, (0, 1)),
    ("fsdp2pp2", 3, TABLE, (1, 3)),
    ("dp2tp2", 2, UP, (0, 2)),
]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "rank", "name", "pair"), UNDECIDED)
@pytest.mark.parametrize("key", ["param", "exp_avg_sq"])
def test_two_that_differ_are_both_named_and_the_steps_are_done_again_with_the_bits_of_an_undisturbed_run(
    tmp_path, undisturbed, layout, rank, name, pair, key
):
    config, ranks = setting(tmp_path, layout)
    error = attempt(config, ranks, Flip(rank, 3, name, key))
    assert (error["kind"], error["ranks"], error["step"]) == (ReplicasDifferError, pair, 3)
    assert error["text"].startswith(f"rank {pair[0]} and rank {pair[1]} have different bits of")
    assert attempt(config, ranks) is None
    assert_same_run(config, undisturbed(layout))
    assert results(config)[3:] == [
        (3, "undecided", list(pair)), (2, "agree", []), (3, "agree", []), (4, "agree", []),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("second", [2, 3])
def test_two_that_differ_again_before_that_step_is_passed_end_the_run_for_good(tmp_path, second):
    config, ranks = setting(tmp_path, "dp2")
    assert attempt(config, ranks, Flip(1, 3))["kind"] is ReplicasDifferError
    if second == 2:
        newest = Path(config.run.dir) / "checkpoints" / "step-00000002"
        newest.rename(newest.with_name("elsewhere"))
    error = attempt(config, ranks, Flip(1, second))
    assert (error["kind"], error["ranks"], error["step"]) == (ReplicasDifferAgainError, (0, 1), second)
    assert "as before at step 3, though these steps were done again" in error["text"]


@pytest.mark.slow
def test_two_that_differ_at_a_later_step_have_another_attempt(tmp_path, undisturbed):
    config, ranks = setting(tmp_path, "dp2")
    for step in (2, 3, 4):
        assert attempt(config, ranks, Flip(1, step))["kind"] is ReplicasDifferError
    assert attempt(config, ranks) is None
    assert_same_run(config, undisturbed("dp2"))


@pytest.mark.slow
def test_a_rank_that_is_wrong_in_all_that_it_holds_is_named_alone(tmp_path):
    """Its norms by the three others, and its columns, of which there is one other copy, because of its norms."""
    config, ranks = setting(tmp_path, "dp2tp2")
    error = attempt(config, ranks, Flip(3, 2, UP), Flip(3, 2, NORM), Flip(3, 2, TABLE, "exp_avg"))
    assert (error["kind"], error["ranks"]) == (ReplicasDifferError, (3,))
    assert "and 2 more shards" in error["text"]


@pytest.mark.slow
def test_two_ranks_that_err_in_two_tensors_are_both_named(tmp_path):
    config, ranks = setting(tmp_path, "dp4")
    error = attempt(config, ranks, Flip(3, 2, UP), Flip(1, 2, NORM))
    assert (error["kind"], error["ranks"]) == (ReplicasDifferError, (1, 3))


@pytest.mark.slow
def test_between_comparisons_nothing_is_saved_unseen_and_the_error_comes_within_seconds(tmp_path, undisturbed):
    config, ranks = setting(tmp_path, "dp3", "elastic.compare_replicas_every=3", "checkpoint.every=2")
    began = time.monotonic()
    error = attempt(config, ranks, Flip(2, 1, bit=20))
    assert time.monotonic() - began < 30
    assert (error["ranks"], error["step"]) == ((2,), 2), "a save is due, and what it would save is compared"
    assert lines(config, "save") == []
    error = attempt(config, ranks, Flip(0, 3))
    assert (error["ranks"], error["step"]) == ((0,), 3)
    assert attempt(config, ranks) is None
    assert_same_run(config, undisturbed("dp3"))


EXPERTS = ("model.num_experts=4", "model.moe_ffn_hidden_size=32", "train.global_batch_size=8")
NORMS, TENSORS = 9, 38  # of the tiny model: two of each layer and one behind them; nine of each layer, the table, that
SHARED = {
    "dp2": (2, (COPIES,), TENSORS),
    "hybrid": (4, ("parallel.dp=4", "parallel.dp_replicate=2"), None),
    "tp": (2, ("parallel.tp=2",), NORMS),
    "tp_whole_sequences": (2, ("parallel.tp=2", "parallel.sequence=false"), NORMS),
    "tp_qk_norms": (2, ("parallel.tp=2", "model.qk_norm=true"), NORMS + 8),
    "cp": (2, ("parallel.cp=2", COPIES), TENSORS),
    "pp_tied": (2, ("parallel.pp=2",), 1),
    "pp": (2, ("parallel.pp=2", "model.tie_embeddings=false"), 0),
    "zb_v": (2, ("parallel.pp=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2"), 0),
    "fsdp": (2, (), 0),
    "muon": (2, (COPIES, "optimizer.name=muon"), None),
    "bf16": (2, (COPIES, "train.precision=bf16"), TENSORS),
    "tree": (4, ("parallel.dp=4", "parallel.dp_replicate=2", "parallel.grad_sum=tree"), None),
    "backend": (4, ("parallel.dp=2", "parallel.tp=2", "fsdp.grad_sum=backend", COPIES), TENSORS),
    "ep": (4, (*EXPERTS, "parallel.dp=4", "parallel.ep=2", "parallel.sharding=optim"), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SHARED)
def test_copies_that_nothing_happens_to_agree_at_every_layout_and_none_is_left_out(tmp_path, layout):
    ranks, keys, shared = SHARED[layout]
    config = tiny_config(tmp_path, *KEYS, EVERY, *keys)
    assert attempt(config, ranks) is None
    assert results(config) == [(step, "agree", []) for step in range(5)]
    found = [line["shards"] for line in lines(config, "replicas")]
    if shared is not None:
        assert found == [shared, *4 * [3 * shared]], "weights, and then both moments"


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rank"), [("dp3", 1), ("fsdp3", 2)])
def test_an_optimizers_count_of_steps_is_compared_also_where_its_tensors_have_no_copies(tmp_path, layout, rank):
    config, ranks = setting(tmp_path, layout, "train.global_batch_size=12")
    error = attempt(config, ranks, Flip(rank, 3, TABLE, "step"))
    assert (error["kind"], error["ranks"], error["step"]) == (ReplicasDifferError, (rank,), 3)
    assert error["tensor"] == f"step of {TABLE}"
    assert attempt(config, ranks) is None


@pytest.mark.slow
def test_where_there_are_no_copies_the_run_says_once_that_nothing_is_compared(tmp_path, capsys):
    config = tiny_config(tmp_path, *KEYS, EVERY)
    run(config, 1)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "no two ranks hold the same shard" in line]
    assert line.startswith("sixfold: elastic.compare_replicas_every is 1,")
    assert {line["shards"] for line in lines(config, "replicas")} == {0}


@pytest.mark.slow
def test_two_comparisons_of_one_layout_say_the_same_and_name_what_they_took(tmp_path):
    config, ranks = setting(tmp_path, "dp2")
    assert attempt(config, ranks) is None
    for line in lines(config, "replicas"):
        assert json.loads(json.dumps(line)) == line and 0 < line["seconds"] < 10
        assert set(line) == {"kind", "time", "step", "result", "ranks", "tensor", "shards", "seconds"}


def test_stages_with_weights_of_different_batches_have_no_copies_to_compare(tmp_path):
    with pytest.raises(ConfigError, match=r"compare_replicas_every is 1 .*pipedream_2bw.*compare_replicas_every = 0"):
        tiny_config(
            tmp_path, "parallel.pp=2", "parallel.schedule=pipedream_2bw", COPIES, "train.clip_grad=0",
            "model.tie_embeddings=false", EVERY,
        )  # fmt: skip
