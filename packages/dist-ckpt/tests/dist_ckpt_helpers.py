"""Layouts for tests: a global tensor cut over a (TP, DP) grid, with plain slicing as the oracle.

    global tensor + Cut --> flat_shards, grid_shards (this file) --> tests

Nothing here shares code with the package: local parts come from ``torch.narrow`` and ``reshape``.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import threading
import traceback
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sixfold import dist_ckpt
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


def state(value: float, elements: int = 1000) -> dict[str, Any]:
    """A tensor whose elements are all ``value``, and the value itself in common data: a mixture of two saves shows."""
    return {"w": one("w", torch.full((elements,), float(value))), "it": value}


def value_of(path: Path) -> float:
    """What ``state`` was saved with; not of a mixture."""
    loaded = dist_ckpt.load(state(0), path, group=None)
    assert bool((loaded["w"] == loaded["it"]).all())
    return loaded["it"]


def names(folder: Path) -> list[str]:
    """What a folder holds."""
    return sorted(path.name for path in folder.iterdir())


def flip_byte(path: Path, position: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Content of every file, to show that nothing was touched."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


_M_MMAP_THRESHOLD = -3  # of malloc.h


def as_of_0_1_0(folder: Path) -> None:
    """Make a checkpoint what 0.1.0 would have written: without the compact manifest."""
    (folder / "shard_manifest.pt").unlink()
    content = json.loads((folder / "integrity.json").read_bytes())
    del content["self"], content["files"]["shard_manifest.pt"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["self"] = f"{zlib.crc32(text.encode()):08x}"
    (folder / "integrity.json").write_text(json.dumps(content, sort_keys=True, separators=(",", ":")))


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


def peak_growth_mib(action: Callable[[], Any]) -> float:
    """MiB of memory that this process holds at most while ``action`` runs, what it returns included.

    For a rank of ranktest: a fresh process, in which glibc returns memory from 64 KiB on when it is freed. In one that
    lives long, what an allocation costs depends on the holes of its heap: for tensors, which are aligned, up to thrice
    their size. Pages of mapped files do not count, which the kernel takes back when it needs them; so the memory is
    sampled, a thousand times a second.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16) == 1
    libc.malloc_trim(0)  # what was freed before and is still held would hide as much of the growth (up to 20 MiB, seen)
    before = most = kib_of_status("RssAnon")
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, kib_of_status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = action()
        most = max(most, kib_of_status("RssAnon"))
        del result
    finally:
        ended.set()
        watcher.join()
    return (most - before) / 1024


def kib_of_status(name: str) -> int:
    """A line of /proc/self/status."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])
