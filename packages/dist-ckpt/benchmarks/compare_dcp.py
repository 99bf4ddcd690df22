"""Two ranks on gloo, Sixfold and torch DCP in turn, values checked after each: the table of the results page.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/compare_dcp.py [folder]

Medians over rounds of the wall time between barriers; order alternates, the first round is thrown
away. Warm page cache; both put their files on disk (fsync) when they save.
"""

import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor

RANKS, ROUNDS = 2, 6
CASES = {  # tensors, shape
    "256 MiB in 16 tensors": (16, (2048, 2048)),
    "2,000 tensors of 2 KiB": (2_000, (16, 32)),
    "400 tensors of 128 KiB, flat shards": (400, (512, 64)),
}


def timed(action):
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def ours(rank, ranks, shape, axis, count, value):
    local = [n // ranks if d == axis else n for d, n in enumerate(shape)]
    return {
        f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", torch.full(local, value), (axis, rank, ranks))
        for i in range(count)
    }


def ours_flat(rank, ranks, shape, count, value):
    elements = torch.Size(shape).numel()
    low, high = elements * rank // ranks + 5 * rank, elements * (rank + 1) // ranks + 5 * (rank + 1 < ranks)
    return {
        f"t{i}": ShardedTensor.from_rank_offsets_flat(
            f"t{i}", torch.full((high - low,), value), shape, flattened_range=slice(low, high)
        )
        for i in range(count)
    }


def theirs(mesh, shape, axis, count, value):
    whole = torch.full(shape, value)
    return {f"t{i}": distribute_tensor(whole, mesh, [Shard(axis)]) for i in range(count)}


def steps_of(mesh, rank, folder, count, shape, flat, value):
    """One round: what each library saves (into a new folder, as a run does) and loads, and a check of what came."""
    ranks = mesh.size()
    row = ours_flat(rank, ranks, shape, count, value) if flat else ours(rank, ranks, shape, 0, count, value)
    same = ours_flat(rank, ranks, shape, count, 0.0) if flat else ours(rank, ranks, shape, 0, count, 0.0)
    column = ours(rank, ranks, shape, 1, count, 0.0)
    peer_row, peer_same = theirs(mesh, shape, 0, count, value), theirs(mesh, shape, 0, count, 0.0)
    peer_column = theirs(mesh, shape, 1, count, 0.0)
    a, b = folder / "ours", str(folder / "theirs")

    def check():
        assert all(bool((record.data == value).all()) for record in (*same.values(), *column.values()))
        assert all(bool((t.to_local() == value).all()) for t in (*peer_same.values(), *peer_column.values()))

    return [
        ("save", lambda: dist_ckpt.save(row, a), lambda: dcp.save(peer_row, checkpoint_id=b)),
        ("load, same rows", lambda: dist_ckpt.load(same, a), lambda: dcp.load(peer_same, checkpoint_id=b)),
        ("load as columns", lambda: dist_ckpt.load(column, a), lambda: dcp.load(peer_column, checkpoint_id=b)),
    ], check


def measure(rank, folder, case):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    count, shape = CASES[case]
    times: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        here = Path(folder) / f"round-{turn}"
        steps, check = steps_of(mesh, rank, here, count, shape, "flat" in case, 1.0 + turn)
        for name, sixfold, peer in steps:
            for who, action in (("sixfold", sixfold), ("dcp", peer))[:: 1 if turn % 2 else -1]:
                times.setdefault(f"{name} {who}", []).append(timed(action))
        check()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(here)
    if rank == 0:
        for step in ("save", "load, same rows", "load as columns"):
            a, b = (statistics.median(times[f"{step} {who}"][1:]) for who in ("sixfold", "dcp"))
            print(f"| {case} | {step} | {a:.3f} | {b:.3f} | {b / a:.1f}x |", flush=True)
    dist.destroy_process_group()


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else None
    print("| case | step | Sixfold s | DCP s | ratio |\n|---|---|---|---|---|", flush=True)
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            torch.multiprocessing.spawn(measure, (folder, case), nprocs=RANKS)


if __name__ == "__main__":
    main()
