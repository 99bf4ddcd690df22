"""From a config to the first samples: prefixes opened and indices built, beside megatron-core's builder.

    OMP_NUM_THREADS=1 pytest packages/blending/benchmarks/bench_builder.py

A start is a new builder over pairs on disk (in the page cache), three parts, then the first sample of each part. P
counts prefixes, so a start makes 3P datasets. megatron-core builds alone, on one thread, into a new cache folder; its
files are not flushed to the disk; ours are, in the orders that have files. A first start is compared with a first
start, and one that finds its files with one that finds them.
"""

import logging
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from megatron_peer import Tokenizer, as_rank_0, peer

from sixfold.blending import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig

indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")

PAIRS, DOCUMENTS, SAMPLES, S = 300, 300, 100_000, 256
SECONDS: dict[tuple[str, ...], float] = {}  # of what was measured so far, for the lines at the end


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """``pairs(P, documents)``: prefixes, written once."""
    made: dict[tuple[int, int], list[str]] = {}

    def write(P, documents):
        if (P, documents) not in made:
            folder = tmp_path_factory.mktemp(f"pairs-{P}-{documents}")
            rng = np.random.default_rng(0)
            for number in range(P):
                ids = rng.integers(1, 256, 600).astype(np.uint16)
                with indexed_data.IndexedDatasetBuilder(str(folder / f"{number}.bin"), dtype=np.uint16) as builder:
                    for length in rng.integers(1, 600, documents).tolist():
                        builder.add_document(ids[:length])
            made[P, documents] = [str(folder / str(number)) for number in range(P)]
        return made[P, documents]

    return write


def fields_of(prefixes, folder=None):
    weights = np.random.default_rng(1).random(len(prefixes)).tolist()
    cache = {} if folder is None else {"path_to_cache": str(folder)}
    return {"random_seed": 1, "sequence_length": S, "split": "90,9,1", "blend": (prefixes, weights)} | cache


