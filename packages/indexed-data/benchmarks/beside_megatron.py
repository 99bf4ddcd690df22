"""The whole of indexed-data beside megatron-core 0.16.1, in one run: a table for benchmarks/results/.

    OMP_NUM_THREADS=1 python packages/indexed-data/benchmarks/beside_megatron.py --scale 1 > table.md

CPU time of one thread (``time.process_time``), both sides in turn, the minimum of some repeats and behind it the
median; what both write is compared byte for byte in the same run. Page cache warm, free memory touched before each
round. ``--scale 0.01`` does all of it in a minute. Documents have 500 to 1,500 ids of uint16 where nothing else is
said. Rows of writing are whole programs (builder, documents, finalize) by the calls that each side's users write.
Needs 5 GB of disk and 10 minutes; ``--only writing`` one minute.
"""

import argparse
import contextlib
import filecmp
import json
import os
import platform
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from array import array
from pathlib import Path

import numpy as np

from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder, build, verify

HERE = Path(__file__).parent
OURS, PEER = "sixfold", "megatron-core"


def load_peer():
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def row(what, ours, peer="", ratio=""):
    print(f"| {what} | {ours} | {peer} | {ratio} |", flush=True)


def in_turn(sides, repeats, unit_s, setup=lambda: (), clock=time.process_time):
    """Seconds of CPU time per ``unit_s`` of each side: {side: (minimum, median)}. They take turns."""
    times = {side: [] for side in sides}
    for _ in range(repeats):
        for side, function in sides.items():
            arguments = setup(side) if setup.__code__.co_argcount else setup()
            touch_memory()
            began = clock()
            function(*arguments)
            times[side].append((clock() - began) / unit_s)
    return {side: (min(each), statistics.median(each)) for side, each in times.items()}


def touch_memory():
    """Free memory that was used just now. On a virtual machine the first use of a page is the hypervisor's work: 200 MB
    of page cache then cost 300 ms instead of 50, whoever writes them."""
    np.ones(2**26)


def compare(what, times, unit="us", factor=1e6, rate=None):
    """One row: the minima, the medians behind them, and how many times faster ours is."""
    texts = []
    for side in (OURS, PEER):
        low, middle = (value * factor for value in times[side])
        more = "" if rate is None else f", {rate(times[side][0])}"
        texts.append(f"{low:.3g} {unit} ({middle:.3g}{more})")
    row(what, *texts, f"{times[PEER][0] / times[OURS][0]:.2f}x ({times[PEER][1] / times[OURS][1]:.2f}x)")


# ---- writing

WITHOUT = "sixfold, without lengths"


def write_pair(kind, prefix, documents, lengths, sync=False):
    """The whole of a user's program: a new builder, every document, finalize. Both sides have flushed their files then;
    ours has also waited for the disk, the peer does so with ``sync``."""
    builder = kind(f"{prefix}.bin", np.uint16)
    if lengths is None:
        for document in documents:
            builder.add_document(document)
    else:
        for document, each in zip(documents, lengths, strict=True):
            builder.add_document(document, each)
    builder.finalize(f"{prefix}.idx")
    if sync:
        for end in (".bin", ".idx"):
            with open(prefix + end, "rb") as file:
                os.fsync(file.fileno())


def as_kind(documents, kind):
    import torch

    if kind == "lists":
        return [d.tolist() for d in documents]
    if kind.startswith("torch "):
        return [torch.from_numpy(d.astype(kind.split()[1])) for d in documents]
    return [d.astype(kind.split()[0]) for d in documents]


