"""Remedies of indexed-data's errors: the error is provoked, its remedy is done, and gives what it promises.

The form of a case is in remedy_helpers.py. Where an error gives the value of its remedy, the case reads it there.
"""

import ast
import os
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from remedy_data import ids_of, pair, texts
from remedy_helpers import follow, said_by

from sixfold.blending import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig
from sixfold.indexed_data import DType, IndexedDataset, IndexedDatasetBuilder, RemoteOptions, build, filter_pair, merge


def a_damaged_pair(folder):
    source = pair(folder / "source")
    for end in (".bin", ".idx"):
        shutil.copy(source + end, f"{folder / 'copy'}{end}")
    os.truncate(f"{folder / 'copy'}.bin", 100)
    yield partial(IndexedDataset, folder / "copy")
    for end in (".bin", ".idx"):
        shutil.copy(source + end, f"{folder / 'copy'}{end}")
    yield lambda: ids_of(folder / "copy") == ids_of(source)


def an_idx_that_is_cut(folder):
    source = pair(folder / "source")
    copy = pair(folder / "copy")
    os.truncate(f"{copy}.idx", 60)
    yield lambda: IndexedDataset(copy)
    shutil.copy(f"{source}.idx", f"{copy}.idx")
    yield lambda: Path(f"{copy}.idx").read_bytes().startswith(b"MMIDIDX") and ids_of(copy) == ids_of(source)


def a_file_that_is_not_there(folder):
    prefix = pair(folder / "wiki")
    yield lambda: IndexedDataset(f"{prefix}.bin")
    yield lambda: len(IndexedDataset(prefix)) == 20


def a_closed_dataset(folder):
    with IndexedDataset(pair(folder / "wiki")) as data:
        kept = data[0]
    yield lambda: data[0]
    yield lambda: np.array_equal(IndexedDataset(folder / "wiki")[0], kept)


def modes_of_a_multimodal_pair(folder):
    with IndexedDatasetBuilder(f"{folder / 'm'}.bin", np.int32, multimodal=True) as builder:
        builder.add_document([1, 2, 3], [1, 2], [0, 1])
    yield lambda: IndexedDataset(folder / "m").sequence_modes
    yield lambda: IndexedDataset(folder / "m", multimodal=True).sequence_modes.tolist() == [0, 1]


def tokens_outside_of_a_sequence(folder):
    data = IndexedDataset(pair(folder / "wiki"))
    yield lambda: data.get(0, 8, 5)
    yield lambda: len(data.get(0, 8, int(data.sequence_lengths[0]) - 8)) == 4


def reading_from_a_store(folder):
    class Stored:
        def __init__(self, path):
            with open(path, "rb") as file:
                self.held = file.read()

        def size(self):
            return len(self.held)

        def read(self, offset, nbytes):
            return self.held[offset : offset + nbytes]

    prefix = pair(folder / "wiki")
    yield lambda: IndexedDataset(prefix, open_bytes=Stored)
    yield lambda: ids_of(prefix, mmap=False, open_bytes=Stored) == ids_of(prefix)


def a_path_with_a_tilde(folder):
    prefix = pair(folder / "wiki")
    said = said_by(lambda: IndexedDataset("~/wiki"))
    yield lambda: IndexedDataset("~/wiki")
    expanded = os.path.expanduser(ast.literal_eval(re.search(r"expanduser\((.*)\)", said)[1]))
    yield lambda: ids_of(expanded) == ids_of(prefix)


def a_url_where_a_path_is_needed(folder):
    inputs = [pair(folder / "a"), pair(folder / "b")]
    yield lambda: merge(inputs, "s3://corpus/all")
    merge(inputs, folder / "all")
    yield lambda: len(IndexedDataset(folder / "all")) == 40


def a_mask_of_another_pair(folder):
    with IndexedDatasetBuilder(f"{folder / 'w'}.bin", np.int32) as builder:
        builder.add_document([1, 2, 3], loss_mask=[0, 1, 1])
    os.truncate(f"{folder / 'w'}.mask", 20)
    yield lambda: IndexedDataset(folder / "w").mask.of(0)
    os.remove(f"{folder / 'w'}.mask")
    yield lambda: IndexedDataset(folder / "w").loss_mask(0).all()


def a_pair_that_was_replaced(folder):
    inputs = texts(folder, a__txt="one", b__txt="two")
    build(inputs, folder / "w", provenance=True)
    data = IndexedDataset(folder / "w")
    build(inputs[:1], folder / "w", provenance=True, overwrite=True)
    yield lambda: data.provenance
    yield lambda: IndexedDataset(folder / "w").provenance.files == inputs[:1]


