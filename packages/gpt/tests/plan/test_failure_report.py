"""``sixfold plan --mtbf-hours``: what it says, and what it makes of its flags."""

import json

import pytest
from config_helpers import MINIMAL

from sixfold.gpt.commands import cli
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.plan.failure_report import FailureFlags

COSTS = [
    "--step-seconds=2", "--snapshot-seconds=0.1", "--save-seconds=3", "--written-seconds=50", "--detect-seconds=1",
    "--recover-seconds=20", "--restart-seconds=90", "--from-checkpoint=0.25",
]  # fmt: skip


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)

    def run(*words):
        status = cli.main(["plan", str(path), *words])
        said = capsys.readouterr()
        return said.out if status == 0 else said.err

    return run


def goodput_of(text):
    return json.loads(text)["goodput"]


def test_text_and_json_say_the_same(plan):
    words = ["train.steps=100000", "checkpoint.every=400", "--device", "h100", "--mtbf-hours", "3", *COSTS]
    found = goodput_of(plan(*words, "--json"))
    assert (found["interval_steps"], found["assumed"]) == (400, [])
    assert 0.8 < found["goodput"] < found["best_goodput"] < 1
    hours = 100000 * 2 / 3600
    assert found["run_hours"] == pytest.approx(hours / found["goodput"])
    assert sum(found["hours_lost"].values()) == pytest.approx(found["run_hours"] - hours)
    assert found["hours_lost"]["snapshots"] == pytest.approx(100000 * 0.1 / 3600)
    assert found["hours_lost"]["saves"] == pytest.approx(100000 / 400 * 3 / 3600)
    assert found["young_interval_steps"] == pytest.approx((2 * 3 * 3 * 3600 / 0.25) ** 0.5 / 2.1)
    text = plan(*words)
    best = f"best: a save each {found['best_interval_steps']:,} steps"
    for said in (f"goodput {found['goodput']:.1%}", best, "each 400 steps (checkpoint.every = 400)", "assumed"):
        assert (said in text) is (said != "assumed"), text


def test_a_rank_that_fails_so_often_makes_a_job_of_many_fail_more_often(plan):
    words = ["--world", "16", "train.global_batch_size=64", "--json", *COSTS]
    one, each = goodput_of(plan("--mtbf-hours", "5", *words)), goodput_of(plan("--rank-mtbf-hours", "80", *words))
    assert one == each and one["costs"]["mtbf_s"] == 5 * 3600


def test_a_save_by_time_is_an_interval_too_and_no_save_is_one_at_the_end(plan):
    words = ["train.steps=100000", "--mtbf-hours", "3", "--json", *COSTS]
    by_time = goodput_of(plan(*words, "checkpoint.every_minutes=30"))
    assert by_time["interval_steps"] == round(1800 / 2.1)
    assert goodput_of(plan(*words, "checkpoint.every_minutes=0"))["interval_steps"] == 100000


def test_what_is_not_given_is_said_to_be_assumed(plan):
    words = ("--device", "h100", "--mtbf-hours", "3")
    assert goodput_of(plan(*words, "--json", "--detect-seconds", "0"))["assumed"] == [
        "snapshot_seconds", "save_seconds", "written_seconds", "recover_seconds", "from_checkpoint"
    ]  # fmt: skip
    assert "assumed: --snapshot-seconds 0, --save-seconds 1, --written-seconds 60, " in plan(*words)


def test_snapshots_take_the_memory_of_two_generations_their_copies_and_the_arena(plan):
    text = plan("--world", "16", "--device", "h100", "--mtbf-hours", "3", "--json", "train.global_batch_size=64")
    whole = json.loads(text)
    share = whole["parameters"] * 12 / 16  # fp32 weights and two moments; the vocabulary's padding comes on top
    grain = 2**21
    arenas = 8 * grain
    found = whole["goodput"]["snapshots"]
    assert (found["hosts"], found["copies"]) == (2, 1)
    assert found["bytes_per_host"] == pytest.approx(arenas + 2 * 2 * 8 * share, rel=0.01)
    words = ("--world", "16", "--device", "h100", "--mtbf-hours", "3", "train.global_batch_size=64")
    assert "on each of 2 hosts, a copy on 1 other" in plan(*words, "elastic.memory_replicas=3")
    assert "on each of 2 hosts, no copy elsewhere" in plan(*words, "elastic.memory_replicas=0")
    assert "no snapshots in memory (elastic.memory_every = 0)" in plan(*words, "elastic.memory_every=0")
    assert goodput_of(plan(*words, "--json", "elastic.memory_every=0"))["snapshots"]["bytes_per_host"] == 0


def test_without_a_rate_of_failures_there_is_no_goodput(plan):
    assert "goodput" not in json.loads(plan("--device", "h100", "--json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--save-seconds", "3"], "--save-seconds is given and no time between failures; add --mtbf-hours or --rank"),
        (["--mtbf-hours", "3", "--device", "cpu"], "the time of a step is not known for cpu; give --step-seconds"),
        (["--mtbf-hours", "3", "--rank-mtbf-hours", "3"], "not allowed with argument"),
        (["--mtbf-hours", "0"], "'0' is no number > 0"),
        (["--mtbf-hours", "3", "--from-checkpoint", "2"], "'2' is no share, 0 to 1"),
        (["--mtbf-hours", "3", "--detect-seconds", "-1"], "'-1' is no number >= 0"),
        (["--mtbf-hours", "3", "--search", "--world", "3"], "train.global_batch_size"),
    ],
)
def test_flags_that_cannot_be_are_refused(plan, words, said):
    assert said in plan(*words)


def test_a_job_that_gets_nowhere_is_told(plan):
    text = plan("--mtbf-hours", "0.0003", "--step-seconds", "3000")
    assert "goodput 0.0%" in text and "no step would ever stay" in text
    found = goodput_of(plan("--mtbf-hours", "0.0003", "--step-seconds", "3000", "--json"))
    assert found["run_hours"] is None and found["hours_lost"] is None


def test_costs_need_a_rate():
    with pytest.raises(ConfigError, match="--step-seconds is given"):
        FailureFlags(step_seconds=1.0)
    assert not FailureFlags().asks