def sizes_of(samples):
    return [samples, samples // 10, samples // 1000]


def start(order, prefixes, samples, folder=None, threads=1):
    config = GPTDatasetConfig(
        tokenizer=Tokenizer(), order=order, num_dataset_builder_threads=threads, **fields_of(prefixes, folder)
    )
    parts = BlendedMegatronDatasetBuilder(GPTDataset, sizes_of(samples), lambda: True, config).build()
    return parts, [part[0] for part in parts]


def start_peer(prefixes, samples, folder):
    gpt = peer("gpt_dataset")
    flags = dict.fromkeys(
        ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False
    )
    with as_rank_0():
        config = gpt.GPTDatasetConfig(tokenizer=Tokenizer(), **flags, **fields_of(prefixes, folder))
        builder = peer("blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
        parts = builder(gpt.GPTDataset, sizes_of(samples), lambda: True, config).build()
        return parts, [part[0] for part in parts]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)  # the peer tells of every index
    yield
    logging.disable(logging.NOTSET)


def timed(benchmark, function, *args, setup=None, rounds=5, warmup_rounds=1):
    """The last result; CPU seconds, the least of ``rounds``."""
    benchmark._timer = time.process_time
    result = benchmark.pedantic(function, args, setup=setup, rounds=rounds, warmup_rounds=warmup_rounds)
    return result, benchmark.stats.stats.min


def files_under(*folders):
    return sorted(str(path) for folder in folders for path in Path(folder).rglob("*"))


@pytest.mark.parametrize("P", [30, PAIRS])
def test_stateless_start(benchmark, pairs, P):
    prefixes = pairs(P, DOCUMENTS)
    before = files_under(Path(prefixes[0]).parent)
    _, SECONDS["stateless", str(P)] = timed(benchmark, start, "stateless", prefixes, SAMPLES)
    benchmark.extra_info.update(P=P, documents=DOCUMENTS, samples=SAMPLES)
    assert files_under(Path(prefixes[0]).parent) == before, "no file is written"


@pytest.mark.parametrize("P", [30, PAIRS])
def test_peer_start(benchmark, pairs, P, tmp_path, say):
    prefixes = pairs(P, DOCUMENTS)
    _, seconds = timed(
        benchmark, start_peer, prefixes, SAMPLES, tmp_path / "cache",
        setup=lambda: shutil.rmtree(tmp_path / "cache", ignore_errors=True), rounds=2, warmup_rounds=0,
    )  # fmt: skip
    SECONDS["peer", str(P)] = seconds
    again = min(cpu(start_peer, prefixes, SAMPLES, tmp_path / "cache")[0] for _ in range(2))
    SECONDS["peer from files", str(P)] = again
    written = len(files_under(tmp_path / "cache"))
    assert written > 4 * 3 * P
    ours = SECONDS.get(("stateless", str(P)))
    if ours:
        say(
            f"start of {P} pairs x 3 parts to the first samples: stateless {ours * 1e3:.1f} ms and no file, "
            f"megatron-core {seconds * 1e3:.0f} ms and {written} files: {seconds / ours:.0f}x; from its files, as any "
            f"later start, {again * 1e3:.0f} ms: {again / ours:.0f}x"
        )


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_start_of_an_order_with_files(benchmark, pairs, order, tmp_path, say, monkeypatch):
    """CPU time of the first start and of one that finds the files."""
    prefixes = pairs(PAIRS // 10, DOCUMENTS)
    _, first = timed(
        benchmark, start, order, prefixes, SAMPLES, tmp_path / "cache",
        setup=lambda: shutil.rmtree(tmp_path / "cache", ignore_errors=True), rounds=2, warmup_rounds=0,
    )  # fmt: skip
    again = min(cpu(start, order, prefixes, SAMPLES, tmp_path / "cache")[0] for _ in range(3))
    theirs = [SECONDS.get((what, str(PAIRS // 10)), 0) for what in ("peer", "peer from files")]
    beside = f", megatron-core {theirs[0] * 1e3:.0f} and {theirs[1] * 1e3:.0f} ms" if all(theirs) else ""
    say(
        f"start of {PAIRS // 10} pairs x 3 parts, {order}: {first * 1e3:.0f} ms, from its files "
        f"{again * 1e3:.0f} ms{beside}"
    )


@pytest.mark.parametrize("threads", [1, 8])
def test_builder_threads_wait_for_the_disk_together(pairs, threads, tmp_path, say):
    """Wall time: every index file is flushed to the disk before it counts, and threads share that waiting."""
    prefixes = pairs(30, DOCUMENTS)
    begin = time.perf_counter()
    start("apportioned", prefixes, SAMPLES, tmp_path / "cache", threads)
    seconds = time.perf_counter() - begin
    say(f"start of 30 pairs x 3 parts, apportioned, {threads} builder threads: {seconds:.2f} s of wall time")


def cpu(function, *args):
    """(CPU seconds, result)."""
    begin = time.process_time()
    result = function(*args)
    return time.process_time() - begin, result


def test_growth_of_a_stateless_start(pairs, full_size, say):
    """Ten times the documents, samples or pairs: only pairs cost."""

    def best(P, documents, samples):
        prefixes = pairs(P, documents)
        start("stateless", prefixes, samples)
        return min(cpu(start, "stateless", prefixes, samples)[0] for _ in range(3)) * 1e3

    base = best(30, 300, 10**5)
    rows = {
        "10x documents": best(30, 3_000, 10**5),
        "10x samples": best(30, 300, 10**6),
        "10,000x samples": best(30, 300, 10**9),
        "10x pairs": best(300, 300, 10**5),
    }
    if full_size:
        rows["100x documents"] = best(30, 30_000, 10**5)
        rows["100x pairs"] = best(3_000, 300, 10**5)
    told = ", ".join(f"{name} {milliseconds:.1f}" for name, milliseconds in rows.items())
    say(f"stateless start of 30 pairs of 300 documents for 1e5 samples: {base:.1f} ms; {told}")


def build_on_a_rank(rank, ranks, prefixes, samples, folder):
    """CPU seconds of a rank from its builder to its datasets."""
    import torch.distributed as dist

    dist.all_gather_object([None] * ranks, rank)  # the first exchange of a process loads what later ones need
    config = GPTDatasetConfig(tokenizer=Tokenizer(), order="megatron", **fields_of(prefixes, folder))
    group = dist.group.WORLD if ranks > 1 else None
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes_of(samples), lambda: True, config, group=group)
    return cpu(builder.build)[0]


def test_building_on_two_ranks(pairs, full_size, tmp_path, say):
    ranktest = pytest.importorskip("ranktest", reason="needs tools/ranktest")
    prefixes = pairs(24, 60_000 if full_size else 20_000)
    samples = 4_000_000 if full_size else 1_300_000
    (alone,) = ranktest.run_ranks(build_on_a_rank, 1, prefixes, samples, str(tmp_path / "alone"), timeout=120)
    both = ranktest.run_ranks(build_on_a_rank, 2, prefixes, samples, str(tmp_path / "both"), timeout=120)
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert names == {path.name for path in (tmp_path / "both").iterdir()}
    say(
        f"building on 2 ranks, {len(prefixes)} pairs x 3 parts, CPU: one process {alone:.2f} s, ranks {both[0]:.2f} "
        f"and {both[1]:.2f} s: the busiest {max(both) / alone:.2f} of one process"
    )
