"""Whole updates of a Llama of 1.1 B parameters on one GPU, beside a plain torch loop and beside what plan says.

    python packages/gpt/benchmarks/one_gpu.py [--seconds 60] [--out FILE]

Both hold the same weights in number and shape (tied head), read the same random tokens, and do forward, backward, clip
at 1.0 and a fused AdamW step; the plain loop computes under autocast, ours as its defaults say. ``compile`` compiles
the layers of either. Contenders run one after the other, each alone in memory; a time is the median of updates after
the third, from host read to host read of the loss. MFU counts as plan does, against the device's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_model import Plain

from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.data.token_stream import Microbatch
from sixfold.gpt.engine.rank_model import build_rank
from sixfold.gpt.engine.step import train_step
from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.machine.devices import device_named
from sixfold.gpt.parallel.mesh import make_mesh
from sixfold.gpt.plan.plan import plan_layout

CONFIG = """
model = {num_layers = 20, hidden_size = 2048, num_attention_heads = 16, num_query_groups = 16, \
ffn_hidden_size = 5632, vocab_size = 32000, tie_embeddings = true}
data = {blend = ["unused"], seq_length = 4096, document_mask = false}
train = {steps = 1, global_batch_size = 4, micro_batch_size = 4}
optimizer = {lr = 1e-4}
run = {dir = "unused", device = "cuda"}
"""
CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "plain compile": (),
    "sixfold": (),
    "sixfold no_shard": ("parallel.sharding=no_shard",),
    "sixfold compile": ("train.compile=true",),
}


def plain(config: TrainConfig, tokens: torch.Tensor, compiled: bool) -> Callable[[], object]:
    """One update as one writes it by hand."""
    model = Plain(config.model, config.data.seq_length).cuda()
    if compiled:
        for layer in model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    labels = tokens.roll(-1, 1)

    def update() -> float:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels) / tokens.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return update


def ours(config: TrainConfig, tokens: torch.Tensor) -> Callable[[], object]:
    """One update of the train loop."""
    world = World(rank=0, size=1, local_rank=0, store=None, device=torch.device("cuda", 0))
    rank = build_rank(config, make_mesh(config.parallel, world, world.device, 60.0), world)
    kwargs = {"labels": tokens.roll(-1, 1), "loss_mask": torch.ones(tokens.shape, device="cuda")}
    batch = [Microbatch(tokens=tokens, kwargs=kwargs, targets=float(tokens.numel()))]
    return lambda: train_step(rank, batch, 1e-4)


def measured(name: str, seconds: float) -> dict[str, float]:
    """Median seconds of an update, tokens a second, MFU, and the most that was allocated, in GiB."""
    config = TrainConfig.from_text(CONFIG, CASES[name])
    shape = (config.train.micro_batch_size, config.data.seq_length)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).cuda()
    torch.cuda.reset_peak_memory_stats()
    update = plain(config, tokens, name.endswith("compile")) if name.startswith("plain") else ours(config, tokens)
    taken: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(taken) < 5:
        torch.cuda.synchronize()
        began = time.perf_counter()
        update()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    step = statistics.median(taken[3:])
    planned = plan_layout(config, 1, device_named("h200"))
    found = {
        "step_s": step,
        "tokens_per_second": tokens.numel() / step,
        "mfu": planned.mfu * planned.step_s / step,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "updates": len(taken),
    }
    del update
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> None:
    """Print a line for each contender, and what plan says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of all contenders together")
    parser.add_argument("--device", default="h200", help="the name that plan has for this one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    results = {}
    for name in options.only:
        config = TrainConfig.from_text(CONFIG, CASES[name])
        try:
            results[name] = measured(name, options.seconds / len(options.only))
        except Exception as error:  # the others are measured all the same
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        planned = plan_layout(config, 1, device_named(options.device))
        low, high = planned.step_s_range
        results[name] |= {"planned_s": planned.step_s, "planned_peak_gib": planned.peak_bytes / 2**30}
        told = ", ".join(f"{key} {value:.4g}" for key, value in results[name].items())
        print(f"{name:18s} {told}, planned {low:.4f} to {high:.4f} s", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
