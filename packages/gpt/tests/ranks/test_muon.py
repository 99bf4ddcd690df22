"""Muon over shards and stages: bit for bit the run of one process, which is torch's."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import assert_same_tensors, final_tensors, lines, losses, run_all

from sixfold import dist_ckpt
from sixfold.gpt import GPTModel, global_batches

MUON = ("optimizer.name=muon", "train.steps=3", "checkpoint.every=2", "train.clip_grad=0", "model.tie_embeddings=false")
ALONE = (1, ())
PIPELINED = [
    (2, ("parallel.pp=2", "parallel.schedule=zb_v", "parallel.stages_per_rank=2")),
    (3, ("parallel.pp=3", "parallel.layers_per_stage=[3, 0, 1]")),
]
SHARDED = [(2, ("parallel.sharding=optim",)), (2, ("fsdp.grad_reduce=last",))]
RESUMED = (2, ("SHARDED[0], from step 2 on as SHARDED[1]",))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    layouts = [ALONE, *PIPELINED, *SHARDED]
    found = {layout: tiny_config(folder, *MUON, *layout[1], run=f"run{n}") for n, layout in enumerate(layouts)}
    run_all((ranks, config) for (ranks, _), config in found.items())
    shutil.copytree(found[SHARDED[0]].run.dir, folder / "again")
    shutil.rmtree(dist_ckpt.retention.step_path(folder / "again" / "checkpoints", 3))
    found[RESUMED] = tiny_config(folder, *MUON, *SHARDED[1][1], run="again")
    run_all([(2, found[RESUMED])])
    return found


def plain_losses(config):
    """torch's Muon and AdamW in a loop of one process, microbatch by microbatch."""
    model = GPTModel(config.model)
    model.initialize(config.train.seed)
    inside = {name: p for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2}
    rest = [p for name, p in model.named_parameters() if name not in inside]
    o = config.optimizer
    muon = torch.optim.Muon(inside.values(), lr=o.lr, weight_decay=o.weight_decay, adjust_lr_fn="match_rms_adamw")
    tables, norms = ([p for p in rest if (p.dim() == 2) == big] for big in (True, False))
    groups = [{"params": tables, "weight_decay": o.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
    found = []
    for step, batch in zip(range(config.train.steps), global_batches(config), strict=False):
        w, total, m = config.schedule.warmup_steps, config.train.steps, config.schedule.min_lr_ratio
        fallen = (1 + math.cos(math.pi * (step - w) / (total - w))) / 2
        rate = (step + 1) / w if step < w else m + (1 - m) * fallen
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = o.lr * rate
        found.append(0.0)
        for rows in range(0, len(batch.tokens), config.train.micro_batch_size):
            part = slice(rows, rows + config.train.micro_batch_size)
            start, end = (config.data.seq_length * row for row in (part.start, part.stop))
            cu = batch.cu_seqlens[(batch.cu_seqlens >= start) & (batch.cu_seqlens <= end)] - start
            labels, mask = batch.labels[part], batch.loss_mask[part]
            loss = model(batch.tokens[part], cu_seqlens=cu, labels=labels, loss_mask=mask).sum()
            loss.backward()
            found[-1] += float(loss.detach().double() / batch.loss_mask.sum())
        for parameter in model.parameters():
            parameter.grad.div_(batch.loss_mask.sum())
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.slow
def test_one_process_trains_as_torchs_muon_and_adamw(trained):
    assert losses(trained[ALONE]) == pytest.approx(plain_losses(trained[ALONE]), rel=1e-6)


@pytest.mark.parametrize("layout", PIPELINED, ids=str)
def test_stages_train_bitwise_as_one_process(trained, layout):
    assert losses(trained[layout]) == losses(trained[ALONE])
    assert_same_tensors(final_tensors(trained[layout]), final_tensors(trained[ALONE]))


def test_strategies_train_bitwise_alike_and_as_one_process_but_for_the_order_of_sums(trained):
    optim, zero_3 = (trained[layout] for layout in SHARDED)
    assert losses(optim) == losses(zero_3) == pytest.approx(losses(trained[ALONE]), rel=1e-6)
    assert_same_tensors(final_tensors(optim), final_tensors(zero_3))


def test_momentum_saved_under_one_strategy_goes_on_bitwise_under_another(trained):
    assert [entry["step"] for entry in lines(trained[RESUMED], "resume")] == [2]
    assert_same_tensors(final_tensors(trained[RESUMED]), final_tensors(trained[SHARDED[0]]))
