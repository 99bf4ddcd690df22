"""Random models at random layouts: losses, norms and all final weights beside one process's.

nox -s full, or nox -s "ranks(gpt)" -- --random-layouts 100       none without it

A seed names model, layout, schedule, strategy and data; one that fails is run again by
``-k "test_a_layout_trains_as_one_process and [17]"``.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from run_helpers import final_tensors, lines, losses, run

from sixfold.gpt.config.train_config import TrainConfig
from sixfold.pipeline.schedules import registered

STEPS = 3
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LOSS = 1e-6  # relative
WEIGHT = 2e-5  # of the largest weight of a tensor: AdamW divides by what rounding has moved


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        count = metafunc.config.getoption("--random-layouts")
        skipped = pytest.param(0, marks=pytest.mark.skip(reason="test_layouts.py has a sample; --random-layouts 100"))
        metafunc.parametrize("seed", range(count) if count else [skipped])


def split_up(rng: random.Random, number: int, parts: int) -> list[int]:
    """``number``, a power of two, as a product of ``parts`` factors."""
    factors = [1] * parts
    while number > 1:
        factors[rng.randrange(parts)] *= 2
        number //= 2
    return factors


def drawn_model(rng: random.Random) -> dict[str, object]:
    """[model], [data] and [train], which the single process has, too."""
    heads = rng.choice([4, 8])
    values: dict[str, object] = {
        "model.num_layers": rng.choice([4, 5, 8]),
        "model.num_attention_heads": heads,
        "model.num_query_groups": rng.choice([g for g in (2, 4, 8) if heads % g == 0]),
        "model.head_dim": 8,
        "model.qk_norm": rng.random() < 0.4,
        "model.qkv_bias": rng.random() < 0.4,
        "model.tie_embeddings": rng.random() < 0.5,
        "data.document_mask": rng.random() < 0.7,
        "train.micro_batch_size": rng.choice([1, 2]),
        "train.global_batch_size": 8,
        "train.seed": rng.randrange(1000),
        "train.clip_grad": rng.choice([0.0, 0.25]),
        # Where a gradient is nothing but rounding, AdamW's steps of +-lr would be of random signs.
        "optimizer.eps": 1e-3,
    }
    if rng.random() < 0.45:
        values |= {
            "model.num_experts": rng.choice([4, 8]),
            "model.experts_per_token": rng.choice([1, 2]),
            "model.moe_ffn_hidden_size": 32,
            "model.dense_layers": rng.choice([0, 1]),
            "model.norm_topk_prob": rng.random() < 0.5,
        }
        if rng.random() < 0.4:
            values |= {"model.shared_ffn_hidden_size": 32, "model.shared_expert_gate": rng.random() < 0.5}
    return values


def drawn_layout(rng: random.Random, model: dict[str, object]) -> tuple[int, dict[str, object]]:
    """(ranks, keys) of a layout that this model can have."""
    ranks = rng.choice([2, 2, 4, 4, 8])
    pp, dp, cp, tp = split_up(rng, ranks, 4)
    microbatches = 8 // (int(str(model["train.micro_batch_size"])) * dp)
    if tp > int(str(model["model.num_query_groups"])) or pp > 4 or microbatches < max(pp, 2):
        return drawn_layout(rng, model)
    keys: dict[str, object] = {"parallel.pp": pp, "parallel.dp": dp, "parallel.cp": cp, "parallel.tp": tp}
    if "model.num_experts" in model:
        keys["parallel.ep"] = rng.choice([ep for ep in (1, 2, 4) if dp * cp % ep == 0])
    keys["parallel.dp_replicate"] = rng.choice([n for n in (1, 2) if dp % n == 0])
    keys["parallel.sharding"] = rng.choice(SHARDINGS)
    keys["train.recompute"] = rng.choice(["none", "none", "selective", "full"])
    if tp > 1:
        keys["parallel.sequence"] = rng.random() < 0.7
    if cp > 1:
        keys["parallel.cp_comm_type"] = rng.choice(["all_gather", "p2p"])
    chunks = rng.choice([1, 2]) if pp > 1 else 1
    if chunks == 2 and int(str(model["model.num_layers"])) < 2 * pp:
        chunks = 1
    names = [e.name for e in registered() if e.flushed and e.name != "plan" and e.chunks in (None, chunks)]
    if chunks == 1:
        names.remove("hanayo")
    keys["parallel.schedule"] = rng.choice(names)
    keys["parallel.stages_per_rank"] = chunks
    return ranks, keys


def drawn(seed: int, folder: Path) -> tuple[int, TrainConfig, TrainConfig]:
    """Ranks, the layout, and the single process of the same model."""
    rng = random.Random(seed)
    model = drawn_model(rng)
    ranks, layout = drawn_layout(rng, model)

    def config(keys: dict[str, object], run: str) -> TrainConfig:
        steps = (f"train.steps={STEPS}", "checkpoint.keep=1")
        texts = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]
        return tiny_config(folder, *steps, *texts, run=run)

    return ranks, config(model | layout, "layout"), config(model, "alone")


def in_words(config: TrainConfig) -> str:
    """One line: what the seed drew."""
    plain = TrainConfig.from_text(config.to_toml()).parallel
    return f"{plain} {config.model} recompute={config.train.recompute}"


def differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """Final weights of ``one`` that are not those of ``other``."""
    expected, found = final_tensors(other), final_tensors(one)
    assert expected.keys() == found.keys()
    return [
        f"{key} by {float((found[key] - value).abs().max() / value.abs().max()):.1e}"
        for key, value in expected.items()
        if key.startswith("model.") and float((found[key] - value).abs().max()) > WEIGHT * float(value.abs().max())
    ]


def test_a_layout_trains_as_one_process(tmp_path, seed):
    ranks, config, alone = drawn(seed, tmp_path)
    told = f"seed {seed}: {in_words(config)}"
    run(alone, 1)
    run(config, ranks)
    assert losses(config) == pytest.approx(losses(alone), rel=LOSS), told
    norms = [[entry["grad_norm"] for entry in lines(one, "step")] for one in (config, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=5 * LOSS), told
    different = differences(config, alone)
    assert not different, f"{different[:4]}; {told}"


def test_what_is_drawn_has_every_degree_and_most_schedules(tmp_path):
    configs = [drawn(seed, tmp_path)[1] for seed in range(25)]
    for key in ("pp", "dp", "cp", "tp", "ep"):
        assert sum(getattr(config.parallel, key) > 1 for config in configs) >= 3, key
    assert len({config.parallel.schedule for config in configs}) >= 7
    assert {config.parallel.sharding for config in configs} == set(SHARDINGS)
    assert len({config.parallel.world for config in configs}) == 3
