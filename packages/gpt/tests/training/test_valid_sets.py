"""Several validation sets by name: each is evaluated as if it were alone, at every layout and after a stop."""

import os
import signal
from dataclasses import replace

import pytest
from config_helpers import config_with, words_of
from gpt_helpers import tiny_config, write_pair
from run_helpers import lines, losses, run_all, world_of

from sixfold.gpt import ConfigError, TrainConfig, train
from sixfold.gpt.config.resume_rules import noted_changes, resume_changes
from sixfold.gpt.training import loop
from sixfold.gpt.training.loop import train_in

EVALUATED = ("data.split=98,2,0", "eval.every=2", "eval.batches=1", "train.steps=3", "data.max_epochs=0")


@pytest.fixture
def held_out(tmp_path):
    """Prefixes of two pairs that training does not read."""
    return [write_pair(tmp_path / name, 40, seed) for name, seed in (("news", 5), ("math", 6))]


def evaluations(config):
    return [(line["step"], line["name"], line["loss"], line["tokens"]) for line in lines(config, "eval")]


def test_a_prefix_or_several_make_a_set_and_the_table_survives_being_written():
    config = config_with('data.valid={wiki = "a", "both of them" = ["a", "b"]}')
    assert config.data.valid_sets == {"wiki": ("a",), "both of them": ("a", "b")}
    assert config.data.valid_prefixes == ("a", "b")
    assert TrainConfig.from_text(config.to_toml()) == config
    assert config_with('data.valid=["a", "b"]').data.valid_sets == {"": ("a", "b")}
    assert config_with().data.valid_sets == {}


@pytest.mark.parametrize("table", ['{"" = "a"}', "{a = []}", '{" " = "a"}', '{"a\\nb" = "c"}'])
def test_a_set_without_a_name_or_a_prefix_is_refused(table):
    with pytest.raises(ConfigError) as error:
        config_with(f"data.valid={table}")
    assert "data.valid has" in words_of(error)


@pytest.mark.parametrize("value", ['"a"', "3", "{a = 3}", "[3]"])
def test_another_type_is_refused_by_the_name_of_the_key(value):
    with pytest.raises(ConfigError, match=r"data\.valid.* is .*; it is"):
        TrainConfig.from_text(config_with().to_toml().replace("valid = []", f"valid = {value}"))


def test_a_resume_may_have_other_sets_and_says_so_but_not_hold_out_anew():
    none, one, two = (config_with(*f) for f in ((), ('data.valid=["x/a"]',), ('data.valid={a = "y/a", b = "b"}',)))
    resume_changes(one, two, step=3)
    assert noted_changes(one, two) == {"data.valid": [{"": ["a"]}, {"a": ["a"], "b": ["b"]}]}
    assert noted_changes(two, config_with('data.valid={a = "moved/a", b = "b"}')) == {}
    for was, now in ((none, one), (two, none)):
        with pytest.raises(ConfigError, match=r"data\.valid \(was '(none|given)', is '(none|given)'\)"):
            resume_changes(was, now, step=3)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["stateless", "apportioned"])
def test_each_set_has_the_loss_that_it_has_alone_and_training_is_the_same(tmp_path, held_out, order):
    news, math = held_out
    several = f'data.valid={{news = "{news}", math = "{math}", all = ["{news}", "{math}"]}}'
    options = (*EVALUATED, f"data.order={order}")
    if order != "stateless":
        options += (f"data.cache_dir={tmp_path}/cache",)
    config = tiny_config(tmp_path, *options, several, run="several")
    train(config)
    found = evaluations(config)
    assert [(step, name) for step, name, _, _ in found] == [(s, n) for s in (2, 3) for n in ("news", "math", "all")]
    for name, prefixes in (("news", [news]), ("math", [math]), ("all", [news, math])):
        alone = tiny_config(tmp_path, *options, f"data.valid={prefixes}", run=name)
        train(alone)
        assert losses(alone) == losses(config)
        assert [(s, "", loss, n) for s, one, loss, n in found if one == name] == evaluations(alone)


@pytest.mark.slow
def test_losses_of_sets_are_the_same_bits_at_every_layout(tmp_path, held_out):
    news, math = held_out
    options = (*EVALUATED, f'data.valid={{news = "{news}", math = ["{math}"]}}', "parallel.grad_sum='tree'")
    layouts = ((1, ()), (2, ("parallel.dp=2",)), (2, ("parallel.pp=2",)))
    configs = [(n, tiny_config(tmp_path, *options, *more, run=str(i))) for i, (n, more) in enumerate(layouts)]
    run_all(configs)
    first, *others = [evaluations(config) for _, config in configs]
    assert len(first) == 4 and all(other == first for other in others)


@pytest.mark.slow
def test_a_stop_between_two_sets_leaves_the_second_to_the_next_start(tmp_path, held_out, monkeypatch):
    news, math = held_out
    options = (*EVALUATED, f'data.valid={{news = "{news}", math = "{math}"}}')
    whole = tiny_config(tmp_path, *options, run="whole")
    train(whole)
    config, evaluate, asked = tiny_config(tmp_path, *options), loop.evaluate, []

    def stop_behind_the_first(*args):
        found = evaluate(*args)
        if not asked:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(loop, "evaluate", stop_behind_the_first)
    assert train(config).reason == "sigterm"
    assert [(step, name) for step, name, _, _ in evaluations(config)] == [(2, "news")]
    assert train(config).reason == "finished"
    assert (evaluations(config), losses(config)) == (evaluations(whole), losses(whole))


class Numbered:
    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return [(self.first + number + i) % 250 for i in range(33)]


@pytest.mark.slow
def test_own_datasets_are_sets_by_name_too(tmp_path):
    own = {"wiki": Numbered(1), "code": Numbered(5), "v": Numbered(9)}
    config = tiny_config(tmp_path, *EVALUATED, 'data.blend=["wiki", "code"]', 'data.valid={v = "v", code = ["code"]}')
    train_in(config, world_of(0, 1), datasets=own)
    found = evaluations(config)
    assert [(step, name) for step, name, _, _ in found] == [(2, "v"), (2, "code"), (3, "v"), (3, "code")]
    with pytest.raises(ConfigError, match=r"'v' is missing in one"):
        train_in(config, world_of(0, 1), datasets={name: own[name] for name in ("wiki", "code")})
    alone = replace(config, data=replace(config.data, valid=("v",)), run=replace(config.run, dir=f"{tmp_path}/alone"))
    train_in(alone, world_of(0, 1), datasets=own)
    assert [e[2] for e in evaluations(alone)] == [e[2] for e in found if e[1] == "v"]


def test_a_set_whose_pair_is_missing_is_refused_before_a_folder_is_made(tmp_path, held_out):
    config = tiny_config(tmp_path, *EVALUATED, f'data.valid={{news = "{held_out[0]}", gone = "{tmp_path}/gone"}}')
    with pytest.raises(Exception, match="gone"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_set_that_is_read_twice_in_an_evaluation_is_told_by_its_name(tmp_path, held_out):
    news, math = held_out
    options = ("data.split=98,2,0", "eval.every=1", "train.steps=1", "eval.batches=40")
    config = tiny_config(tmp_path, *options, f'data.valid={{news = "{news}", math = "{math}"}}')
    with pytest.warns(UserWarning, match=r"reads validation data of 'math' \d"):
        train(config)
