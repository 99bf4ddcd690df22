"""A save of adapters on a frozen model, full and with ``since``, beside torch DCP: bytes and seconds.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/compare_since.py [folder] [--size MIB] [--rounds N]

Frozen weights of ``--size`` MiB in 16 tensors, all ranks with the same as under DDP. Adapters with two moments each are
1 % of it and change before each save. "full": ``save`` without ``since``. "first since": the older checkpoint was saved
in full, so what is frozen is read once. "since": the older one was saved with ``since`` itself. Each save goes into a
new folder, fsync and metadata included, after a ``sync``. Bytes are those of files that no older folder has. Values are
compared after each save. Medians of the wall time between barriers in turn, the order alternates, the first round is
thrown away.
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

from sixfold import dist_ckpt

NAMES = ("full", "first since", "since", "DCP")


def new_bytes(folder, older):
    known = {path.stat().st_ino for place in older for path in place.iterdir()}
    return sum(path.stat().st_size for path in folder.iterdir() if path.stat().st_ino not in known)


def job(rank, folder, ranks, mib, rounds, results):
    start(rank, ranks, folder, "since")
    folder, generator = Path(folder), torch.Generator().manual_seed(0)
    frozen = {f"f{i}": torch.randn(mib * 2**14, generator=generator) for i in range(16)}
    adapters = {f"a{i}.{j}": torch.zeros(mib * 2**14 // 300) for i in range(16) for j in range(3)}
    state, turns, written = {"frozen": frozen, "adapters": adapters}, iter(range(10**6)), {}
    dist_ckpt.save(state, folder / "base")
    dist_ckpt.save(state, folder / "chain", since=folder / "base")

    def trained():
        for value in adapters.values():
            value += 1
        dist.barrier()
        os.sync()
        dist.barrier()

    def since(name, older):
        place = folder / f"{name}-{next(turns)}"
        dist_ckpt.save(state, place, since=older)
        return place

    actions = {
        "full": lambda: dist_ckpt.save(state, folder / "full"),
        "first since": lambda: since("first", folder / "base"),
        "since": lambda: since("since", folder / "chain"),
        "DCP": lambda: dcp.save(state, checkpoint_id=str(folder / "DCP")),
    }

    def after(name):
        dist.barrier()
        if rank == 0:
            (place,) = [
                path for path in folder.iterdir() if path.name.startswith(f"{name.split()[0]}-") or path.name == name
            ]
            kept = [path for path in folder.iterdir() if path.is_dir() and path.name in ("base", "chain")]
            written[name] = new_bytes(place, kept)
            if name != "DCP":
                asked = {kind: {key: value * 0 - 1 for key, value in own.items()} for kind, own in state.items()}
                dist_ckpt.load(asked, place, group=None)
                same = [torch.equal(asked[kind][key], value) for kind in state for key, value in state[kind].items()]
                assert all(same), name
            shutil.rmtree(place)
        dist.barrier()

    medians = in_turn(rounds, actions, False, trained, after)
    if rank == 0:
        torch.save((medians, written), results)
    dist.destroy_process_group()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", nargs="?", help="where to write; default: the system's temporary folder")
    options.add_argument("--size", type=int, default=1024, help="MiB that are frozen (default 1024)")
    options.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        describe_machine(folder)
    print(f"| ranks | {' | '.join(f'{name} s' for name in NAMES)} | {' | '.join(f'{name} MiB' for name in NAMES)} |")
    print("|---" * 9 + "|", flush=True)
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            medians, written = run(job, ranks, folder, ranks, chosen.size, chosen.rounds)
        cells = [*(f"{medians[name]:.3f}" for name in NAMES), *(f"{written[name] / 2**20:.1f}" for name in NAMES)]
        print(f"| {ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
