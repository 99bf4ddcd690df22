"""``parallel.grad_sum = "tree"``: the bits of a run do not depend on how it is laid out, and are those of plain torch.

nox -s full, or nox -s "ranks(gpt)" -- --same-bits-matrix      every layout; a sample without it
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, lines, run_all
from torch import Tensor, nn

from sixfold import dist_ckpt
from sixfold.gpt import GPTModel, TrainConfig, global_batches
from sixfold.gpt.data.token_stream import Batch

STEPS = 20
BASE = (
    "parallel.grad_sum=tree", "model.num_layers=6", "train.micro_batch_size=1", f"train.steps={STEPS}",
    "checkpoint.every=0", "log.digest_every=1",
)  # fmt: skip
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OPTIMIZERS = ("adamw", "muon")
Layout = tuple[int, tuple[str, ...]]


def data_parallel(batch: int) -> list[Layout]:
    """Ranks and sharding."""
    return [(dp, (f"parallel.sharding={one}",)) for dp in (1, 2, 4, 8) if batch % dp == 0 for one in SHARDINGS]


PIPELINES: list[Layout] = [
    (4, ("parallel.pp=4",)),
    (4, ("parallel.pp=2",)),
    (4, ("parallel.dp_replicate=2",)),
    (4, ("parallel.pp=2", "parallel.dp_replicate=2", "parallel.sharding=optim")),
    *[(2, ("parallel.pp=2", f"parallel.schedule={name}")) for name in ("gpipe", "zb_h1", "zb_h2")],
    *[
        (2, ("parallel.pp=2", f"parallel.schedule={name}", "parallel.stages_per_rank=2"))
        for name in ("interleaved", "looped_bfs", "hanayo", "zb_v", "v_half", "v_min", "zb_interleaved", "dualpipe_v")
    ],
]
CASES = [
    *[(batch, "adamw", layout) for batch in (8, 16, 12) for layout in data_parallel(batch)],
    *[(8, "muon", layout) for layout in data_parallel(8)],
    *[(batch, name, layout) for batch, name, layout in product((8, 12), OPTIMIZERS, PIPELINES[:3])],
    *[(8, "adamw", layout) for layout in PIPELINES[3:]],
]
SAMPLE = [
    (8, "adamw", (2, ("parallel.sharding=optim_grads_params",))),
    (12, "adamw", (4, ("parallel.sharding=optim",))),
    (12, "muon", (4, ("parallel.pp=2",))),
    (8, "adamw", (2, ("parallel.pp=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2"))),
]


def pytest_generate_tests(metafunc):
    """The sample, or all cases."""
    if "found" in metafunc.fixturenames:
        every = metafunc.config.getoption("--same-bits-matrix")
        metafunc.parametrize(("batch", "optimizer", "layout"), CASES if every else SAMPLE, ids=str)


def config_of(folder, batch: int, optimizer: str, *overrides: str, run: str) -> TrainConfig:
    """Of twenty steps."""
    chosen = (f"train.global_batch_size={batch}", f"optimizer.name={optimizer}")
    return tiny_config(folder, *BASE, *chosen, *overrides, run=run)


# ---- the oracle: one process, plain torch


def tree_sum(leaves: list[list[Tensor]]) -> list[Tensor]:
    """Neighbours, then neighbours of these, over the next power of two; a missing one is left out."""
    while len(leaves) > 1:
        pairs = [leaves[at : at + 2] for at in range(0, len(leaves), 2)]
        leaves = [pair[0] if len(pair) == 1 else [a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
    return leaves[0]


def loss_of(model: GPTModel, batch: Batch, row: int) -> Tensor:
    """The sum of a row's losses."""
    length, here = batch.tokens.shape[1], slice(row, row + 1)
    inside = (batch.cu_seqlens >= row * length) & (batch.cu_seqlens <= (row + 1) * length)
    losses = model(
        batch.tokens[here],
        cu_seqlens=(batch.cu_seqlens[inside] - row * length).to(torch.int32),
        labels=batch.labels[here],
        loss_mask=batch.loss_mask[here],
    )
    return losses.sum()


def make_optimizers(config: TrainConfig, named: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """torch's own."""
    o = config.optimizer
    muon = [n for n, p in named.items() if o.name == "muon" and n.startswith("layers.") and p.dim() == 2]
    rest = [p for n, p in named.items() if n not in muon]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)
    ]
    if muon:
        matrices = [named[n] for n in muon]
        found.append(torch.optim.Muon(matrices, lr=o.lr, weight_decay=o.weight_decay, adjust_lr_fn="match_rms_adamw"))
    return found


def rate(config: TrainConfig, step: int) -> float:
    """A warm-up, then a cosine down to a tenth."""
    warmup, steps, least = config.schedule.warmup_steps, config.train.steps, config.schedule.min_lr_ratio
    if step < warmup:
        return config.optimizer.lr * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return config.optimizer.lr * (least + (1 - least) * (1 + math.cos(math.pi * done)) / 2)


