"""Checkpoints in an S3 server of this machine, Sixfold beside torch DCP through fsspec, at a latency per request.

    OMP_NUM_THREADS=1 python packages/dist-ckpt/benchmarks/compare_s3.py [--mib 1024] [--ranks 4] [--latency-ms 20]
        [--rounds 3] [--sixfold-url "s3://{bucket}/sixfold"] [--out FILE]

Work: ``--mib`` MiB of float32 in 16 tensors, saved in rows by ``--ranks`` ranks on gloo, restored in the same rows and
resharded to columns; values are checked after each restore. Peer: ``dcp.save(storage_writer=FsspecWriter(url))`` and
``dcp.load(storage_reader=FsspecReader(url))`` with their defaults, on DTensors. Both read through s3fs with its
defaults. Medians of the wall time between barriers; both run in turn in every round, the order alternates, the first
round is thrown away. Background saves go to the server and, in turn, to a local folder; "blocked_s" is the call of the
slowest rank. Requests, bytes, the most in flight and CPU seconds are the server's own of the last round.

The server (tests/s3_server.py) is moto behind a front that adds the latency and, once it has read an object whole,
serves its ranges from memory: without this moto copies the whole object for each range and is all that is measured.
So it stands for a fast store: both sides profit alike, and "floor" says what plain HTTP connections of one process get
from it for the same bytes in ranges of 8 MiB. It shares this machine's cores with the ranks, on both sides.

JSON to ``--out`` or standard output; a side that cannot do a step has "error" instead of seconds.
"""

import argparse
import http.client
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import s3_server

TENSORS, COLUMNS, AXES = 16, 4096, {"rows": 0, "columns": 1}
SPAN_BYTES, CONNECTIONS = 8 << 20, 16


class Run(NamedTuple):
    """What every step needs."""

    rank: int
    options: argparse.Namespace
    server: s3_server.S3Server


