"""What users do with pairs: pickle them, replace them, change folders, hand over numbers that look alike."""

import pickle

import numpy as np
import pytest

from sixfold.indexed_data import IndexedDataError, IndexedDataset, IndexedDatasetBuilder


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("other", [[[1, 2, 3], [4]], [[1, 2], [3, 4, 6]], [[1, 2, 3], [4, 5]], [[1]]], ids=str)
def test_a_pickle_refuses_another_pair_of_its_name(tmp_path, other, mmap):
    prefix = write(tmp_path / "a", [[1, 2], [3, 4, 5]])
    kept = pickle.dumps(IndexedDataset(prefix, mmap=mmap))
    assert pickle.loads(kept)[1].tolist() == [3, 4, 5]
    write(tmp_path / "a", [[1, 2], [3, 4, 5]])  # the same, built again or copied
    assert pickle.loads(kept)[1].tolist() == [3, 4, 5]
    write(tmp_path / "a", other)
    with pytest.raises(IndexedDataError, match=r"a: the pair was replaced since it was pickled: it had 2 sequences"):
        pickle.loads(kept)


def test_a_pickle_of_a_relative_path_opens_the_same_pair_in_another_folder(tmp_path, monkeypatch):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a", [[1, 2]] if folder == "one" else [[7, 8]])
    monkeypatch.chdir(tmp_path / "one")
    kept = pickle.dumps(IndexedDataset("a"))
    monkeypatch.chdir(tmp_path / "two")
    assert pickle.loads(kept)[0].tolist() == [1, 2]
    assert pickle.loads(kept).path_prefix == "a", "as it was given, for messages"


def test_document_indices_that_were_set_travel_with_a_pickle(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a", [[1], [2], [3]]))
    dataset.set_document_indices(np.array([0, 3]))
    assert pickle.loads(pickle.dumps(dataset)).document_indices.tolist() == [0, 3]


@pytest.mark.parametrize("number", [True, False, np.True_, 1.0, "1", None], ids=repr)
def test_a_sequence_number_that_is_none_is_refused(tmp_path, number):
    dataset = IndexedDataset(write(tmp_path / "a", [[1], [2], [3]]))
    for read in (dataset.get, dataset.__getitem__):
        with pytest.raises(TypeError):
            read(number)
