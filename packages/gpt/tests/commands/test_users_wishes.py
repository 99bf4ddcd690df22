"""What users write into configurations and commands: taken for what they mean, or told what it does."""

import json

import pytest
from config_helpers import config_with, words_of
from gpt_helpers import tiny_config, write_pair

from sixfold.gpt import TrainConfig, train
from sixfold.gpt.commands import cli
from sixfold.gpt.config.resume_rules import noted_changes
from sixfold.gpt.data.prepare import prepare
from sixfold.gpt.data.token_stream import build_datasets, global_batches
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.machine.devices import cpu_has_bfloat16, peak_flops_of
from sixfold.gpt.observe.metrics import read_all
from sixfold.gpt.training.config_warnings import config_warnings
from sixfold.indexed_data import IndexedDataset


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr=.001", 0.001), ("optimizer.lr=1.", 1.0), ("optimizer.lr=.5e-2", 0.005),
        ("optimizer.lr=1.e-3", 0.001),
        ("optimizer.lr= .001 ", 0.001), ("train.compile=True", True), ("train.compile=False", False),
        ("train.compile=true", True), ("optimizer.lr=1e-3", 0.001), ("data.tokenizer=True", "True"),
        ("run.dir=.5", ".5"), ("train.clip_grad=0.", 0.0),
    ],
)  # fmt: skip
def test_numbers_and_truths_of_python_are_taken(override, value):
    table, _, key = override.partition("=")[0].partition(".")
    found = getattr(getattr(config_with(override), table), key)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("override", ["optimizer.lr=.", "optimizer.lr=1.2.3", "train.compile=yes", "train.steps=1."])
def test_what_is_no_number_and_no_truth_is_still_refused(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        config_with(override)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [("run.device=gpu", "cuda"), ("train.precision=bfloat16", "bf16"), ("train.precision=float32", "fp32")],
)  # fmt: skip
def test_the_nearest_value_is_the_one_that_is_meant(override, nearest):
    with pytest.raises(ConfigError) as error:
        config_with(override)
    assert words_of(error).endswith(f"the nearest is {nearest}")
    config_with(override.partition("=")[0] + "=" + nearest)


def test_the_version_of_every_package_is_told(capsys):
    assert cli.main(["--version"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines][:2] == ["sixfold-gpt", "sixfold-indexed-data"] and len(lines) == 6
    assert all(version[0].isdigit() for _, version in lines)


def test_a_batch_that_no_step_has_is_refused_and_both_remedies_work():
    ramp = "train.batch_ramp=[[0, 32], [2, 64]]"
    with pytest.raises(ConfigError) as error:
        config_with(ramp, "train.global_batch_size=128")
    assert "train.global_batch_size = 64 works, or a last entry [step, 128]" in words_of(error)
    config_with(ramp, "train.global_batch_size=64")
    config_with("train.batch_ramp=[[0, 32], [2, 64], [9, 128]]", "train.global_batch_size=128")


@pytest.mark.parametrize(
    ("model", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A100-PCIE-40GB", None), ("NVIDIA H200 NVL", None),
        ("NVIDIA H200", 989.4e12), ("NVIDIA RTX A1000", None),
    ],
)  # fmt: skip
def test_the_peak_of_a_card_is_its_own_or_not_told(model, peak):
    assert peak_flops_of(model) == (peak if peak is None else pytest.approx(peak, rel=1e-2))


# ---- lines on stderr


def lines_of(*overrides, past=None, step=0):
    before = None if past is None else config_with("schedule.warmup_steps=2", *past)
    return config_warnings(config_with("schedule.warmup_steps=2", *overrides), before, step)


def test_a_longer_run_whose_learning_rate_jumps_says_so_and_what_does_not_jump():
    [line] = lines_of("train.steps=30", "optimizer.lr=3e-3", past=("train.steps=20", "optimizer.lr=3e-3"), step=20)
    assert "train.steps was 20 and is 30" in line and "from 0.000321 at step 20 to 0.00106 at step 21" in line
    remedy = ("train.steps=30", "schedule.shape=constant", "optimizer.lr=0.000321")
    assert lines_of(*remedy, past=("train.steps=20", "optimizer.lr=3e-3"), step=20) == []


@pytest.mark.parametrize("shape", ["cosine", "constant"])
def test_a_resume_notes_another_number_of_steps_where_the_learning_rate_falls_over_them(shape):
    old, new = (config_with(f"train.steps={n}", f"schedule.shape={shape}") for n in (20, 30))
    assert noted_changes(old, new) == ({} if shape == "constant" else {"train.steps": [20, 30]})
    assert noted_changes(old, old) == {}


def test_steps_that_end_within_the_warm_up_are_told_with_the_rate_that_is_reached():
    [line] = lines_of("schedule.warmup_steps=1000", "train.steps=3", "optimizer.lr=1e-3")
    assert "only rises, to 3e-06 of optimizer.lr = 0.001" in line
    assert lines_of("schedule.warmup_steps=3", "train.steps=3") == []


def test_a_rate_that_is_to_decay_and_never_does_is_told():
    [line] = lines_of("schedule.shape=wsd")
    assert "shape is 'wsd' without schedule.decay_steps" in line and "stays at optimizer.lr = 0.001 to the end" in line
    assert lines_of("schedule.shape=wsd", "schedule.decay_steps=1") == lines_of("schedule.shape=constant") == []
    assert lines_of("schedule.shape=wsd", "schedule.decay_tokens=1") == []


def test_bfloat16_on_a_cpu_without_instructions_for_it_is_told_and_the_remedy_is_silent():
    config = config_with("schedule.warmup_steps=2")
    [line] = config_warnings(config, None, 0, slow_bfloat16=True)
    assert line.startswith("this CPU has no instructions for bfloat16") and 'train.precision = "fp32"' in line
    told = config_warnings(config_with("schedule.warmup_steps=2", "train.precision=fp32"), None, 0, slow_bfloat16=True)
    assert told == config_warnings(config, None, 0) == []


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512bw", False), ("flags\t\t: avx512f avx512_bf16 amx_tile", True),
        ("Features\t: asimd i8mm bf16", True), (None, False),
    ],
)  # fmt: skip
def test_instructions_for_bfloat16_are_read_by_their_whole_names(tmp_path, flags, has):
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    assert cpu_has_bfloat16(tmp_path / "cpuinfo") is has


