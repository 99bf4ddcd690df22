"""A save of many ranks without its data, and the load plan of one rank of it: what the first rank, and that one, do.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/simulate_planning.py [--save] [--load]
        [--most-chunks N] [--most-dcp-chunks N] [--folder PATH]
    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/simulate_planning.py --keys

Beside torch DCP at the same task, at sizes growing by ten up to 1,024 ranks x 10,000 tensors; each tensor is
(ranks * 4, 64), cut by rows over all ranks. Every task runs in a process of its own: CPU seconds of the task, and the
peak of that process's memory, imports and inputs included.

``--save``, from what the ranks have sent to what a commit needs. Sixfold: ``saving.check_reports`` (tables merged;
coverage, overlaps, bounds and agreement checked), ``saving.index_of`` (sorted), and the two index files, ``.metadata``
and the compact manifest, streamed into a folder and hashed. DCP, with its planner's defaults:
``DefaultSavePlanner.create_global_plan`` (duplicates removed, global plan, validation) and what
``FileSystemWriter.finish`` does with the results of all ranks: gather them into ``storage_data``, pickle, write. Both
write to a disk and call fsync; messages between ranks are in neither. Ours begin as bytes that are decoded in the task,
DCP's as objects.

``--load``: the same rank cut of another layout (half as many ranks, so two chunks for each tensor): Sixfold opens the
folder (its ``.distcp`` files are sparse) and plans the reads; DCP unpickles ``.metadata`` and runs
``create_default_local_load_plan``. Needs the files of ``--save``, which are written first where they are not there.

``--keys``: what many tensors cost, as jobs with experts have them, here (chunks * 4, 64) in 1 and in 8 chunks: the CPU
seconds in which the compact manifest and ``.metadata`` are encoded, the folder is opened, ``load_tensors_metadata``
answers, and the folder is opened without the compact manifest, so that ``.metadata`` is decoded.

Sizes above ``--most-dcp-chunks`` are extrapolated for DCP from the largest that was run, by chunks, and say so.
"""

import argparse
import gc
import multiprocessing
import os
import pickle
import resource
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from sixfold.dist_ckpt import ShardedTensor, load_tensors_metadata
from sixfold.dist_ckpt.checkpoint.opening import open_checkpoint
from sixfold.dist_ckpt.formats import compact_manifest, integrity, metadata, weights_only
from sixfold.dist_ckpt.formats.dcp_pickle import Index
from sixfold.dist_ckpt.formats.integrity import FileDigest
from sixfold.dist_ckpt.plans import plan
from sixfold.dist_ckpt.plans.shard_table import tabulate
from sixfold.dist_ckpt.save_load import saving
from sixfold.dist_ckpt.save_load.writer import Written
from sixfold.dist_ckpt.storage import local

ROWS, COLUMNS = 4, 64
FRAME_BYTES = 1088  # of a chunk in its file
SAVE_ID = "0123456789abcdef"
SIZES = ((10, 1_000), (100, 1_000), (1_000, 1_000), (1024, 10_000))
KEYS = ((10_000, 1), (10_000, 8), (100_000, 1), (100_000, 8), (300_000, 1), (300_000, 8), (1_000_000, 1))
MOST_DECODED = 1_000_000  # chunks: some kilobytes of memory for each


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def name_of(rank):
    return f"__{rank}_0.distcp"


def key_of(index):
    return f"layers.{index:05}.weight"


