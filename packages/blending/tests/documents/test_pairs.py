"""Real .idx/.bin pairs: why(n) tells the very bytes, damage raises, missing prefixes are named."""

import pickle

import numpy as np
import pytest
from blending_helpers import config, sequences_of

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset

indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which reads prefixes")

LENGTHS = {"wiki": [30, 0, 7, 55, 2, 19], "code": [8, 90, 41]}


@pytest.fixture
def prefixes(tmp_path):
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        with indexed_data.IndexedDatasetBuilder(tmp_path / f"{name}.bin", dtype=np.uint16) as builder:
            for sequence in sequences_of(lengths, number):
                builder.add_document(sequence)
    return [str(tmp_path / name) for name in LENGTHS]


def build(prefixes, size=60, **fields):
    made = config(blend=(prefixes, [0.7, 0.3]), split="1", create_cu_seqlens=True, **fields)
    return BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, made).build()[0]


def test_the_ranges_of_why_reproduce_the_tokens_from_the_files_bytes(prefixes):
    data = build(prefixes)
    for position in range(60):
        why = data.why(position)
        assert why.position == position
        assert (why.dataset_id, why.sample) == tuple(int(array[0]) for array in data.locate([position]))
        assert prefixes[why.dataset_id].endswith(f"/{why.dataset_name}")
        ids = []
        for part in why.ranges:
            assert part.path == f"{prefixes[why.dataset_id]}.bin"
            with open(part.path, "rb") as file:
                file.seek(part.byte_begin)
                ids += np.frombuffer(file.read(part.byte_end - part.byte_begin), dtype=np.uint16).tolist()
            assert part.byte_end - part.byte_begin == 2 * part.length
        assert data[position]["tokens"].tolist() == ids
        assert f"position {position}: sample {why.sample}" in str(why)


def test_with_and_without_a_memory_map_and_after_pickling_it_is_the_same(prefixes):
    data = build(prefixes)
    expected = data.get_batch(range(60))
    for other in (build(prefixes, mmap_bin_files=False), pickle.loads(pickle.dumps(data))):
        batch = other.get_batch(range(60))
        assert {name: array.tolist() for name, array in batch.items()} == {
            name: array.tolist() for name, array in expected.items()
        }


def test_a_missing_prefix_is_named(prefixes, tmp_path):
    with pytest.raises(BlendingError, match=r"nowhere\.idx or .*nowhere\.bin is missing"):
        build([prefixes[0], str(tmp_path / "nowhere")])


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_cut_pair_raises_and_names_the_prefix(prefixes, suffix):
    with open(prefixes[1] + suffix, "r+b") as file:
        file.truncate(60)
    with pytest.raises(indexed_data.IndexedDataError, match="code"):
        build(prefixes).get_batch(range(60))


def test_lengths_that_do_not_fit_their_pointers_raise_and_never_give_other_tokens(prefixes):
    sound = build(prefixes).get_batch(range(60))["tokens"]
    with open(prefixes[1] + ".idx", "r+b") as file:  # lengths of sequences 0 and 1: one less, one more
        file.seek(34)
        file.write(np.array([7, 91], dtype="<i4").tobytes())
    data, refused = build(prefixes), 0
    for position in range(60):
        try:
            tokens = data[position]["tokens"]
        except indexed_data.IndexedDataError:
            refused += 1
        else:
            assert np.array_equal(tokens, sound[position])
    assert refused > 5


def test_pointers_that_run_backwards_raise(prefixes):
    with open(prefixes[1] + ".idx", "r+b") as file:
        file.seek(34 + 4 * 3 + 8)
        file.write(np.array([900], dtype="<i8").tobytes())
    with pytest.raises((indexed_data.IndexedDataError, BlendingError)):
        build(prefixes).get_batch(range(60))
