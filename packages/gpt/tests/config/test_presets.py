"""Presets of published models, several files, files that include others."""

import pytest
from config_helpers import MINIMAL

from sixfold.gpt.commands.arguments import configuration
from sixfold.gpt.commands.cli import main
from sixfold.gpt.config.presets import PRESETS
from sixfold.gpt.config.train_config import GPTConfig, TrainConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface.config import write

# Of the weights that each model was published with, counted in its safetensors files; a tied table once.
PARAMETERS = {
    "llama-2-7b": 6738415616,
    "llama-2-13b": 13015864320,
    "llama-2-70b": 68976648192,
    "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496,
    "llama-3.1-8b": 8030261248,
    "llama-3.1-70b": 70553706496,
    "llama-3.1-405b": 405853388800,
    "llama-3.2-1b": 1235814400,
    "llama-3.2-3b": 3212749824,
    "qwen2.5-0.5b": 494032768,
    "qwen2.5-1.5b": 1543714304,
    "qwen2.5-3b": 3085938688,
    "qwen2.5-7b": 7615616512,
    "qwen2.5-14b": 14770033664,
    "qwen2.5-32b": 32763876352,
    "qwen2.5-72b": 72706203648,
    "qwen3-0.6b": 596049920,
    "qwen3-1.7b": 1720574976,
    "qwen3-4b": 4022468096,
    "qwen3-8b": 8190735360,
    "qwen3-14b": 14768307200,
    "qwen3-32b": 32762123264,
    "qwen3-30b-a3b": 30532122624,
    "qwen3-235b-a22b": 235093634560,
    "smollm2-135m": 134515008,
    "smollm2-360m": 361821120,
    "smollm2-1.7b": 1711376384,
    "tinyllama-1.1b": 1100048384,
    "mistral-7b-v0.1": 7241732096,
    "mistral-7b-v0.3": 7248023552,
    "mixtral-8x7b": 46702792704,
    "mixtral-8x22b": 140620634112,
    "olmo-2-1b": 1484916736,
    "olmo-2-7b": 7298617344,
    "olmo-2-13b": 13716198400,
    "olmo-2-32b": 32234279936,
    "olmo-3-7b": 7298011136,
    "olmo-3-32b": 32233522176,
    "gemma-2-2b": 2614341888,
    "gemma-2-9b": 9241705984,
    "gemma-2-27b": 27227128320,
    "gemma-3-270m": 268098176,
    "gemma-3-1b": 999885952,
    # Of all weights of the model that sees pictures, without those that read them.
    "gemma-3-4b": 4300079472 - 416866032 - (1152 * 2560 + 1152),
    "gemma-3-12b": 12187325040 - 416866032 - (1152 * 3840 + 1152),
    "gemma-3-27b": 27432406640 - 416866032 - (1152 * 5376 + 1152),
    "deepseek-v3": 671026419200,  # without the 11.5 billion of its further layer, which predicts one more token
}
REST = "\n".join(MINIMAL.split("[data]", 1)[1:])


@pytest.fixture
def rest(tmp_path):
    file = tmp_path / "rest.toml"
    file.write_text("[data]" + REST)
    return file


def test_each_preset_has_the_published_number_of_parameters():
    assert {name: GPTConfig(**keys).num_parameters for name, keys in PRESETS.items()} == PARAMETERS


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "qwen3-30b-a3b",
        "qwen2.5-7b",
        "mistral-7b-v0.1",
        "mixtral-8x7b",
        "olmo-2-7b",
        "olmo-3-7b",
        "gemma-2-27b",
        "gemma-3-1b",
        "gemma-3-27b",
        "deepseek-v3",
    ],
)
def test_a_preset_is_a_model_that_hugging_face_has(name):
    from sixfold.gpt.huggingface.config import read, write

    config = GPTConfig(**PRESETS[name])
    assert read(write(config, max_positions=8192, dtype="bfloat16", tokens={})) == config


def test_layers_that_see_all_of_a_row_are_where_the_models_have_them():
    for name, every in (("olmo-3-7b", 4), ("gemma-2-9b", 2), ("gemma-3-12b", 6)):
        kinds = PRESETS[name]["layer_types"]
        assert {at % every for at, kind in enumerate(kinds) if kind == "full_attention"} == {every - 1}, name


def test_a_preset_is_the_model_and_files_and_arguments_change_it(rest):
    config = TrainConfig.from_toml(rest, preset="llama-3-8b")
    assert config.model == GPTConfig(**PRESETS["llama-3-8b"])
    rest.write_text("[model]\nnum_layers = 4\n" + rest.read_text())
    changed = TrainConfig.from_toml(rest, ["model.rope_theta=1e4"], preset="llama-3-8b").model
    assert (changed.num_layers, changed.rope_theta, changed.hidden_size) == (4, 1e4, 4096)


def test_an_unknown_preset_names_the_nearest(rest):
    with pytest.raises(ConfigError, match=r"--preset is 'Llama-3_8B'; llama-3-8b works"):
        TrainConfig.from_toml(rest, preset="Llama-3_8B")


def test_of_several_files_the_later_says_keys_anew(tmp_path):
    base, more = tmp_path / "base.toml", tmp_path / "more.toml"
    base.write_text(MINIMAL)
    more.write_text("[train]\nsteps = 7\n[optimizer]\nlr = 0.5\n")
    config = TrainConfig.from_toml([base, more], ["optimizer.lr=0.25"])
    plain = TrainConfig.from_toml(base, ["train.steps=7", "optimizer.lr=0.25"])
    assert config == plain
    assert TrainConfig.from_toml([more, base]) == TrainConfig.from_toml(base)


