"""Layouts for tests: a global tensor cut over a (TP, DP) grid, with plain slicing as the oracle.

    global tensor + Cut --> flat_shards, grid_shards (this file) --> tests

Nothing here shares code with the package: local parts come from ``torch.narrow`` and ``reshape``.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import threading
import traceback
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt import ShardedTensor

#: How many examples a property is tried on; ``DIST_CKPT_EXAMPLES=1000`` for a long search.
EXAMPLES = int(os.environ.get("DIST_CKPT_EXAMPLES", "30"))


class Cut(NamedTuple):
    """Tensor-parallel parts of one axis, each flattened and cut at ``bounds`` for data parallelism."""

    axis: int
    parts: int
    bounds: tuple[int, ...]  # dp + 1 places, first 0, last the elements of a local box


def random_cut(shape: tuple[int, ...], rng: random.Random) -> Cut:
    """Any axis, any divisor of its length, any places to cut, equal ones (empty shards) included."""
    axis = rng.randrange(len(shape))
    parts = rng.choice([n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0])
    elements = prod(shape) // parts
    inner = sorted(rng.randint(0, elements) for _ in range(rng.randint(0, 4)))
    return Cut(axis, parts, (0, *inner, elements))


def flat_shards(key: str, whole: torch.Tensor, cut: Cut, *, fill: bool) -> list[ShardedTensor]:
    """The shards of every rank of the cut; with ``fill`` they hold their values, else zeros."""
    shards = []
    length = whole.shape[cut.axis] // cut.parts
    for tp in range(cut.parts):
        local = whole.narrow(cut.axis, tp * length, length)
        for start, stop in zip(cut.bounds, cut.bounds[1:], strict=False):
            data = local.reshape(-1)[start:stop].clone()
            shards.append(
                ShardedTensor.from_rank_offsets_flat(
                    key,
                    data if fill else torch.zeros_like(data),
                    tuple(local.shape),
                    (cut.axis, tp, cut.parts),
                    flattened_range=slice(start, stop),
                )
            )
    return shards


def expected_values(whole: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
    """What each shard of ``flat_shards`` must hold."""
    length = whole.shape[cut.axis] // cut.parts
    return [
        whole.narrow(cut.axis, tp * length, length).reshape(-1)[start:stop]
        for tp in range(cut.parts)
        for start, stop in zip(cut.bounds, cut.bounds[1:], strict=False)
    ]


def one(key: str, tensor: torch.Tensor, **fields: Any) -> ShardedTensor:
    """A tensor as one whole shard."""
    return ShardedTensor.from_rank_offsets(key, tensor, **fields)


def flip_byte(path: Path, position: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Content of every file, to show that nothing was touched."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def in_child(action: Callable[[], Any]) -> Any:
    """What ``action`` returns in a forked child, whose limits and peaks are its own; its error fails the test."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)  # the threads of OpenMP are not there after a fork
        try:
            sender.send((action(), None))
        except BaseException:
            sender.send((None, traceback.format_exc()))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    sender.close()
    try:
        assert receiver.poll(30), "the child says nothing for 30 s"
        value, error = receiver.recv()
    finally:
        child.kill()
        child.join()
    assert error is None, error
    return value


def peak_growth_mib(action: Callable[[], Any], *, anonymous: bool = False) -> float:
    """MiB by which a forked child's memory grows at most while ``action`` runs.

    With ``anonymous`` the pages of mapped files do not count, which the kernel takes back when it needs them: then the
    memory is sampled, a thousand times a second.
    """

    def run() -> float:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before the fork would hide what is allocated now
        if anonymous:
            return sampled(action)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        before = kib_of_status("VmRSS")
        action()
        return (kib_of_status("VmHWM") - before) / 1024

    return in_child(run)


def kib_of_status(name: str) -> int:
    """A line of /proc/self/status."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def sampled(action: Callable[[], Any]) -> float:
    before = most = kib_of_status("RssAnon")
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, kib_of_status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        ended.set()
        watcher.join()
    return (most - before) / 1024
