"""The state of a model and its AdamW on one GPU, by plain dictionaries, beside torch DCP: save, background save, load.

    python packages/dist-ckpt/benchmarks/one_gpu.py [--gib 6] [--rounds 3] [--folder DIR] [--out FILE]

A third of the bytes are weights, two thirds are moments. One process without a process group. "blocked" is what an
``async_save`` keeps the trainer from its next step, the first one apart; DCP saves in the background as its defaults
do, and with pinned shared memory that is used again (its `DefaultStager`). "copy" is one copy of all
bytes from the device into pinned memory that was touched before. Values are compared after each load. Ours waits until
bytes are on disk and checks them when they are read; DCP does neither.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from sixfold import dist_ckpt


def state_of(gib: float, fill: float) -> dict[str, Any]:
    """Layers of 64 MiB matrices and small vectors, on the device."""
    layers = max(1, round(gib * 1024 / 3 / 64))

    def tensors(value: float) -> dict[str, torch.Tensor]:
        found = {f"layers.{at}.weight": torch.full((4096, 4096), value + at, device="cuda") for at in range(layers)}
        return found | {f"layers.{at}.bias": torch.full((4096,), value - at, device="cuda") for at in range(layers)}

    moments = {name: {"exp_avg": one, "exp_avg_sq": two} for (name, one), two in zip(
        tensors(fill + 0.5).items(), tensors(fill + 0.25).values(), strict=True
    )}  # fmt: skip
    return {"model": tensors(fill), "optimizer": moments, "step": 7}


def leaves(state: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors."""
    found: list[torch.Tensor] = []
    for value in state.values():
        found += leaves(value) if isinstance(value, dict) else [value] if isinstance(value, torch.Tensor) else []
    return found


def seconds(call: Callable[[], object]) -> float:
    """Of one call, with an idle device before and after."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    parser.add_argument("--out", type=Path, help="the medians, as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    state, target = state_of(options.gib, 1.0), state_of(options.gib, 0.0)
    total = sum(one.nbytes for one in leaves(state))
    pinned = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in leaves(state)]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, f"{total / 2**30:.2f} GiB", flush=True)

    def copy() -> None:
        for one, other in zip(leaves(state), pinned, strict=True):
            other.copy_(one, non_blocking=True)

    def check() -> None:
        assert all(torch.equal(a, b) for a, b in zip(leaves(state), leaves(target), strict=True)), "other values"
        for one in leaves(target):
            one.zero_()

    stager = DefaultStager(StagingOptions(use_pinned_memory=True, use_shared_memory=True, use_async_staging=False))
    taken: dict[str, list[float]] = {}

    def background(name: str, save: Callable[[], Any], wait: Callable[[Any], object]) -> None:
        handles: list[Any] = []
        taken.setdefault(f"blocked, {name}", []).append(seconds(lambda: handles.append(save())))
        taken.setdefault(f"durable, {name}", []).append(seconds(lambda: wait(handles[0])))

    for turn in range(options.rounds + 1):
        at = folder / str(turn)
        taken.setdefault("copy", []).append(seconds(copy))
        taken.setdefault("save, sixfold", []).append(seconds(lambda at=at: dist_ckpt.save(state, at / "ours")))
        taken.setdefault("save, dcp", []).append(seconds(lambda at=at: dcp.save(state, checkpoint_id=at / "dcp")))
        taken.setdefault("load, sixfold", []).append(seconds(lambda at=at: dist_ckpt.load(target, at / "ours")))
        check()
        taken.setdefault("load, dcp", []).append(seconds(lambda at=at: dcp.load(target, checkpoint_id=at / "dcp")))
        check()
        shutil.rmtree(at)
        background("sixfold", lambda at=at: dist_ckpt.async_save(state, at / "a"), lambda handle: handle.wait(600))
        background("dcp", lambda at=at: dcp.async_save(state, checkpoint_id=at / "b"), lambda f: f.result(600))
        try:
            background(
                "dcp kept",
                lambda at=at: dcp.async_save(state, checkpoint_id=at / "c", async_stager=stager),
                lambda f: f.result(600),
            )
        except KeyError as error:  # torch 2.11's stager: KeyError: <class 'type'>
            print(f"dcp kept: {error!r}", flush=True)
        shutil.rmtree(at)
    found: dict[str, dict[str, float]] = {}
    for name, values in taken.items():
        first, median = values[0], statistics.median(values[1:] or values)
        found[name] = {"first_s": first, "then_s": median, "gib_per_second": total / median / 2**30}
        print(f"{name:20s} first {first:.3f} s, then {median:.3f} s, {total / median / 2**30:.2f} GiB/s", flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
