"""A save of many ranks without its data: what the first rank does until the bytes of ``.metadata`` are there.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/simulate_planning.py [--most-chunks N] [--most-dcp-chunks N]

In one process, beside torch DCP at the same task, at growing sizes up to 1,024 ranks x 10,000 tensors; each tensor is
(ranks * 4, 64), cut by rows over all ranks. Both begin with what the ranks have sent, decoded, and end with the bytes
of ``.metadata`` in memory.

Sixfold: ``saving.check_together`` (tables merged; coverage, overlaps, bounds and agreement checked) and
``saving.index_of`` (merged again, as after the writing, sorted, encoded). DCP, with its planner's defaults:
``DefaultSavePlanner.create_global_plan`` (duplicates removed, global plan, validation) and what
``FileSystemWriter.finish`` does with the results of all ranks: gather them into ``storage_data`` and pickle.
Neither side's messages between ranks are in it, nor writing the file.

DCP's lists of objects take some 3 KiB for each chunk: sizes above ``--most-dcp-chunks`` are extrapolated from the
largest that was run, by chunks, and say so; ``--most-chunks`` bounds ours. CPU seconds after one tiny run, so that
imports are done on both sides; memory is the growth of the peak during the task. Where they are small (``--compare``)
the two pickles are compared.
"""

import argparse
import multiprocessing
import pickle
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from sixfold.dist_ckpt import ShardedTensor
from sixfold.dist_ckpt.files.integrity import FileDigest
from sixfold.dist_ckpt.plans.table import tabulate
from sixfold.dist_ckpt.road import saving
from sixfold.dist_ckpt.road.transfer import Written

ROWS, COLUMNS = 4, 64
FRAME_BYTES = 1088  # of a chunk in its file
SAVE_ID = "0123456789abcdef"
SIZES = ((64, 500), (64, 2_000), (256, 2_000), (1024, 1_000), (1024, 4_000), (1024, 10_000))


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def name_of(rank):
    return f"__{rank}_0.distcp"


def encoded_reports(ranks, tensors):
    """What arrives: the table of rank 0 for real, the others by moving its boxes, which is what they would send."""
    shape = (ranks * ROWS, COLUMNS)
    records = [
        ShardedTensor(f"layers.{i}.weight", None, torch.bfloat16, (ROWS, COLUMNS), shape, (0, 0), None)
        for i in range(tensors)
    ]
    table, _ = tabulate(records)
    places_N2 = torch.stack([torch.arange(tensors) * FRAME_BYTES, torch.full((tensors,), FRAME_BYTES)], 1)
    places = places_N2.contiguous().numpy().tobytes()
    written = []
    for rank in range(ranks):
        rows = table.rows_NW.clone()
        rows[:, 2] = rank * ROWS
        files = {name_of(rank): FileDigest(tensors * FRAME_BYTES, ("0",))}
        written.append(Written(replace(table, rows_NW=rows).encode(), places, [], files))
    return written


def plan_sixfold(written):
    reports = [saving._Report(part.table, "", [], 0, 0) for part in written]
    saving.check_together([report.table for report in reports], reports, None)
    return saving.index_of(written, SAVE_ID, None)


def dcp_messages(ranks, tensors):
    """The plans and the results that ranks of DCP send."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult

    shape = torch.Size((ranks * ROWS, COLUMNS))

    def item(rank, index):
        offset = torch.Size((rank * ROWS, 0))
        chunk = ChunkStorageMetadata(offset, torch.Size((ROWS, COLUMNS)))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.bfloat16), shape)
        return WriteItem(MetadataIndex(f"layers.{index}.weight", offset), WriteItemType.SHARD, tensor_data=data)

    def result(rank, index):
        place = _StorageInfo(name_of(rank), index * FRAME_BYTES, FRAME_BYTES)
        return WriteResult(MetadataIndex(f"layers.{index}.weight", torch.Size((rank * ROWS, 0))), FRAME_BYTES, place)

    paths = {f"layers.{index}.weight": (f"layers.{index}.weight",) for index in range(tensors)}
    plans = [SavePlan([item(rank, i) for i in range(tensors)], planner_data=dict(paths)) for rank in range(ranks)]
    return plans, [[result(rank, index) for index in range(tensors)] for rank in range(ranks)]


def plan_dcp(messages):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import StorageMeta

    plans, results = messages
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan(plans)
    # What FileSystemWriter.finish does, up to the file.
    places = {}
    for found in results:
        places.update({part.index: part.storage_data for part in found})
    metadata.storage_data = places
    metadata.storage_meta = StorageMeta(save_id=SAVE_ID)
    return pickle.dumps(metadata)


def measured(make, plan, arguments, keep):
    """CPU seconds, MiB, the length of the pickle, and the pickle if it is to be kept."""
    torch.set_num_threads(1)
    plan(make(2, 2))  # imports and caches
    messages = make(*arguments)
    before_mib, start = peak_mib(), time.process_time()
    data = plan(messages)
    seconds = time.process_time() - start
    return seconds, peak_mib() - before_mib, len(data), data if keep else b""


def in_process(*task):
    """In a process of its own, so that one's memory is not the other's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, *task).result()


def check_equal(ours, theirs):
    """Both pickles hold the same, but for what only one of them says: our save id."""
    mine, peer = pickle.loads(ours), pickle.loads(theirs)
    assert mine.storage_data == peer.storage_data, "other places"
    for key, entry in peer.state_dict_metadata.items():
        found = mine.state_dict_metadata[key]
        assert (found.size, found.properties) == (entry.size, entry.properties), key
        assert sorted(map(repr, found.chunks)) == sorted(map(repr, entry.chunks)), key


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--most-chunks", type=int, default=SIZES[-1][0] * SIZES[-1][1])
    options.add_argument("--most-dcp-chunks", type=int, default=1_100_000)
    options.add_argument("--compare", type=int, default=40_000, help="chunks up to which the two pickles are compared")
    chosen = options.parse_args()
    print("| ranks x tensors | chunks | Sixfold s | MiB | DCP s | MiB | ratio | .metadata MiB |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    last = None
    for ranks, tensors in SIZES:
        chunks = ranks * tensors
        if chunks > chosen.most_chunks:
            continue
        keep = chunks <= chosen.compare
        seconds, mib, size, data = in_process(encoded_reports, plan_sixfold, (ranks, tensors), keep)
        if chunks <= chosen.most_dcp_chunks:
            peer_s, peer_mib, peer_size, peer = in_process(dcp_messages, plan_dcp, (ranks, tensors), keep)
            last, note = (chunks, peer_s, peer_mib, peer_size), ""
            if keep:
                check_equal(data, peer)
        else:
            factor = chunks / last[0]
            peer_s, peer_mib, peer_size = (value * factor for value in last[1:])
            note = f" (DCP: times {factor:.1f})"
        print(
            f"| {ranks} x {tensors} | {chunks} | {seconds:.2f} | {mib:.0f} | {peer_s:.2f} | {peer_mib:.0f} | "
            f"{peer_s / seconds:.1f}x{note} | {size / 2**20:.1f}, DCP {peer_size / 2**20:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