def test_a_run_that_has_done_its_steps_says_that_nothing_is_trained():
    [line] = lines_of("train.steps=10", past=("train.steps=30",), step=30)
    assert line.startswith("the run has done 30 steps and train.steps is 10: nothing is trained")


def test_a_model_that_cannot_be_exported_is_told_of_before_it_is_trained_and_the_remedy_works():
    experts = ("model.num_experts=4", "model.experts_per_token=2", "model.dense_layers=1")
    [line] = lines_of(*experts)
    assert "`sixfold export` will refuse it" in line and "Qwen3MoeForCausalLM, has model.qk_norm = true." in line
    assert lines_of(*experts, "model.qk_norm=true") == []
    assert lines_of(*experts, past=experts, step=5) == []


# ---- data of one dataset, of one document


@pytest.mark.parametrize("order", ["stateless", "megatron", "apportioned"])
@pytest.mark.slow
def test_one_prefix_to_train_on_beside_others_to_validate(tmp_path, order):
    tiny_config(tmp_path)
    one = (f'data.blend=["{tmp_path}/wiki"]', "data.weights=[]", f"data.order={order}")
    if order != "stateless":
        one += (f"data.cache_dir={tmp_path}/cache",)
    alone = tiny_config(tmp_path, *one, "data.split=100,0,0")
    beside = tiny_config(
        tmp_path, *one, "data.split=98,2,0", f'data.valid=["{tmp_path}/code"]', "eval.every=2", "eval.batches=1"
    )
    for ours, theirs in zip(global_batches(beside), global_batches(alone), strict=True):
        assert ours.tokens.equal(theirs.tokens) and ours.cu_seqlens.equal(theirs.cu_seqlens)
    if order == "stateless":
        assert train(beside).step == 4
        assert [r["step"] for r in read_all(tmp_path / "run") if r["kind"] == "eval"] == [2, 4]
        longer = tiny_config(tmp_path, *one, "data.split=98,2,0", f'data.valid=["{tmp_path}/code"]', "train.steps=5")
        assert train(longer).step == 5, "and goes on"


def text_config(prefix, *overrides):
    return TrainConfig.from_text(
        f"""
        model = {{num_layers = 1, hidden_size = 16, num_attention_heads = 2, ffn_hidden_size = 32, vocab_size = 257}}
        data = {{blend = ["{prefix}"], seq_length = 32}}
        train = {{steps = 3, global_batch_size = 4, micro_batch_size = 4}}
        optimizer = {{lr = 1e-3}}
        checkpoint = {{background = false}}
        run = {{dir = "{prefix}-run", device = "cpu"}}
        """,
        overrides,
    )


