"""Sizes of the largest runs: 2e9 samples of 1,000 datasets, 5e12 tokens built by many ranks, 5e9 documents.

    OMP_NUM_THREADS=1 pytest packages/blending/benchmarks/bench_scale.py              # under a minute, below 1 GiB
    OMP_NUM_THREADS=1 pytest packages/blending/benchmarks/bench_scale.py --full-size  # minutes, 9 GiB

What is marked "from a slice" is a time per element, measured on a slice in the same run, times the number of elements.
D counts datasets, N samples, R ranks. The peer is megatron-core's compiled helper.
"""

import json
import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from megatron_peer import peer

from sixfold.blending import GPTDataset
from sixfold.blending.blend.exact_counts import ApportionedBlend
from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.builder.rank_shares import build_cost, shares
from sixfold.blending.documents.part import Part
from sixfold.blending.megatron.document_index import plan_epochs
from sixfold.blending.megatron.index_order import build_indices
from sixfold.blending.numbers.largest_remainder import apportion
from sixfold.blending.numbers.permutation import permute_range
from sixfold.blending.order import QuotaTree

N, D, SEED = 2_000_000_000, 1_000, 1234
SLICE = 2**22  # positions of a range, entries of a table
PEER_SLICE = {10: 500_000, 100: 500_000, 1_000: 100_000, 10_000: 10_000}
TOKENS, S, DOCUMENT_TOKENS = 5 * 10**12, 4096, 1_000


def weights_of(datasets):
    return np.random.default_rng(0).random(datasets).tolist()


def cpu(function, *args, rounds=1):
    """(least CPU seconds, last result)."""
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        result = function(*args)
        seconds.append(time.process_time() - begin)
    return min(seconds), result


def peer_ns(datasets):
    """Nanoseconds per sample of the peer's blend."""
    size, weights = PEER_SLICE[datasets], np.array(weights_of(datasets))
    dataset, sample = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    args = (dataset, sample, weights / weights.sum(), datasets, size, False)
    return cpu(peer("helpers").build_blending_indices, *args, rounds=2)[0] / size * 1e9


def apportioned(weights, size):
    blend = ApportionedBlend(apportion(weights, size), Shuffle(SEED, size), S)
    return blend, blend.locate(np.zeros(1, dtype=np.int64))


def stateless(weights, size):
    tree = QuotaTree(weights)
    return tree, tree.locate([0])


def ms(seconds):
    return (
        f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
    )