def plain(config: TrainConfig) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """(weights, losses, norms). The embedding and the head read one table, and their gradients are summed apart."""
    torch.manual_seed(0)
    model = GPTModel(replace(config.model, tie_embeddings=False))
    GPTModel.initialize(model, config.train.seed)
    named = dict(model.named_parameters())
    head, table = named.pop("head.weight"), named["embedding.weight"]
    optimizers, losses, norms = make_optimizers(config, named), [], []
    for step, batch in zip(range(STEPS), global_batches(config), strict=False):
        head.data.copy_(table.data)
        found = [loss_of(model, batch, row) for row in range(len(batch.tokens))]
        leaves = [list(torch.autograd.grad(loss, [*named.values(), head])) for loss in found]
        *total, of_head = tree_sum(leaves)
        targets = batch.loss_mask.sum()
        for (name, p), gradient in zip(named.items(), total, strict=True):
            p.grad = (gradient + of_head if name == "embedding.weight" else gradient) / targets
        losses.append(math.fsum(loss.item() for loss in found) / float(targets))
        norms.append(math.sqrt(math.fsum(x**2 for p in named.values() for x in p.grad.flatten().tolist())))
        factor = config.train.clip_grad / (torch.tensor(norms[-1], dtype=torch.float32) + 1e-6)
        for p in named.values():
            p.grad *= float(factor.clamp(max=1.0))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(config, step)
            optimizer.step()
    return {f"model.{name}": p.detach() for name, p in named.items()}, losses, norms


# ---- the tests


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """The plain run of a batch and an optimizer, once for all layouts."""
    folder, known = tmp_path_factory.mktemp("plain"), {}

    def of(batch: int, optimizer: str) -> tuple[dict[str, Tensor], list[float], list[float]]:
        if (batch, optimizer) not in known:
            known[batch, optimizer] = plain(config_of(folder, batch, optimizer, run="never"))
        return known[batch, optimizer]

    return of


@pytest.fixture(scope="module")
def first_digests():
    """Of the first layout of a batch and an optimizer."""
    return {}


@pytest.fixture(scope="module")
def found(tmp_path_factory, chosen):
    """The runs."""
    folder, runs = tmp_path_factory.mktemp("runs"), {}
    for number, (batch, optimizer, layout) in enumerate(chosen("batch", "optimizer", "layout")):
        runs[batch, optimizer, layout] = config_of(folder, batch, optimizer, *layout[1], run=f"run{number}")
    run_all((layout[0], config) for (_, _, layout), config in runs.items())
    return runs


def told(config: TrainConfig, key: str) -> list[float]:
    """Of each step."""
    return [line[key] for line in lines(config, "step")]


def digests(config: TrainConfig) -> dict[int, list[str]]:
    """Of the weights at each step, one for each time that the run had it."""
    found: dict[int, list[str]] = {}
    for line in lines(config, "digest"):
        found.setdefault(line["step"], []).append(line["digest"])
    return found


@pytest.mark.slow
def test_weights_losses_and_norms_have_the_bits_of_plain_torch_at_every_layout(
    oracle, found, first_digests, batch, optimizer, layout
):
    weights, losses, norms = oracle(batch, optimizer)
    config = found[batch, optimizer, layout]
    assert told(config, "loss") == losses
    assert told(config, "grad_norm") == pytest.approx(norms, rel=2**-40)
    assert min(norms) > config.train.clip_grad, "a norm that clips nothing would hide a wrong one"
    assert digests(config) == first_digests.setdefault((batch, optimizer), digests(config))
    tensors = final_tensors(config)
    assert [name for name, value in weights.items() if not torch.equal(value, tensors[name])] == []


@pytest.mark.slow
def test_samples_that_are_dealt_anew_each_step_keep_the_bits_of_plain_torch_at_every_layout(tmp_path):
    """``data.deal = "permuted"``: gradients are summed in the order in which the samples are dealt."""
    layouts = [(2, ("parallel.sharding=optim_grads_params",)), (2, ("parallel.pp=2",))]
    configs = [
        config_of(tmp_path, 8, "adamw", "data.deal=permuted", *more, run=f"run{n}")
        for n, (_, more) in enumerate(layouts)
    ]
    in_turn = config_of(tmp_path, 8, "adamw", run="never")
    run_all((ranks, config) for (ranks, _), config in zip(layouts, configs, strict=True))
    weights, losses, _ = plain(configs[0])
    for config in configs:
        assert told(config, "loss") == losses, config.parallel
        tensors = final_tensors(config)
        assert [name for name, value in weights.items() if not torch.equal(value, tensors[name])] == []
    assert digests(configs[0]) == digests(configs[1])
    dealt, plainly = (next(global_batches(config)).tokens for config in (configs[0], in_turn))
    assert not torch.equal(dealt, plainly) and sorted(dealt.tolist()) == sorted(plainly.tolist())