def writing(memory, folder, peer, scale):
    """On a memory file system, so that no disk is measured; the last row is on the disk, by the clock."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50_000, n).astype(np.uint16) for n in rng.integers(500, 1501, int(5000 * scale) + 50)]
    kinds = {OURS: IndexedDatasetBuilder, PEER: peer.IndexedDatasetBuilder, WITHOUT: IndexedDatasetBuilder}
    tokens = sum(map(len, documents)) / len(documents)
    rows = {
        "uint16 arrays": "",
        "int64 arrays": ", range-checked here, wrapped there",
        "lists": ", range-checked",
        "torch int64 tensors": ", range-checked here, wrapped there",
    }
    whole = [[len(d)] for d in documents]
    for kind, more in rows.items():
        given = as_kind(documents, kind)
        sides = {
            side: lambda each=each, side=side, given=given: write_pair(
                each, f"{memory}/{side}", given, None if side == WITHOUT else whole
            )
            for side, each in kinds.items()
        }
        times = in_turn(sides, 9, len(documents))
        same(memory)
        what = f"write {len(documents):,} documents given as {kind}, `add_document(ids, [len(ids)])`{more}"
        compare(what, times, "us per document", rate=lambda s: f"{tokens / s / 1e6:.0f} M tokens/s")
        low, middle = (1e6 * value for value in times[WITHOUT])
        row("the same with `add_document(ids)`, which the peer does not have", f"{low:.3g} us ({middle:.3g})")
    sentences = [[50] * (len(d) // 50) + [len(d) % 50] for d in documents]
    sides = {s: lambda s=s: write_pair(kinds[s], f"{memory}/{s}", documents, sentences) for s in (OURS, PEER)}
    compare("documents of about 21 sequences each, uint16 arrays", in_turn(sides, 9, len(documents)), "us per document")
    same(memory)
    sides = {
        OURS: lambda: write_pair(IndexedDatasetBuilder, f"{folder}/{OURS}", documents, whole),
        PEER: lambda: write_pair(peer.IndexedDatasetBuilder, f"{folder}/{PEER}", documents, whole, sync=True),
    }
    times = in_turn(sides, 9, len(documents), clock=time.perf_counter)
    compare("on the disk, by the clock, `fsync` on both sides", times, "us per document")
    same(folder)
    return len(documents)


def same(folder):
    for end in (".bin", ".idx"):
        assert filecmp.cmp(f"{folder}/{OURS}{end}", f"{folder}/{PEER}{end}", shallow=False), f"{end} differ"


def finalizing(folder, peer, scale):
    """Ten million documents of one id. Each round's builder is handed the same state, which was made once."""
    n = int(10_000_000 * scale)
    ids = np.ones(n, np.uint16)
    ours, theirs = (array("i", [1]) * n, array("q", range(n + 1))), ([1] * n, list(range(n + 1)))

    def setup(side):
        if side == OURS:
            builder = IndexedDatasetBuilder(f"{folder}/{side}.bin", np.uint16)
            builder._file.write(ids)
            builder._lengths, builder._documents = ours
        else:
            builder = peer.IndexedDatasetBuilder(f"{folder}/{side}.bin", np.uint16)
            builder.data_file.write(ids)
            builder.sequence_lengths, builder.document_indices = theirs
        return (builder,)

    def finalize(side):
        return lambda builder: builder.finalize(f"{folder}/{side}.idx")

    times = in_turn({side: finalize(side) for side in (OURS, PEER)}, 7, n, setup)
    compare(f"`finalize` of {n:,} documents, CPU time, fsync here and none there", times, "ns per document", 1e9)
    same(folder)
    index = Path(f"{folder}/{OURS}.idx").read_bytes()

    def write_plainly():
        with open(f"{folder}/plain", "wb", buffering=0) as file:
            file.write(index)

    low, middle = (1e9 * value for value in in_turn({OURS: write_plainly}, 7, n)[OURS])
    row(f"floor: one `write` of those {len(index) / 1e6:,.0f} MB", f"{low:.3g} ns ({middle:.3g})")
    return n


