"""Copies compared in runs that are kept alive: real processes, a bit that turns over, and the undisturbed run."""

import pytest
from gpt_helpers import tiny_config
from kept_alive_helpers import Fault, assert_same_run, pids, run_kept_alive
from replica_helpers import Flip, undisturbed_runs
from run_helpers import lines, run

from sixfold.gpt.launch.spawn import RankError

KEYS = ("train.steps=5", "checkpoint.every=2", "train.micro_batch_size=1", "train.global_batch_size=12")
EVERY = "elastic.compare_replicas_every=1"
COPIES = "parallel.sharding=no_shard"
LAYOUTS = {
    "dp2": (2, COPIES),
    "dp3": (3, COPIES),
    "dp2pp2": (4, "parallel.dp=2", "parallel.pp=2", COPIES),
    "hybrid": (4, "parallel.dp=4", "parallel.dp_replicate=2"),
}
UP, TABLE = "layers.1.ffn.up.weight", "embedding.weight"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_runs(tmp_path_factory, KEYS, LAYOUTS)


def disturbed(folder, layout, *flips, overrides=(EVERY,)):
    """The run's configuration, and what the supervisor told."""
    ranks, *keys = LAYOUTS[layout]
    config = tiny_config(folder, *KEYS, *keys, *overrides)
    return config, run_kept_alive(config, ranks, *flips, attempts=config.elastic.attempts)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "flip"),
    [
        ("dp3", Flip(1, 3)),
        ("dp3", Flip(0, 5, UP, "exp_avg_sq")),
        ("dp3", Flip(2, 1, UP, "exp_avg")),
        ("dp2pp2", Flip(3, 3, TABLE)),
    ],
)
def test_a_rank_that_the_majority_is_against_is_replaced_and_the_run_has_the_bits_of_an_undisturbed_one(
    tmp_path, undisturbed, layout, flip
):
    config, told = disturbed(tmp_path, layout, flip)
    [line] = told
    assert line.startswith(f"rank {flip.rank} has other bits of ") and line.endswith("; generation 2 goes on")
    [recovery] = lines(config, "recovery")
    assert [one["rank"] for one in recovery["lost"]] == [flip.rank]
    assert recovery["step"] < flip.step, "all go back to a step on which all agreed"
    first, second = pids(config)
    assert [a == b for a, b in zip(first, second, strict=True)] == [r != flip.rank for r in range(len(first))]
    assert_same_run(config, undisturbed(layout))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "flip", "pair"),
    [
        ("dp2", Flip(1, 3), [0, 1]),
        ("dp2", Flip(0, 4, UP, "exp_avg"), [0, 1]),
        ("hybrid", Flip(3, 3, None), [1, 3]),
        ("dp2pp2", Flip(2, 3, "layers.3.ffn.up.weight"), [2, 3]),
    ],
)
def test_two_that_differ_once_stay_and_do_the_steps_again(tmp_path, undisturbed, layout, flip, pair):
    config, told = disturbed(tmp_path, layout, flip)
    assert len(told) == 1 and "no majority says which are right" in told[0], told
    [recovery] = lines(config, "recovery")
    assert recovery["lost"] == [] and recovery["step"] < flip.step
    first, second = pids(config)
    assert first == second
    [undecided] = [line for line in lines(config, "replicas") if line["result"] == "undecided"]
    assert undecided["ranks"] == pair and undecided["step"] == flip.step
    assert_same_run(config, undisturbed(layout))


@pytest.mark.slow
def test_two_that_differ_again_end_the_run_which_names_both(tmp_path):
    with pytest.raises(RankError) as error:
        disturbed(tmp_path, "dp2", Flip(1, 3, generation=0))
    assert error.value.final
    assert error.match("rank 0 and rank 1 have different bits of layers.1.ffn.up.weight after step 3")
    config = tiny_config(tmp_path, *KEYS, COPIES, EVERY)
    assert len(lines(config, "start")) == 2 and lines(config, "end")[-1]["reason"] == "error"


@pytest.mark.slow
def test_a_rank_that_is_wrong_in_each_process_ends_the_run_after_so_many_attempts(tmp_path):
    with pytest.raises(RankError) as error:
        disturbed(tmp_path, "dp3", Flip(1, 3, generation=0), overrides=(EVERY, "elastic.attempts=2"))
    assert error.match("rank 1 has other bits of .*; the run was recovered 2 times and did no step beyond 3")


@pytest.mark.slow
@pytest.mark.parametrize(("memory_every", "checkpoint_every", "source"), [(1, 0, "memory"), (0, 2, "disk")])
def test_the_run_goes_back_to_a_step_that_was_compared(tmp_path, memory_every, checkpoint_every, source):
    """The last step has other bits already; it was not looked at, and so nobody can go back to it."""
    overrides = (
        "elastic.compare_replicas_every=4", f"elastic.memory_every={memory_every}",
        f"checkpoint.every={checkpoint_every}", "train.steps=6",
    )  # fmt: skip
    faults = Flip(1, 5, bit=20), Fault("in a forward", 0, "SIGKILL", generation=2, step=6)
    config, told = disturbed(tmp_path, "dp3", *faults, overrides=overrides)
    assert len(told) == 2
    first, second = lines(config, "recovery")
    assert (first["step"], [one["rank"] for one in first["lost"]], first["source"]) == (4, [1], source)
    assert (second["step"], [one["rank"] for one in second["lost"]]) == (4, [0]), "the fifth was not compared"
    found = [(line["step"], line["result"]) for line in lines(config, "replicas")]
    saved = [(2, "agree")] if checkpoint_every else []
    back = [(4, "agree")]
    assert found == [(0, "agree"), *saved, (4, "agree"), (6, "differ"), *back, *back, (6, "agree")]
    whole = tiny_config(tmp_path, *KEYS, COPIES, "train.steps=6", run="whole")
    run(whole, 3)
    assert_same_run(config, whole)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("action", ["SIGKILL", "SIGSTOP", "error"])
def test_a_rank_that_is_lost_in_a_comparison_is_replaced_as_at_any_other_instant(tmp_path, undisturbed, action, rank):
    fault = Fault("in a comparison", rank, action)
    config, told = disturbed(tmp_path, "dp3", fault, overrides=(EVERY, "elastic.hung_after_seconds=2.0"))
    assert len(told) == 1, told
    [recovery] = lines(config, "recovery")
    assert ([one["rank"] for one in recovery["lost"]], recovery["step"]) == ([rank], 2), "the third was not compared"
    assert {line["result"] for line in lines(config, "replicas")} == {"agree"}
    assert_same_run(config, undisturbed("dp3"))


@pytest.mark.slow
def test_a_snapshot_that_is_due_is_taken_of_the_next_step_that_is_compared(tmp_path, undisturbed):
    overrides = ("elastic.compare_replicas_every=3", "elastic.memory_every=2", "checkpoint.every=0")
    config, told = disturbed(tmp_path, "dp3", Fault("in a forward", 1, "SIGKILL", step=5), overrides=overrides)
    [recovery] = lines(config, "recovery")
    assert (recovery["step"], recovery["source"]) == (3, "memory"), told
    assert_same_run(config, undisturbed("dp3"))