@pytest.mark.timeout(900)
def test_two_billion_apportioned_samples_of_a_thousand_datasets(full_size, say):
    """The blend alone, as the peer's helper is: the indices of the datasets, which both build, are not in it."""
    first, (blend, _) = cpu(apportioned, weights_of(D), N, rounds=5)
    shuffle = Shuffle(SEED, N)
    if full_size:
        table_s, table = cpu(lambda: shuffle.table)
        assert table.dtype == np.uint32
        assert int(table.max()) == N - 1
        anywhere = np.random.default_rng(0).integers(0, N, SLICE // 4)
        looked, sent = cpu(table.__getitem__, anywhere)
        computed, same = cpu(shuffle.at, anywhere)
        assert np.array_equal(sent, same)
        looked_ns, computed_ns = (seconds / anywhere.size * 1e9 for seconds in (looked, computed))
        say(
            f"a random position of the shuffle of 2e9: {looked_ns:.0f} ns looked up in the table, "
            f"{computed_ns:.0f} ns computed"
        )
        del table
        how = "made in full"
    else:
        table = np.empty(SLICE, dtype=np.uint32)
        table_s, how = cpu(permute_range, shuffle._key, N, 12_345_678, table)[0] / SLICE * N, "from a slice"
    positions = np.arange(10**9, 10**9 + SLICE)
    range_ns = cpu(blend.locate, positions)[0] / SLICE * 1e9
    theirs = peer_ns(D) * N * 1e-9
    say(
        f"apportioned, N = 2e9, D = 1,000: {ms(first)} from the weights to the first (dataset, sample); the whole "
        f"table of the shuffle, which it does not wait for, {ms(table_s)} ({how}); a range {range_ns:.0f} ns a position"
    )
    say(
        f"  megatron-core's compiled helper {ms(theirs)} (from a slice): {theirs / first:,.0f}x, with the wait for the "
        f"whole table {theirs / (first + table_s):.0f}x, all 2e9 (dataset, sample) made "
        f"{theirs / (first + range_ns * N * 1e-9):.1f}x"
    )
    assert theirs > 20 * first


@pytest.mark.parametrize("order", [apportioned, stateless], ids=lambda order: order.__name__)
def test_growth_by_ten_of_samples_and_of_datasets(order, say):
    samples = [f"{ms(cpu(order, weights_of(D), size, rounds=3)[0])}" for size in (2 * 10**6, 2 * 10**7, 2 * 10**8, N)]
    datasets, theirs = [], []
    for number in (10, 100, 1_000, 10_000):
        datasets.append(ms(cpu(order, weights_of(number), N, rounds=3)[0]))
        theirs.append(ms(peer_ns(number) * N * 1e-9))
    name = order.__name__
    say(f"{name}, weights to the first index: D = 1,000, N = 2e6, 2e7, 2e8, 2e9: {', '.join(samples)}")
    peers = ", ".join(theirs)
    say(f"  N = 2e9, D = 10, 100, 1,000, 10,000: {', '.join(datasets)}; megatron-core (from slices): {peers}")


class Lengths:
    """Documents of 1 to 2,000 tokens without a token."""

    dtype = np.dtype(np.uint32)

    def __init__(self, documents, seed=0):
        self.sequence_lengths = np.random.default_rng(seed).integers(1, 2 * DOCUMENT_TOKENS, documents).astype(np.int32)
        self.sequence_pointers = (np.cumsum(self.sequence_lengths, dtype=np.int64) - self.sequence_lengths) * 4


DOCUMENTS, CYCLE = 5_000_000_000, np.array([100, 700, 300, 500])  # tokens of four documents, and again of the next four
START = """
import json, sys, time
from sixfold.blending import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig

def resident():
    return {line.split()[0]: int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("Vm")}

def start(cls, prefix, shuffle):
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=4096, split="99,1,0", blend=([prefix], None), dataset_names={prefix: "corpus"},
        document_shuffle=shuffle,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(cls, [10**9, 1000, 0], lambda: True, config).build()
    return train, valid, train.get_batch(range(8)), valid.get_batch(range(8))

if __name__ == "__main__":
    import sixfold.indexed_data  # the reader is loaded before the clock runs, as numpy is
    before, wall, cpu = resident(), time.perf_counter(), time.process_time()
    train, valid, *_ = start(GPTDataset, *sys.argv[1:])
    wall, cpu, after = time.perf_counter() - wall, time.process_time() - cpu, resident()
    ranges = [[r.document, r.offset, r.length] for p in range(8) for r in (*train.why(p).ranges, *valid.why(p).ranges)]
    print(json.dumps([wall, cpu, after["VmRSS:"] - before["VmRSS:"], after["VmHWM:"], ranges]))
"""


class Recorded:
    """An array that is a function of the index, and remembers which were read."""

    def __init__(self, function, dtype):
        self.function, self.dtype, self.read = function, np.dtype(dtype), set()

    def __len__(self):
        return DOCUMENTS

    def __getitem__(self, key):
        key = np.arange(*key.indices(DOCUMENTS)) if isinstance(key, slice) else np.asarray(key, dtype=np.int64)
        self.read.update(key.reshape(-1).tolist())
        return self.function(key).astype(self.dtype)[()]


def pointer(number):
    before = np.cumsum(CYCLE) - CYCLE
    return 2 * (number // 4 * int(CYCLE.sum()) + before[number % 4])


class Corpus:
    """5e9 documents as formulas."""

    dtype, tokens = np.dtype(np.uint16), None

    def __init__(self):
        self.sequence_lengths = Recorded(lambda number: CYCLE[number % 4], np.int32)
        self.sequence_pointers = Recorded(pointer, np.int64)

    def get(self, idx, offset=0, length=None):
        return np.zeros(int(CYCLE[idx % 4]) - offset if length is None else length, dtype=np.uint16)


def write_sparse(prefix, corpus):
    """A pair of 5e9 documents with holes where a start does not look: a wrong look would find zeros, and raise."""
    size = 34 + 4 * DOCUMENTS + 8 * DOCUMENTS + 8 * (DOCUMENTS + 1)
    with open(f"{prefix}.idx", "wb") as file:
        file.truncate(size)
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, DOCUMENTS, DOCUMENTS + 1))
        for number in {*corpus.sequence_lengths.read, DOCUMENTS - 1}:
            os.pwrite(file.fileno(), struct.pack("<i", CYCLE[number % 4]), 34 + 4 * number)
        for number in {*corpus.sequence_pointers.read, DOCUMENTS - 1}:
            os.pwrite(file.fileno(), struct.pack("<q", pointer(number)), 34 + 4 * DOCUMENTS + 8 * number)
        os.pwrite(file.fileno(), struct.pack("<q", DOCUMENTS), size - 8)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * DOCUMENTS * int(CYCLE.mean()))


