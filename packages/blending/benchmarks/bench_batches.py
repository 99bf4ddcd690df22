"""Batches of 16 x 2,048 beside megatron-core's GPTDataset, litdata's TokensLoader, Grain's mix and a plain copy.

    OMP_NUM_THREADS=1 pytest packages/blending/benchmarks/bench_batches.py

A pair of uint16 ids in the page cache, documents of 1,000 tokens on average, each position another place; megatron-core
reads it by its own IndexedDataset. CPU time, both sides in turn, the least of the rounds. Equal work is
``test_loaders_as_users_write_them``: both through a torch loader, to stacked tensors. Elsewhere the peer's samples are
left as its ``__getitem__`` returns them, one by one (less than a loader does), ours are whole batches, and in
``order="megatron"`` they are compared bit for bit.
"""

import json
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from megatron_peer import Tokenizer, as_rank_0, peer

from sixfold.blending import BlendedDataset, GPTDataset, GPTDatasetConfig, Prefetcher, Split
from sixfold.blending.documents.idx_bin import open_prefix

B, S, BATCHES, MEAN = 16, 2048, 40, 1000
BOUNDARIES = {"reset_position_ids": True, "eod_mask_loss": True, "create_cu_seqlens": True, "create_document_ids": True}
DOCUMENTS = [2_000, 20_000, 200_000]
LARGE = 100_000  # documents of 200 MB, read only where the full size is asked for


class Source:
    """Documents of random ids that end in 0, in memory."""

    dtype = np.dtype(np.uint16)

    def __init__(self, documents, seed=0, mean=MEAN):
        rng = np.random.default_rng(seed)
        self.sequence_lengths = rng.integers(1, 2 * mean, documents).astype(np.int32)
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        self.sequence_pointers = (ends - self.sequence_lengths) * 2
        self.tokens = rng.integers(1, 256, int(ends[-1]), dtype=np.uint16)
        self.tokens[ends - 1] = 0

    def get(self, idx, offset=0, length=None):
        begin = int(self.sequence_pointers[idx]) // 2 + offset
        end = begin + (int(self.sequence_lengths[idx]) - offset if length is None else length)
        return self.tokens[begin:end]


def config(**fields):
    return GPTDatasetConfig(random_seed=1, sequence_length=S, tokenizer=Tokenizer(), **fields)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """``pair(documents)``: the prefix of one, written once."""
    indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")
    written: dict[int, str] = {}

    def write(documents):
        if documents not in written:
            written[documents] = str(tmp_path_factory.mktemp("pairs") / str(documents))
            source = Source(documents)
            with indexed_data.IndexedDatasetBuilder(f"{written[documents]}.bin", dtype=np.uint16) as builder:
                for number in range(documents):
                    builder.add_document(source.get(number))
        return written[documents]

    return write


def opened(prefix):
    return open_prefix(prefix, mmap=True)


def dataset(source, folder=None, **fields):
    documents = len(source.sequence_lengths)
    cache = {} if folder is None else {"path_to_cache": str(folder)}
    samples = None if fields.get("order") == "megatron" else 10**9
    return GPTDataset(source, "a", range(documents), samples, Split.train, config(**cache, **fields))


def peer_dataset(prefix, folder, *, mask):
    """megatron-core's, with document boundaries in a mask of S x S if ``mask``."""
    pytest.importorskip("torch", reason="megatron-core needs torch")
    gpt = peer("gpt_dataset")
    flags = {"reset_position_ids": mask, "reset_attention_mask": mask, "eod_mask_loss": mask}
    with as_rank_0():
        from megatron.core.datasets.utils import Split as PeerSplit

        made = gpt.GPTDatasetConfig(
            random_seed=1, sequence_length=S, tokenizer=Tokenizer(), split="1", blend=(["a"], None),
            create_attention_mask=mask, path_to_cache=str(folder), **flags,
        )  # fmt: skip
        source = peer("indexed_dataset").IndexedDataset(prefix, multimodal=False, mmap=True)
        documents = np.arange(len(source.sequence_lengths), dtype=np.int32)
        return gpt.GPTDataset(source, "a", documents, None, PeerSplit.train, made)


def seconds_of(function, *args):
    begin = time.process_time()
    function(*args)
    return time.process_time() - begin


def in_turn(benchmark, ours, theirs, our_samples, their_samples, rounds=5):
    """(samples per second of ours, of theirs); the peer's turn is before each of ours."""
    seconds = []
    benchmark._timer = time.process_time
    benchmark.pedantic(ours, setup=lambda: seconds.append(seconds_of(theirs)), rounds=rounds, warmup_rounds=1)
    rates = our_samples / benchmark.stats.stats.min, their_samples / min(seconds)
    benchmark.extra_info.update(samples_per_s=rates[0], peer_samples_per_s=rates[1], ratio=rates[0] / rates[1])
    return rates


def told(what, rates, whom):
    return (
        f"{what}: {rates[0] / 1e3:.1f}k samples/s, beside {rates[1] / 1e3:.2f}k of {whom}: {rates[0] / rates[1]:.1f}x"
    )


