"""Joining pairs: the same bytes as one builder writes, or a typed error and nothing changed."""

import os
import struct

import numpy as np
import pytest
from indexed_data_helpers import pair_bytes, write_pair

from sixfold.indexed_data import IndexedDataError, IndexedDataset, IndexedDatasetBuilder, merge
from sixfold.indexed_data import atomic_files as disk

PARTS = [[[[1, 2], [3]], []], [], [[[4]]]]


@pytest.fixture
def prefixes(tmp_path):
    for i, documents in enumerate(PARTS):
        write_pair(tmp_path / f"part{i}", "uint16", documents)
    return [tmp_path / f"part{i}" for i in range(len(PARTS))]


@pytest.mark.parametrize("kernel", [True, False])
def test_merged_is_what_one_writer_would_have_written(tmp_path, prefixes, monkeypatch, kernel):
    def refuse(*_):
        raise OSError("not here")

    if not kernel:
        monkeypatch.setattr(os, "copy_file_range", refuse)
        monkeypatch.setattr(disk, "BUFFER_BYTES", 3)
    write_pair(tmp_path / "hand", "uint16", [document for part in PARTS for document in part])
    merge(prefixes, tmp_path / "both")
    assert pair_bytes(tmp_path / "both") == pair_bytes(tmp_path / "hand")
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


def test_an_output_may_be_one_of_its_inputs(tmp_path, prefixes):
    write_pair(tmp_path / "hand", "uint16", PARTS[0] + PARTS[0])
    before = pair_bytes(prefixes[0])
    with pytest.raises(IndexedDataError, match=r"part0\.bin is there already; pass overwrite"):
        merge([prefixes[0], prefixes[0]], prefixes[0])
    assert pair_bytes(prefixes[0]) == before
    merge([prefixes[0], prefixes[0]], prefixes[0], overwrite=True)
    assert pair_bytes(prefixes[0]) == pair_bytes(tmp_path / "hand")


def test_documents_can_be_added_before_and_after_a_pair(tmp_path, prefixes):
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16) as builder:
        builder.add_document([9])
        builder.add_index(prefixes[0])
        builder.add_document([8, 8])
    write_pair(tmp_path / "hand", "uint16", [[[9]], *PARTS[0], [[8, 8]]])
    assert pair_bytes(tmp_path / "a") == pair_bytes(tmp_path / "hand")


def test_modes_are_appended(tmp_path):
    write_pair(tmp_path / "a", "uint8", [[[1], [2]]], modes=[1, 2])
    write_pair(tmp_path / "b", "uint8", [[[3]]], modes=[3])
    write_pair(tmp_path / "hand", "uint8", [[[1], [2]], [[3]]], modes=[1, 2, 3])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both", multimodal=True)
    assert pair_bytes(tmp_path / "both") == pair_bytes(tmp_path / "hand")


def damage_a_length(path):
    with open(path, "r+b") as file:
        file.seek(34)
        file.write(struct.pack("<i", -1))


REFUSALS = {
    "another dtype": (lambda d: write_pair(d / "x", "int32", [[[1]]]), "x has dtype int32, .* has uint16"),
    "a damaged index": (
        lambda d: (write_pair(d / "x", "uint16", [[[1], [2]]]), damage_a_length(d / "x.idx")),
        "a length is not negative",
    ),
    "a missing pair": (lambda d: None, "No such file"),
    "unexpected modes": (
        lambda d: write_pair(d / "x", "uint16", [[[1], [2]]], modes=[0, 1]),
        "modes of a multimodal pair",
    ),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_pair_that_cannot_be_added_changes_nothing(tmp_path, prefixes, reason):
    make, message = REFUSALS[reason]
    make(tmp_path)
    with IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16) as builder:
        builder.add_index(prefixes[0])
        with pytest.raises(IndexedDataError, match=message):
            builder.add_index(tmp_path / "x")
        builder.add_index(prefixes[2])
    write_pair(tmp_path / "hand", "uint16", PARTS[0] + PARTS[2])
    assert pair_bytes(tmp_path / "a") == pair_bytes(tmp_path / "hand")
    with pytest.raises(IndexedDataError, match=message):
        merge([prefixes[0], tmp_path / "x"], tmp_path / "both")
    assert not IndexedDataset.exists(tmp_path / "both")


def test_modes_that_are_missing_are_refused(tmp_path, prefixes):
    with pytest.raises(IndexedDataError, match="and the modes"):
        merge([prefixes[0]], tmp_path / "both", multimodal=True)


def test_sequences_outside_documents_do_not_flow_into_an_added_pair(tmp_path, prefixes):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16)
    builder.add_item([1])
    with pytest.raises(IndexedDataError, match="call end_document"):
        builder.add_index(prefixes[0])
    builder.abort()


def test_nothing_to_merge_and_nowhere_to_put_it_are_refused(tmp_path, prefixes):
    with pytest.raises(IndexedDataError, match="nothing to merge"):
        merge([], tmp_path / "both")
    with pytest.raises(IndexedDataError, match="it is a list of path prefixes"):
        merge("part0", tmp_path / "both")
    with pytest.raises(IndexedDataError, match="has no name at its end"):
        merge([tmp_path / "part0"], f"{tmp_path}/")
