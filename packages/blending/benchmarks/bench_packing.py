"""What packed documents cost: rows, windows, batches, and a start at 1e9 documents.

    OMP_NUM_THREADS=1 python packages/blending/benchmarks/bench_packing.py [--documents 524288] [--only rows,...]

Lengths are drawn: "web" log-normal (median 446, sigma 1.0), "code" log-normal (median 735, sigma 1.4), "heavy" Pareto
(100 tokens at least, exponent 1.1). CPU seconds: the least of several rounds, or what a row says.
"""

import argparse
import contextlib
import os
import tempfile
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np

from sixfold.blending import GPTDataset, GPTDatasetConfig, Split, packing_costs
from sixfold.blending.documents.part import Part
from sixfold.blending.numbers.kernels import Level, forced, levels
from sixfold.blending.samples import packed_rows
from sixfold.blending.samples.best_fit import rows_of
from sixfold.blending.samples.packed_rows import Windows, window_size
from sixfold.blending.source import ListSource

KINDS = ("web", "code", "heavy")


def lengths_of(kind: str, documents: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    if kind == "heavy":
        drawn = 100 * (1 + rng.pareto(1.1, documents))
    else:
        drawn = np.exp(rng.normal(6.1 if kind == "web" else 6.6, 1.0 if kind == "web" else 1.4, documents))
    return np.clip(drawn, 1, 5_000_000).astype(np.int64)


def rows(documents: int) -> None:
    print("| lengths | S | packing | rows / concatenated | padding | documents cut | tokens of loss |\n|" + "---|" * 7)
    for kind in KINDS:
        for S in (2048, 8192):
            lengths = lengths_of(kind, documents)
            costs = packing_costs(lengths, S)
            for cost in costs:
                share = cost.documents_cut / lengths.size
                print(
                    f"| {kind} | {S} | {cost.packing} | {cost.rows / costs[0].rows:.5f} | "
                    f"{cost.padding / (cost.rows * S):.3%} | {share:.2%} | {cost.loss_tokens / lengths.sum():.4f} |"
                )


def windows(documents: int) -> None:
    print(
        "| lengths | S | documents of a window | rows / concatenated | us per document | ms per window |\n|"
        + "---|" * 6
    )
    for kind in KINDS:
        for S in (2048, 8192):
            lengths = lengths_of(kind, documents)
            for size in (2**12, 2**14, 2**16, 2**18):
                begin, found = time.process_time(), 0
                for at in range(0, documents, size):
                    some = lengths[at : at + size]
                    tail = some % S
                    found += int((some // S).sum()) + rows_of(tail[tail > 0], S)
                each = (time.process_time() - begin) / documents
                mark = " (taken)" if size == window_size(S) else ""
                print(
                    f"| {kind} | {S} | {size}{mark} | {found / (lengths.sum() / S):.5f} | {each * 1e6:.3f} | "
                    f"{each * size * 1e3:.2f} |"
                )


def batches(documents: int) -> None:
    lengths = lengths_of("web", 200_000).astype(np.int32)
    source = ListSource([])
    source.sequence_lengths = lengths
    source.dtype = np.dtype(np.uint16)
    source.sequence_pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    source.tokens = np.random.default_rng(0).integers(1, 30_000, int(lengths.sum())).astype(np.uint16)
    source.tokens[np.cumsum(lengths, dtype=np.int64) - 1] = 0
    print("| batch | end to end, documents apart | packed | packed / end to end |\n|" + "---|" * 4)
    for B, S in ((16, 2048), (64, 2048), (16, 8192)):
        found = []
        for packing in ("concatenate", "best_fit"):
            config = GPTDatasetConfig(
                random_seed=1, sequence_length=S, tokenizer=SimpleNamespace(eod=0), create_cu_seqlens=True,
                reset_position_ids=True, packing=packing,
            )  # fmt: skip
            data = GPTDataset(source, "web", range(lengths.size), 0, Split.train, config)
            out, least = data.get_batch(range(B)), float("inf")
            for begin in range(10):
                start = time.process_time()
                for step in range(begin * 50, begin * 50 + 50):
                    data.get_batch(range(step * B, step * B + B), out=out)
                least = min(least, (time.process_time() - start) / 50)
            found.append(B / least)
        print(f"| {B} x {S} | {found[0] / 1e3:.1f}k samples/s | {found[1] / 1e3:.1f}k | {found[1] / found[0]:.2f} |")


WAYS = {  # to make one window ready to give a row
    "16,384 documents, ranges of all rows": {},
    "8,192 documents": {"window": 2**13},
    "4,096 documents": {"window": 2**12},
    "lengths in steps of 16 tokens": {"step": 16},
    "lengths in steps of 64 tokens": {"step": 64},
    "ranges of the row asked alone": {"all_rows": False},
    "best fit in a kernel": {"kernel": True},
    "both of these (taken)": {"all_rows": False, "kernel": True},
}


def ways(documents: int) -> None:
    print("| way | lengths | S | rows / concatenated | ms per window, median |\n|" + "---|" * 5)
    for kind in KINDS:
        lengths = lengths_of(kind, documents)
        for S in (2048, 8192):
            for way, options in WAYS.items():
                found, spent = packed_windows(lengths, S, **options)
                ratio = found / (lengths.sum() / S)
                print(f"| {way} | {kind} | {S} | {ratio:.5f} | {np.median(spent) * 1e3:.2f} |")


def packed_windows(lengths, S, *, window=2**14, step=1, kernel=False, all_rows=True) -> tuple[int, list[float]]:
    """Rows of all windows, and CPU seconds of each: of ``window`` documents, with lengths in steps of ``step`` tokens,
    by a kernel or by NumPy alone, with the ranges of all rows or of one."""
    source = ListSource([])
    source.sequence_lengths = -(-lengths // step)
    source.dtype = np.dtype(np.uint16)
    source.sequence_pointers = (np.cumsum(source.sequence_lengths) - source.sequence_lengths) * 2
    cut = Windows(Part(source, range(lengths.size)), (1, "web", "train"), S // step, "block")
    found, spent = 0, []
    level = contextlib.nullcontext() if kernel else forced(Level.NUMPY)
    with mock.patch.object(packed_rows, "window_size", return_value=window), level:
        for number in range(len(cut)):
            start = time.process_time()
            packed = cut.packed(number)
            rows = packed.edge_R.size - 1
            packed.table(np.arange(rows if all_rows else 1))
            spent.append(time.process_time() - start)
            found += rows
    return found, spent


class Periodic:
    """An array whose items repeat and step: lengths and pointers of any number of documents, in little memory."""

    def __init__(self, period: np.ndarray, step: int, items: int) -> None:
        self._period, self._step, self._items = period, step, items

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, at):
        number = np.arange(*at.indices(self._items)) if isinstance(at, slice) else np.asarray(at)
        found = self._period[number & (self._period.size - 1)]  # a power of two, so that this costs next to nothing
        return found + (number >> self._period.size.bit_length() - 1) * self._step if self._step else found


def billion(_documents: int) -> None:
    """Of more documents than ``--documents`` says, whose lengths are in no memory."""
    for documents, S in ((10**8, 2048), (10**9, 2048), (10**9, 8192)):
        count_open_and_read(documents, S)


def count_open_and_read(documents: int, S: int) -> None:
    period = lengths_of("web", 2**20).astype(np.int32)
    pointers = (np.cumsum(period, dtype=np.int64) - period) * 2
    total = int(period.sum(dtype=np.int64))
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/web"
        for end in ("idx", "bin"):
            open(f"{prefix}.{end}", "wb").close()
        source = SimpleNamespace(
            sequence_lengths=Periodic(period, 0, documents),
            sequence_pointers=Periodic(pointers, total * 2, documents),
            dtype=np.dtype(np.uint16), path_prefix=prefix,
            get=lambda idx, offset=0, length=None: np.ones(length, np.uint16),
        )  # fmt: skip
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=S, packing="best_fit", path_to_cache=folder, max_epochs=None
        )
        start = time.process_time()
        counted = GPTDataset(source, prefix, range(documents), 10, Split.train, config).order
        counting, windows = time.process_time() - start, len(counted.windows)
        before, start = rss_MiB(), time.perf_counter()
        data = GPTDataset(source, prefix, range(documents), 10, Split.train, config)
        opened = time.perf_counter() - start
        data.get_batch(range(16))
        first = time.perf_counter() - start
        size = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith("rows.npy"))
        print(
            f"{documents:.0e} documents, S = {S}, shuffled by {data.document_shuffle}: {windows} windows, "
            f"{size / 2**20:.2f} MiB of counts, counted in {counting:.0f} s ({counting / windows * 1e3:.2f} ms a "
            f"window); opened in {opened:.3f} s, first batch after {first:.3f} s, {rss_MiB() - before:.0f} MiB more"
        )
        start = time.process_time()
        for at in range(0, 20_000, 16):
            data.order.table(np.arange(at, at + 16))
        print(f"rows found one after the other: {(time.process_time() - start) / 20_000 * 1e6:.1f} us per row")
        anywhere = np.random.default_rng(2).integers(0, 3 * data.order.rows, 300).tolist()
        for level in levels():
            spent = []
            with forced(level):
                for at in anywhere:
                    start = time.process_time()
                    data.order.table(np.array([at]))
                    spent.append(time.process_time() - start)
            some = ", ".join(f"{np.percentile(spent, share) * 1e3:.2f}" for share in (50, 90, 100))
            print(f"rows anywhere in three epochs, {level.name}: {some} ms (median, 90 %, most of {len(spent)})")


def rss_MiB() -> float:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=2**19)
    tables = {"rows": rows, "windows": windows, "ways": ways, "batches": batches, "billion": billion}
    parser.add_argument("--only", default=",".join(tables))
    options = parser.parse_args()
    for name in options.only.split(","):
        tables[name](options.documents)
        print()


if __name__ == "__main__":
    main()
