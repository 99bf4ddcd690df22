"""megatron-core 0.16.1 on both sides: the same bytes, and each reads what the other wrote."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_data_helpers import CODES, load_peer, pair_bytes

import sixfold.indexed_data
from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder, merge, verify

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the peer's own

GOLDEN = Path(__file__).parent / "golden"
PAIRS = json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture(scope="module")
def peer():
    module = load_peer()
    gc.freeze()  # its builder collects all garbage in every add_index: 0.1 s each, once torch is loaded
    yield module
    gc.unfreeze()


def random_documents(seed, modes=False):
    """Documents of (ids, mode), with empty sequences and empty documents among them."""
    rng = np.random.default_rng(seed)
    return [
        [(rng.integers(0, 100, rng.integers(0, 7)).tolist(), int(rng.integers(-2, 3)) * modes) for _ in range(n)]
        for n in rng.integers(0, 5, 20)
    ]


def write(builder, documents, tensor=lambda ids: ids):
    for i, document in enumerate(documents):
        if i % 2:
            for ids, mode in document:
                builder.add_item(tensor(ids), mode)
            builder.end_document()
        else:
            ids, lengths = [i for ids, _ in document for i in ids], [len(ids) for ids, _ in document]
            modes = [mode for _, mode in document] if builder.multimodal else None
            builder.add_document(tensor(ids), lengths, modes)


def write_with_peer(peer, prefix, documents, dtype, multimodal):
    torch = pytest.importorskip("torch", reason="megatron-core's builder takes torch tensors")
    builder = peer.IndexedDatasetBuilder(f"{prefix}.bin", dtype, multimodal)
    write(builder, documents, lambda ids: torch.tensor(ids, dtype=torch.int64))
    builder.finalize(f"{prefix}.idx")


def same_sequences(ours, theirs, multimodal):
    assert len(ours) == len(theirs)
    for i in range(len(ours)):
        mine, other = (ours[i], theirs[i]) if multimodal else ((ours[i], 0), (theirs[i], 0))
        assert mine[0].dtype == other[0].dtype
        assert mine[0].tobytes() == other[0].tobytes()
        assert mine[1] == other[1]
    assert np.array_equal(ours.document_indices, theirs.document_indices)


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64, np.float32, np.float64])
def test_both_write_the_same_bytes_and_read_each_others(peer, tmp_path, dtype, multimodal):
    documents = random_documents(seed=7, modes=multimodal)
    write_with_peer(peer, tmp_path / "theirs", documents, dtype, multimodal)
    with IndexedDatasetBuilder(tmp_path / "ours.bin", dtype, multimodal) as builder:
        write(builder, documents)
    assert pair_bytes(tmp_path / "ours") == pair_bytes(tmp_path / "theirs")

    ours = IndexedDataset(tmp_path / "theirs", multimodal)
    assert len(ours) > 0
    same_sequences(ours, peer.IndexedDataset(str(tmp_path / "ours"), multimodal), multimodal)
    assert verify(tmp_path / "theirs", multimodal=multimodal).ok


@pytest.mark.parametrize("multimodal", [False, True])
def test_both_merge_to_the_same_bytes(peer, tmp_path, multimodal):
    prefixes = [str(tmp_path / f"part{i}") for i in range(3)]
    for i, prefix in enumerate(prefixes):
        write_with_peer(peer, prefix, random_documents(i, multimodal), np.uint16, multimodal)
    builder = peer.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), np.uint16, multimodal)
    for prefix in prefixes:
        builder.add_index(prefix)
    builder.finalize(str(tmp_path / "theirs.idx"))
    merge(prefixes, tmp_path / "ours", multimodal=multimodal)
    assert pair_bytes(tmp_path / "ours") == pair_bytes(tmp_path / "theirs")


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_builder_calls_gives_the_peers_bytes(peer, tmp_path, seed):
    """An ``add_document`` after ``add_item`` closes both as one document, there and here."""
    torch = pytest.importorskip("torch", reason="megatron-core's builder takes torch tensors")
    theirs = peer.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), np.uint16)
    ours = IndexedDatasetBuilder(tmp_path / "ours.bin", np.uint16)
    for call in np.random.default_rng(seed).integers(0, 3, 30):
        ids = torch.arange(int(call) + 2)
        for builder in (ours, theirs):
            if call == 0:
                builder.add_item(ids)
            elif call == 1:
                builder.add_document(ids, [1, len(ids) - 1])
            else:
                builder.end_document()
    for builder in (ours, theirs):
        builder.end_document()
        builder.finalize(str(tmp_path / ("ours.idx" if builder is ours else "theirs.idx")))
    assert pair_bytes(tmp_path / "ours") == pair_bytes(tmp_path / "theirs")


@pytest.mark.parametrize("whose", ["ours", "peer"])
def test_a_program_of_megatrons_users_runs_with_its_import_line_changed(peer, tmp_path, whose):
    """Calls as tools/preprocess_data.py, merge_datasets.py and NeMo's scripts write them, by position and by name."""
    torch = pytest.importorskip("torch", reason="megatron-core's builder takes torch tensors")
    lib = sixfold.indexed_data if whose == "ours" else peer
    prefix = str(tmp_path / "wiki_text_document")
    builder = lib.IndexedDatasetBuilder(prefix + ".bin", dtype=lib.DType.optimal_dtype(50_257))
    builder.add_item(torch.IntTensor([1, 2, 3]))
    builder.add_item(torch.tensor([4], dtype=torch.int64), 0)
    builder.end_document()
    builder.add_document([5, 6, 7], [2, 1])
    builder.add_document(torch.LongTensor([50_256]), [1])
    builder.add_document(np.array([8, 9]), lengths=[2], modes=None)
    builder.add_document([10, 11], np.array([1, 1]))
    builder.finalize(prefix + ".idx")

    joined = str(tmp_path / "joined")
    builder = lib.IndexedDatasetBuilder(joined + ".bin", dtype=np.uint16, multimodal=False)
    for each in (prefix, prefix):
        builder.add_index(each)
    builder.finalize(joined + ".idx")

    sequences = [[1, 2, 3], [4], [5, 6], [7], [50_256], [8, 9], [10], [11]]
    assert lib.IndexedDataset.exists(joined)
    for mmap in (True, False):
        dataset = lib.IndexedDataset(joined, mmap=mmap)
        assert len(dataset) == dataset.sequence_lengths.shape[0] == 16
        assert [dataset[i].tolist() for i in range(16)] == sequences * 2
        assert [s.tolist() for s in dataset[2:5]] == sequences[2:5]
        assert dataset.get(0, offset=1, length=2).tolist() == [2, 3]
        assert dataset.get(np.int64(0), np.int32(1)).tolist() == [2, 3]
        assert dataset.document_indices.tolist() == [0, 2, 4, 5, 6, 8, 10, 12, 13, 14, 16]
        assert dataset.get_document_indices().dtype == np.int64
    assert [lib.DType.size(code) for code in range(1, 9)] == [1, 1, 2, 4, 8, 8, 4, 2]
    assert lib.DType.code_from_dtype(np.uint16) == 8
    assert lib.DType.dtype_from_code(4) is np.int32


