"""Whole updates of a Llama of 1.1 B parameters on one GPU, beside a plain torch loop and beside what plan says.

    python packages/gpt/benchmarks/one_gpu.py [--seconds 60] [--out FILE]

Both hold the same weights in number and shape (tied head), read the same random tokens, and do forward, backward, clip
at 1.0 and a fused AdamW step; the plain loop computes under autocast, ours as its defaults say. ``compile`` compiles
the layers of either; ``float8`` has the products of ours by torchao. Contenders run one after the other, each alone in
memory, with weights drawn on the device; a time is the median of updates after the third, from host read to host read
of the loss. MFU counts as plan does, against the device's dense bf16 peak. ``--out`` is written after each contender.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from bench_model import Plain

from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.data.token_stream import Microbatch
from sixfold.gpt.engine.rank_model import build_rank
from sixfold.gpt.engine.step import train_step
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.machine.devices import DEVICES, Device, device_named
from sixfold.gpt.model.float8_linear import check_float8
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
CASES: dict[str, tuple[str, ...]] = {  # in the order of what tells most
    "plain": (),
    "sixfold": (),
    "sixfold compile": ("train.compile=true",),
    "sixfold compile float8": ("train.compile=true", "train.float8_products=true"),
    "plain compile": (),
    "sixfold no_shard": ("parallel.sharding=no_shard",),
}


def plain(config: TrainConfig, tokens: torch.Tensor, compiled: bool) -> Callable[[], object]:
    """One update as one writes it by hand."""
    with torch.device("cuda"):
        model = Plain(config.model, config.data.seq_length)
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
    rank = build_rank(config, make_mesh(config.parallel, world, world.device, 60.0), world, draw=False)
    with torch.no_grad():
        for record in rank.model.state_records():  # build_rank draws on the CPU: half a minute
            record.tensor.fill_(1.0) if "norm" in record.name else record.tensor.normal_(std=0.02)
    rank.model.refresh()
    kwargs = {"labels": tokens.roll(-1, 1), "loss_mask": torch.ones(tokens.shape, device="cuda")}
    batch = [Microbatch(tokens=tokens, kwargs=kwargs, targets=float(tokens.numel()))]
    return lambda: train_step(rank, batch, 1e-4)


def measured(name: str, seconds: float, device: Device | None) -> dict[str, float]:
    """Median seconds of an update, tokens a second, MFU, the most that was allocated in GiB; what plan says."""
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
    found = {
        "step_s": step,
        "tokens_per_second": tokens.numel() / step,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "updates": len(taken),
    }
    if device is not None:
        planned = plan_layout(config, 1, device)
        low, high = planned.step_s_range
        found |= {"mfu": planned.mfu * planned.step_s / step, "planned_s": planned.step_s}
        found |= {"planned_low_s": low, "planned_high_s": high, "planned_peak_gib": planned.peak_bytes / 2**30}
    del update
    gc.collect()
    torch.cuda.empty_cache()
    return found


def device_here(name: str) -> Device | None:
    """Plan's device of the name that CUDA gives it; None where plan knows none."""
    known = [one for one in DEVICES if one != "cpu" and one in name.lower()]
    return device_named(known[0]) if known else None


def write(path: Path | None, results: Mapping[str, object]) -> None:
    """All or nothing of it is read, whenever this process ends."""
    if path is not None:
        path.with_suffix(".part").write_text(json.dumps(results, indent=1) + "\n")
        os.replace(path.with_suffix(".part"), path)


def main() -> None:
    """Print a line for each contender, and what plan says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of all contenders together")
    parser.add_argument("--device", help="the name that plan has for this one; or by CUDA's name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    device = device_named(options.device) if options.device else device_here(torch.cuda.get_device_name())
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    results: dict[str, Mapping[str, object]] = {name: {"error": "not reached"} for name in options.only}
    failed = []
    for name in options.only:
        write(options.out, results)
        try:
            if TrainConfig.from_text(CONFIG, CASES[name]).train.float8_products:
                check_float8(torch.device("cuda", 0))
            results[name] = measured(name, options.seconds / len(options.only), device)
        except ConfigError as error:  # the device or torchao is not there
            results[name] = {"left out": str(error)}
        except Exception as error:  # the others are measured all the same
            failed.append(name)
            results[name] = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        told = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in results[name].items()
        )
        print(f"{name:22s} {told}", flush=True)
    write(options.out, results)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