def encoded_tables(ranks, tensors):
    """What arrives: the table of rank 0 for real, the others by moving its boxes, which is what they would send."""
    shape = (ranks * ROWS, COLUMNS)
    records = [
        ShardedTensor(key_of(i), None, torch.bfloat16, (ROWS, COLUMNS), shape, (0, 0), None) for i in range(tensors)
    ]
    table, _ = tabulate(records)
    places_N2 = torch.stack([torch.arange(tensors) * FRAME_BYTES, torch.full((tensors,), FRAME_BYTES)], 1)
    places = places_N2.contiguous().numpy().tobytes()
    blocks = ("00000000",) * -(-tensors * FRAME_BYTES // integrity.BLOCK_BYTES)
    written = []
    for rank in range(ranks):
        rows = table.rows_NW.clone()
        rows[:, 2] = rank * ROWS
        files = {name_of(rank): FileDigest(tensors * FRAME_BYTES, blocks)}
        written.append(Written(replace(table, rows_NW=rows).encode(), places, [], files))
    return written


def save_sixfold(written, folder):
    """The first rank's part; what it writes opens as a checkpoint."""
    saving.check_reports([saving._Report(part.table.digest, part.table, [], 0, 0, "", {}) for part in written], None)
    digests = {name: digest for part in written for name, digest in part.files.items()}
    small = {"common.pt": weights_only.dump({}, "common data"), "metadata.json": metadata.CONFIG_JSON}
    for name, content in (saving.index_of(written, SAVE_ID, None) | small).items():
        digests[name] = local.write_file(folder, name, content)
    content = integrity.Integrity(save_id=SAVE_ID, files=digests).encode()
    local.write_file(folder, integrity.FILE_NAME, content)


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
        return WriteItem(MetadataIndex(key_of(index), offset), WriteItemType.SHARD, tensor_data=data)

    def result(rank, index):
        place = _StorageInfo(name_of(rank), index * FRAME_BYTES, FRAME_BYTES)
        return WriteResult(MetadataIndex(key_of(index), torch.Size((rank * ROWS, 0))), FRAME_BYTES, place)

    paths = {key_of(index): (key_of(index),) for index in range(tensors)}
    plans = [SavePlan([item(rank, i) for i in range(tensors)], planner_data=dict(paths)) for rank in range(ranks)]
    return plans, [[result(rank, index) for index in range(tensors)] for rank in range(ranks)]


def save_dcp(messages, folder):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import StorageMeta

    plans, results = messages
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    _, found = planner.create_global_plan(plans)
    # What FileSystemWriter.finish does.
    places = {}
    for by_rank in results:
        places.update({part.index: part.storage_data for part in by_rank})
    found.storage_data = places
    found.storage_meta = StorageMeta(save_id=SAVE_ID)
    with (folder / "dcp.metadata").open("wb") as file:
        pickle.dump(found, file)
        os.fsync(file.fileno())


def wanted(ranks, tensors):
    """What one rank of half as many asks for: two chunks of each tensor."""
    shape, local_shape = (ranks * ROWS, COLUMNS), (2 * ROWS, COLUMNS)
    at = (ranks // 4 * 2 * ROWS, 0)
    return [ShardedTensor(key_of(i), None, torch.bfloat16, local_shape, shape, at, None) for i in range(tensors)]


def load_sixfold(records, folder):
    checkpoint = open_checkpoint(folder)
    tabulate(records)
    found = plan.plan_load(records, checkpoint.manifest, dtype_policy="exact")
    assert len(found.reads) == 2 * len(records), len(found.reads)


def load_dcp(records, folder):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    with (folder / "dcp.metadata").open("rb") as file:
        found = pickle.load(file)
    items = []
    for record in records:
        chunk = ChunkStorageMetadata(torch.Size(record.global_offset), torch.Size(record.local_shape))
        items += create_read_items_for_chunk_list(record.key, found.state_dict_metadata[record.key], [chunk])
    assert len(items) == 2 * len(records), len(items)


TASKS = {
    "save": (encoded_tables, save_sixfold, dcp_messages, save_dcp),
    "load": (wanted, load_sixfold, wanted, load_dcp),
}


def measured(make, task, arguments, folder):
    """CPU seconds, seconds of the clock, MiB at the peak, and MiB at the beginning."""
    torch.set_num_threads(1)
    inputs = make(*arguments)
    before_mib, start, clock = peak_mib(), time.process_time(), time.monotonic()
    task(inputs, folder)
    return time.process_time() - start, time.monotonic() - clock, peak_mib(), before_mib


def in_process(*task):
    """In a process of its own, so that one's memory is not the other's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, *task).result()


def keys_task(tensors, chunks, folder):
    """CPU seconds of each column of ``--keys``."""
    torch.set_num_threads(1)
    number_N, chunk_N = torch.arange(tensors).repeat_interleave(chunks), torch.arange(chunks).repeat(tensors)
    zero_N = torch.zeros_like(number_N)
    index = Index(
        tensors=[(f"layers.{i:07}.weight", torch.bfloat16, (chunks * ROWS, COLUMNS)) for i in range(tensors)],
        tensor_N=number_N,
        offsets_ND=torch.stack([chunk_N * ROWS, zero_N], 1),
        sizes_ND=torch.stack([zero_N + ROWS, zero_N + COLUMNS], 1),
        files=[name_of(rank) for rank in range(chunks)],
        file_N=chunk_N,
        start_N=number_N * FRAME_BYTES,
        length_N=zero_N + FRAME_BYTES,
        objects={},
        save_id=SAVE_ID,
    )
    asked = [ShardedTensor(key, None, dtype, shape, shape, (0, 0), None) for key, dtype, shape in index.tensors[-10:]]
    spent = []

    def timed(step):
        gc.collect()
        start = time.process_time()
        found = step()
        spent.append(time.process_time() - start)
        return found

    small = {"common.pt": weights_only.dump({}, "common data"), "metadata.json": metadata.CONFIG_JSON}
    small[compact_manifest.FILE_NAME] = timed(lambda: b"".join(compact_manifest.encode(index)))
    small[".metadata"] = timed(lambda: b"".join(metadata.encode_parts(index)))
    blocks = ("00000000",) * -(-tensors * FRAME_BYTES // integrity.BLOCK_BYTES)
    digests = {name: FileDigest(tensors * FRAME_BYTES, blocks) for name in index.files}
    digests |= {name: local.write_file(folder, name, content) for name, content in small.items()}
    for name in (compact_manifest.FILE_NAME, ".metadata"):  # what a load reads: the second one only without the first
        content = integrity.Integrity(save_id=SAVE_ID, files=digests).encode()
        local.write_file(folder, integrity.FILE_NAME, content)
        if name == ".metadata" and tensors * chunks > MOST_DECODED:
            spent.append(float("nan"))
            continue
        plan.plan_load(asked, timed(lambda: open_checkpoint(folder)).manifest, dtype_policy="exact")
        if name == compact_manifest.FILE_NAME:
            assert len(timed(lambda: load_tensors_metadata(folder))) == tensors
        (folder / integrity.FILE_NAME).unlink()
        del digests[name]
    return spent


def main_of_keys(root):
    steps = ("encode", "encode .metadata", "open", "tensors metadata", "open .metadata")
    print(f"| tensors x chunks | {' | '.join(steps)} |\n|---|{'---|' * len(steps)}", flush=True)
    for tensors, chunks in KEYS:
        folder = prepared(root / f"{tensors}-{chunks}", chunks, tensors)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            spent = pool.submit(keys_task, tensors, chunks, folder).result()
        print(f"| {tensors:,} x {chunks} | {' | '.join(f'{cpu_s:.2f}' for cpu_s in spent)} |", flush=True)
        shutil.rmtree(folder)


def prepared(folder, ranks, tensors):
    """An empty folder with sparse files of frames."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        with (folder / name_of(rank)).open("wb") as file:
            file.truncate(tensors * FRAME_BYTES)
    return folder


def check_equal(folder):
    """Both pickles hold the same, but for what only one of them says: our save id."""
    mine = pickle.loads((folder / ".metadata").read_bytes())
    peer = pickle.loads((folder / "dcp.metadata").read_bytes())
    assert mine.storage_data == peer.storage_data, "other places"
    for key, entry in peer.state_dict_metadata.items():
        found = mine.state_dict_metadata[key]
        assert (found.size, found.properties) == (entry.size, entry.properties), key
        assert sorted(map(repr, found.chunks)) == sorted(map(repr, entry.chunks)), key


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--save", action="store_true")
    options.add_argument("--load", action="store_true")
    options.add_argument("--keys", action="store_true")
    options.add_argument("--least-chunks", type=int, default=0)
    options.add_argument("--most-chunks", type=int, default=SIZES[-1][0] * SIZES[-1][1])
    options.add_argument("--most-dcp-chunks", type=int, default=1_000_000)
    options.add_argument("--compare", type=int, default=100_000, help="chunks up to which the two pickles are compared")
    options.add_argument("--folder", type=Path, help="where index files are written (default: a temporary folder)")
    chosen = options.parse_args()
    root = chosen.folder or Path(tempfile.mkdtemp(prefix="sixfold-planning-"))
    kinds = [kind for kind in TASKS if getattr(chosen, kind)] or list(TASKS)
    last = {}
    try:
        if chosen.keys:
            main_of_keys(root)
            return
        print("| task | ranks x tensors | Sixfold CPU s | clock s | peak MiB (inputs) | DCP CPU s | peak MiB | ratio |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for ranks, tensors in SIZES:
            chunks = ranks * tensors
            if not chosen.least_chunks <= chunks <= chosen.most_chunks:
                continue
            folder = prepared(root / str(chunks), ranks, tensors)
            for kind in TASKS:
                make, ours, make_dcp, theirs = TASKS[kind]
                cpu_s, clock_s, mib, before_mib = in_process(make, ours, (ranks, tensors), folder)
                if chunks <= chosen.most_dcp_chunks:
                    peer_s, _, peer_mib, _ = in_process(make_dcp, theirs, (ranks, tensors), folder)
                    last[kind], note = (chunks, peer_s, peer_mib), ""
                elif kind in last:
                    factor = chunks / last[kind][0]
                    peer_s, peer_mib = last[kind][1] * factor, last[kind][2] * factor
                    note = f" (DCP: times {factor:.1f})"
                else:
                    peer_s, peer_mib, note = float("nan"), float("nan"), " (no DCP run)"
                if kind in kinds:
                    print(
                        f"| {kind} | {ranks} x {tensors} | {cpu_s:.2f} | {clock_s:.2f} | {mib:.0f} ({before_mib:.0f}) "
                        f"| {peer_s:.2f} | {peer_mib:.0f} | {peer_s / cpu_s:.1f}x{note} |",
                        flush=True,
                    )
                if kind == "save" and chunks <= min(chosen.compare, chosen.most_dcp_chunks):
                    check_equal(folder)
            sizes = {name: (folder / name).stat().st_size / 2**20 for name in (".metadata", "shard_manifest.pt")}
            print(f"  {', '.join(f'{name} {size:.0f} MiB' for name, size in sizes.items())}", flush=True)
            shutil.rmtree(folder)
    finally:
        if chosen.folder is None:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
