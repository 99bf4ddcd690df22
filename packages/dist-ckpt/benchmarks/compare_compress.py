"""Weights in bfloat16 and the moments of AdamW in float32, plain and compressed, beside torch DCP: bytes and seconds.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/compare_compress.py [folder] [--size MIB] [--rounds N]

Linear layers that AdamW has trained for three steps on random data, cut by rows over the ranks as DTensors. "zstd":
``save(compress="zstd")``; of DCP, its extension ``ZStandard``, which has zstd's level 3. Saves go into new folders,
fsync and metadata included, after a ``sync``; loads are warm, at the layout of the save. Values are compared after each
load. Medians of the wall time between barriers in turn, the order alternates, the first round is thrown away.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare_dcp import describe_machine, in_turn, run, start
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.tensor import DTensor, Shard

from sixfold import dist_ckpt

NAMES = ("plain", "zstd", "DCP", "DCP zstd")
WIDTH = 2048


def trained(rank, layers, rows):
    """Three tensors by layer: weights in bfloat16, both moments in float32; this rank's rows."""
    torch.manual_seed(rank)
    found = {}
    for number in range(layers):
        weight = torch.nn.Parameter(torch.randn(rows, WIDTH) * 0.02)
        optimizer = torch.optim.AdamW([weight], lr=1e-3)
        for _ in range(3):
            (torch.randn(32, WIDTH) @ weight.t()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        moments = optimizer.state[weight]
        found[f"{number}.weight"] = weight.detach().bfloat16()
        found |= {f"{number}.{name}": moments[name] for name in ("exp_avg", "exp_avg_sq")}
    return found


def job(rank, folder, ranks, mib, rounds, results):
    mesh, folder = start(rank, ranks, folder, "compress"), Path(folder)
    rows = WIDTH // ranks
    own = trained(rank, max(1, mib * 2**20 // (10 * WIDTH * WIDTH)), rows)
    state = {key: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for key, value in own.items()}
    asked = {
        key: DTensor.from_local(torch.zeros_like(value), mesh, [Shard(0)], run_check=False)
        for key, value in own.items()
    }

    def clear():
        dist.barrier()
        if rank == 0:
            for name in NAMES:
                shutil.rmtree(folder / name, ignore_errors=True)
            os.sync()
        dist.barrier()

    def by_torch(name, extensions=()):
        writer = dcp.FileSystemWriter(folder / name, _extensions=list(extensions) or None)
        dcp.save(state, storage_writer=writer)

    def same(name):
        for key, value in own.items():
            assert torch.equal(asked[key].to_local(), value), (name, key)
            asked[key].to_local().zero_()

    saves = {
        "plain": lambda: dist_ckpt.save(state, folder / "plain"),
        "zstd": lambda: dist_ckpt.save(state, folder / "zstd", compress="zstd"),
        "DCP": lambda: by_torch("DCP"),
        "DCP zstd": lambda: by_torch("DCP zstd", [ZStandard()]),
    }
    loads = {name: lambda name=name: dist_ckpt.load(asked, folder / name) for name in ("plain", "zstd")}
    loads |= {name: lambda name=name: dcp.load(asked, checkpoint_id=str(folder / name)) for name in ("DCP", "DCP zstd")}
    saved = in_turn(rounds, saves, False, clear)
    clear()
    for save in saves.values():
        save()
    loaded = in_turn(rounds, loads, False, dist.barrier, same)
    if rank == 0:
        written = {name: sum(path.stat().st_size for path in (folder / name).iterdir()) for name in NAMES}
        torch.save((saved, loaded, written), results)
    dist.destroy_process_group()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", nargs="?", help="where to write; default: the system's temporary folder")
    options.add_argument("--size", type=int, default=512, help="MiB of values (default 512)")
    options.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        describe_machine(folder)
    print(f"| ranks | what | {' | '.join(NAMES)} |")
    print("|---" * 6 + "|", flush=True)
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            saved, loaded, written = run(job, ranks, folder, ranks, chosen.size, chosen.rounds)
        rows = {"save s": saved, "load s": loaded, "MiB": {name: size / 2**20 for name, size in written.items()}}
        for what, found in rows.items():
            digits = 1 if what == "MiB" else 3
            print(f"| {ranks} | {what} | {' | '.join(f'{found[name]:.{digits}f}' for name in NAMES)} |", flush=True)


if __name__ == "__main__":
    main()
