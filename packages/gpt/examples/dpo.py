"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290) with a reference model that is sharded too.

    python dpo.py                                  a tiny base and pairs of its own, in one process
    torchrun --nproc-per-node 2 dpo.py             the same over two ranks, with the same losses
    torchrun --nproc-per-node 8 dpo.py runs/imported pairs.jsonl runs/tuned

A line of pairs.jsonl is {"prompt": ..., "chosen": ..., "rejected": ...}. Policy and reference both begin as the base,
a run or an import, whose shards each rank reads; the reference is frozen and has no gradients and no moments.

    loss = -log sigmoid(beta * ((log p(chosen) - log p(rejected)) - (log q(chosen) - log q(rejected))))

p is the policy and q the reference; each log-probability is the sum over the tokens of an answer.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sixfold import dist_ckpt
from sixfold.fsdp import FullyShardedDataParallel, fully_shard_optimizer
from sixfold.gpt import GPTConfig, GPTModel
from sixfold.gpt.checkpoint import find
from sixfold.gpt.load import saved_model, saved_tokenizer
from sixfold.gpt.tokenizer import Tokenizer

TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 176, "vocab_size": 257}
PAIRS = [
    {"prompt": "what does the fox do? ", "chosen": "it jumps", "rejected": "it sleeps all day"},
    {"prompt": "who is lazy? ", "chosen": "the dog is", "rejected": "the fox"},
] * 4


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


def sharded(base: Path, *, trained: bool) -> FullyShardedDataParallel:
    """The model of a checkpoint; no rank ever has the whole of it."""
    net = GPTModel(saved_model(base), device="meta").requires_grad_(trained)
    model = FullyShardedDataParallel(
        net,
        fsdp_unit_modules=["Block"],
        init_fn=lambda name, module: None,  # the shards are filled by the load
        initial="trust",
        grad_divisor=1.0,  # gradients of ranks are added: the loss below is divided by the whole batch
    )
    dist_ckpt.load(records(model), base, group="world")
    model.refresh()
    return model


def rows_of(pairs: Sequence[dict[str, str]], tokenizer: Tokenizer) -> dict[str, Tensor]:
    """The chosen answers, then the rejected ones, each behind its prompt; only tokens of answers count."""
    texts = [(pair["prompt"], pair[which]) for which in ("chosen", "rejected") for pair in pairs]
    ids = [(tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eod]) for prompt, answer in texts]
    length = max(len(prompt) + len(answer) for prompt, answer in ids)
    rows = torch.full((len(ids), length), tokenizer.pad)
    mask = torch.zeros(len(ids), length)
    for number, (prompt, answer) in enumerate(ids):
        rows[number, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        mask[number, len(prompt) : len(prompt) + len(answer)] = 1
    return {"x": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": mask[:, 1:]}


def margins(model: FullyShardedDataParallel, rows: dict[str, Tensor]) -> Tensor:
    """log p(chosen) - log p(rejected) of each pair: losses of GPTModel are -log p of each token, 0 where masked."""
    chosen, rejected = model(**rows).sum(1).chunk(2)
    difference: Tensor = rejected - chosen
    return difference


def train(
    base: Path, pairs: Sequence[dict[str, str]], tokenizer: Tokenizer, out: Path,
    *, steps: int = 10, batch: int = 4, beta: float = 0.1, lr: float = 1e-3,
) -> list[float]:  # fmt: skip
    """Train on ``batch`` pairs a step, a share of them on each rank, write a checkpoint; returns the losses by step."""
    rank, ranks = place()
    policy, reference = sharded(base, trained=True), sharded(base, trained=False).eval()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(policy.module.parameters(), lr=lr, weight_decay=0.0), policy)
    losses: list[float] = []
    for step in range(steps):
        numbers = range(step * batch + rank, (step + 1) * batch, ranks)
        rows = rows_of([pairs[number % len(pairs)] for number in numbers], tokenizer)
        with torch.no_grad():
            wanted = margins(reference, rows)
        loss = -F.logsigmoid(beta * (margins(policy, rows) - wanted)).sum() / batch
        loss.backward()
        policy.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(total.item())
    common = dist_ckpt.load_common_state_dict(base) | {"step": steps}  # its config, for export and sample
    dist_ckpt.save(records(policy) | common, out / f"checkpoints/step-{steps:08}", group="world")
    return losses


def write_tiny(folder: Path) -> None:
    """Write a base with initial weights, as `sixfold import` writes one."""
    config = GPTConfig(**TINY)
    text = "[model]\n" + "".join(f"{key} = {value}\n" for key, value in TINY.items())
    common = {"step": 0, "samples": 0, "tokens": 0, "config": text, "imported": {"max_position_embeddings": 256}}
    dist_ckpt.save(GPTModel(config).sharded_state_dict() | common, folder / "checkpoints/step-00000000", group=None)


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")  # tensors are on CPUs here
    with tempfile.TemporaryDirectory() as temporary:
        folders = [temporary]
        if place()[0] == 0 and not sys.argv[1:]:
            write_tiny(Path(temporary))
        if dist.is_initialized():
            dist.broadcast_object_list(folders, 0)  # that of rank 0
        base, given, out = sys.argv[1:] or (folders[0], "", f"{folders[0]}/tuned")
        read = [json.loads(line) for line in Path(given).read_text().splitlines()] if given else PAIRS
        tokenizer = saved_tokenizer(find(base), "" if given else "bytes")
        found = train(find(base), read, tokenizer, Path(out))
        if place()[0] == 0:
            print(f"loss {found[0]:.4f} at first, {found[-1]:.4f} after {len(found)} steps")
        if dist.is_initialized():
            dist.barrier()  # rank 0's folder is there until all have read
            dist.destroy_process_group()
