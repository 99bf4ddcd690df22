"""Tiny data, tiny configs, and a plain single-process loop that shares no code with the train loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sixfold.gpt.config.train_config import FsdpConfig, ParallelConfig, PipelineConfig, RunConfig, TrainConfig
from sixfold.indexed_data import IndexedDatasetBuilder

TINY = """
[model]
num_layers = 4
hidden_size = 32
num_attention_heads = 4
num_query_groups = 2
ffn_hidden_size = 64
vocab_size = 257
[data]
blend = [{blend}]
weights = [0.7, 0.3]
split = "90,10,0"
seq_length = 32
tokenizer = "bytes"
[train]
steps = 4
global_batch_size = 8
micro_batch_size = 2
precision = "fp32"
clip_grad = 0.25
[optimizer]
lr = 3e-3
[schedule]
warmup_steps = 2
[fsdp]
grad_sum = "rank_order"
[checkpoint]
background = false  # its worker takes a second to start
[run]
dir = "{run}"
device = "cpu"
timeout_seconds = 120
"""


def write_pair(prefix: Path, documents: int, seed: int) -> str:
    """A pair of random documents of 5 to 120 ids below 256, each ended by 256."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for _ in range(documents):
            ids = rng.integers(0, 256, rng.integers(5, 120))
            builder.add_document(np.append(ids, 256).astype(np.uint16))
    return str(prefix)


def tiny_config(folder: Path, *overrides: str, run: str = "run") -> TrainConfig:
    """Two small datasets below ``folder`` (made once) and a four-layer model."""
    for name, documents, seed in (("wiki", 120, 1), ("code", 80, 2)):
        if not (folder / f"{name}.idx").exists():
            write_pair(folder / name, documents, seed)
    path = folder / "tiny.toml"
    blend = ", ".join(f'"{folder / name}"' for name in ("wiki", "code"))
    path.write_text(TINY.format(blend=blend, run=folder / run))
    return TrainConfig.from_toml(path, overrides)


def plain_losses(config: TrainConfig, steps: int) -> list[float]:
    """Losses of ``plain_run``."""
    return [loss for loss, _ in plain_run(config, steps)]


def plain_run(config: TrainConfig, steps: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) per step of an ordinary torch loop over the same global batches.

    One process, whole batches, torch's own clipping and AdamW. Done once for all layouts of a configuration: what
    ``write_pair`` writes is a function of the base names.
    """
    apart = replace(
        config, parallel=ParallelConfig(), pipeline=PipelineConfig(), fsdp=FsdpConfig(), run=RunConfig(dir="any")
    )
    key = f"{steps} {apart.to_toml()}".replace(str(Path(config.data.blend[0]).parent), "")
    if key not in _PLAIN:
        _PLAIN[key] = _plain_run(config, steps)
    return _PLAIN[key]


_PLAIN: dict[str, list[tuple[float, float]]] = {}


def _plain_run(config: TrainConfig, steps: int) -> list[tuple[float, float]]:
    from sixfold.gpt import GPTModel, global_batches

    model = GPTModel(config.model)
    model.initialize(config.train.seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(config.train.frozen))  # () is the beginning of nothing
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in trained if p.dim() >= 2]
    rest = [p for p in trained if p.dim() < 2]
    o = config.optimizer
    groups = [{"params": decay, "weight_decay": o.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
    found = []
    for step, batch in zip(range(steps), global_batches(config), strict=False):
        s, w, total, m = step, config.schedule.warmup_steps, config.train.steps, config.schedule.min_lr_ratio
        factor = (s + 1) / w if s < w else m + (1 - m) * (1 + np.cos(np.pi * (s - w) / (total - w))) / 2
        for group in optimizer.param_groups:
            group["lr"] = o.lr * factor
        loss = model(batch.tokens, cu_seqlens=batch.cu_seqlens, labels=batch.labels, loss_mask=batch.loss_mask).sum()
        loss = loss / batch.loss_mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found