def test_an_include_is_a_path_from_its_own_file_and_lies_below_it(tmp_path, monkeypatch):
    deep = tmp_path / "shared"
    deep.mkdir()
    (deep / "sizes.toml").write_text(MINIMAL)
    (deep / "base.toml").write_text('include = ["sizes.toml"]\n[optimizer]\nlr = 0.5\n')
    run = tmp_path / "run.toml"
    run.write_text('include = ["shared/base.toml"]\n[train]\nsteps = 9\n')
    monkeypatch.chdir(deep)
    config = TrainConfig.from_toml(run)
    assert config == TrainConfig.from_text(MINIMAL, ["optimizer.lr=0.5", "train.steps=9"])
    assert TrainConfig.from_text(config.to_toml()) == config  # what a run writes stands alone


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('include = "base.toml"', "include is 'base.toml'; it is a list of paths"),
        ("include = [3]", r"include is \[3\]; it is a list of paths"),
        ('include = ["run.toml"]', "run.toml includes 'run.toml', which includes .*; take one of them out"),
        (
            'include = ["none.toml"]',
            "includes 'none.toml', a path from the folder of that file: .*No such file",
        ),
        ('include = ["loop.toml"]', "loop.toml includes 'run.toml', which includes"),
        ('include = ["wrong.toml"]', r"model.layerz is not a key of \[model\]"),
    ],
)
def test_an_include_that_cannot_be_is_refused(tmp_path, text, said):
    run = tmp_path / "run.toml"
    run.write_text(text + "\n" + MINIMAL)
    (tmp_path / "loop.toml").write_text('include = ["run.toml"]\n')
    (tmp_path / "wrong.toml").write_text("[model]\nlayerz = 3\n")
    with pytest.raises(ConfigError, match=said):
        TrainConfig.from_toml(run)


def test_text_includes_nothing():
    with pytest.raises(ConfigError, match="include stands in a text that is no file"):
        TrainConfig.from_text('include = ["base.toml"]\n' + MINIMAL)


def test_the_command_takes_files_presets_and_changes_anywhere(rest, tmp_path, capsys):
    more = tmp_path / "more.toml"
    more.write_text("[train]\nsteps = 7\n")
    words = ["train", "--preset", "llama-3.2-1b", "optimizer.lr=.5", str(rest), "--print-config", str(more)]
    assert main([*words, "--set", "parallel.sequence=False", "train.seed=3"]) == 0
    printed = TrainConfig.from_text(capsys.readouterr().out)
    wanted = TrainConfig.from_toml(
        [rest, more], ["optimizer.lr=0.5", "train.seed=3", "parallel.sequence=false"], preset="llama-3.2-1b"
    )
    assert printed == wanted


@pytest.mark.parametrize("last", ["optimizer.lr=8e-4", "--set optimizer.lr=8e-4", "--set=optimizer.lr=8e-4"])
@pytest.mark.parametrize(
    "before", ["optimizer.lr=7e-4", "--set optimizer.lr=7e-4", "optimizer.lr=8e-4 --set optimizer.lr=7e-4"]
)
def test_of_two_changes_of_a_key_the_last_counts_in_whatever_form(rest, capsys, before, last):
    rest.write_text("[model]\n" + rest.read_text())
    words = ["train", "--preset", "llama-3.2-1b", *before.split(), str(rest), *last.split(), "--print-config"]
    assert main(words) == 0
    assert TrainConfig.from_text(capsys.readouterr().out).optimizer.lr == 8e-4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "train needs a CONFIG, or --preset with the name of a model"),
        (["train.steps=3"], "no configuration is named; give a TOML file, or --preset with the name of a model"),
        (["run.toml"], "run.toml: No such file or directory; give the path of a TOML configuration"),
        (["--preset", "llama-3-8b", "train.steps"], "override 'train.steps' is not section.key=value"),
        (["--preset", "llama-3-8b", "steps=3"], "override 'steps=3' is not section.key=value"),
    ],
)
def test_words_that_name_no_configuration_are_refused(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_file_may_have_an_equals_sign_in_its_name(tmp_path):
    import argparse

    file = tmp_path / "lr=3.toml"
    file.write_text(MINIMAL)
    args = argparse.Namespace(words=[str(file)], changes=[], preset="", given=[str(file)])
    assert configuration(args, TrainConfig) == TrainConfig.from_toml(file)


def test_the_guide_lists_every_preset():
    from pathlib import Path

    guide = (Path(__file__).parents[4] / "docs" / "guide" / "gpt-configuration.md").read_text(encoding="utf-8")
    rows = [line for line in guide.splitlines() if line.startswith("| ")]
    assert [name for name in PRESETS if not any(f"`{name}`" in row for row in rows)] == []


@pytest.mark.parametrize(
    ("name", "published"),
    [("qwen3-30b-a3b", 0.001), ("qwen3-235b-a22b", 0.001), ("mixtral-8x7b", 0.02), ("mixtral-8x22b", 0.001)],
)
def test_an_export_of_a_preset_has_the_published_coefficient_of_the_balance(name, published):
    written = write(GPTConfig(**PRESETS[name]), max_positions=1, dtype="float32", tokens={})
    assert written["router_aux_loss_coef"] == pytest.approx(published, rel=1e-12)