EXPERTS = ("model.num_experts=4", "model.moe_ffn_hidden_size=32")
SPLIT = {
    "tp": [(2, ("parallel.tp=2",)), (4, ("parallel.tp=2",)), (4, ("parallel.tp=2", "parallel.pp=2"))],
    "cp": [(2, ("parallel.cp=2",)), (4, ("parallel.cp=2",)), (4, ("parallel.cp=2", "parallel.sharding=no_shard"))],
    "experts": [(1, EXPERTS), (2, EXPERTS), (4, EXPERTS), (2, (*EXPERTS, "parallel.pp=2"))],
    "ep": [
        (2, (*EXPERTS, "parallel.ep=2")),
        (4, (*EXPERTS, "parallel.ep=2")),
        (4, (*EXPERTS, "parallel.ep=2", "parallel.pp=2")),
    ],
    "bf16": [(1, ("train.precision=bf16",)), (4, ("train.precision=bf16", "parallel.pp=2", "parallel.schedule=zb_h1"))],
    "fp8": [(1, ("train.precision=fp8",)), (4, ("train.precision=fp8", "parallel.pp=2"))],
    "recompute": [(1, ()), (2, ("train.recompute=full",)), (2, ("train.recompute=selective", "parallel.pp=2"))],
}


@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.slow
def test_at_fixed_tp_cp_and_ep_the_other_degrees_change_no_bit(tmp_path, split):
    short = "train.steps=3", "model.num_layers=2"
    configs = [
        config_of(tmp_path, 8, "adamw", *more, *short, run=f"run{n}") for n, (_, more) in enumerate(SPLIT[split])
    ]
    run_all((ranks, config) for (ranks, _), config in zip(SPLIT[split], configs, strict=True))
    first, *others = configs
    for other in others:
        for key in ("loss", "grad_norm"):
            assert told(other, key) == told(first, key), (key, other.parallel)
        assert digests(other) == digests(first), other.parallel
        assert_same_tensors(final_tensors(other), final_tensors(first))


@pytest.mark.slow
def test_norms_digests_and_moments_are_the_same_at_every_layout(tmp_path):
    layouts = [(1, ()), (4, ("parallel.sharding=optim",)), (4, ("parallel.pp=2", "parallel.schedule=gpipe"))]
    configs = [config_of(tmp_path, 12, "muon", *more, run=f"run{n}") for n, (_, more) in enumerate(layouts)]
    run_all((ranks, config) for (ranks, _), config in zip(layouts, configs, strict=True))
    first, *others = configs
    for other in others:
        for key in ("loss", "grad_norm"):
            assert told(other, key) == told(first, key), key
        assert digests(other) == digests(first)
        assert_same_tensors(final_tensors(other), final_tensors(first))
    each = [one for (one,) in digests(first).values()]
    assert len(set(each)) == STEPS + 1, "a digest that stays tells nothing"


@pytest.mark.slow
def test_a_run_that_changes_its_layout_twice_is_the_run_that_never_stopped(tmp_path):
    saving = "checkpoint.every=1", "checkpoint.keep=20", "checkpoint.keep_every=1"
    whole = config_of(tmp_path, 8, "adamw", *saving, run="whole")
    run_all([(1, whole)])
    moves = [
        (7, 4, ("parallel.pp=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2")),
        (13, 8, ("parallel.dp_replicate=2",)),
    ]
    for at, ranks, layout in moves:
        moved = config_of(tmp_path, 8, "adamw", *saving, *layout, run="moved")
        if at == 7:
            shutil.copytree(whole.run.dir, moved.run.dir)
        for step in range(at + 1, STEPS + 1):
            shutil.rmtree(dist_ckpt.retention.step_path(Path(moved.run.dir) / "checkpoints", step))
        run_all([(ranks, moved)])
    assert [line["step"] for line in lines(moved, "resume")] == [7, 13]
    for key in ("loss", "grad_norm"):
        expected = told(whole, key)
        assert told(moved, key) == [*expected, *expected[7:], *expected[13:]], key
    expected = digests(whole)
    assert {step: set(found) for step, found in digests(moved).items()} == {
        step: set(found) for step, found in expected.items()
    }
    assert [len(found) for found in digests(moved).values()] == [1] * 7 + [2] * 6 + [3] * 8
    assert_same_tensors(final_tensors(moved), final_tensors(whole))


@pytest.mark.slow
def test_the_default_does_not_have_the_same_bits(tmp_path):
    configs = [
        config_of(tmp_path, 8, "adamw", f"parallel.grad_sum={name}", run=f"{name}{ranks}")
        for name in ("backend", "rank_order")
        for ranks in (1, 4)
    ]
    run_all(zip((1, 4, 1, 4), configs, strict=True))
    for alone, shared in (configs[:2], configs[2:]):
        assert told(alone, "loss")[:1] == pytest.approx(told(shared, "loss")[:1])
        assert digests(alone)[0] == digests(shared)[0]
        assert digests(alone)[STEPS] != digests(shared)[STEPS]
