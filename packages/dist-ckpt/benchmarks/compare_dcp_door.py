"""torch.distributed.checkpoint through dcp.Writer and dcp.Reader beside its own file system ones, the calls the same.

    python packages/dist-ckpt/benchmarks/compare_dcp_door.py [folder] [--mib N] [--rounds N] [--json F]
        [--tensors N] [--cpu]

DTensors, ``--tensors`` (16) equal float32 ones, cut into rows on 2 ranks, are saved, and loaded by 4 ranks cut into
rows and into columns: the same state dicts, planners and process group for both, only ``storage_writer`` and
``storage_reader`` differ. Both put their files on disk before they return; ours hashes what it writes and checks what
it reads.
Seconds are medians of the wall time between barriers. Both run in turn in every round, the order alternates, the first
round is thrown away, and the values are compared after each load. Saves go into a new folder each. ``--cpu`` gives the
CPU seconds of all ranks together instead, for a machine that is not quiet.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sixfold.dist_ckpt import dcp
from sixfold.dist_ckpt.formats.integrity import library

WRITERS, READERS = 2, 4
SIDES = {
    "sixfold": (dcp.Writer, dcp.Reader),
    "torch": (torch_dcp.FileSystemWriter, torch_dcp.FileSystemReader),
}
AXES = {"rows": 0, "columns": 1}


def state_of(options, axis, mesh, fill):
    """DTensors, ``--mib`` MiB together; each element tells where it belongs, and in which tensor."""
    shape = (max(4, 4 * options.mib), max(8, 65536 // options.tensors // 8 * 8))
    whole = (torch.arange(shape[0] * shape[1], dtype=torch.float32) % 8191).view(shape)
    own = whole.chunk(mesh.size(), axis)[mesh.get_local_rank()].clone()
    tensors = [own + number if fill else torch.zeros_like(own) for number in range(options.tensors)]
    return {
        f"t{number}": DTensor.from_local(tensor, mesh, [Shard(axis)], run_check=False)
        for number, tensor in enumerate(tensors)
    }


def timed(action, cpu):
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    action()
    used = torch.tensor(time.process_time() - start_cpu, dtype=torch.float64)
    dist.barrier()
    wall = time.perf_counter() - start
    dist.all_reduce(used)
    return float(used) if cpu else wall


def in_turn(rounds, actions, cpu, before, after):
    """Seconds by name of the side, the first round left out."""
    times = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name in list(actions)[:: 1 if turn % 2 else -1]:
            before(name)
            times[name].append(timed(actions[name], cpu))
            after(name)
    return {name: found[1:] for name, found in times.items()}


def start(rank, ranks, folder, name):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store-{name}", ranks), rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def save_job(rank, folder, options, results):
    """Saves in turn; the last checkpoint of each side stays for the loads."""
    mesh, folder = start(rank, WRITERS, folder, "save"), Path(folder)
    state = state_of(options, AXES["rows"], mesh, fill=True)

    def keep(name):
        if rank == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / f"next-{name}").rename(folder / name)
        dist.barrier()

    def save(name):
        torch_dcp.save(state, storage_writer=SIDES[name][0](folder / f"next-{name}"))

    actions = {name: lambda name=name: save(name) for name in SIDES}
    found = in_turn(options.rounds, actions, options.cpu, lambda _: None, keep)
    finish(rank, found, results)


def load_job(rank, folder, layout, options, results):
    """Each side loads what it saved."""
    mesh, folder = start(rank, READERS, folder, f"load-{layout}"), Path(folder)
    expected = state_of(options, AXES[layout], mesh, fill=True)
    state = state_of(options, AXES[layout], mesh, fill=False)

    def clear(_):
        for tensor in state.values():
            tensor.to_local().zero_()

    def check(name):
        for key, tensor in state.items():
            assert torch.equal(tensor.to_local(), expected[key].to_local()), f"{name} loaded other values into {key}"

    def load(name):
        torch_dcp.load(state, storage_reader=SIDES[name][1](folder / name))

    actions = {name: lambda name=name: load(name) for name in SIDES}
    finish(rank, in_turn(options.rounds, actions, options.cpu, clear, check), results)


def finish(rank, found, results):
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.destroy_process_group()


def run(job, ranks, *arguments):
    """What rank 0 of a job of fresh processes leaves."""
    with tempfile.NamedTemporaryFile() as results:
        torch.multiprocessing.spawn(job, (*arguments, results.name), nprocs=ranks)
        return json.loads(Path(results.name).read_text())


def machine():
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "crc32": library(),
    }


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", nargs="?", help="where to write; default: the system's temporary folder")
    options.add_argument("--mib", type=int, default=1024, help="MiB of a checkpoint (default 1024)")
    options.add_argument("--tensors", type=int, default=16, help="how many tensors they are cut from (default 16)")
    options.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    options.add_argument("--cpu", action="store_true", help="CPU seconds of all ranks together")
    options.add_argument("--json", help="a file for all figures")
    chosen = options.parse_args()
    figures = {"mib": chosen.mib, "rounds": chosen.rounds, "cpu": chosen.cpu, **machine()}
    print(figures, "\n\n| step | Sixfold s | torch s | ratio |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        jobs = {"save on 2 ranks": (save_job, WRITERS, folder, chosen)}
        jobs |= {f"load as {layout} on 4 ranks": (load_job, READERS, folder, layout, chosen) for layout in AXES}
        for name, job in jobs.items():
            figures[name] = run(*job)
            mine, peer = (statistics.median(figures[name][side]) for side in SIDES)
            print(f"| {name} | {mine:.3f} | {peer:.3f} | {peer / mine:.2f}x |", flush=True)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