@st.composite
def shards(draw):
    """(dtype, multimodal, shards): a shard is a list of documents of (ids, mode), and all may be empty."""
    dtype = np.dtype(draw(st.sampled_from(list(CODES))))
    if dtype.kind == "f":
        token = st.floats(width=8 * dtype.itemsize)
    else:
        token = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    multimodal = draw(st.booleans())
    mode = st.integers(-128, 127) if multimodal else st.just(0)
    document = st.lists(st.tuples(st.lists(token, max_size=5), mode), max_size=3)
    return dtype, multimodal, draw(st.lists(st.lists(document, max_size=4), min_size=1, max_size=3))


@pytest.mark.slow
def test_any_dataset_whole_or_merged_is_the_same_bytes_and_reads_the_same_both_ways(
    peer, tmp_path_factory, pytestconfig
):
    torch = pytest.importorskip("torch", reason="megatron-core's builder takes torch tensors")

    @settings(max_examples=max(20, pytestconfig.getoption("--fuzz-cases", 0) // 100), deadline=None)
    @given(data=shards())
    def holds(data):
        dtype, multimodal, parts = data
        folder = tmp_path_factory.mktemp("pairs")
        # The peer takes tensors, and torch has had no uint16 for most of its life: the next larger type holds the same.
        wide = torch.float64 if dtype.kind == "f" else torch.int64
        sides = {
            "theirs": (peer.IndexedDatasetBuilder, lambda ids: torch.tensor(ids, dtype=wide)),
            "ours": (IndexedDatasetBuilder, lambda ids: np.array(ids, dtype)),
        }
        for side, (kind, tensor) in sides.items():
            for i, documents in [*enumerate(parts), ("whole", [d for part in parts for d in part])]:
                builder = kind(str(folder / f"{side}{i}.bin"), dtype.type, multimodal)
                write(builder, documents, tensor)
                builder.finalize(str(folder / f"{side}{i}.idx"))
        names = [*range(len(parts)), "whole"]
        for i in names:
            assert pair_bytes(folder / f"ours{i}") == pair_bytes(folder / f"theirs{i}")

        merge([folder / f"theirs{i}" for i in names[:-1]], folder / "merged", multimodal=multimodal)
        assert pair_bytes(folder / "merged") == pair_bytes(folder / "theirswhole")
        full = [i for i, part in enumerate(parts) if sum(len(ids) for document in part for ids, _ in document)]
        if full:  # the peer cannot open a pair without tokens
            theirs, ours = IndexedDataset(folder / "theirswhole", multimodal), str(folder / "merged")
            same_sequences(theirs, peer.IndexedDataset(ours, multimodal), multimodal)
            joined = peer.IndexedDatasetBuilder(str(folder / "joined.bin"), dtype.type, multimodal)
            for i in full:
                joined.add_index(str(folder / f"ours{i}"))
            joined.finalize(str(folder / "joined.idx"))
            merge([folder / f"ours{i}" for i in full], folder / "again", multimodal=multimodal)
            assert pair_bytes(folder / "again") == pair_bytes(folder / "joined")

    holds()


@pytest.mark.parametrize("name", PAIRS)
def test_golden_pairs_of_the_peer_are_read_and_written_again(tmp_path, name):
    dtype, multimodal, documents = PAIRS[name]
    golden = IndexedDataset(GOLDEN / name, multimodal)
    golden.check()
    assert golden.dtype == dtype
    reads = [
        (golden[i][0].tolist(), golden[i][1]) if multimodal else (golden[i].tolist(), 0) for i in range(len(golden))
    ]
    assert reads == [(ids, mode) for document in documents for ids, mode in document]
    with IndexedDatasetBuilder(tmp_path / "ours.bin", dtype, multimodal) as builder:
        write(builder, documents)
    assert pair_bytes(tmp_path / "ours") == pair_bytes(GOLDEN / name)
