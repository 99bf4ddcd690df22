"""Batches from an object store while a step takes 100 ms: Sixfold, MosaicML Streaming and litdata on one server.

    python packages/blending/benchmarks/remote_beside_peers.py --steps 200 [--only sixfold,streaming,litdata]

The server of indexed-data's tests answers S3's GET and HEAD too, in a process of its own. A request takes 50 ms, and
5 % of its answers fail: half of those with 503, half cut. All sides hold the same documents of 2,049 ids of uint16, and
give 8 of them per step in an order that they shuffle, each at most once. Streaming and litdata read shards of 2 MiB,
whole, through boto3, in a DataLoader of one worker that is 8 batches ahead; Sixfold reads ranges of a pair by http, 8
batches ahead, in a thread. The first batch is left out. A sample counts as wrong if its ids are of no document.
Versions: benchmarks/peers.txt.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path += [str(Path(__file__).parents[n] / path) for n, path in ((2, "indexed-data/tests"), (3, "tests-integration"))]

from range_server_helpers import RangeServer

ROWS, TOKENS, STEP_S, AHEAD, DOCUMENTS, SHARD = 8, 2049, 0.1, 8, 12_000, 2 << 20
_kept: list[object] = []  # what lives only as long as something refers to it


class StoreServer(RangeServer):
    """A range server that answers boto3 too: HEAD, and GET without a range. A path begins with the bucket's name."""

    def __init__(self, *arguments, **fields):
        super().__init__(*arguments, **fields)
        outer, handler = self, self._server.RequestHandlerClass

        def get(self):
            self.path = self.path.partition("?")[0].replace("/bucket/", "/")
            name = self.path.lstrip("/")
            if self.headers["Range"] is None and name in outer.files:
                self.headers["Range"] = f"bytes=0-{len(outer.files[name]) - 1}"
            outer.answer(self)

        def head(self):
            time.sleep(outer.delay_s)
            name = self.path.partition("?")[0].replace("/bucket/", "/").lstrip("/")
            self.send_response(200 if name in outer.files else 404)
            self.send_header("Content-Length", str(len(outer.files.get(name, b""))))
            self.send_header("ETag", '"one"')
            self.end_headers()

        handler.do_GET, handler.do_HEAD = get, head


def serve(folder, delay, failing, pipe):
    files = {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    with StoreServer(files, failing=failing, delay_s=delay) as server:
        pipe.send(server.url)
        while pipe.recv() == "facts":
            pipe.send((server.given, server.failed, len(server.requests)))


def documents():
    rng = np.random.default_rng(0)
    return rng.integers(1, 60_000, (DOCUMENTS, TOKENS)).astype(np.uint16)


def prepare(folder, only):
    if "sixfold" in only:
        from sixfold.indexed_data import IndexedDatasetBuilder

        with IndexedDatasetBuilder(f"{folder}/wiki.bin", np.uint16) as builder:
            for ids in documents():
                builder.add_document(ids)
    if "streaming" in only:
        from streaming_on_cpu import import_torchvision  # which Streaming imports, of whatever build

        _kept.append(import_torchvision())
        from streaming import MDSWriter

        with MDSWriter(out=f"{folder}/mds", columns={"ids": "bytes"}, size_limit=SHARD) as writer:
            for ids in documents():
                writer.write({"ids": ids.tobytes()})
    if "litdata" in only:
        from litdata.streaming.writer import BinaryWriter

        os.mkdir(f"{folder}/lit")
        writer = BinaryWriter(f"{folder}/lit", chunk_bytes=SHARD)
        for number, ids in enumerate(documents()):
            writer.add_item(number, ids.tobytes())
        writer.done()
        writer.merge()


def of_sixfold(url, folder):
    from sixfold.blending import GPTDataset, GPTDatasetConfig, Prefetcher, Split
    from sixfold.indexed_data import IndexedDataset

    config = GPTDatasetConfig(random_seed=1, sequence_length=TOKENS, packing="best_fit", max_epochs=None)
    data = GPTDataset(IndexedDataset(f"{url}/wiki"), "wiki", range(DOCUMENTS), DOCUMENTS, Split.train, config)
    with Prefetcher(data, [range(at, at + ROWS) for at in range(0, DOCUMENTS, ROWS)], 2, ahead=AHEAD) as reader:
        for batch in reader:
            yield batch["tokens"].astype(np.uint16)


def batches_of(loader):
    for batch in loader:
        yield np.stack([np.frombuffer(one, np.uint16) for one in batch])


def of_streaming(url, folder):
    import streaming
    from torch.utils.data import DataLoader

    streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(
        remote="s3://bucket/mds", local=f"{folder}/streaming", shuffle=True, shuffle_seed=1, batch_size=ROWS,
        download_timeout=60, download_retry=5, predownload=AHEAD * ROWS,
    )  # fmt: skip
    yield from batches_of(DataLoader(data, ROWS, num_workers=1, prefetch_factor=AHEAD, collate_fn=ids_of))


def ids_of(samples):
    return [bytes(one["ids"] if isinstance(one, dict) else one) for one in samples]


def of_litdata(url, folder):
    import litdata

    data = litdata.StreamingDataset(
        "s3://bucket/lit", cache_dir=f"{folder}/litdata", shuffle=True, seed=1,
        storage_options={"endpoint_url": url, "aws_access_key_id": "any", "aws_secret_access_key": "any"},
    )  # fmt: skip
    yield from batches_of(
        litdata.StreamingDataLoader(data, batch_size=ROWS, num_workers=1, prefetch_factor=AHEAD, collate_fn=ids_of)
    )


def measure(name, steps, facts, url, folder):
    known, found = {ids.tobytes() for ids in documents()}, set()
    waited, slowest, wrong = 0.0, 0.0, 0
    reader = {"sixfold": of_sixfold, "streaming": of_streaming, "litdata": of_litdata}[name](url, folder)
    given, failed, requests = facts()
    began = time.perf_counter()
    for step in range(steps):
        start = time.perf_counter()
        batch = next(reader)
        took = time.perf_counter() - start
        if step:
            waited, slowest = waited + took, max(slowest, took)
        else:
            first = start + took - began
        for row in batch:
            wrong += row.tobytes() not in known or row.tobytes() in found
            found.add(row.tobytes())
        time.sleep(max(0.0, STEP_S - (time.perf_counter() - start - took)))
    after = facts()
    read = (after[0] - given) / (steps * ROWS * TOKENS * 2)
    share = waited / ((steps - 1) * STEP_S)
    print(
        f"| {name} | {share:.2%} | {slowest * 1e3:.1f} | {first:.2f} | {read:.2f} | {after[2] - requests} | "
        f"{after[1] - failed} | {wrong} |",
        flush=True,
    )
    reader.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--failing", type=float, default=0.05)
    parser.add_argument("--only", default="sixfold,streaming,litdata")
    options = parser.parse_args()
    only = options.only.split(",")
    os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory() as store, tempfile.TemporaryDirectory() as folder:
        prepare(store, only)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        arguments = (store, options.delay, options.failing, theirs)
        process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
        process.start()
        url = os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"] = ours.recv()

        def facts():
            ours.send("facts")
            return ours.recv()

        print("| reader | waited, of the steps | slowest wait ms | first batch s | bytes read, of those given | "
              "answers | failed | wrong samples |\n|" + "---|" * 8)  # fmt: skip
        for name in only:
            measure(name, options.steps, facts, url, folder)
        ours.send("end")
        process.join()


if __name__ == "__main__":
    main()