def a_line_that_a_pair_does_not_have(folder):
    [path] = texts(folder, a__jsonl='{"text": "one"}\n{"text": "two"}\n')
    build([path], folder / "w", provenance=True)
    found = IndexedDataset(folder / "w").provenance
    yield lambda: found.find("b.jsonl", 2)
    yield lambda: list(found.find(found.files[0], 2)) == [1]


def options_of_a_store(folder):
    prefix = pair(folder / "wiki")
    yield lambda: IndexedDataset(prefix, remote=RemoteOptions())
    yield lambda: len(IndexedDataset(prefix))


def a_value_that_is_not_stored_exactly(folder):
    builder = IndexedDatasetBuilder(f"{folder / 'w'}.bin", np.float32)
    values = np.array([0.1, 0.2])
    yield lambda: builder.add_document(values)
    builder.add_document(values.astype(np.float32))
    builder.finalize()
    with IndexedDatasetBuilder(f"{folder / 'wide'}.bin", np.float64) as wide:
        wide.add_document(values)
    yield lambda: len(IndexedDataset(folder / "w")) == 1 and ids_of(folder / "wide") == [0.1, 0.2]


def an_id_that_the_pair_cannot_hold(folder):
    small = IndexedDatasetBuilder(f"{folder / 's'}.bin", np.uint16)
    small.add_document([1, 2])
    yield lambda: small.add_document([70000])
    small.add_document([3])  # you can go on with the builder
    small.finalize()
    with IndexedDatasetBuilder(f"{folder / 'w'}.bin", DType.optimal_dtype(70001)) as builder:
        builder.add_document([70000])
    yield lambda: ids_of(folder / "s") == [1, 2, 3] and ids_of(folder / "w") == [70000]


def a_batch_of_ids(folder):
    builder = IndexedDatasetBuilder(f"{folder / 'w'}.bin", np.int32)
    batch = {"input_ids": np.array([[1, 2], [3, 4]])}
    yield lambda: builder.add_document(batch["input_ids"])
    builder.add_document(batch["input_ids"][0])
    builder.add_document(batch["input_ids"].flatten())
    builder.finalize()
    yield lambda: ids_of(folder / "w") == [1, 2, 1, 2, 3, 4]


def a_vocabulary_of_a_dtype(folder):
    path = f"{folder / 'w'}.bin"
    yield lambda: IndexedDatasetBuilder(path, np.uint16, vocab_size=100_000)
    with IndexedDatasetBuilder(path, DType.optimal_dtype(100_000), vocab_size=100_000) as builder:
        builder.add_document([99_999])
    yield lambda: ids_of(folder / "w") == [99_999]


def lengths_of_a_document(folder):
    builder = IndexedDatasetBuilder(f"{folder / 'w'}.bin", np.int32)
    yield lambda: builder.add_document([1, 2, 3, 4, 0], [2, 2])
    builder.add_document([1, 2, 3, 4, 0])
    builder.add_document([1, 2, 3, 4, 0], [2, 3])
    builder.finalize()
    yield lambda: IndexedDataset(folder / "w").sequence_lengths.tolist() == [5, 2, 3]


def sequences_of_no_document(folder):
    builder = IndexedDatasetBuilder(f"{folder / 'w'}.bin", np.int32)
    builder.add_item([1, 2])
    yield builder.finalize
    builder.end_document()
    builder.finalize()
    yield lambda: ids_of(folder / "w") == [1, 2] and len(IndexedDataset(folder / "w").document_indices) == 2


def a_builder_that_has_ended(folder):
    builder = IndexedDatasetBuilder(f"{folder / 'w'}.bin", np.int32)
    builder.add_document([1])
    builder.finalize()
    yield lambda: builder.add_document([2])
    with IndexedDatasetBuilder(f"{folder / 'more'}.bin", np.int32) as more:
        more.add_index(folder / "w")
        more.add_document([2])
    yield lambda: ids_of(folder / "more") == [1, 2]


def names_of_the_two_files(folder):
    inputs = [pair(folder / "a")]
    said = said_by(lambda: merge(inputs, str(folder / "all.bin")))
    yield lambda: merge(inputs, str(folder / "all.bin"))
    named = ast.literal_eval(re.search(r"without extension: ('.*') names", said)[1])
    merge(inputs, named)
    yield lambda: named == str(folder / "all") and len(IndexedDataset(named)) == 20


