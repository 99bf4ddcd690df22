"""No key of the configuration is accepted without effect, and a path is what it says or is refused."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from config_helpers import MINIMAL, config_with, words_of

from sixfold.gpt.checkpoints import trained_model as load
from sixfold.gpt.checkpoints.starting_point import settled
from sixfold.gpt.config import train_config as config_module
from sixfold.gpt.config.toml import read_tables, write_tables
from sixfold.gpt.config.train_config import TABLES, resume_changes
from sixfold.gpt.errors import ConfigError

# A value that a key may not have, because nothing would read it. Two are read by what they ask for alone.
REFUSED = {
    "model.experts_per_token": "3", "model.router_aux_loss": "0.5", "model.norm_topk_prob": "false",
    "pipeline.steps": "3", "lora.alpha": "8", "lora.targets": '["q"]',
    "pipeline.waves": "2", "train.cuda_graphs": "true", "train.attention_dropout": "0.1",
}  # fmt: skip
BY_NAME = {  # handed on as a mapping, or read before there are tables
    "fsdp": {"reduce_dtype", "main_dtype", "grad_dtype", *config_module._BUFFER_KEYS},
    "train": {"tokens"},
    "schedule": {"warmup_tokens", "decay_tokens"},
}


def attributes_read() -> set[tuple[str, str]]:
    """(what stands before the dot, attribute) of every attribute read outside the files that check configurations."""
    config_folder = Path(config_module.__file__).parent
    found = set()
    for path in config_folder.parent.rglob("*.py"):
        if path.parent == config_folder and path.name in ("rules.py", "table.py", "toml.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                found.add((getattr(owner, "attr", getattr(owner, "id", "")), node.attr))
    return found


# How the code calls a table when it reads one of its keys.
OWNERS = {
    "model": {"config", "model", "self"}, "data": {"data", "config", "self"}, "parallel": {"parallel", "p"},
    "pipeline": {"pipeline"}, "fsdp": {"fsdp"}, "train": {"train"}, "optimizer": {"config", "optimizer"},
    "schedule": {"schedule"}, "lora": {"lora", "self"},
    "checkpoint": {"checkpoint", "keep"}, "eval": {"eval"}, "log": {"log"},
    "elastic": {"elastic"}, "run": {"run"},
}  # fmt: skip


@pytest.mark.slow
def test_every_key_is_read_by_the_code_or_refused():
    read = attributes_read()
    idle = {
        f"{name}.{field.name}"
        for name, table in TABLES.items()
        for field in fields(table)
        if not any((owner, field.name) in read for owner in OWNERS[name]) and field.name not in BY_NAME.get(name, ())
    }
    assert idle - REFUSED.keys() == set()


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_nothing_reads_is_refused_when_it_is_changed(key):
    with pytest.raises(ConfigError) as error:
        config_with(f"{key}={REFUSED[key]}")
    assert key in words_of(error)


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=~/runs/a", "run.dir=s3://bucket/run", "run.dir=file:///tmp/run", "checkpoint.init_from=~/a",
        "checkpoint.init_from=gs://bucket/a", "data.cache_dir=~/cache", "data.cache_dir=s3://bucket/cache",
    ],
)  # fmt: skip
def test_a_path_that_would_become_a_strange_folder_here_is_refused(override):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError) as error:
        config_with(override)
    assert words_of(error).startswith(f"{key} is {value!r}; ")


@pytest.mark.parametrize("path", ["runs/a", "./runs/a", "/runs/a", "runs/a/", "../a", "runs/~a", "2026"])
def test_every_other_path_is_taken_as_it_stands(path):
    assert config_with(f"run.dir={path}").run.dir == path


@pytest.mark.parametrize("wiki", ["wiki", "./data/wiki", "/abs/wiki", "x/../wiki", "data//wiki"])
def test_every_way_to_write_a_prefix_names_one_dataset_and_may_be_resumed(wiki):
    config = config_with(f"data.blend=['{wiki}', 'data/code']")
    assert config.data.dataset_names == ("wiki", "code")
    resume_changes(config_with(), config, step=3)


IDLE = (
    ("data", 'data.split="90,10,0"', 'data.valid=["v"]'),
    ("schedule", "schedule.min_lr_ratio=0.0", "schedule.shape=constant"),
    ("pipeline", "pipeline.group=3", "pipeline.waves=2", "pipeline.steps=4"),
    ("model", "model.experts_per_token=4", "model.router_aux_loss=0.5"), ("run", "run.dir=~/runs/a"),
    ("checkpoint", "checkpoint.init_from=~/a"), ("data", "data.cache_dir=~/b"),
)  # fmt: skip


@pytest.mark.parametrize("overrides", IDLE, ids=lambda one: one[1])
def test_a_checkpoint_whose_configuration_has_what_release_0_1_0_took_is_read(overrides, monkeypatch):
    with pytest.raises(ConfigError):
        config_with(*overrides[1:])
    tables = read_tables(MINIMAL, overrides[1:], TABLES, "a run of 0.1.0")
    text = write_tables(tables)
    monkeypatch.setattr(load.dist_ckpt, "load_common_state_dict", lambda folder: {"config": text})
    config = load.saved_config(Path("step-00000001"))
    assert config.model.num_layers == 4
    resume_changes(config, config_with(*(one for one in overrides[1:] if "valid" in one or "shape" in one)))
    if overrides[0] == "run":
        assert config.run.dir == "./~/runs/a", "the folder that 0.1.0 made of it"


def test_a_checkpoint_that_does_not_say_how_samples_were_dealt_goes_on_in_turn(monkeypatch):
    tables = read_tables(MINIMAL, (), TABLES, "a run of 0.1.0")
    tables["data"].pop("deal", None)
    monkeypatch.setattr(load.dist_ckpt, "load_common_state_dict", lambda folder: {"config": write_tables(tables)})
    past = load.saved_config(Path("step-00000001"))
    assert past.data.deal == "in_turn"
    resume_changes(past, config_with(), step=3)
    assert settled(config_with(), Path("step-00000001")).data.deal == "in_turn"
    with pytest.raises(ConfigError, match=r"data\.deal \(was 'in_turn', is 'permuted'\)"):
        resume_changes(past, config_with("data.deal=permuted"), step=3)


@pytest.mark.parametrize(
    ("order", "deal"), [("stateless", "permuted"), ("apportioned", "permuted"), ("megatron", "in_turn")]
)
def test_a_new_run_permutes_the_samples_of_a_step_unless_its_order_is_megatrons(order, deal):
    config = config_with(f"data.order={order}")
    assert config.data.deal == "auto"
    assert settled(config, None).data.deal == config.data.dealt_as == deal
    assert settled(config_with("data.deal=in_turn"), None).data.deal == "in_turn"