def test_one_text_file_is_trained_on_by_default_and_validation_says_what_to_do(tmp_path):
    (tmp_path / "all.txt").write_text("".join(f"SPEAKER {n}:\nWords {n * 7}.\n\n" for n in range(200)))
    prepare([tmp_path / "all.txt"], tmp_path / "one")
    assert train(text_config(tmp_path / "one")).step == 3
    with pytest.raises(ConfigError) as error:
        build_datasets(text_config(tmp_path / "one", "eval.every=1"))
    assert all(part in words_of(error) for part in ("data.split is '98,2,0'", "data.valid", "--documents paragraph"))
    words = ["prepare", str(tmp_path / "all.txt"), "--out", str(tmp_path / "cut"), "--documents", "paragraph"]
    assert cli.main(words) == 0
    build_datasets(text_config(tmp_path / "cut", "eval.every=1"))
    with IndexedDataset(str(tmp_path / "cut")) as cut:
        assert len(cut) == 200 and bytes(cut[3][:-1].tolist()).strip() == b"SPEAKER 3:\nWords 21."


def test_the_last_step_is_evaluated_whatever_eval_every_is(tmp_path):
    write_pair(tmp_path / "p", 120, 0)
    train(text_config(tmp_path / "p", "eval.every=2", "eval.batches=1", "data.tokenizer=bytes"))
    assert [r["step"] for r in read_all(tmp_path / "p-run") if r["kind"] == "eval"] == [2, 3]


@pytest.mark.parametrize("how", ["checkpoint.init_from", "sample", "export"])
@pytest.mark.slow
def test_a_hugging_face_folder_in_the_place_of_a_run_leads_to_import(tmp_path, capsys, how):
    if how == "export":
        pytest.importorskip("safetensors", reason="needs the extra hf, without which export says what to install")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (tmp_path / "hf/model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    write_pair(tmp_path / "p", 20, 0)
    if how == "checkpoint.init_from":
        with pytest.raises(ConfigError) as error:
            train(text_config(tmp_path / "p", f"checkpoint.init_from={tmp_path / 'hf'}"))
        said = str(error.value)
    else:
        assert cli.main([how, str(tmp_path / "hf"), *(["out"] if how == "export" else [])]) == 2
        said = capsys.readouterr().err
    assert f"`sixfold import {tmp_path / 'hf'} RUN_DIR` makes a run folder of it" in said


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.n_head=4", "model.num_attention_heads"), ("model.d_model=64", "model.hidden_size"),
        ("model.intermediate_size=64", "model.ffn_hidden_size"), ("train.dtype=bf16", "train.precision"),
        ("checkpoint.save_interval=9", "checkpoint.every"), ("train.max_steps=9", "train.steps"),
        ("model.rms_norm_eps=1e-5", "model.norm_eps"), ("train.lr=1", "optimizer.lr"),
        ("train.eval_every=9", "eval.every"), ("train.eval_interval=9", "eval.every"),
        ("log.eval_iters=9", "eval.batches"),
        ("train.log_interval=9", "log.every"), ("train.checkpoint_every=9", "checkpoint.every"),
        ("train.parallel_tp=2", "parallel.tp"), ("optimizer.schedule_warmup_steps=2", "schedule.warmup_steps"),
    ],
)  # fmt: skip
def test_a_key_by_another_programs_name_leads_to_ours(override, key):
    with pytest.raises(ConfigError, match=f"the nearest is {key}$"):
        config_with(override)


@pytest.mark.parametrize("override", ["train.foo=1", "train.eval=1"])
def test_a_key_that_is_like_no_other_gets_no_nearest_key(override):
    with pytest.raises(ConfigError) as error:
        config_with(override)
    assert "nearest" not in words_of(error)


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.init_from"])
def test_a_configuration_without_a_model_names_the_file_of_the_import_that_has_it(tmp_path, key):
    folder = tmp_path / "imported"
    folder.mkdir()
    (folder / "config.toml").write_text("[model]\nnum_layers = 1\n")
    rest = text_config(tmp_path / "p").to_toml().partition("[data]")[2]
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_text("[data]" + rest, [f"{key}={folder}"])
    assert words_of(error).endswith(f"copy the table [model] of {folder}/config.toml into the configuration")
    (folder / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"model\.num_layers, .* are not given.*; write them into"):
        TrainConfig.from_text("[data]" + rest, [f"{key}={folder}"])


def test_a_configuration_of_an_editor_that_puts_a_mark_before_it_is_read(tmp_path):
    config = tiny_config(tmp_path)
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + config.to_toml().replace("\n", "\r\n").encode())
    assert TrainConfig.from_toml(tmp_path / "marked.toml") == config


def test_a_configuration_printed_over_itself_is_told_as_what_the_shell_emptied(tmp_path, capsys):
    (tmp_path / "own.toml").touch()
    assert cli.main(["train", str(tmp_path / "own.toml"), "--print-config"]) == 2
    assert "own.toml is empty; " in (said := capsys.readouterr().err) and "print to another file" in said