def pairs_of_two_dtypes(folder):
    [path] = texts(folder, a__txt="text")
    small, large = pair(folder / "a"), pair(folder / "b", dtype=np.int32)
    yield lambda: merge([small, large], folder / "all")
    build([path], folder / "c", dtype="int32")
    merge([large, folder / "c"], folder / "all")
    given = GPTDatasetConfig(random_seed=1, sequence_length=8, blend=([small, large], [1, 1]), split="1,0,0")
    [blended, *_] = BlendedMegatronDatasetBuilder(GPTDataset, (50, 0, 0), lambda: True, given).build()
    yield lambda: len(IndexedDataset(folder / "all")) == 21 and blended.counts(50).min() > 0


def nothing_to_merge(folder):
    prefix = pair(folder / "a")
    yield lambda: merge(prefix, folder / "all")
    merge([prefix], folder / "all")
    yield lambda: ids_of(folder / "all") == ids_of(prefix)


def a_loss_mask(folder):
    builder = IndexedDatasetBuilder(f"{folder / 'w'}.bin", np.int32)
    yield lambda: builder.add_document([1, 2, 0], loss_mask=[0, 1])
    builder.add_document([1, 2, 0], loss_mask=[0, 1, 1])
    builder.finalize()
    yield lambda: IndexedDataset(folder / "w").loss_mask(0).tolist() == [False, True, True]


def a_file_beside_a_pair(folder):
    [path] = texts(folder, a__txt="text")
    (folder / "w.sources").write_text("of another program")
    yield lambda: build([path], folder / "w", provenance=True)
    (folder / "w.sources").rename(folder / "moved")
    build([path], folder / "w", provenance=True)
    yield lambda: IndexedDataset(folder / "w").provenance.files == [path]


def a_pair_with_ids_beyond(folder):
    prefix = pair(folder / "a")
    builder = IndexedDatasetBuilder(f"{folder / 'w'}.bin", np.uint16, vocab_size=256)
    builder.add_document([7])
    yield lambda: builder.add_index(prefix)
    builder.finalize()  # the builder is as it was before the call
    yield lambda: ids_of(folder / "w") == [7]


def a_list_that_does_not_fit(folder):
    prefix = pair(folder / "a")
    wrong, right = texts(folder, wrong__txt="3\n20\n", right__txt="3\n19\n")
    yield lambda: filter_pair(prefix, folder / "view", lists=[wrong])
    filter_pair(prefix, folder / "view", lists=[right])
    yield lambda: len(IndexedDataset(folder / "view")) == 18


def a_view_of_a_view(folder):
    prefix = pair(folder / "a")
    one, two = texts(folder, one__txt="3\n", two__txt="4\n")
    filter_pair(prefix, folder / "once", lists=[one])
    yield lambda: filter_pair(folder / "once", folder / "twice", lists=[two])
    filter_pair(prefix, folder / "twice", lists=[one, two])
    yield lambda: IndexedDataset(folder / "twice").kept_sequences.tolist() == [*range(3), *range(5, 20)]


def an_output_that_is_there(folder):
    first, second = texts(folder, a__txt="one", b__txt="other")
    build([first], folder / "w")
    yield lambda: build([second], folder / "w")
    build([second], folder / "w", overwrite=True)
    yield lambda: bytes(ids_of(folder / "w")[:-1]) == b"other"


def a_folder_of_somebody(folder):
    [path] = texts(folder, a__txt="one")
    (folder / "w.building").mkdir()
    (folder / "w.building" / "thesis.txt").write_text("mine")
    yield lambda: build([path], folder / "w")
    (folder / "w.building").rename(folder / "kept")
    build([path], folder / "w")
    yield lambda: bytes(ids_of(folder / "w")[:-1]) == b"one" and (folder / "kept/thesis.txt").read_text() == "mine"


def a_line_that_is_no_document(folder):
    [path] = texts(folder, a__jsonl='{"content": "one"}\n{"text": "two"}\n')
    yield lambda: build([path], folder / "w")
    report = build([path], folder / "w", on_error="skip")
    texts(folder, a__jsonl='{"content": "one"}\n')
    build([path], folder / "key", json_key="content")
    yield lambda: bytes(ids_of(folder / "w")[:-1]) == b"two" and bytes(ids_of(folder / "key")[:-1]) == b"one" and report


def an_input_that_is_a_folder(folder):
    (folder / "corpus").mkdir()
    [path] = texts(folder / "corpus", a__txt="one")
    yield lambda: build([folder / "corpus"], folder / "w")
    build(sorted((folder / "corpus").glob("*.txt")), folder / "w")
    yield lambda: bytes(ids_of(folder / "w")[:-1]) == b"one" and path