class Sixfold:
    def __init__(self, rank, ranks, mesh, url):
        self.rank, self.ranks, self.url = rank, ranks, url

    def state(self, tensors, layout):
        cut = (AXES[layout], self.rank, self.ranks)
        return {f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", t, cut) for i, t in enumerate(tensors)}

    def save(self, state):
        dist_ckpt.save(state, self.url)

    def load(self, state):
        dist_ckpt.load(state, self.url)


class Dcp:
    def __init__(self, rank, ranks, mesh, url):
        self.mesh, self.url = mesh, url

    def state(self, tensors, layout):
        placement = [Shard(AXES[layout])]
        return {f"t{i}": DTensor.from_local(t, self.mesh, placement, run_check=False) for i, t in enumerate(tensors)}

    def save(self, state):
        dcp.save(state, storage_writer=FsspecWriter(self.url))

    def load(self, state):
        dcp.load(state, storage_reader=FsspecReader(self.url))


SIDES = {"sixfold": Sixfold, "dcp": Dcp}


def values(options, rank, layout):
    """This rank's part of each tensor: every element tells where it belongs, and in which tensor."""
    rows = max(options.ranks, options.mib * 2**20 // (4 * COLUMNS * TENSORS))
    whole = (torch.arange(rows * COLUMNS, dtype=torch.float32) % 8191).view(rows, COLUMNS)
    part = whole.chunk(options.ranks, AXES[layout])[rank].clone()
    return [part + index for index in range(TENSORS)]


def timed(action):
    """Seconds between barriers, and the first error of any rank; both alike on all ranks."""
    dist.barrier()
    start_s, error = time.perf_counter(), None
    try:
        action()
    except Exception as found:  # what a side cannot do is told, not measured
        error = f"{type(found).__name__}: {found}"[:300]
    dist.barrier()
    seconds, errors = time.perf_counter() - start_s, [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return seconds, next(filter(None, errors), None)


class Measured:
    """One step of one side: seconds of each round, and the server's counts of the last."""

    def __init__(self):
        self.seconds, self.error, self.server = [], None, {}

    def report(self):
        if self.error:
            return {"error": self.error, "server": self.server}
        counted = self.seconds[1:] or self.seconds
        return {"seconds": statistics.median(counted), "rounds": self.seconds, "server": self.server}


def once(measured, action, run):
    """One round; a side that failed before is left out."""
    if measured.error:
        return False
    if run.rank == 0:
        run.server.set(latency_ms=run.options.latency_ms)
    seconds, measured.error = timed(action)
    measured.seconds.append(seconds)
    if run.rank == 0:
        told = ("requests", "bytes_in", "bytes_out", "most_in_flight")
        found = run.server.report()
        kinds = {**found["kinds"], "total": found["total"]}
        measured.server = {kind: {name: tally[name] for name in told} for kind, tally in kinds.items()}
        measured.server["cpu_s"] = found["cpu_s"]
    return measured.error is None


def in_turn(rounds, sides, step, run, check=lambda name: None):
    """{side: Measured} of rounds that take turns."""
    found = {name: Measured() for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            if once(found[name], lambda name=name: step(name), run):
                check(name)
    return found


def loads(run, sides, layout):
    """Restores in turn, values checked after each."""
    expected = values(run.options, run.rank, layout)
    targets = {name: [torch.zeros_like(tensor) for tensor in expected] for name in sides}
    states = {name: side.state(targets[name], layout) for name, side in sides.items()}

    def check(name):
        for loaded, wanted in zip(targets[name], expected, strict=True):
            assert torch.equal(loaded, wanted), f"{name} loaded other values"
            loaded.zero_()

    return in_turn(run.options.rounds, sides, lambda name: sides[name].load(states[name]), run, check)


def background(run, places, state):
    """{place: seconds until the call returns, seconds until it is committed} of background saves that take turns."""
    blocked = {name: [] for name in places}

    def save(name):
        start_s = time.perf_counter()
        handle = dist_ckpt.async_save(state, places[name])
        blocked[name].append(time.perf_counter() - start_s)
        handle.wait()

    found = in_turn(run.options.rounds, places, save, run)
    report = {name: measured.report() for name, measured in found.items()}
    for name, seconds in blocked.items():
        if not found[name].error:
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            report[name] |= {"blocked_s": float(slowest[1:].median()), "blocked_rounds": slowest.tolist()}
    return report


def job(rank, folder, options, port, bucket, results):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", options.ranks), rank=rank,
                            world_size=options.ranks)  # fmt: skip
    mesh, run = init_device_mesh("cpu", (options.ranks,)), Run(rank, options, s3_server.S3Server(port))
    urls = {"sixfold": options.sixfold_url.format(bucket=bucket), "dcp": f"s3://{bucket}/dcp"}
    sides = {name: make(rank, options.ranks, mesh, urls[name]) for name, make in SIDES.items()}
    steps = {}
    tensors = values(options, rank, "rows")
    states = {name: side.state(tensors, "rows") for name, side in sides.items()}
    steps["save"] = in_turn(1, sides, lambda name: sides[name].save(states[name]), run)
    for layout in AXES:
        steps[f"load as {layout}"] = loads(run, sides, layout)
    report = {step: {name: measured.report() for name, measured in found.items()} for step, found in steps.items()}
    places = {"sixfold": f"{urls['sixfold']}-background", "sixfold to a folder": f"{folder}/background"}
    report["background save"] = background(run, places, states["sixfold"])
    if rank == 0:
        Path(results).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def floor(server, bucket, mib, connections, latency_ms):
    """Seconds of plain HTTP for the same bytes: so many connections of one process, ranges of 8 MiB."""
    size = max(mib << 20, SPAN_BYTES)
    import s3fs

    files = s3fs.S3FileSystem(**server.storage_options())
    files.pipe_file(f"{bucket}/floor", bytes(size))
    files.cat_file(f"{bucket}/floor", start=0, end=8)  # from now on in the server's memory
    headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, Signature=any"}
    spans = [list(range(at, size, connections * SPAN_BYTES)) for at in range(0, connections * SPAN_BYTES, SPAN_BYTES)]
    server.set(latency_ms=latency_ms)

    def read(starts):
        connection, into = http.client.HTTPConnection("127.0.0.1", server.port), bytearray(SPAN_BYTES)
        for start in starts:
            stop = min(start + SPAN_BYTES, size)
            connection.request("GET", f"/{bucket}/floor", headers=headers | {"Range": f"bytes={start}-{stop - 1}"})
            with connection.getresponse() as answer, memoryview(into) as view:
                done = 0
                while done < stop - start:
                    done += answer.readinto(view[done:])
        connection.close()

    start_s = time.perf_counter()
    with ThreadPoolExecutor(connections) as threads:
        list(threads.map(read, spans))
    seconds = time.perf_counter() - start_s
    files.rm_file(f"{bucket}/floor")
    return {"seconds": seconds, "mib_per_s": size / 2**20 / seconds}


def with_ratios(steps):
    for found in steps.values():
        sides = [found.get(name, {}) for name in SIDES]
        if all("seconds" in side for side in sides):
            found["ratio"] = sides[1]["seconds"] / sides[0]["seconds"]
    return steps


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mib", type=int, default=1024, help="MiB of the checkpoint (default 1024)")
    options.add_argument("--ranks", type=int, default=4, help="(default 4)")
    options.add_argument("--latency-ms", type=float, default=20.0, help="added to each request (default 20)")
    options.add_argument("--rounds", type=int, default=3, help="restores that count (default 3)")
    options.add_argument("--sixfold-url", default="s3://{bucket}/sixfold", help="where Sixfold's checkpoint goes")
    options.add_argument("--out", help="file for the JSON; default: standard output")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, s3_server.started() as server:
        os.environ.update(server.environment())
        bucket, results = server.bucket(), f"{folder}/results"
        floors = {
            f"{connections} connections": floor(server, bucket, chosen.mib, connections, chosen.latency_ms)
            for connections in (1, CONNECTIONS)
        }
        arguments = (folder, chosen, server.port, bucket, results)
        torch.multiprocessing.spawn(job, arguments, nprocs=chosen.ranks)
        report = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
            "options": vars(chosen),
            "floor": floors,
            "steps": with_ratios(json.loads(Path(results).read_text())),
        }
    text = json.dumps(report, indent=1)
    if chosen.out:
        Path(chosen.out).write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
