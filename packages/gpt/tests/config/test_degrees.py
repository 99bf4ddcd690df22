# ruff: noqa: E501 - a line of the table is a line of the terminal
"""What the degrees divide: which configurations are refused, and that the values which a refusal names work."""

import random
import re
from dataclasses import replace

import pytest
from config_helpers import MINIMAL, config_with, words_of

from sixfold.gpt.commands import cli
from sixfold.gpt.config.train_config import check_world
from sixfold.gpt.engine.rank_model import check_provider
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.plan.layout import (
    PlannedConfig,  # takes what a run may refuse: rules between keys alone are asked here
)

EXPERTS = "model.num_experts=4 and "


def planned(*overrides: str) -> PlannedConfig:
    return PlannedConfig.from_text(MINIMAL, overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("parallel.tp=3", "model.num_attention_heads is 4 and parallel.tp is 3; tp divides it: parallel.tp = 2 works"),
        ("parallel.tp=4 and model.num_query_groups=2", "model.num_query_groups is 2 and parallel.tp is 4; tp divides it: parallel.tp = 2 works"),
        ("parallel.tp=4 and model.ffn_hidden_size=90", "model.ffn_hidden_size is 90 and parallel.tp is 4; tp divides it: parallel.tp = 2 works"),
        (EXPERTS + "parallel.tp=4 and model.moe_ffn_hidden_size=90", "model.moe_ffn_hidden_size is 90 and parallel.tp is 4; tp divides it: parallel.tp = 2 works"),
        (EXPERTS + "parallel.tp=4 and model.shared_ffn_hidden_size=90", "model.shared_ffn_hidden_size is 90 and parallel.tp is 4; tp divides it: parallel.tp = 2 works"),
        ("parallel.tp=2 and model.vocab_multiple=1", "the padded vocabulary (model.vocab_size, model.vocab_multiple) is 257 and parallel.tp is 2; tp divides it: parallel.tp = 1 works"),
        ("parallel.tp=2 and optimizer.name=muon", "optimizer.name is 'muon' and parallel.tp 2, which splits the matrices that Muon needs whole; optimizer.name = 'adamw' works"),
        ("parallel.cp=3", "data.seq_length is 32; it is a multiple of 2 * parallel.cp = 6: 30 or 36 works"),
        ("parallel.tp=4 and parallel.cp=2 and data.seq_length=36", "data.seq_length / parallel.cp is 36 / 2 = 18 and parallel.tp is 4; with parallel.sequence tp divides it: data.seq_length = 32 or 40 works, or parallel.sequence = false"),
        ("parallel.ep=2", "parallel.ep is 2 and model.num_experts 0, so there are no experts to split; parallel.ep = 1 works, or model.num_experts = 2"),
        (EXPERTS + "parallel.ep=3", "model.num_experts is 4 and parallel.ep is 3; ep divides it: parallel.ep = 2 works"),
        (EXPERTS + "parallel.ep=4 and parallel.dp=2", "parallel.ep is 4 and parallel.dp * cp = 2 * 1 = 2. Experts are split over these ranks, so ep divides dp * cp: parallel.ep = 2 works, or parallel.dp = 4"),
        ("parallel.tp_overlap=true", "parallel.tp_overlap is true with parallel.tp 1 and parallel.sequence true, where linears wait for no gather; parallel.tp_overlap = false works, or parallel.tp = 2 with parallel.sequence = true"),
        ("parallel.tp=2 and train.compile=true and train.recompute=full", "train.compile is true, train.recompute 'full' and parallel.tp 2. Messages between ranks are not compiled, so a layer with messages cannot be compiled and recomputed whole: train.recompute = 'selective' works"),
        ("parallel.cp=2 and train.compile=true and train.recompute=full", "train.compile is true, train.recompute 'full' and parallel.cp 2. Messages between ranks are not compiled, so a layer with messages cannot be compiled and recomputed whole: train.recompute = 'selective' works"),
        ("parallel.cp_comm_type=p2p", "parallel.cp_comm_type is 'p2p' and parallel.cp 1, where keys and values do not travel; leave the key out, or set parallel.cp = 2"),
        ("parallel.dp=4 and parallel.dp_replicate=3", "parallel.dp_replicate is 3 and parallel.dp 4; dp_replicate divides dp: parallel.dp_replicate = 2 works"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_divide_are_named_with_both_numbers_and_what_works(overrides, expected):
    with pytest.raises(ConfigError) as error:
        planned(*overrides.split(" and "))
    assert expected in words_of(error)


def test_experts_are_split_over_ranks_that_only_the_world_tells():
    config = planned("model.num_experts=8", "parallel.ep=4", "parallel.pp=2", "parallel.cp=2")
    assert check_world(config, 8).dp == 2
    with pytest.raises(ConfigError, match=r"ep is 4 and parallel\.dp \* cp = 3 \* 2 = 6.*: parallel\.ep = 2 works"):
        check_world(replace(config, train=replace(config.train, global_batch_size=12)), 12)


@pytest.mark.parametrize("key", ["tp", "ep"])
def test_versions_of_weights_are_refused_beside_sums_that_their_program_lacks(key):
    versions = ("parallel.sharding=no_shard", "train.clip_grad=0", "model.tie_embeddings=false", "parallel.pp=2")
    degrees = ("model.num_experts=4", "parallel.cp=2", f"parallel.{key}=2")
    with pytest.raises(ConfigError, match=rf"parallel\.{key} is 2 and parallel\.schedule 'pipedream_2bw'.*= 1 works"):
        planned("parallel.schedule=pipedream_2bw", *versions, *degrees)


@pytest.mark.parametrize("key", ["tp", "cp", "ep"])
def test_a_model_of_ones_own_is_refused_beside_degrees_that_split_ours(key):
    config = planned("model.num_experts=4", f"parallel.{key}=2")
    check_provider(config, None)
    with pytest.raises(ConfigError, match=rf"parallel\.{key} is 2, which splits GPTModel .*parallel\.{key} = 1 works"):
        check_provider(config, lambda pre_process, post_process, vp_stage: None)


@pytest.mark.parametrize(
    "option",
    ["train.precision=fp8", "train.compile=true", "train.recompute=full", "train.z_loss=0.1",
     "train.label_smoothing=0.1", "train.hidden_dropout=0.1", "train.embedding_dropout=0.1", "train.frozen=['norm']",
     "lora.rank=2", "optimizer.name=muon", "model.num_experts=4"],
)  # fmt: skip
def test_a_model_of_ones_own_is_refused_beside_options_that_only_ours_has(option):
    config = config_with(option)
    check_provider(config, None)
    key = option.partition("=")[0].replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"{key} is .*, which is of GPTModel and not of a model_provider"):
        check_provider(config, lambda pre_process, post_process, vp_stage: None)


def test_main_weights_of_another_dtype_are_of_a_model_of_ones_own(tmp_path, capsys):
    config = planned("fsdp.main_dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"fsdp\.main_dtype is 'bfloat16' .*fsdp\.main_dtype = 'float32' works"):
        check_provider(config, None)
    check_provider(config, lambda pre_process, post_process, vp_stage: None)
    (tmp_path / "run.toml").write_text(config.to_toml())
    assert cli.main(["train", str(tmp_path / "run.toml"), "parallel.dp=1"]) == 2
    assert capsys.readouterr().err.startswith("sixfold: fsdp.main_dtype is 'bfloat16'")


def can_work(v: dict[str, int]) -> bool:
    """The rules once more, as spec and documentation of the keys say them."""
    cut = (v["model.num_attention_heads"], v["model.num_query_groups"], v["model.ffn_hidden_size"], 384)
    tp, cp, ep, experts = v["parallel.tp"], v["parallel.cp"], v["parallel.ep"], v["model.num_experts"]
    here, sequence = v["data.seq_length"] // cp, v["parallel.sequence"] and tp > 1
    return (
        not any(size % tp for size in cut)
        and not (cp > 1 and v["data.seq_length"] % (2 * cp))
        and not (sequence and here % tp)
        and (ep == 1 or (experts > 0 and experts % ep == 0 and v["parallel.dp"] * cp % ep == 0))
    )


def drawn(seed: int) -> dict[str, int]:
    """A small configuration: some work, many do not."""
    rng = random.Random(seed)
    heads = rng.choice([2, 4, 6, 8, 12])
    return {
        "parallel.tp": rng.choice([1, 2, 3, 4]),
        "parallel.cp": rng.choice([1, 2, 3]),
        "parallel.ep": rng.choice([1, 1, 2, 3, 4]),
        "parallel.dp": rng.choice([1, 2, 4, 6]),
        "parallel.sequence": rng.choice([False, True]),
        "model.num_experts": rng.choice([0, 4, 6, 8]),
        "model.num_attention_heads": heads,
        "model.num_query_groups": rng.choice([d for d in range(1, heads + 1) if heads % d == 0]),
        "model.hidden_size": 48,
        "model.head_dim": 4,
        "model.ffn_hidden_size": rng.choice([96, 72, 50]),
        "data.seq_length": rng.choice([24, 28, 30, 36]),
        "train.micro_batch_size": (micro := rng.choice([1, 2, 3])),
        "train.global_batch_size": 24 * micro,
    }


def refusal(values: dict[str, int]) -> str:
    try:
        planned(*(f"{key}={str(value).lower()}" for key, value in values.items()))
    except ConfigError as error:
        return str(error)
    return ""


def test_what_cannot_work_is_refused_what_can_is_not_and_the_values_named_work():
    refused = named = 0
    for seed in range(50):
        values = drawn(seed)
        said = refusal(values)
        assert (said == "") == can_work(values), f"seed {seed}: {values}: {said}"
        refused += bool(said)
        where, lists = said.split("; ")[0], re.findall(r"([a-z]+\.[a-z_]+)(?: = | is \d+; .*: )([\d or]+) works", said)
        for key, numbers in lists:
            for number in re.findall(r"\d+", numbers):
                named += 1
                again = refusal({**values, key: int(number)})
                subject = where.split(" is ")[0]
                assert subject != again.split(" is ")[0] or "ep" in key, f"seed {seed}: {key} = {number}: {again}"
    assert 15 < refused < 48 and named > 15, f"{refused} refused, {named} values named"


def test_degrees_of_one_split_nothing_and_are_taken():
    assert config_with("parallel.sequence=false").parallel.world == 1
