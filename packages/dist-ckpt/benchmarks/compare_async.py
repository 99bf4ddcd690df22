"""Background saves of two ranks on gloo beside torch DCP: time the trainer is blocked, and time until durable.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/compare_async.py [--size MIB] [--rounds N]
        [--folder DIR] [--only sixfold "dcp default" "dcp kept" megatron]

``--size`` is of the whole state, in 16 tensors, half on each rank. Peers: DCP's async_save as it is by default (a
thread, staging into fresh memory), and with its best options here, kept by the caller: shared-memory stager and
a process; if asked for, megatron-core, which forks and needs psutil. "copy" is the floor of blocking: one copy of
the rank's state into memory touched before. Medians over rounds of the wall time between barriers; order
alternates, the first round is thrown away, values are checked after each. Weights are changed between call and
end, so a copy that is none would be seen.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor

RANKS, TENSORS, COLUMNS = 2, 16, 1024


def timed(action, group):
    """Result, seconds on the slower rank, start. Nobody may use the default group while DCP's thread does."""
    dist.barrier(group)
    start = time.perf_counter()
    result = action()
    blocked = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(blocked, dist.ReduceOp.MAX, group=group)
    return result, float(blocked), start


class Sixfold:
    def __init__(self, rank, mesh, local):
        self.state = {k: ShardedTensor.from_rank_offsets(k, t, (0, rank, RANKS)) for k, t in local.items()}

    def start(self, folder):
        return dist_ckpt.async_save(self.state, folder)

    def close(self):
        pass


class Dcp:
    """DCP's default."""

    def __init__(self, rank, mesh, local):
        self.state = {k: DTensor.from_local(t, mesh, [Shard(0)]) for k, t in local.items()}

    def start(self, folder):
        return Waiting(dcp.async_save(self.state, checkpoint_id=str(folder)))

    def close(self):
        pass


class DcpKept(Dcp):
    """A stager that keeps its shared memory, and a process that keeps running."""

    def __init__(self, rank, mesh, local):
        super().__init__(rank, mesh, local)
        self.stager = DefaultStager(StagingOptions(False, True, False, False))

    def start(self, folder):
        future = dcp.async_save(
            self.state,
            checkpoint_id=str(folder),
            async_stager=self.stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        return Waiting(future)

    def close(self):
        self.stager.close()


class Megatron:
    """megatron-core with its default caller, which forks; its CUDA calls become no-ops in this process."""

    def __init__(self, rank, mesh, local):
        torch.cuda.synchronize = lambda *_, **__: None
        torch.cuda.current_device = lambda: "cpu"
        torch.cuda.device_count = lambda: 1
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self.library, self.queue = dist_checkpointing, AsyncCallsQueue()
        make = dist_checkpointing.ShardedTensor.from_rank_offsets
        self.state = {k: make(k, t, (0, rank, RANKS)) for k, t in local.items()}

    def start(self, folder):
        folder.mkdir(exist_ok=True)
        self.queue.schedule_async_request(self.library.save(self.state, str(folder), async_sharded_save=True))
        return self

    def wait(self):
        self.queue.maybe_finalize_async_calls(blocking=True)

    def close(self):
        self.queue.close()


class Waiting:
    def __init__(self, future):
        self._future = getattr(future, "upload_completion", future)

    def wait(self):
        self._future.result()


CONTENDERS = {"sixfold": Sixfold, "dcp default": Dcp, "dcp kept": DcpKept, "megatron": Megatron}


def check(folder, value, local):
    """Both kinds are read by DCP, in this process alone."""
    loaded = {key: torch.zeros(RANKS * tensor.shape[0], COLUMNS) for key, tensor in list(local.items())[:2]}
    dcp.load(loaded, checkpoint_id=str(folder), no_dist=True)
    assert all(bool((tensor == value).all()) for tensor in loaded.values()), f"{folder} is not of the call"


def measure(rank, root, mib, rounds, port, names):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # DCP's worker process makes a group of its own and reads these.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", store=dist.FileStore(f"{root}/store", RANKS), rank=rank, world_size=RANKS)
    mesh, clock = init_device_mesh("cpu", (RANKS,)), dist.new_group()
    rows = mib * 2**20 // (4 * COLUMNS * TENSORS * RANKS)
    local = {f"t{i}": torch.zeros(rows, COLUMNS) for i in range(TENSORS)}
    floor = torch.empty(TENSORS, rows, COLUMNS)
    contenders = {name: CONTENDERS[name](rank, mesh, local) for name in names}
    blocked, durable, copies = {name: [] for name in names}, {name: [] for name in names}, []
    for turn in range(rounds + 1):
        for name in names[:: 1 if turn % 2 else -1]:
            value = float(turn + 1)
            for tensor in local.values():
                tensor.fill_(value)
            folder = Path(root) / f"{name}-{turn}".replace(" ", "-")
            handle, stopped_s, start = timed(lambda name=name, folder=folder: contenders[name].start(folder), clock)
            for tensor in local.values():
                tensor.fill_(-1)
            handle.wait()
            dist.barrier(clock)
            durable[name].append(time.perf_counter() - start)
            blocked[name].append(stopped_s)
            if rank == 0:
                check(folder, value, local)
        copies.append(timed(lambda: [floor[i].copy_(t) for i, t in enumerate(local.values())], clock)[1])
    if rank == 0:
        floor_s = statistics.median(copies[1:])
        print(f"state {mib} MiB, {rounds} rounds; copy {floor_s:.4f} s", flush=True)
        print("| who | blocked s | durable s |\n|---|---|---|", flush=True)
        for name in names:
            print(
                f"| {name} | {statistics.median(blocked[name][1:]):.4f} | {statistics.median(durable[name][1:]):.3f} |",
                flush=True,
            )
    dist.barrier()
    for contender in contenders.values():
        contender.close()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description="background saves beside torch DCP")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS)[:3], choices=list(CONTENDERS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        arguments = (root, options.size, options.rounds, 29500 + os.getpid() % 20000, options.only)
        torch.multiprocessing.spawn(measure, arguments, nprocs=RANKS)


if __name__ == "__main__":
    main()