@pytest.fixture
def documents(request, full_size):
    if request.param > LARGE and not full_size:
        pytest.skip("100 million tokens and more: --full-size")
    return request.param


def read(data, out=None):
    for step in range(BATCHES):
        data.get_batch(range(step * B, step * B + B), out=out)


@pytest.mark.parametrize("way", ["stateless", "stateless, into out=", "megatron, into out="])
@pytest.mark.parametrize("documents", DOCUMENTS, indirect=True)
def test_batches_beside_megatron_core(benchmark, say, tmp_path, pair, documents, way):
    source = opened(pair(documents))
    theirs = peer_dataset(pair(documents), tmp_path / "peer", mask=False)
    order = way.split(",")[0]
    data = dataset(source, tmp_path if order == "megatron" else None, order=order)
    out = data.get_batch(range(B)) if "out=" in way else None
    if order == "megatron":
        batch = data.get_batch(range(B))
        for n in range(B):
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert np.array_equal(batch[name][n], theirs[n][name].numpy()), (n, name)
    rates = in_turn(
        benchmark, lambda: read(data, out), lambda: [theirs[n] for n in range(8 * B)], B * BATCHES, 8 * B
    )  # fmt: skip
    say(told(f"{documents:,} documents, {way}", rates, "GPTDataset"))


