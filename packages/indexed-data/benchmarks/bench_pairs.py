"""Writing, finalizing, reading and opening pairs, each beside megatron-core 0.16.1.

    OMP_NUM_THREADS=1 pytest packages/indexed-data/benchmarks -o python_files='bench_*.py' --benchmark-only

CPU time (``time.process_time``) of one thread, page cache warm. Documents have 1,000 tokens in the mean (500 to 1,500);
what both write is compared byte for byte before it is timed.
"""

import time
import warnings

import numpy as np
import pytest

from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder, verify

DOCUMENTS = 5_000
INDEX_DOCUMENTS = 300_000
READS = 50_000
SIDES = ("sixfold", "megatron-core")
each_side = pytest.mark.parametrize("side", SIDES)


@pytest.fixture(scope="module")
def peer():
    pytest.importorskip("megatron.core", reason="needs megatron-core, a peer that only tests use")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 50_000, n).astype(np.uint16) for n in rng.integers(500, 1_501, DOCUMENTS)]


@pytest.fixture(scope="module")
def pair(peer, documents, tmp_path_factory):
    """One prefix, written by us and found equal to the peer's."""
    folder = tmp_path_factory.mktemp("pair")
    for side in SIDES:
        add(side, peer, folder / side, documents).finalize(str(folder / f"{side}.idx"))
    for end in (".bin", ".idx"):
        assert (folder / f"sixfold{end}").read_bytes() == (folder / f"megatron-core{end}").read_bytes()
    return str(folder / "sixfold")


def add(side, peer, prefix, documents):
    """The call that both have: in megatron-core lengths are mandatory."""
    builder = (IndexedDatasetBuilder if side == "sixfold" else peer.IndexedDatasetBuilder)(f"{prefix}.bin", np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    return builder


def timed(benchmark, function, setup=None, rounds=7, **scale):
    benchmark._timer = time.process_time
    benchmark.extra_info.update(scale)
    return benchmark.pedantic(function, setup=setup, rounds=rounds, warmup_rounds=0 if setup else 1)


def convert(documents, kind):
    """The same ids as another type."""
    if kind == "list":
        return [document.tolist() for document in documents]
    return [document.astype(kind) for document in documents]


@pytest.mark.parametrize("kind", ["uint16", "int64", "list"])
@each_side
def test_add_documents(benchmark, peer, documents, tmp_path, side, kind):
    benchmark.group = f"add documents of {kind} into uint16"
    given = convert(documents, kind)
    timed(
        benchmark,
        lambda: add(side, peer, tmp_path / "a", given),
        documents=DOCUMENTS,
        tokens=sum(map(len, documents)),
    )


@each_side
def test_finalize(benchmark, peer, tmp_path, side):
    benchmark.group = "finalize"

    def ready():
        return (add(side, peer, tmp_path / "a", [[1]] * INDEX_DOCUMENTS),), {}

    timed(
        benchmark,
        lambda builder: builder.finalize(str(tmp_path / "a.idx")),
        ready,
        rounds=3,
        documents=INDEX_DOCUMENTS,
    )


@pytest.mark.parametrize("mmap", [True, False], ids=["map", "file"])
@each_side
def test_get_random_documents(benchmark, peer, pair, side, mmap):
    benchmark.group = f"get random documents, {'map' if mmap else 'file'}"
    dataset = (IndexedDataset if side == "sixfold" else peer.IndexedDataset)(pair, mmap=mmap)
    indices = np.random.default_rng(1).integers(0, DOCUMENTS, READS).tolist()

    def read():
        for i in indices:
            dataset.get(i)

    timed(benchmark, read, rounds=5, reads=READS, documents=DOCUMENTS)


@pytest.mark.parametrize("sequences", [1_000, 1_000_000])
@each_side
def test_open(benchmark, peer, tmp_path, side, sequences):
    benchmark.group = f"open 100 times, {sequences} documents"
    add("sixfold", peer, tmp_path / "a", [[1]] * sequences).finalize()
    kind, prefix = IndexedDataset if side == "sixfold" else peer.IndexedDataset, str(tmp_path / "a")

    def open_100():
        for _ in range(100):
            kind(prefix)

    timed(benchmark, open_100, sequences=sequences)


def test_verify_every_id(benchmark, pair, documents):
    """Floor: 1 GB/s of .bin. No peer has it."""
    timed(benchmark, lambda: verify(pair, vocab_size=60_000), bin_bytes=2 * sum(map(len, documents)))