def an_option_of_build(folder):
    [path] = texts(folder, a__txt="one\ntwo\n")
    wrong = partial(build, [path], folder / "w", text_documents="lines")
    named = re.search(r"it is one of (.*)", said_by(wrong))[1].split(", ")
    yield wrong
    for word in named:
        build([path], folder / word, text_documents=word)
    yield lambda: "line" in named and len(IndexedDataset(folder / "line")) == 2


def no_such_tokenizer(folder):
    [path] = texts(folder, a__txt="one")
    yield lambda: build([path], folder / "w", tokenizer="byte")
    build([path], folder / "w", tokenizer="bytes")
    yield lambda: bytes(ids_of(folder / "w")[:-1]) == b"one"


def an_end_of_bytes(folder):
    [path] = texts(folder, a__txt="one")
    yield lambda: build([path], folder / "w", eod_token="</s>")
    build([path], folder / "w")
    build([path], folder / "without", append_eod=False)
    yield lambda: len(ids_of(folder / "w")) == 4 and bytes(ids_of(folder / "without")) == b"one"


def json_lines_under_another_name(folder):
    path = folder / "part-00000"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    wrong = partial(build, [path], folder / "w")
    named = re.findall(r'format="(\w+)"', said_by(wrong))
    yield wrong
    for word in named:
        build([path], folder / word, format=word)
    yield lambda: {word: len(IndexedDataset(folder / word)) for word in named} == {"jsonl": 2, "text": 1}


def special_tokens(folder):
    [path] = texts(folder, a__txt="one")
    yield lambda: build([path], folder / "w", special_tokens="id")
    build([path], folder / "w", special_tokens="text")
    yield lambda: bytes(ids_of(folder / "w")[:-1]) == b"one"


CASES = [
    ("a damaged pair", a_damaged_pair),
    ("an .idx that is cut or of another kind", an_idx_that_is_cut),
    ("a file of a pair is not there", a_file_that_is_not_there),
    ("a closed dataset", a_closed_dataset),
    ("modes of a multimodal pair", modes_of_a_multimodal_pair),
    ("tokens outside of a sequence", tokens_outside_of_a_sequence),
    ("reading from a store", reading_from_a_store),
    ("paths that lead nowhere", a_path_with_a_tilde),
    ("a URL where a local path is needed", a_url_where_a_path_is_needed),
    ("a file beside a pair that is damaged or of another pair", a_mask_of_another_pair),
    ("the pair was replaced since it was opened", a_pair_that_was_replaced),
    ("a document or line that a pair does not have", a_line_that_a_pair_does_not_have),
    ("look-ahead and options that do not fit", options_of_a_store),
    ("a value that cannot be stored exactly", a_value_that_is_not_stored_exactly),
    ("an id that the pair cannot hold", an_id_that_the_pair_cannot_hold),
    ("ids that are no whole numbers in one row", a_batch_of_ids),
    ("vocab_size and dtype of a pair", a_vocabulary_of_a_dtype),
    ("lengths and modes of a document", lengths_of_a_document),
    ("sequences of no document", sequences_of_no_document),
    ("a builder that has ended", a_builder_that_has_ended),
    ("names of the two files", names_of_the_two_files),
    ("only pairs of one dtype can be joined", pairs_of_two_dtypes),
    ("nothing to merge", nothing_to_merge),
    ("a loss mask that does not fit", a_loss_mask),
    ("a file of somebody else beside a pair", a_file_beside_a_pair),
    ("a pair with ids beyond the vocabulary", a_pair_with_ids_beyond),
    ("a list of documents that does not fit the pair", a_list_that_does_not_fit),
    ("a view that cannot be used so", a_view_of_a_view),
    ("the output is there already", an_output_that_is_there),
    ("a folder of somebody else", a_folder_of_somebody),
    ("a line that is no document", a_line_that_is_no_document),
    ("an input that is no text", an_input_that_is_a_folder),
    ("options of build", an_option_of_build),
    ("no such tokenizer", no_such_tokenizer),
    ("the end of a document", an_end_of_bytes),
    ("JSON lines under another name", json_lines_under_another_name),
    ("special tokens and templates of a tokenizer", special_tokens),
]


@pytest.mark.parametrize(("heading", "case"), CASES)
def test_the_remedy_of_an_error_of_pairs_gives_what_it_promises(heading, case, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    follow("indexed-data", heading, case(tmp_path))
