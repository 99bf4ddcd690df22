"""Runs with experts: one process beside a plain loop, and every layout beside one process.

nox -s full, or nox -s "ranks(gpt)" -- --expert-layouts      all layouts; a few without it
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, lines, losses, run, run_all

from sixfold.gpt import GPTModel, TrainConfig, global_batches
from sixfold.gpt.errors import ConfigError

EXPERTS = (
    "model.num_experts=4", "model.experts_per_token=2", "model.moe_ffn_hidden_size=16", "model.dense_layers=1",
    "model.router_aux_loss=0.05", "model.shared_ffn_hidden_size=24", "model.shared_expert_gate=true",
    "train.steps=3", "checkpoint.every=2", "train.micro_batch_size=1", "train.global_batch_size=4",
)  # fmt: skip
FEW = {
    "tp2 whole sequences": (2, ("parallel.tp=2", "parallel.sequence=false", "train.recompute=selective")),
    "ep2 whole weights": (2, ("parallel.ep=2", "parallel.sharding=no_shard", "train.recompute=full")),
    "pp2": (2, ("parallel.pp=2",)),
    "pp2 split recomputed": (2, ("parallel.pp=2", "parallel.schedule=zb_h1", "train.recompute=full")),
    "ep2 tp2": (4, ("parallel.ep=2", "parallel.tp=2", "parallel.sharding=optim_grads")),
}
MORE = {
    "ep2 cp2": (2, ("parallel.cp=2", "parallel.ep=2")),
    "dp2": (2, ("parallel.dp=2",)),
    "tp2": (2, ("parallel.tp=2",)),
    "pp2 split": (2, ("parallel.pp=2", "parallel.schedule=zb_h1")),
    "ep2": (2, ("parallel.ep=2",)),
    "ep2, optimizer": (2, ("parallel.ep=2", "parallel.sharding=optim")),
    "ep2 of dp4": (4, ("parallel.dp=4", "parallel.ep=2")),
    "ep4": (4, ("parallel.ep=4",)),
    "ep2 of two copies": (4, ("parallel.dp=4", "parallel.ep=2", "parallel.dp_replicate=2")),
    "ep2 pp2 split": (4, ("parallel.pp=2", "parallel.ep=2", "parallel.schedule=zb_h1")),
    "ep2 pp2 v": (4, ("parallel.pp=2", "parallel.ep=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2")),
    "tp2 cp2": (4, ("parallel.cp=2", "parallel.tp=2")),
    "ep2 tp2 cp2": (4, ("parallel.cp=2", "parallel.tp=2", "parallel.ep=2", "parallel.sequence=false")),
    "tp2 pp2": (4, ("parallel.pp=2", "parallel.tp=2", "parallel.schedule=interleaved", "parallel.stages_per_rank=2")),
}
LAYOUTS = FEW | MORE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def experts(folder: Path, name: str, *overrides: str) -> TrainConfig:
    return tiny_config(folder, *EXPERTS, *overrides, run=name)


@pytest.fixture(scope="module")
def alone(folder):
    config = experts(folder, "alone")
    run(config, 1)
    return config


def layouts_of(config: pytest.Config) -> list[str]:
    return list(FEW | MORE if config.getoption("--expert-layouts") else FEW)


def pytest_generate_tests(metafunc):
    """A few layouts, or all of them."""
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", layouts_of(metafunc.config))


@pytest.fixture(scope="module")
def trained(folder, request):
    found = {name: experts(folder, name, *LAYOUTS[name][1]) for name in layouts_of(request.config)}
    run_all((LAYOUTS[name][0], config) for name, config in found.items())
    return found


def balance_of(probabilities: list[torch.Tensor]) -> torch.Tensor:
    """The load-balancing loss of a microbatch, times its tokens, by definition: 0.05 of 4 experts, 2 of a token."""
    total = torch.zeros(())
    for p in probabilities:
        pairs = torch.zeros_like(p).scatter_(1, p.topk(2).indices, 1.0)
        total = total + 0.05 * 4 * (pairs.sum(0) / pairs.sum() * p.mean(0)).sum() * len(p)
    return total


def plain_steps(config: TrainConfig, rates: list[float]) -> list[tuple[float, float]]:
    """(loss, norm) of steps of a plain loop over microbatches, the balance in its loss.

    The model's own is off; hooks see what routers read.
    """
    quiet = TrainConfig.from_text(config.to_toml(), ("model.router_aux_loss=0.0",))
    model = GPTModel(quiet.model)
    model.initialize(quiet.train.seed)
    probabilities: list[torch.Tensor] = []
    for layer in list(model.layers.values())[1:]:
        layer.ffn.register_forward_hook(
            lambda module, args, out: probabilities.append(
                torch.softmax(args[0].flatten(0, 1) @ module.router.weight.t(), -1)
            )
        )
    decayed, kept = ([p for p in model.parameters() if (p.dim() >= 2) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    found, size, seq = [], quiet.train.micro_batch_size, quiet.data.seq_length
    for lr, batch in zip(rates, global_batches(quiet), strict=False):
        total = 0.0
        for first in range(0, len(batch.tokens), size):
            rows, begin, end = slice(first, first + size), first * seq, (first + size) * seq
            inside = batch.cu_seqlens[(batch.cu_seqlens >= begin) & (batch.cu_seqlens <= end)] - begin
            probabilities.clear()
            labels, mask = batch.labels[rows], batch.loss_mask[rows]
            nats = model(batch.tokens[rows], cu_seqlens=inside, labels=labels, loss_mask=mask).sum()
            (nats + balance_of(probabilities)).backward()
            total += float(nats.detach())
        count = batch.loss_mask.sum()
        for parameter in model.parameters():
            parameter.grad /= count
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), quiet.train.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        found.append((total / float(count), float(norm)))
    return found


@pytest.mark.slow
def test_one_process_trains_as_a_plain_loop_with_the_balance_in_its_loss(alone):
    steps = lines(alone, "step")
    found = plain_steps(alone, [entry["lr"] for entry in steps])
    assert [entry["loss"] for entry in steps] == pytest.approx([loss for loss, _ in found], rel=1e-6)
    assert [entry["grad_norm"] for entry in steps] == pytest.approx([norm for _, norm in found], rel=2e-6)


@pytest.mark.slow
def test_losses_norms_and_loads_do_not_depend_on_the_layout(alone, trained, layout):
    config = trained[layout]
    assert losses(config) == pytest.approx(losses(alone), rel=1e-6)
    for found, expected in zip(lines(config, "step"), lines(alone, "step"), strict=True):
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6)
        assert found["expert_load"] == expected["expert_load"]


def test_split_backwards_give_the_bits_of_whole_ones(trained):
    assert_same_tensors(final_tensors(trained["pp2 split recomputed"]), final_tensors(trained["pp2"]))


def test_the_load_of_a_step_is_told_for_each_layer_with_experts(alone):
    for entry in lines(alone, "step"):
        assert set(entry["expert_load"]) == {"1", "2", "3"}
        for least, most in entry["expert_load"].values():
            assert 0 <= least <= 1 <= most <= 2  # of four experts, each token in two


@pytest.mark.parametrize(("before", "after"), [("ep2 tp2", "alone"), ("ep2 whole weights", "tp2 whole sequences")])
@pytest.mark.slow
def test_a_run_goes_on_at_another_layout(alone, trained, folder, before, after):
    ranks, overrides = (1, ()) if after == "alone" else LAYOUTS[after]
    config = experts(folder, f"from {before} to {after}", *overrides)
    step = Path("checkpoints") / "step-00000002"
    shutil.copytree(Path(trained[before].run.dir) / step, Path(config.run.dir) / step)
    run(config, ranks)
    assert losses(config) == pytest.approx(losses(alone)[2:], rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("parallel.schedule=pipedream", "parallel.sharding=no_shard", "train.clip_grad=0", "train.micro_batch_size=4"),
         "parallel.schedule = 'one_f_one_b' works"),
    ],
)  # fmt: skip
def test_what_experts_are_not_combined_with_is_refused(tmp_path, overrides, expected):
    with pytest.raises(ConfigError) as error:
        tiny_config(tmp_path, *EXPERTS, *overrides)
    assert expected in str(error.value)


def fp8_loss(config: TrainConfig, parts: int) -> float:
    """The first loss by definition, of weights that bytes with a scale stand for: of experts one for each part."""
    model = GPTModel(config.model)
    model.initialize(config.train.seed)
    for name, parameter in model.named_parameters():
        pieces = [parameter.data]
        if re.search(r"layers.*\.(q|k|v|out|gate|up|down)\.weight", name):
            pieces = list(parameter.data.chunk(parts if ".experts." in name else 1))
            scales = [piece.abs().max() / 448 for piece in pieces]
            pieces = [(p / s).to(torch.float8_e4m3fn).float() * s for p, s in zip(pieces, scales, strict=True)]
        parameter.data = torch.cat(pieces).to(torch.bfloat16)
    batch, size, seq = next(global_batches(config)), config.train.micro_batch_size, config.data.seq_length
    total = 0.0
    for first in range(0, len(batch.tokens), size):
        rows, begin, end = slice(first, first + size), first * seq, (first + size) * seq
        inside = batch.cu_seqlens[(batch.cu_seqlens >= begin) & (batch.cu_seqlens <= end)] - begin
        labels, mask = batch.labels[rows], batch.loss_mask[rows]
        with torch.no_grad():
            total += float(model(batch.tokens[rows], cu_seqlens=inside, labels=labels, loss_mask=mask).sum())
    return total / float(batch.loss_mask.sum())


@pytest.mark.slow
def test_fp8_experts_are_the_weights_that_their_bytes_stand_for(folder):
    fp8 = ("train.precision=fp8", "train.steps=1", "model.init_std=0.2")
    alone, apart = (experts(folder, f"fp8 {n}", *fp8, *more) for n, more in enumerate([(), ("parallel.ep=2",)]))
    run_all([(1, alone), (2, apart)])
    for config, parts in ((alone, 1), (apart, 2)):
        assert losses(config)[0] == pytest.approx(fp8_loss(config, parts), rel=1e-5)
    assert losses(alone)[0] != pytest.approx(losses(apart)[0], rel=2e-5)