@pytest.mark.parametrize("shuffle", ["global", "block"])
@pytest.mark.parametrize("documents", DOCUMENTS, indirect=True)
def test_loaders_as_users_write_them(benchmark, say, tmp_path, pair, documents, shuffle):
    """Equal work: both sides end with stacked tensors from a torch loader without workers.

    Theirs is ``DataLoader(dataset, batch_size=B)``, which collates; ours reads whole batches of a PositionSampler.
    """
    torch = pytest.importorskip("torch", reason="loaders are torch's")
    from sixfold.blending.torch import PositionSampler

    theirs = peer_dataset(pair(documents), tmp_path / "peer", mask=False)
    data = dataset(opened(pair(documents)), document_shuffle=shuffle)
    end = B * BATCHES

    def ours():
        loader = torch.utils.data.DataLoader(data, sampler=PositionSampler(0, B, end=end), batch_size=None)
        assert [tuple(batch["tokens"].shape) for batch in loader] == [(B, S)] * BATCHES

    def peers():
        loader = torch.utils.data.DataLoader(theirs, batch_size=B, sampler=range(min(end, len(theirs)) // B * B))
        assert {tuple(batch["tokens"].shape) for batch in loader} == {(B, S)}

    rates = in_turn(benchmark, ours, peers, end, min(end, len(theirs)) // B * B, rounds=3)
    say(told(f"{documents:,} documents, {shuffle}, both through a DataLoader", rates, "GPTDataset"))


@pytest.mark.parametrize("documents", DOCUMENTS[:2], indirect=True)
def test_document_boundaries_beside_megatron_core(benchmark, say, tmp_path, pair, documents):
    """Ours as cu_seqlens and document_ids, the peer's as a mask of S x S; positions and loss are compared."""
    source = opened(pair(documents))
    theirs, data = peer_dataset(pair(documents), tmp_path / "peer", mask=True), dataset(source, **BOUNDARIES)
    same = dataset(source, tmp_path, order="megatron", **BOUNDARIES).get_batch([0, 1])
    for n in range(2):
        sample = theirs[n]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(same[name][n], sample[name].numpy()), name
    out = data.get_batch(range(B))
    rates = in_turn(benchmark, lambda: read(data, out), lambda: [theirs[n] for n in range(8)], B * BATCHES, 8, rounds=3)
    say(told(f"{documents:,} documents, with document boundaries", rates, "GPTDataset"))


@pytest.mark.parametrize("D", [1, 10, 100, 1_000])
def test_blends_of_many_datasets_beside_one(benchmark, say, full_size, D):
    """Each dataset is a source of its own with its own map; the floor is the first of them alone."""
    if D > 100 and not full_size:
        pytest.skip("a thousand sources: --full-size")
    sources = [Source(3000, number, mean=400) for number in range(D)]
    made = config()
    parts = [GPTDataset(source, str(n), range(3000), 0, Split.train, made) for n, source in enumerate(sources)]
    weights = np.random.default_rng(0).random(D).tolist()
    blend, alone = BlendedDataset(parts, weights, 10**9, made), dataset(sources[0])
    out, alone_out = blend.get_batch(range(B)), alone.get_batch(range(B))
    rates = in_turn(
        benchmark, lambda: read(blend, out), lambda: read(alone, alone_out), B * BATCHES, B * BATCHES
    )  # fmt: skip
    say(told(f"a blend of D = {D:,}", rates, "one dataset alone"))


@pytest.mark.parametrize("at_a_time", [1, B])
@pytest.mark.parametrize("D", [10, 100, 1_000])
def test_which_dataset_a_position_is_beside_grain(benchmark, say, D, at_a_time):
    """Random positions. Equal work is one a call, on both sides.

    Grain selects one by one whatever is asked (its ``_getitems`` loops); ours, 16 a call, is what ``get_batch`` does.
    """
    grain = pytest.importorskip("grain", reason="needs grain, a peer that only benchmarks use")
    weights = (np.random.default_rng(0).random(D) + 0.01).tolist()
    mixed = grain.MapDataset.mix([grain.MapDataset.range(10**9) for _ in range(D)], weights=weights)
    source, made = Source(2000), config()
    parts = [GPTDataset(source, str(n), range(2000), 0, Split.train, made) for n in range(D)]
    blend = BlendedDataset(parts, weights, 10**9, made)
    positions = np.random.default_rng(1).integers(0, len(mixed), 200 * B)
    ours = positions.reshape(-1, at_a_time).tolist()
    rates = in_turn(
        benchmark, lambda: [blend.locate(some) for some in ours],
        lambda: [mixed._selection_map[n] for n in positions[: 10 * B].tolist()], positions.size, 10 * B,
    )  # fmt: skip
    say(told(f"position to dataset and sample, D = {D:,}, {at_a_time} a call", rates, "Grain's mix, one by one"))


def tokens_loader(folder, source):
    """(litdata's TokensLoader over the same ids in one chunk, blocks in it, arguments behind the block's number)."""
    torch = pytest.importorskip("torch", reason="litdata needs torch")
    loaders = pytest.importorskip(
        "litdata.streaming.item_loader", reason="needs litdata, a peer that only benchmarks use"
    )
    from litdata.streaming.serializers import _SERIALIZERS
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=2**32 - 1, item_loader=loaders.TokensLoader(S + 1))
    writer[0] = torch.from_numpy(source.tokens)
    writer.done()
    writer.merge(1)
    index = json.loads((folder / "index.json").read_text())
    loader = loaders.TokensLoader(S + 1)
    loader.setup(index["config"], index["chunks"], _SERIALIZERS)
    path = Path(folder, index["chunks"][0]["filename"])
    loader.pre_load_chunk(0, str(path))
    return loader, index["chunks"][0]["dim"] // (S + 1), (0, str(path), 0, path.stat().st_size)


@pytest.mark.filterwarnings("ignore")
def test_batches_beside_litdata(benchmark, say, tmp_path):
    """Both sides end with new arrays of whole batches: theirs stacked, as its loader's collate function does.

    Its loader copies S + 1 ids of a chunk from a known place, in their type: no labels, masks or documents, no search.
    """
    source = Source(20_000)
    loader, blocks, where = tokens_loader(tmp_path, source)
    numbers = np.random.default_rng(0).integers(0, blocks, (BATCHES, B)).tolist()
    assert np.array_equal(loader.load_item_from_chunk(3, *where).numpy(), source.tokens[3 * (S + 1) :][: S + 1])
    from torch.utils.data import default_collate

    data = dataset(source)
    rates = in_turn(
        benchmark, lambda: read(data),
        lambda: [default_collate([loader.load_item_from_chunk(n, *where) for n in batch]) for batch in numbers],
        B * BATCHES, B * BATCHES,
    )  # fmt: skip
    say(told("all arrays of a batch", rates, "litdata's TokensLoader, stacked (ids alone)"))


def test_batches_beside_a_copy_from_known_places(benchmark, say):
    """The floor: numpy copies S + 1 ids of each sample to the same arrays, and writes the masks."""
    source = Source(20_000)
    data = dataset(source)
    out = data.get_batch(range(B))
    begins = np.random.default_rng(0).integers(0, source.tokens.size - S - 1, (BATCHES, B)).tolist()
    place = np.arange(S)

    def copy():
        for batch in begins:
            for row, begin in enumerate(batch):
                out["tokens"][row] = source.tokens[begin : begin + S]
                out["labels"][row] = source.tokens[begin + 1 : begin + S + 1]
            out["loss_mask"][...] = 1
            out["position_ids"][...] = place

    rates = in_turn(benchmark, lambda: read(data, out), copy, B * BATCHES, B * BATCHES)
    say(told("all arrays of a batch", rates, "numpy copying from known places"))


def test_a_prefetcher_beside_reading_in_the_loop(benchmark, say):
    """Wall time of a loop that computes for 1 ms per batch without the GIL's help: sorting, in numpy."""
    source, work = Source(20_000), np.random.default_rng(0).random(20_000)
    data = dataset(source)
    ranges = [range(low, high) for low, high in pairwise(range(0, (BATCHES + 1) * B, B))]

    def step(_):
        np.sort(work)

    def ahead():
        with Prefetcher(data, ranges, make_out=lambda: data.get_batch(range(B))) as batches:
            for batch in batches:
                step(batch)

    seconds = []

    def plain():
        begin = time.perf_counter()
        for some in ranges:
            step(data.get_batch(some))
        seconds.append(time.perf_counter() - begin)

    benchmark.pedantic(ahead, setup=plain, rounds=5, warmup_rounds=1)
    per_batch_us = [least / BATCHES * 1e6 for least in (benchmark.stats.stats.min, min(seconds))]
    benchmark.extra_info.update(us=per_batch_us[0], floor_us=per_batch_us[1])
    say(f"a step of 1 ms, wall time: {per_batch_us[0]:.0f} us read ahead, {per_batch_us[1]:.0f} us read in the loop")
