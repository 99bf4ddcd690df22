"""Numbers of ranks that a run may have, and the word that asks for another."""

import os
import threading
import time

import pytest
from gpt_helpers import tiny_config

from sixfold.gpt.elastic import sizes
from sixfold.gpt.elastic.sizes import ask, config_of, sizes_of, taken
from sixfold.gpt.errors import ConfigError


def test_by_default_halves_of_the_data_parallel_ranks_as_far_as_the_batch_divides(tmp_path):
    config = tiny_config(tmp_path, "train.global_batch_size=8", "train.micro_batch_size=1", "parallel.pp=2")
    assert sizes_of(config, 8) == (8, 4, 2)
    assert sizes_of(config, 6) == (6,)  # three have no half
    assert sizes_of(config, 2) == (2,)


def test_degrees_that_are_listed_are_taken_and_one_that_cannot_be_is_named(tmp_path):
    config = tiny_config(tmp_path, "train.global_batch_size=12", "train.micro_batch_size=1", "elastic.dp=[3, 1]")
    assert sizes_of(config, 4) == (4, 3, 1)
    with pytest.raises(ConfigError, match=r"elastic.dp has 5, with which the run would not work: .*global_batch_size"):
        sizes_of(tiny_config(tmp_path, "train.global_batch_size=12", "elastic.dp=[5]", run="b"), 4)


def test_the_batch_stays_when_ranks_go(tmp_path):
    config = tiny_config(tmp_path, "parallel.dp=4", "parallel.tp=2")
    assert config_of(config, 4).parallel.dp == 2
    assert config_of(config, 4).train == config.train


@pytest.fixture
def run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    return tmp_path


def answering(run, numbers, found):
    """A supervisor that looks until it was asked, or half a minute."""

    def look():
        for _ in range(600):
            number = taken(run, numbers)
            if number is not None:
                found.append(number)
                return
            if stop.wait(0.05):
                return

    stop = threading.Event()
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return stop, thread


def test_a_number_is_taken_once(run):
    found = []
    _, thread = answering(run, (4, 2, 1), found)
    ask(run, 2)
    thread.join(30)
    assert found == [2] and taken(run, (4, 2, 1)) is None
    assert os.listdir(run) == ["metrics.jsonl"]


def test_two_that_ask_at_once_are_both_heard_one_after_the_other(run):
    asking = [threading.Thread(target=ask, args=(run, ranks)) for ranks in (2, 4, 1)]
    for one in asking:
        one.start()
    found, deadline = [], time.monotonic() + 30
    while any(one.is_alive() for one in asking) and time.monotonic() < deadline:
        found += [number] if (number := taken(run, (4, 2, 1))) is not None else []
        time.sleep(0.02)
    assert sorted(found) == [1, 2, 4] and os.listdir(run) == ["metrics.jsonl"]


def test_a_number_that_the_run_cannot_have_is_refused_to_who_asked(run):
    found = []
    stop, thread = answering(run, (4, 2, 1), found)
    with pytest.raises(ConfigError, match=r"3 ranks are asked for; this run can have 4, 2, 1: see elastic.dp"):
        ask(run, 3)
    stop.set()
    thread.join(30)
    assert found == [] and os.listdir(run) == ["metrics.jsonl"]


def test_a_run_that_does_not_answer_is_told_and_the_word_is_taken_back(run, monkeypatch):
    monkeypatch.setattr(sizes, "ANSWER_S", 0.2)
    with pytest.raises(ConfigError, match=r"no run in .* has answered within 0.2 s; only one that .*--keep-alive"):
        ask(run, 2)
    assert os.listdir(run) == ["metrics.jsonl"]


def test_a_folder_of_no_run_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"no folder of a run"):
        ask(tmp_path, 2)


def test_what_nobody_has_asked_is_no_number(run):
    (run / sizes.WORD).write_text("many")
    assert taken(run, (4, 2)) is None
