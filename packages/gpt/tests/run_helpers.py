"""Training jobs of several ranks, as ranktest starts them, and what they wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore

import ranktest
from sixfold import dist_ckpt
from sixfold.gpt import TrainConfig
from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.training.loop import train_in


def world_of(rank: int, ranks: int) -> World:
    """This process among the ranks of a job of ranktest."""
    store = ranktest.store() if ranks > 1 else None
    return World(rank=rank, size=ranks, local_rank=rank, store=store, device=torch.device("cpu"))


def train_rank(rank: int, ranks: int, text: str) -> tuple[int, float | None, str]:
    """One rank of a training job; the result is (step, loss, reason)."""
    result = train_in(TrainConfig.from_text(text), world_of(rank, ranks))
    return result.step, result.loss, result.reason


TOGETHER = 24  # jobs of one process: what each leaves open (files, sockets) goes with it
JOB_S = 150.0  # ends what hangs and nothing else: longer than the deadline of the tiny configuration


def train_all(rank: int, ranks: int, texts: list[str]) -> None:
    """One rank of several jobs, one after the other."""
    for number, text in enumerate(texts):
        world = world_of(rank, ranks)
        # A job has a store of its own: nothing that it leaves there is another's.
        store = world.store and PrefixStore(f"job-{number}", world.store)
        train_in(TrainConfig.from_text(text), replace(world, store=store))


def run_all(
    configs: Iterable[tuple[int, TrainConfig]], target: Callable[[int, int, list[str]], None] = train_all
) -> None:
    """Train each configuration on its number of ranks; those of one number in one job, which saves starting it.

    Of more than two ranks those of one pp: torch names the group of a tied pair by how many groups a process has made.
    """
    texts: dict[tuple[int, int], list[str]] = {}
    for ranks, config in configs:
        texts.setdefault((ranks, config.parallel.pp if ranks > 2 else 0), []).append(config.to_toml())
    for (ranks, _), jobs in texts.items():
        for first in range(0, len(jobs), TOGETHER):
            some = jobs[first : first + TOGETHER]
            if ranks == 1:
                target(0, 1, some)
            else:
                ranktest.run_ranks(target, ranks, some, timeout=JOB_S * max(1, len(some) // 4))


def run(config: TrainConfig, ranks: int) -> list[tuple[int, float | None, str] | None]:
    """Train on ``ranks`` ranks; one rank runs in this process."""
    if ranks == 1:
        return [train_rank(0, 1, config.to_toml())]
    return ranktest.run_ranks(train_rank, ranks, config.to_toml(), timeout=JOB_S)


def lines(config: TrainConfig, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind of a run's metrics.jsonl; not the one that is being written."""
    whole, _, _ = (Path(config.run.dir) / "metrics.jsonl").read_text().rpartition("\n")
    return [entry for entry in map(json.loads, whole.splitlines()) if entry["kind"] == kind]


def losses(config: TrainConfig) -> list[float]:
    """The losses of a run's steps."""
    return [entry["loss"] for entry in lines(config, "step")]


def final_tensors(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, whole."""
    return dist_ckpt.load_plain_tensors(dist_ckpt.retention.latest(Path(config.run.dir) / "checkpoints"))


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Bitwise the same tensors under the same names."""
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, f"{len(different)} of {len(a)} tensors differ, first {different[:3]}"
