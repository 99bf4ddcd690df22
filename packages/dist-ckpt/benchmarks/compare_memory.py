"""Snapshots in memory of two ranks on gloo, beside ``async_save`` to a folder: blocked, until whole, and back.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/compare_memory.py [--size MIB] [--rounds N]
        [--shm /dev/shm] [--folder DIR]

``--size`` is of the whole state, in 16 tensors, half on each rank. The ranks are of two domains on this machine, so
each part has one copy, which goes over loopback. "copy" is the floor of blocking: one copy of the rank's state into
memory touched before. A snapshot "until whole" has its copy; a save to the folder is committed. "back" is a load at two
ranks: each from its own domain, with one domain lost, and from the folder (its pages are in memory). Medians over
rounds of the wall time between barriers. The first round is thrown away, values are checked after each load.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MemoryTier, ShardedTensor

RANKS, TENSORS, COLUMNS = 2, 16, 1024


def timed(action):
    """Result, seconds on the slower rank, start."""
    dist.barrier()
    start = time.perf_counter()
    result = action()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return result, float(took), start


def until(action, start):
    action()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def run(rank, meeting, shm, folder, mib, rounds, found):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    rows = mib * 2**20 // 4 // COLUMNS // TENSORS // RANKS
    local = {f"w{n}": torch.full((rows, COLUMNS), float(n)) for n in range(TENSORS)}
    state = {key: ShardedTensor.from_rank_offsets(key, t, (0, rank, RANKS)) for key, t in local.items()}
    kept = {key: t.clone() for key, t in local.items()}
    times = {}

    def note(name, seconds):
        times.setdefault(name, []).append(seconds)

    def checked(step):
        for number, tensor in enumerate(local.values()):
            assert bool((tensor == number + step).all()), (number, step)

    def tier_of():
        return MemoryTier(shm / f"host{rank}", "bench", domain=f"host{rank}", timeout_s=60)

    tier = tier_of()
    for step in range(1, rounds + 2):
        for number, tensor in enumerate(local.values()):
            tensor.fill_(number + step)
        note("copy", timed(lambda: [kept[key].copy_(t) for key, t in local.items()])[1])
        handle, blocked, start = timed(partial(tier.save, step, state))
        note("snapshot: blocked", blocked)
        note("snapshot: until whole", until(handle.wait, start))
        assert handle.unreplicated is None
        handle, blocked, start = timed(lambda: dist_ckpt.async_save(state, folder / "disk"))
        note("async_save: blocked", blocked)
        note("async_save: until committed", until(handle.wait, start))
    tier.close()
    last = rounds + 1
    for _ in range(rounds + 1):
        for lost in (False, True):
            [tensor.zero_() for tensor in local.values()]
            if lost and rank == 1:
                shutil.rmtree(shm / "host1")
            tier = tier_of()
            result, took, _ = timed(partial(tier.restore, state))
            assert result.step == last
            checked(last)
            note("back: one domain lost" if lost else "back: from memory", took)
            tier.close()
            if lost:  # as it was: a copy of both parts in both domains
                dist.barrier()
                with tier_of() as again:
                    again.restore(state)
                    again.save(last, state)
        [tensor.zero_() for tensor in local.values()]
        note("back: from the folder", timed(lambda: dist_ckpt.load(state, folder / "disk"))[1])
        checked(last)
    if rank == 0:
        found.update({name: values[1:] for name, values in times.items()})
    dist.barrier()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="MiB of the whole state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shm", default="/dev/shm")
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(dir=options.shm) as shm,
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        context.Manager() as manager,
    ):
        found = manager.dict()
        arguments = (str(Path(folder) / "meeting"), Path(shm), Path(folder), options.size, options.rounds, found)
        torch.multiprocessing.start_processes(run, arguments, nprocs=RANKS, start_method="spawn")
        copy = statistics.median(found["copy"])
        for name, values in found.items():
            median = statistics.median(values)
            print(f"{name:30} {median:7.3f} s  {min(values):7.3f} to {max(values):7.3f}  {median / copy:6.1f} copies")


if __name__ == "__main__":
    main()
