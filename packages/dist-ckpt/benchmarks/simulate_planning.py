"""Planning a save of many ranks in one process, beside torch DCP's planner at the same task.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/simulate_planning.py [--ranks 1024] [--tensors 10000]

What the first rank does with the reports of all ranks. Sixfold: encoded tables are merged, and coverage, overlaps,
bounds and agreement are checked; ``.metadata`` is written from the merged table. DCP: ``_validate_global_plan`` of what
``create_default_global_save_plan`` makes of lists of objects. Each tensor is (ranks * 4, 64), cut by rows over all
ranks. DCP's lists do not fit into memory at full size, so it plans ``--dcp-tensors`` of the tensors, and its time and
memory are multiplied; its cost a tensor does not fall with their number. CPU seconds; memory is the peak's growth.
"""

import argparse
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from sixfold.dist_ckpt import ShardedTensor
from sixfold.dist_ckpt.table import Encoded, merge, tabulate
from sixfold.dist_ckpt.validation import table_problems

ROWS, COLUMNS = 4, 64


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def encoded_reports(ranks, tensors):
    """What arrives: the table of rank 0 for real, the others by moving its boxes, which is what they would send."""
    shape = (ranks * ROWS, COLUMNS)
    records = [
        ShardedTensor(f"layers.{i}.weight", None, torch.bfloat16, (ROWS, COLUMNS), shape, (0, 0), None)
        for i in range(tensors)
    ]
    table, _ = tabulate(records)
    reports = []
    for rank in range(ranks):
        rows = table.rows_NW.clone()
        rows[:, 2] = rank * ROWS
        reports.append(replace(table, rows_NW=rows).encode())
    return reports


def plan_sixfold(reports):
    table = merge(reports)
    problems = table_problems(table, "saved")
    assert not problems, problems[0]
    return len(table.rows_NW)


def dcp_plans(ranks, tensors):
    """The plans that ranks of DCP would send."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    shape, properties = torch.Size((ranks * ROWS, COLUMNS)), TensorProperties(dtype=torch.bfloat16)

    def item(rank, index):
        offset = torch.Size((rank * ROWS, 0))
        chunk = ChunkStorageMetadata(offset, torch.Size((ROWS, COLUMNS)))
        data = TensorWriteData(chunk, properties, shape)
        return WriteItem(MetadataIndex(f"layers.{index}.weight", offset), WriteItemType.SHARD, tensor_data=data)

    return [SavePlan([item(rank, index) for index in range(tensors)]) for rank in range(ranks)]


def plan_dcp(plans):
    from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan

    plans, metadata = create_default_global_save_plan(plans)
    assert not _validate_global_plan(plans, metadata), "DCP calls its own plan wrong"
    return sum(len(plan.items) for plan in plans)


def measured(make, plan, arguments):
    """CPU seconds, MiB and shards of planning what ``make`` gives, and MiB of encoded reports."""
    torch.set_num_threads(1)
    reports = make(*arguments)
    before_mib, start = peak_mib(), time.process_time()
    shards = plan(reports)
    seconds = time.process_time() - start
    held = sum(len(r.names) + len(r.rows) for r in reports if isinstance(r, Encoded)) / 2**20
    return seconds, peak_mib() - before_mib, shards, held


def in_process(*task):
    """In a process of its own, so that one's memory is not the other's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, *task).result()


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=1024)
    options.add_argument("--tensors", type=int, default=10_000)
    options.add_argument("--dcp-tensors", type=int, default=200)
    chosen = options.parse_args()
    seconds, mib, shards, held = in_process(encoded_reports, plan_sixfold, (chosen.ranks, chosen.tensors))
    print(f"Sixfold: {chosen.ranks} ranks x {chosen.tensors} tensors, {shards} shards: {seconds:.2f} s, {mib:.0f} MiB")
    print(f"         beside the reports themselves, {held:.0f} MiB as they arrive")
    few = min(chosen.dcp_tensors, chosen.tensors)
    peer_s, peer_mib, peer_shards, _ = in_process(dcp_plans, plan_dcp, (chosen.ranks, few))
    factor = chosen.tensors / few
    print(f"DCP:     {chosen.ranks} ranks x {few} tensors, {peer_shards} shards: {peer_s:.2f} s, {peer_mib:.0f} MiB")
    print(
        f"         times {factor:g}: {peer_s * factor:.0f} s, {peer_mib * factor:.0f} MiB beside its lists of objects"
    )
    print(f"ratio    {peer_s * factor / seconds:.0f}x")


if __name__ == "__main__":
    main()
