"""Ranks on gloo, Sixfold beside torch DCP and megatron's first save, values checked after each: the results table.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/compare_dcp.py [folder] [--size MIB] [--rounds N] [--only X]

Medians of the wall time between barriers; all that are compared run in turn in every round, the order alternates, the
first round is thrown away. Saves go into a new folder each, as in a run, fsync included on all sides. Loads are warm
unless the line says cold: then ``sync`` and ``drop_caches``, which needs root, come before each. Sixfold checks; with
"unchecked" it does not (``verify="off"``). "raw" is one file per rank with the same bytes and one fsync.
"""

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor
from sixfold.dist_ckpt.formats.integrity import library


class Case(NamedTuple):
    """One checkpoint, saved by ``savers`` ranks as ``saved`` and loaded by ``loaders`` as each of ``loaded``."""

    name: str
    saved: str
    savers: int
    loaded: tuple[str, ...]
    loaders: int
    small: bool = False
    cold: bool = False


CASES = (
    Case("same 2 row shards", "rows", 2, ("rows",), 2),
    Case("2 row shards to 4", "rows", 2, ("rows", "columns"), 4),
    Case("2 row shards to 4, cold", "rows", 2, ("columns",), 4, cold=True),
    Case("replicated on 2", "whole", 2, ("whole",), 2),
    Case("small tensors, 2 KiB a rank", "rows", 2, ("rows", "columns"), 2, small=True),
)
AXES = {"rows": 0, "columns": 1}


class Sizes(NamedTuple):
    """How much is saved: ``count`` tensors of ``shape``."""

    count: int
    shape: tuple[int, int]


