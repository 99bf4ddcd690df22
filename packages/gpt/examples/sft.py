"""Supervised fine-tuning by a loop of your own, over the parts that `sixfold train` is made of.

    python sft.py                                  a tiny base and chats of its own, in one process
    torchrun --nproc-per-node 2 sft.py             the same over two ranks, with the same losses
    torchrun --nproc-per-node 8 sft.py run.toml    yours: checkpoint.init_from, a blend with masks, run.dir

`sixfold train run.toml` has the same losses, and also pipelines, resumes and logs. Write a loop of your own for what it
lacks, such as another loss (dpo.py).
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from sixfold import dist_ckpt
from sixfold.fsdp import FullyShardedDataParallel, fully_shard_optimizer
from sixfold.gpt import Batch, GPTModel, TrainConfig, global_batches
from sixfold.gpt.checkpoint import find
from sixfold.gpt.tokenizer import ByteTokenizer
from sixfold.indexed_data import IndexedDatasetBuilder

TINY = """
[model]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
ffn_hidden_size = 176
vocab_size = 257
[data]
blend = ["{folder}/chats"]
split = "1,0,0"
seq_length = 64
packing = "best_fit"
[train]
steps = 20
global_batch_size = 8
micro_batch_size = 4
precision = "fp32"
[optimizer]
lr = 3e-3
[checkpoint]
init_from = "{folder}/base"
[run]
dir = "{folder}/tuned"
device = "cpu"
"""


def place() -> tuple[int, int]:
    """(rank, ranks)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def records(model: FullyShardedDataParallel) -> dict[str, dist_ckpt.ShardedTensor]:
    """What this rank holds of the weights, as sixfold.dist_ckpt takes it: for a load in place, and for a save."""
    return {
        f"model.{one.name}": dist_ckpt.ShardedTensor.from_rank_offsets_flat(
            f"model.{one.name}", one.tensor, one.global_shape,
            flattened_range=slice(one.start, one.stop), replica_id=one.replica,
        )
        for one in model.state_records()
    }  # fmt: skip


def sharded(config: TrainConfig) -> FullyShardedDataParallel:
    """The model of ``checkpoint.init_from`` (a run, a checkpoint or an import); no rank ever has the whole of it."""
    net = GPTModel(config.model, device="meta")
    model = FullyShardedDataParallel(
        net,
        fsdp_unit_modules=["Block"],
        init_fn=lambda name, module: None,  # the shards are filled by the load
        initial="trust",
        grad_divisor=1.0,  # gradients of ranks are added: the loss below is divided by the whole batch
    )
    dist_ckpt.load(records(model), find(config.checkpoint.init_from), group="world")
    model.refresh()
    return model


def rows_of(batch: Batch) -> dict[str, torch.Tensor]:
    """This rank's rows of a global batch, as GPTModel takes them."""
    (rank, ranks), (rows, length) = place(), batch.tokens.shape
    first, last = rank * rows // ranks, (rank + 1) * rows // ranks
    ends = batch.cu_seqlens
    here = ends[(ends >= first * length) & (ends <= last * length)] - first * length
    named = {"x": batch.tokens, "labels": batch.labels, "loss_mask": batch.loss_mask}
    return {name: tensor[first:last] for name, tensor in named.items()} | {"cu_seqlens": here}


def fine_tune(config: TrainConfig) -> list[float]:
    """Train, write a checkpoint for `sixfold export`, `sixfold sample` and `load_model`; returns the losses by step."""
    model, o = sharded(config), config.optimizer
    matrices = [p for p in model.module.parameters() if p.dim() > 1]
    rest = [p for p in model.module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
    optimizer = fully_shard_optimizer(adamw, model)
    losses: list[float] = []
    for batch in global_batches(config):
        count = batch.loss_mask.sum()  # what the assistant says in all rows, of all ranks
        loss = model(**rows_of(batch)).sum() / count
        loss.backward()
        if config.train.clip_grad:
            model.clip_grad_norm_(config.train.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(total.item())
    state = records(model) | {"step": len(losses), "samples": 0, "tokens": 0, "config": config.to_toml()}
    dist_ckpt.save(state, f"{config.run.dir}/checkpoints/step-{len(losses):08}", group="world")
    return losses


def write_tiny(folder: Path) -> None:
    """Write a base with initial weights, and chats as bytes, in which only answers count."""
    tokenizer, says = ByteTokenizer(), [("what does the fox do? ", "it jumps"), ("who sleeps? ", "the dog")]
    with IndexedDatasetBuilder(f"{folder}/chats.bin", dtype=np.uint16) as builder:
        for question, answer in says * 50:
            asked, answered = tokenizer.encode(question), [*tokenizer.encode(answer), tokenizer.eod]
            mask = [False] * len(asked) + [True] * len(answered)
            builder.add_document(np.array(asked + answered, dtype=np.uint16), loss_mask=mask)
    config = TrainConfig.from_text(TINY.format(folder=folder))
    common = {"step": 0, "samples": 0, "tokens": 0, "config": config.to_toml()}
    dist_ckpt.save(GPTModel(config.model).sharded_state_dict() | common, folder / "base", group=None)


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")  # tensors are on CPUs here
    with tempfile.TemporaryDirectory() as temporary:
        texts = [TINY.format(folder=temporary)]
        if place()[0] == 0 and not sys.argv[1:]:
            write_tiny(Path(temporary))
        if dist.is_initialized():
            dist.broadcast_object_list(texts, 0)  # with the folder of rank 0
        found = fine_tune(TrainConfig.from_toml(sys.argv[1]) if sys.argv[1:] else TrainConfig.from_text(texts[0]))
        if place()[0] == 0:
            print(f"loss {found[0]:.3f} at first, {found[-1]:.3f} after {len(found)} steps")
        if dist.is_initialized():
            dist.barrier()  # rank 0's folder is there until all have read
            dist.destroy_process_group()