@pytest.mark.parametrize(("shuffle", "most"), [("block", 200 * 10**6), ("auto", 10**9)])
def test_five_billion_documents_start_in_the_stateless_order(tmp_path, say, shuffle, most):
    """In a fresh process, from a pair on disk: files of 100 GB and 4 TB, of which only what is read takes room.

    "auto" shuffles the 5e7 documents of valid as a whole and sums up lengths of some 1 % of them, in as many pages.
    """
    corpus, names = Corpus(), {"__name__": "start"}
    exec(START, names)  # the same start once over formulas tells which numbers it looks at

    class CorpusDataset(GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            return corpus

    prefix = str(tmp_path / "corpus")
    train, valid, *_ = names["start"](CorpusDataset, prefix, shuffle)
    why = [part for position in range(8) for data in (train, valid) for part in data.why(position).ranges]
    write_sparse(prefix, corpus)
    ran = subprocess.run([sys.executable, "-c", START, prefix, shuffle], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    wall, cpu_s, grown, peak, ranges = json.loads(ran.stdout)
    assert ranges == [[part.document, part.offset, part.length] for part in why]
    assert any(document > 2**31 for document, _, _ in ranges)
    say(
        f"5e9 documents in one pair, {shuffle}, builder to a batch of 8 of train and of valid: {wall * 1e3:.0f} ms "
        f"({cpu_s * 1e3:.0f} ms CPU), {grown / 2**20:.0f} MiB more resident, {peak / 2**20:.0f} MiB at the peak"
    )
    assert cpu_s < 1  # the wall is the machine's too
    assert grown < most


def built(part, samples):
    plan = plan_epochs(part.tokens, samples, S, 1)
    return build_indices(part, plan, SEED)


def corpus(tokens, datasets=D):
    """Tokens of each dataset: lognormal, the largest some fifteen times the mean."""
    sizes = np.random.default_rng(0).lognormal(0, 1, datasets)
    return (sizes / sizes.sum() * tokens).astype(np.int64)


def test_five_trillion_tokens_built_by_many_ranks(say):
    """Time per entry from one real build; shares of the full size; and of real builds of 1e-5 the size."""
    scale = 10**5
    documents = (corpus(TOKENS) // (DOCUMENT_TOKENS * scale) + 1).tolist()
    small = [Part(Lengths(some, seed), range(some)) for seed, some in enumerate(documents)]
    costs = [build_cost(len(part), part.tokens, None, S) for part in small]
    measured = [cpu(built, part, None)[0] for part in small]
    large = Part(Lengths(2_000_000), range(2_000_000))
    entry_s = cpu(built, large, None)[0] / build_cost(len(large), large.tokens, None, S)
    full = [build_cost(int(tokens) // DOCUMENT_TOKENS, int(tokens), None, S) for tokens in corpus(TOKENS)]
    one = sum(full) * entry_s
    say(
        f"5e12 tokens, {D:,} datasets, 5e9 documents, S = {S}: {sum(full):.2e} entries of {entry_s * 1e9:.0f} ns "
        f"(from 2e6 documents); one rank {ms(one)}"
    )
    for ranks in (2, 8, 64, 512):
        planning, plan = cpu(shares, full, ranks)
        loads = [sum(full[number] for number in share) for share in plan]
        tried = [sum(measured[number] for number in share) for share in shares(costs, ranks)]
        busiest, uneven = max(loads), max(tried) / (sum(tried) / ranks)
        say(
            f"  R = {ranks}: plan {ms(planning)}, busiest {busiest / sum(full):.4f} of one rank, "
            f"{busiest / (sum(full) / ranks):.2f} of the mean ({uneven:.2f} in CPU time of real "
            f"builds of 1e-5 the size), {ms(busiest * entry_s)}"
        )
    say(f"  the largest dataset, which one rank builds, is {max(full) / sum(full):.4f} of all")