def sizes_of(case, mib):
    """1 GiB is 16 tensors of 4096 x 4096 float32, or 8,000 of 2 x 512."""
    if case.small:
        return Sizes(max(500, 8_000 * mib // 1024), (2, 512))
    return Sizes(16, (max(4, 4 * mib), 4096))


def values(sizes, layout, rank, ranks):
    """What this rank holds: each element tells where it belongs, and in which tensor."""
    whole = (torch.arange(sizes.shape[0] * sizes.shape[1], dtype=torch.float32) % 8191).view(sizes.shape)
    part = whole if layout == "whole" else whole.chunk(ranks, AXES[layout])[rank].clone()
    return [part + index for index in range(sizes.count)]


def ours(tensors, layout, rank, ranks):
    place = {"replica_id": rank} if layout == "whole" else {}
    cut = () if layout == "whole" else ((AXES[layout], rank, ranks),)
    return {
        f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", tensor, *cut, **place) for i, tensor in enumerate(tensors)
    }


def theirs(tensors, layout, mesh):
    placement = Replicate() if layout == "whole" else Shard(AXES[layout])
    return {f"t{i}": DTensor.from_local(tensor, mesh, [placement], run_check=False) for i, tensor in enumerate(tensors)}


def timed(action, cpu=False):
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    action()
    used = torch.tensor(time.process_time() - start_cpu, dtype=torch.float64)
    dist.barrier()
    wall = time.perf_counter() - start
    dist.all_reduce(used)
    return float(used) if cpu else wall


def in_turn(rounds, actions, cpu, before=lambda: None, after=lambda name: None):
    """Seconds by name of the action, the first round left out."""
    times = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name in list(actions)[:: 1 if turn % 2 else -1]:
            before()
            times[name].append(timed(actions[name], cpu))
            after(name)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def start(rank, ranks, folder, port):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store-{port}", ranks), rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def save_job(rank, folder, case, mib, rounds, cpu, results):
    """Saves in turn; the last checkpoint of each library stays for the loads."""
    mesh = start(rank, case.savers, folder, "save")
    sizes, folder = sizes_of(case, mib), Path(folder)
    tensors = values(sizes, case.saved, rank, case.savers)
    mine, peer = ours(tensors, case.saved, rank, case.savers), theirs(tensors, case.saved, mesh)

    def clear():
        dist.barrier()
        if rank == 0:
            for name in ("raw", "next-sixfold", "next-dcp"):
                shutil.rmtree(folder / name, ignore_errors=True)
            (folder / "raw").mkdir()
        dist.barrier()

    def raw():
        handle = os.open(folder / "raw" / str(rank), os.O_WRONLY | os.O_CREAT)
        if case.saved != "whole" or rank == 0:
            for tensor in tensors:
                os.write(handle, memoryview(tensor.view(-1).view(torch.uint8).numpy()))
        os.fsync(handle)
        os.close(handle)

    def keep(name):
        if rank == 0 and name != "raw":
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / f"next-{name}").rename(folder / name)
        dist.barrier()

    actions = {
        "sixfold": lambda: dist_ckpt.save(mine, folder / "next-sixfold"),
        "dcp": lambda: dcp.save(peer, checkpoint_id=str(folder / "next-dcp")),
        "raw": raw,
    }
    medians = in_turn(rounds, actions, cpu, clear, keep)
    if rank == 0:
        torch.save(medians, results)
    dist.destroy_process_group()


def load_job(rank, folder, case, mib, rounds, cpu, layout, results):
    """Loads in turn from what ``save_job`` has left."""
    mesh = start(rank, case.loaders, folder, f"load-{layout}")
    sizes, folder = sizes_of(case, mib), Path(folder)
    expected = values(sizes, layout, rank, case.loaders)
    targets = {name: [torch.zeros_like(tensor) for tensor in expected] for name in ("sixfold", "dcp")}
    targets["unchecked"] = targets["sixfold"]
    mine = ours(targets["sixfold"], layout, rank, case.loaders)
    peer = theirs(targets["dcp"], layout, mesh)

    def drop():
        for tensors in targets.values():
            for tensor in tensors:
                tensor.zero_()
        dist.barrier()
        if rank == 0 and case.cold:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")

    def check(name):
        for found, wanted in zip(targets[name], expected, strict=True):
            assert torch.equal(found, wanted), f"{name} loaded other values"

    medians = in_turn(
        rounds,
        {
            "sixfold": lambda: dist_ckpt.load(mine, folder / "sixfold"),
            "dcp": lambda: dcp.load(peer, checkpoint_id=str(folder / "dcp")),
            "unchecked": lambda: dist_ckpt.load(mine, folder / "sixfold", verify="off"),
        },
        cpu,
        drop,
        check,
    )
    if rank == 0:
        torch.save(medians, results)
    dist.destroy_process_group()


def first_save_job(rank, folder, who, mib, results):
    """The first save of a fresh process: imports are done, nothing else is."""
    start(rank, 2, folder, who)
    case = CASES[0]
    tensors = values(sizes_of(case, mib), "rows", rank, 2)
    if who == "megatron":
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # megatron makes a tensor there
        torch.cuda.device_count = lambda: 1
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        from megatron.core import dist_checkpointing as library
    else:
        library = dist_ckpt
    make = library.ShardedTensor.from_rank_offsets
    state = {f"t{i}": make(f"t{i}", tensor, (0, rank, 2)) for i, tensor in enumerate(tensors)}
    target = Path(folder) / f"first-{who}"
    if rank == 0:
        target.mkdir()
    seconds = timed(lambda: library.save(state, str(target)))
    if rank == 0:
        torch.save(seconds, results)
    dist.destroy_process_group()


def run(job, ranks, *arguments):
    """The result that rank 0 of a job of fresh processes leaves."""
    with tempfile.NamedTemporaryFile() as results:
        torch.multiprocessing.spawn(job, (*arguments, results.name), nprocs=ranks)
        return torch.load(results.name)


def first_saves(root, mib, rounds):
    seconds = {"sixfold": [], "megatron": []}
    for turn in range(rounds):
        for who in list(seconds)[:: 1 if turn % 2 else -1]:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                seconds[who].append(run(first_save_job, 2, folder, who, mib))
    mine, peer = (statistics.median(found) for found in seconds.values())
    print(f"| first save of a process | save | {mine:.3f} | megatron {peer:.3f} | {peer / mine:.1f}x | |", flush=True)


def line(case, step, medians, sizes):
    mine, peer = medians["sixfold"], medians["dcp"]
    if "raw" in medians:
        note = f"raw {medians['raw']:.3f}, {mine / medians['raw']:.2f}x of it"
    else:
        note = f"unchecked {medians['unchecked']:.3f}, checks {100 * (1 - medians['unchecked'] / mine):.0f} %"
    if case.small:
        note += f"; {mine / sizes.count * 1e6:.0f} us a tensor, DCP {peer / sizes.count * 1e6:.0f}"
    print(f"| {case.name} | {step} | {mine:.3f} | {peer:.3f} | {peer / mine:.1f}x | {note} |", flush=True)


def describe_machine(folder):
    costs = []
    for turn in range(20):
        with open(Path(folder) / f"fsync-{turn}", "wb") as file:
            file.write(bytes(4096))
            start_s = time.perf_counter()
            os.fsync(file.fileno())
            costs.append(time.perf_counter() - start_s)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CRC-32 by {library()}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, {versions}, fsync of 4 KiB {statistics.median(costs) * 1e3:.2f} ms\n")


def may_drop_caches():
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", nargs="?", help="where to write; default: the system's temporary folder")
    options.add_argument("--size", type=int, default=1024, help="MiB of a checkpoint (default 1024)")
    options.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    options.add_argument("--only", default="", help="cases whose name holds this text")
    options.add_argument("--cpu", action="store_true", help="CPU seconds of all ranks together: for a busy machine")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        describe_machine(folder)
    print("| case | step | Sixfold s | DCP s | ratio | |\n|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        if chosen.only not in case.name:
            continue
        if case.cold and not may_drop_caches():
            print(f"| {case.name} | | | | | skipped: only root drops caches |")
            continue
        sizes = sizes_of(case, chosen.size)
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            line(case, "save", run(save_job, case.savers, folder, case, chosen.size, chosen.rounds, chosen.cpu), sizes)
            for layout in case.loaded:
                medians = run(load_job, case.loaders, folder, case, chosen.size, chosen.rounds, chosen.cpu, layout)
                line(case, f"load as {layout}", medians, sizes)
    if chosen.only in "first save":
        try:
            import megatron.core  # noqa: F401
        except ImportError:
            print("| first save of a process | | | | | skipped: megatron-core is not installed |")
        else:
            first_saves(chosen.folder, chosen.size, 3)


if __name__ == "__main__":
    main()