MEMORY = """
import sys, os, numpy as np, resource
from array import array
n, side, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def mib(key): return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) / 1024
if side == "sixfold":
    from sixfold.indexed_data import IndexedDatasetBuilder
else:
    sys.path.insert(0, sys.argv[4])
    from indexed_data_helpers import load_peer
    IndexedDatasetBuilder = load_peer().IndexedDatasetBuilder
builder = IndexedDatasetBuilder(f"{folder}/{side}.bin", np.uint16)
before = mib("VmRSS")
if side == "sixfold":
    for i in range(n):
        builder.add_document((i % 60000,))
else:  # the state that its add_document leaves, without the minute that it takes
    builder.sequence_lengths.extend([1] * n)
    builder.document_indices.extend(range(1, n + 1))
held = mib("VmRSS") - before
builder.finalize(f"{folder}/{side}.idx")
print(held, mib("VmHWM") - before)
"""


def building_memory(folder, n):
    figures = {}
    for side in (OURS, PEER):
        command = [sys.executable, "-c", MEMORY, str(n), side, folder, str(HERE.parent / "tests")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures[side] = [float(x) for x in done.stdout.split()[-2:]]
    held, peak = ([figures[side][i] for side in (OURS, PEER)] for i in (0, 1))
    row(f"memory of a builder with {n:,} documents", f"{held[0]:.0f} MiB", f"{held[1]:.0f} MiB", "")
    row("and at the peak of its `finalize`", f"{peak[0]:.0f} MiB", f"{peak[1]:.0f} MiB", f"{peak[1] / peak[0]:.1f}x")


# ---- reading


def opening(folder, peer, n):
    """The pair of ``finalizing``, and one a tenth of it."""
    with IndexedDatasetBuilder(f"{folder}/tenth.bin", np.uint16) as builder:
        builder._file.write(np.ones(n // 10, np.uint16))
        builder._lengths, builder._documents = array("i", [1]) * (n // 10), array("q", range(n // 10 + 1))
    for prefix, count in ((f"{folder}/tenth", n // 10), (f"{folder}/{OURS}", n)):
        sides = {OURS: IndexedDataset, PEER: peer.IndexedDataset}
        repeated = {side: lambda kind=kind, p=prefix: [kind(p) for _ in range(200)] for side, kind in sides.items()}
        compare(f"open, {count:,} documents", in_turn(repeated, 9, 200))


def descriptors(folder, peer):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    counts = {}
    for side, kind in ((OURS, IndexedDataset), (PEER, peer.IndexedDataset)):
        before = len(os.listdir("/proc/self/fd"))
        pairs = [kind(f"{folder}/{OURS}") for _ in range(1000)]
        counts[side] = len(os.listdir("/proc/self/fd")) - before
        del pairs
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    row("descriptors of 1,000 open pairs", counts[OURS], counts[PEER])


def reading(folder, peer, n):
    rng = np.random.default_rng(1)
    kinds = {OURS: IndexedDataset, PEER: peer.IndexedDataset}
    reads, batch = 50_000, 64
    indices = rng.integers(0, n, reads).tolist()
    starts = rng.integers(0, max(1, n - batch), reads // batch).tolist()
    for mmap in (True, False):
        datasets = {side: kind(f"{folder}/{OURS}", mmap=mmap) for side, kind in kinds.items()}
        for i in indices[:100]:
            assert np.array_equal(datasets[OURS][i], datasets[PEER][i])

        def get(dataset):
            for i in indices:
                dataset.get(i)

        def get_slices(dataset):
            for a in starts:
                dataset[a : a + batch]

        name = "mapped" if mmap else "from the file"
        times = in_turn({side: lambda d=d: get(d) for side, d in datasets.items()}, 7, reads)
        compare(f"`get` of a random document, {name}", times, rate=lambda s: f"{1e-3 / s:.0f}k/s")
        times = in_turn({side: lambda d=d: get_slices(d) for side, d in datasets.items()}, 7, len(starts) * batch)
        compare(f"batched: slices of {batch} documents, {name}", times, "us per document")


def verifying(folder, scale):
    n = int(1000 * scale) + 1
    with IndexedDatasetBuilder(f"{folder}/large.bin", np.uint16) as builder:
        block = np.random.default_rng(0).integers(0, 50_000, 2**18).astype(np.uint16)
        for _ in range(n):
            builder.add_document(block)
    tokens = IndexedDataset(f"{folder}/large").tokens
    sides = {
        OURS: lambda: verify(f"{folder}/large", vocab_size=60_000),
        PEER: lambda: (int(tokens.max()), int(tokens.min())),
    }
    times = in_turn(sides, 5, tokens.nbytes)
    texts = [f"{1e-9 / times[side][0]:.1f} GB/s ({1e-9 / times[side][1]:.1f})" for side in (OURS, PEER)]
    row(f"`verify` with every id, {tokens.nbytes / 1e6:,.0f} MB of .bin", texts[0], "none", "")
    row("floor: `max` and `min` of the map in two passes", "", texts[1])


# ---- merging


MERGE = """
import sys, time, numpy as np, gc
side, folder, shards, tests = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
def mib(key): return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) / 1024
prefixes = [f"{folder}/shards/{i}" for i in range(shards)]
if side == "sixfold":
    from sixfold.indexed_data import merge
else:
    sys.path.insert(0, tests)
    from indexed_data_helpers import load_peer
    peer = load_peer()
began = time.process_time(); gc.collect(); collecting = time.process_time() - began
gc.freeze()
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of the imports
before, began = mib("VmRSS"), time.process_time()
if side == "sixfold":
    merge(prefixes, f"{folder}/{side}", overwrite=True)
else:
    builder = peer.IndexedDatasetBuilder(f"{folder}/{side}.bin", np.uint16)
    for prefix in prefixes:
        builder.add_index(prefix)
    builder.finalize(f"{folder}/{side}.idx")
print(time.process_time() - began, mib("VmHWM") - before, collecting)
"""


def merging(folder, scale):
    shards, documents = max(10, int(2000 * scale)), 500
    os.mkdir(f"{folder}/shards")
    rng = np.random.default_rng(2)
    with IndexedDatasetBuilder(f"{folder}/shards/0.bin", np.uint16) as builder:
        for length in rng.integers(500, 1501, documents):
            builder.add_document(rng.integers(0, 50_000, length))
    for i in range(1, shards):
        for end in (".bin", ".idx"):
            shutil.copyfile(f"{folder}/shards/0{end}", f"{folder}/shards/{i}{end}")
    size = os.path.getsize(f"{folder}/shards/0.bin") * shards
    figures = {OURS: [], PEER: []}
    for _ in range(3):
        for side, each in figures.items():
            command = [sys.executable, "-c", MERGE, side, folder, str(shards), str(HERE.parent / "tests")]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            each.append([float(x) for x in done.stdout.split()[-3:]])
        same(folder)
    best = {side: [min(column) for column in zip(*each, strict=True)] for side, each in figures.items()}
    ours, peer = best[OURS], best[PEER]
    what = f"merge of {shards:,} shards, {size / 1e6:,.0f} MB, {documents * shards:,} documents"
    row(what, f"{ours[0]:.2f} s", f"{peer[0]:.2f} s + {shards:,} x gc.collect()", f"{peer[0] / ours[0]:.2f}x")
    row("one `gc.collect()`, the peer calls it for each shard", "none", f"{peer[2] * 1e3:.0f} ms")
    row("memory of that merge at its peak, beside what was loaded", f"{ours[1]:.0f} MiB", f"{peer[1]:.0f} MiB")


# ---- importing, preprocessing


IMPORT = """
import numpy, sys, time
before, began = len(sys.modules), time.process_time()
import {module}
print((time.process_time() - began) * 1e3, len(sys.modules) - before)
"""


def importing(folder):
    figures = {}
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/pyc"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for side, module in ((OURS, "sixfold.indexed_data"), (PEER, "megatron.core.datasets.indexed_dataset")):
        runs = []
        for _ in range(4):  # the first one compiles
            command = [sys.executable, "-W", "ignore", "-c", IMPORT.format(module=module)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            runs.append([float(x) for x in done.stdout.split()[-2:]])
        figures[side] = min(runs)
    ours, peer = figures[OURS], figures[PEER]
    row("import, beside numpy's own", f"{ours[0]:.0f} ms", f"{peer[0]:.0f} ms", f"{peer[0] / ours[0]:.0f}x")
    row("modules it loads beside numpy's", f"{ours[1]:.0f}", f"{peer[1]:.0f}")


def plain_loop(path, output):
    """What one would write without a package, with numpy's arrays from lists."""
    lengths = []
    with open(path, "rb") as lines, open(output, "wb") as data:
        for line in lines:
            ids = [*json.loads(line)["text"].encode(), 256]
            data.write(np.array(ids, np.uint16).tobytes())
            lengths.append(len(ids))


def tuned_loop(path, output):
    """The least that Python can do: no list, no check, no index."""
    with open(path, "rb") as lines, open(output, "wb") as data:
        for line in lines:
            data.write(np.frombuffer(json.loads(line)["text"].encode(), np.uint8).astype(np.uint16))
            data.write(b"\0\1")


def preprocessing(folder, scale):
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(2, 9))) for _ in range(5000)]
    words += ["naïve", '"quoted"', "line\nbreak", "日本"]
    size = 0
    with open(f"{folder}/text.jsonl", "w") as file:
        while size < 200e6 * scale:
            size += file.write(json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(50, 1000)))}) + "\n")
    sides = {
        OURS: lambda: build(f"{folder}/text.jsonl", f"{folder}/text", overwrite=True),
        "plain": lambda: plain_loop(f"{folder}/text.jsonl", f"{folder}/plain"),
        "tuned": lambda: tuned_loop(f"{folder}/text.jsonl", f"{folder}/tuned"),
    }
    times = in_turn(sides, 3, size)
    for name in ("plain", "tuned"):
        assert filecmp.cmp(f"{folder}/text.bin", f"{folder}/{name}", shallow=False), f"the {name} loop differs"
    rates = {side: f"{1e-6 / low:.0f} MB/s ({1e-6 / middle:.0f})" for side, (low, middle) in times.items()}
    row(f"`build` of {size / 1e6:,.0f} MB of jsonl with bytes, per core", rates[OURS], "", "")
    for name, what in (("plain", "a plain loop, lists of ids"), ("tuned", "a loop of json and numpy alone, unchecked")):
        row(what, "", rates[name], f"{times[name][0] / times[OURS][0]:.2f}x")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--folder", help="for the files (default: the system's temporary folder)")
    parser.add_argument("--memory", default="/dev/shm", help="folder of a memory file system (default: /dev/shm)")
    parser.add_argument("--only", choices=("writing",), help="one part of the table")
    options = parser.parse_args()
    peer = load_peer()
    import torch

    cpu = re.search("model name.*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    load = os.getloadavg()[0]
    print(f"{cpu}, {os.cpu_count()} cores, load {load:.1f} at the start; Python {platform.python_version()}, ", end="")
    print(f"numpy {np.__version__}, torch {torch.__version__}; scale {options.scale:g}.\n")
    row("what", "sixfold", "megatron-core 0.16.1", "ratio")
    row("---", "---", "---", "---")
    folder = tempfile.mkdtemp(prefix="indexed-data-", dir=options.folder)
    memory = tempfile.mkdtemp(prefix="indexed-data-", dir=options.memory)
    try:
        n = writing(memory, folder, peer, options.scale)
        if options.only:
            return
        reading(folder, peer, n)
        n = finalizing(folder, peer, options.scale)
        opening(folder, peer, n)
        descriptors(folder, peer)
        building_memory(folder, n)
        verifying(folder, options.scale)
        merging(folder, options.scale)
        importing(folder)
        preprocessing(folder, options.scale)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(memory)
    print(f"\nLoad {os.getloadavg()[0]:.1f} at the end.")


if __name__ == "__main__":
    main()
