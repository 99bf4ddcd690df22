"""What people write, beside torch DCP: plain state dicts, and a model with its optimizer as objects.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/compare_objects.py [folder] [--size MIB] [--rounds N]

"plain": one dict of tensors that all ranks have, as under DDP. "FSDP2": a model and its AdamW, which has made a step;
Sixfold gets the objects, DCP what ``get_state_dict`` gives of them, and after a load ``set_state_dict``. Each load
gets a new AdamW, as a run that starts again. "blocks": a transformer of 24 blocks, of 96 MiB if the others have 1
GiB. "door": the same plain dict through ``sixfold.dist_ckpt.dcp``. "small": the plain dict as 8,000 tensors. Both
sides save into a new folder each time, fsync and metadata included; loads are warm and both fill the caller's
tensors, whose values are compared after each. "blocked": the call of a background save of the plain dict, in copies
of it into memory touched before, the first save of the process apart, once as it is and once after
``prepare_async_save``. Medians of the wall time between barriers in turn, the order alternates, the first round is
thrown away.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare_dcp import describe_machine, in_turn, run, start
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from sixfold import dist_ckpt
from sixfold.dist_ckpt import dcp as door


def plain_state(mib, count, fill=None):
    length = mib * 2**18 // count
    return {"model": {f"t{i}": torch.full((length,), float(i if fill is None else fill)) for i in range(count)}}


def saved_in_turn(rank, folder, rounds, saves):
    """Medians of saves into folders that are not there; one checkpoint of each stays for the loads."""

    def clear():
        dist.barrier()
        if rank == 0:
            for name in saves:
                shutil.rmtree(folder / name, ignore_errors=True)
        dist.barrier()

    medians = in_turn(rounds, saves, False, clear)
    for save in saves.values():
        save()
    return medians


def plain_job(rank, folder, ranks, mib, count, rounds, results):
    start(rank, ranks, folder, "plain")
    folder, state, empty = Path(folder), plain_state(mib, count), plain_state(mib, count, -1)
    saves = {
        "sixfold": lambda: dist_ckpt.save(state, folder / "sixfold"),
        "dcp": lambda: dcp.save(state, checkpoint_id=str(folder / "dcp")),
        "door": lambda: door.save(state, checkpoint_id=str(folder / "door")),
    }
    loads = {
        "sixfold": lambda: dist_ckpt.load(empty, folder / "sixfold"),
        "dcp": lambda: dcp.load(empty, checkpoint_id=str(folder / "dcp")),
        "door": lambda: door.load(empty, checkpoint_id=str(folder / "door")),
    }

    found = {"save": saved_in_turn(rank, folder, rounds, saves)}

    def zero():
        for tensor in empty["model"].values():
            tensor.fill_(-1)

    def check(name):
        assert all(torch.equal(empty["model"][key], value) for key, value in state["model"].items()), name

    found["load"] = in_turn(rounds, loads, False, zero, check)
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def made(ranks, mib, blocks):
    """A model of four square weights or, of so many blocks, a transformer; each weight has two moments."""
    width = max(32, int((mib * 2**18 / 3 / (12 * blocks or 4)) ** 0.5) // 32 * 32)
    if blocks:
        block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        model = torch.nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
    else:
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4)))
    for layer in (*(model.layers if blocks else model), model):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (ranks,)))
    return model, torch.optim.AdamW(model.parameters()), width


def objects_job(rank, folder, ranks, mib, blocks, rounds, results):
    start(rank, ranks, folder, "objects")
    folder, (model, optimizer, width) = Path(folder), made(ranks, mib, blocks)
    model(torch.ones(1, 2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    wanted = [value.full_tensor().clone() for value in model.state_dict().values()]

    def their_save():
        weights, moments = get_state_dict(model, state["optimizer"])
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=str(folder / "dcp"))

    def their_load():
        weights, moments = get_state_dict(model, state["optimizer"])
        found = {"model": weights, "optim": moments}
        dcp.load(found, checkpoint_id=str(folder / "dcp"))
        set_state_dict(model, state["optimizer"], model_state_dict=found["model"], optim_state_dict=found["optim"])

    state = {"model": model, "optimizer": optimizer}
    saves = {"sixfold": lambda: dist_ckpt.save(state, folder / "sixfold"), "dcp": their_save}
    loads = {"sixfold": lambda: dist_ckpt.load(state, folder / "sixfold"), "dcp": their_load}

    found = {"save": saved_in_turn(rank, folder, rounds, saves)}

    def zero():
        state["optimizer"] = torch.optim.AdamW(model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    def check(name):
        values = [value.full_tensor() for value in model.state_dict().values()]
        assert all(map(torch.equal, values, wanted)), name

    found["load"] = in_turn(rounds, loads, False, zero, check)
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def blocked_job(rank, folder, ranks, mib, prepares, rounds, results):
    start(rank, ranks, folder, "blocked")
    folder, state = Path(folder), plain_state(mib, 16)
    if prepares:
        dist_ckpt.prepare_async_save(state)
        time.sleep(5)  # as a run trains on
    copies = [torch.zeros_like(tensor) for tensor in state["model"].values()]
    copied, blocked = [], []
    for turn in range(rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        for target, tensor in zip(copies, state["model"].values(), strict=True):
            target.copy_(tensor)
        copied.append(time.perf_counter() - begin)
        dist.barrier()
        begin = time.perf_counter()
        handle = dist_ckpt.async_save(state, folder / f"{turn}")
        blocked.append(time.perf_counter() - begin)
        handle.wait()
    if rank == 0:
        copy = statistics.median(copied[1:])
        torch.save({"first": blocked[0] / copy, "later": statistics.median(blocked[1:]) / copy, "copy": copy}, results)
    dist.destroy_process_group()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", nargs="?", help="where to write; default: the system's temporary folder")
    options.add_argument("--size", type=int, default=1024, help="MiB of a checkpoint (default 1024)")
    options.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        describe_machine(folder)
    print("| case | step | Sixfold s | DCP s | ratio | door s |\n|---|---|---|---|---|---|", flush=True)
    jobs = [
        ("plain, 1 rank", plain_job, 1, (1, chosen.size, 16)),
        ("plain on 2", plain_job, 2, (2, chosen.size, 16)),
        ("plain on 2, small", plain_job, 2, (2, 16 * chosen.size // 1024 + 1, 8000 * chosen.size // 1024)),
        ("FSDP2 and AdamW on 2", objects_job, 2, (2, chosen.size, 0)),
        ("FSDP2 and AdamW on 4", objects_job, 4, (4, chosen.size, 0)),
        ("FSDP2 and AdamW on 2, blocks", objects_job, 2, (2, chosen.size * 3 // 32, 24)),
        ("FSDP2 and AdamW on 4, blocks", objects_job, 4, (4, chosen.size * 3 // 32, 24)),
    ]
    for name, job, ranks, arguments in jobs:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            found = run(job, ranks, folder, *arguments, chosen.rounds)
        for step, medians in found.items():
            mine, peer, own_door = medians["sixfold"], medians["dcp"], medians.get("door")
            last = "" if own_door is None else f"{own_door:.3f}"
            print(f"| {name} | {step} | {mine:.3f} | {peer:.3f} | {peer / mine:.1f}x | {last} |", flush=True)
    for ranks, prepares in ((1, False), (2, False), (1, True), (2, True)):
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            found = run(blocked_job, ranks, folder, ranks, chosen.size, prepares, chosen.rounds)
        print(
            f"| plain on {ranks}, blocked{', prepared' * prepares} | later and first background save, in copies of "
            f"{found['copy']:.3f} s | {found['later']:.2f} | | | {found['first']:.2f} first |",
            flush=True,
        )


if __name__ == "__main__":
    main()
