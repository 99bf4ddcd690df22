"""A run with a memory tier for tests: ranks, their domains, and a state whose values tell the step.

    ranks, domains --> tier_of, state_of (this file) --> tests

Domains are folders of one machine. The oracle of a state is ``torch.arange`` and its slices.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from forked_worker import fork_workers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sixfold.dist_ckpt import MemoryTier, ShardedTensor

RUN = "a-run"
LARGE = 300_000  # elements of a sharded tensor, whose frame is a large one on up to four ranks


def domain_of(rank, ranks, domains):
    """Ranks in a row share a domain."""
    return f"host{rank * domains // ranks}"


def tier_of(shm, rank, ranks, domains, **options):
    """This rank's tier, with workers that are forked."""
    fork_workers()
    name = domain_of(rank, ranks, domains)
    options = {"timeout_s": 20, "replicas": min(1, domains - 1), **options}
    return MemoryTier(shm / name, RUN, domain=name, **options)


@functools.cache
def mesh_of(ranks):
    """All ranks in a row."""
    return init_device_mesh("cpu", (ranks,))


def whole_of(step):
    """Tensors of a step, whole: what the ranks cut, and what each of them has."""
    cut = {"large": torch.arange(float(LARGE)) + step, "small": torch.arange(24, dtype=torch.int64) * step}
    same = {"plain": torch.full((20_000,), float(step)), "half": torch.full((5, 7), step, dtype=torch.bfloat16)}
    return cut, same


def state_of(rank, ranks, step, *, fill=True):
    """Shards, DTensors, plain tensors, an optimizer's state, numbers; ``fill=False``: zeros for a load."""
    cut, same = whole_of(step if fill else 0)
    if not fill:
        cut, same = ({name: torch.zeros_like(t) for name, t in tensors.items()} for tensors in (cut, same))
    records = {
        name: ShardedTensor.from_rank_offsets(name, tensor.chunk(ranks)[rank].clone(), (0, rank, ranks))
        for name, tensor in cut.items()
    }
    rows = rows_of(rank, ranks, step) if fill else torch.zeros_like(rows_of(rank, ranks, 0))
    # Made without a collective: a rank may be late, or dead.
    dtensor = DTensor.from_local(rows, mesh_of(ranks), [Shard(0)], run_check=False, shape=(7, 3), stride=(3, 1))
    model = torch.nn.Linear(40, 30)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float(step if fill else 0))
    return {**records, "plain": same, "rows": dtensor, "model": model, "step": step if fill else -1}


def rows_of(rank, ranks, step):
    """Of seven rows those that a rank has, as DTensors are cut; none perhaps."""
    most = -(-7 // ranks)
    return (torch.arange(21.0).reshape(7, 3) * step)[rank * most : (rank + 1) * most]


def check_state(loaded, rank, ranks, step):
    """Bit for bit that of a step."""
    cut, same = whole_of(step)
    for name, tensor in cut.items():
        assert torch.equal(loaded[name], tensor.chunk(ranks)[rank]), (name, step, loaded[name])
    for name, tensor in same.items():
        assert torch.equal(loaded["plain"][name], tensor), (name, step)
    assert torch.equal(loaded["rows"].to_local(), rows_of(rank, ranks, step))
    assert torch.equal(loaded["model"].weight, torch.full((30, 40), float(step)))
    assert loaded["step"] == step


def saves(rank, ranks, shm, domains, steps, settled=True, options=None):
    """Snapshots of steps; the last one is settled, or the ranks go without a word as if they were killed."""
    tier, told = tier_of(shm, rank, ranks, domains, **(options or {})), []
    for step in steps:
        handle = tier.save(step, state_of(rank, ranks, step))
        handle.wait()
        told.append((handle.step, handle.unreplicated))
    if settled:
        tier.close()
    else:
        dist.barrier()  # all have written
        tier.__exit__(ValueError, None, None)
    return told


def restores(rank, ranks, shm, domains, options=None):
    """What a fresh tier restores, its values checked; None if that is nothing. No folder of a disk is asked for."""

    def on_disk():
        raise AssertionError("a folder for temporary files")

    tempfile.gettempdir = on_disk
    tier = tier_of(shm, rank, ranks, domains, **(options or {}))
    found = tier.restore(state_of(rank, ranks, 0, fill=False))
    tier.close()
    if found is None:
        return None
    check_state(found.state, rank, ranks, found.step)
    return found._replace(state=None)


def lose(shm, *domains):
    """Hosts whose memory is gone, and which come back empty."""
    for number in domains:
        shutil.rmtree(shm / f"host{number}")


def generations(shm, domain):
    """Folders of generations in a domain, the newest last."""
    return sorted((shm / f"host{domain}").glob("sixfold-memory-*/attempt-*"))


def files_below(folder):
    """Relative names of all files."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def used_bytes(folder):
    """Memory that the files below a folder take."""
    return sum(os.lstat(path).st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())
