"""Snapshots in memory that are copied in the call, beside lazy ones: how long the trainer is blocked.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/compare_lazy.py [--rounds N]

One rank, 512 MB in 16 tensors. Between two snapshots a second of products of matrices stands for forward and backward.
Then comes the fence, and then the tensors change. Medians; the floor is a copy into memory that was touched before.
"""

import argparse
import statistics
import tempfile
import time

import torch

from sixfold import dist_ckpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    state = {f"w{number}": torch.ones(8_000_000) for number in range(16)}
    factor, step = torch.ones(1500, 1500), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tier = dist_ckpt.MemoryTier(folder, "bench", replicas=0, group=None)
        for lazy in [False, True] * rounds:
            saves, fences = [], []
            for _ in range(6):
                step += 1
                for tensor in state.values():
                    tensor.fill_(step)
                start = time.perf_counter()
                snapshot = tier.save(step, state, lazy=lazy)
                saves.append(time.perf_counter() - start)
                until = time.perf_counter() + 1.0
                while time.perf_counter() < until:
                    factor @ factor
                start = time.perf_counter()
                snapshot.fence()
                fences.append(time.perf_counter() - start)
            blocked, fence = (1e3 * statistics.median(times) for times in (saves, fences))
            print(f"{'lazy' if lazy else 'usual':6} save {blocked:6.1f} ms  fence {fence:5.1f} ms")
        tier.discard()
    copies, targets = [], [tensor.clone() for tensor in state.values()]
    for _ in range(6):
        start = time.perf_counter()
        for target, tensor in zip(targets, state.values(), strict=True):
            target.copy_(tensor)
        copies.append(time.perf_counter() - start)
    print(f"a copy {1e3 * statistics.median(copies):6.1f} ms")


if __name__ == "__main__":
    main()
