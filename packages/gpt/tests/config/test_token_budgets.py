"""Lengths in tokens: as many steps as read them, whatever the batch does meanwhile."""

import re
from dataclasses import replace

import pytest
from config_helpers import MINIMAL
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.gpt.config.batch_schedule import samples_before
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.errors import ConfigError

NO_STEPS = MINIMAL.replace("steps = 100\n", "")  # 16 rows of 32 tokens a step


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [("1", 1), ("512", 1), ("513", 2), ("1e6", 1954), ("1_000_000", 1954), ("10_000_000_000", 19531250)],
)
def test_a_run_of_so_many_tokens_has_the_steps_that_read_them(tokens, steps):
    config = TrainConfig.from_text(NO_STEPS, [f"train.tokens={tokens}"])
    assert (config.train.steps, config.train.tokens) == (steps, int(float(tokens)))
    assert TrainConfig.from_text(config.to_toml()) == config


def test_warmup_and_decay_take_tokens_too_and_count_the_ramp():
    config = TrainConfig.from_text(
        NO_STEPS,
        ["train.tokens=51200", "train.batch_ramp=[[0, 8], [10, 16]]", "schedule.shape=wsd",
         "schedule.warmup_tokens=2561", "schedule.decay_tokens=5120"],
    )  # fmt: skip
    # 10 steps of 256 tokens, then 512 each: 2560 + 95 * 512 = 51200.
    assert (config.train.steps, config.schedule.warmup_steps, config.schedule.decay_steps) == (105, 11, 10)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200_000), st.integers(0, 200_000), st.lists(st.integers(1, 9), max_size=3))
def test_no_step_too_few_and_none_too_many(tokens, decay, growth):
    ramp = [[7 * (at + 1), 16 * batch] for at, batch in enumerate(growth)]
    words = [f"train.tokens={tokens}", f"train.batch_ramp={ramp}", "schedule.shape=wsd"]
    config = TrainConfig.from_text(NO_STEPS, words)
    decay = min(decay, 32 * samples_before(config, config.train.steps))
    config = TrainConfig.from_text(NO_STEPS, [*words, f"schedule.decay_tokens={decay}"])
    read = [32 * samples_before(config, step) for step in (config.train.steps - 1, config.train.steps)]
    assert read[0] < tokens <= read[1]
    begin = config.train.steps - config.schedule.decay_steps
    if decay and begin:
        assert read[1] - 32 * samples_before(config, begin) >= decay > read[1] - 32 * samples_before(config, begin + 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(2_000, 50_000), st.integers(1, 200_000), st.integers(1, 200_000))
def test_what_works_instead_of_a_decay_that_is_too_long_works(tokens, warmup, decay):
    words = [
        f"train.tokens={tokens}",
        "train.batch_ramp=[[4, 48], [9, 32]]",
        "schedule.shape=wsd",
        f"schedule.warmup_tokens={min(warmup, tokens // 2)}",
    ]
    try:
        TrainConfig.from_text(NO_STEPS, [*words, f"schedule.decay_tokens={decay}"])
    except ConfigError as error:
        [works] = re.findall(r"schedule\.decay_tokens = (\d+) works", str(error))
        config = TrainConfig.from_text(NO_STEPS, [*words, f"schedule.decay_tokens={works}"])
        assert config.schedule.decay_steps == config.train.steps - config.schedule.warmup_steps
        assert int(works) < decay


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.tokens=1000", "train.steps=3"], "train.tokens is 1000, which is 2 steps, and train.steps 3; the two"),
        (["train.tokens=1000", "train.steps=0"], "train.tokens is 1000, which is 2 steps, and train.steps 0; the two"),
        (["train.steps=9", "schedule.warmup_tokens=513", "schedule.warmup_steps=9"],
         "schedule.warmup_tokens is 513, which is 2 steps, and schedule.warmup_steps 9; the two"),
        (["train.tokens=-1"], "train.tokens is -1; it is >= 0"),
        (["train.tokens=2B"], "train.tokens is '2B'"),
        (["train.tokens='2e10'"], "train.tokens is '2e10'"),
        (["train.tokens=5.5"], "train.tokens is 5.5"),
        (["train.tokens=1e400"], "train.tokens is inf"),
        (["train.tokens=0"], "train.steps is not given"),
        (["train.tokens=1e6", "train.micro_batch_size=0"], "train.micro_batch_size is 0"),
        (["train.tokens=1e6", "train.global_batch_size=0"], "train.global_batch_size is 0"),
        (["train.tokens=5120", "schedule.shape=wsd", "schedule.decay_tokens=5121"],
         "schedule.decay_tokens is 5121, and behind schedule.warmup_steps 0 the run of train.steps 10 reads 5120"),
        (["train.steps=10", "schedule.shape=wsd", "schedule.decay_tokens=51200000"],
         "schedule.decay_tokens is 51200000"),
        (["train.steps=10", "schedule.decay_tokens=51200000"], "it is 0 unless the shape is 'wsd'"),
        (["train.steps=9", "train.tokens=1.5"], "train.tokens is 1.5"),
        (["train.steps=9", "schedule.decay_tokens=513"], "it is 0 unless the shape is 'wsd'"),
        (["train.steps=9", "schedule.decay=cosine"], "schedule.decay is 'cosine' and schedule.shape 'cosine'"),
        ([], "train.steps is not given"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(words, said):
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_text(NO_STEPS, words)
    assert said in str(error.value)


def test_a_configuration_that_is_changed_in_python_keeps_steps_and_tokens_alike():
    config = TrainConfig.from_text(NO_STEPS, ["train.tokens=5120", "schedule.shape=wsd", "schedule.decay_tokens=1024"])
    assert replace(config, optimizer=replace(config.optimizer, lr=0.5)).schedule.decay_steps == 2
    for table, change, said in (
        ("schedule", {"decay_tokens": 2048}, "schedule.decay_tokens is 2048, which is 4 steps, and"),
        ("schedule", {"warmup_tokens": 513}, "in Python both are given: schedule.warmup_steps = 2"),
        ("train", {"steps": 20}, "train.tokens is 5120, which is 10 steps, and train.steps 20"),
        ("train", {"global_batch_size": 32}, "train.tokens is 5120, which is 5 steps, and train.steps 10"),
    ):
        with pytest.raises(ConfigError) as error:
            replace(config, **{table: replace(getattr(config, table), **change)})
        assert said in str(error.value)
