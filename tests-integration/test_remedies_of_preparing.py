"""Remedies of gpt's errors about what a run reads: texts, tokenizers, own datasets.

The form of a case is in remedy_helpers.py. No run is started.
"""

import ast
import os
import re

import pytest
from config_remedies import MINIMAL, toml_of
from remedy_data import texts
from remedy_helpers import follow, said_by

from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.data.own_data import check_own
from sixfold.gpt.data.tokenizer import check_identity
from sixfold.gpt.elastic.sizes import sizes_of
from sixfold.gpt.prepare import prepare
from sixfold.gpt.tokenizer import tokenizer_for, tokenizer_of
from sixfold.indexed_data import IndexedDataset

tokenizers = pytest.importorskip("tokenizers", reason="tokenizer.json files are read by the library tokenizers")


def config(**keys):
    """The smallest configuration with keys as ``data__order``."""
    return TrainConfig.from_text(toml_of(MINIMAL | {key.replace("__", ".", 1): value for key, value in keys.items()}))


def tokenizer_file(path, *special):
    """A tokenizer.json of words with these special tokens."""
    words = tokenizers.models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(list(special))
    made.save(str(path))
    return path


def inputs_that_are_no_files(folder):
    paths = texts(folder, a__txt="one", b__jsonl='{"text": "two"}\n{"text": "three"}\n')
    yield lambda: prepare([folder / "*.txt"], folder / "out")
    prepare(paths, folder / "out")
    yield lambda: len(IndexedDataset(folder / "out")) == 3


def a_pair_that_exists(folder):
    paths = texts(folder, a__txt="one")
    prepare(paths, folder / "wiki")
    yield lambda: prepare(paths, folder / "wiki")
    prepare(paths, folder / "other")
    for ending in (".bin", ".idx", ".json"):
        os.remove(f"{folder / 'wiki'}{ending}")
    prepare(paths, folder / "wiki")
    yield lambda: (folder / "wiki.bin").read_bytes() == (folder / "other.bin").read_bytes()


def a_tokenizer_that_is_not_there(folder):
    yield lambda: tokenizer_for(str(folder / "nowhere.json"))
    path = tokenizer_file(folder / "tokenizer.json", "<eos>", "</s>")
    yield lambda: tokenizer_for("bytes").encode("a") == [97] and tokenizer_for(str(path)).encode("two") == [1]


def a_file_that_is_no_tokenizer(folder):
    (folder / "t.json").write_text("{}")
    yield lambda: tokenizer_for(str(folder / "t.json"))
    path = tokenizer_file(folder / "tokenizer.json", "</s>")
    yield lambda: tokenizer_for(str(path)).encode("one two") == [0, 1]


def an_end_that_is_not_known(folder):
    paths, path = texts(folder, a__txt="one two"), tokenizer_file(folder / "t.json", "<halt>")
    said = said_by(lambda: prepare(paths, folder / "a", tokenizer=str(path)))
    yield lambda: prepare(paths, folder / "a", tokenizer=str(path))
    [name] = re.search(r"special tokens are (.*?)\. Name", said)[1].split(", ")
    prepare(paths, folder / "a", tokenizer=str(path), eod_token=name)
    yield lambda: tokenizer_of([str(folder / "a")]).eod == IndexedDataset(folder / "a")[0][-1]  # a run knows it then


def an_end_of_bytes(folder):
    paths = texts(folder, a__txt="one")
    yield lambda: prepare(paths, folder / "a", eod_token="</s>")
    prepare(paths, folder / "a")
    path = tokenizer_file(folder / "t.json", "</s>")
    prepare(paths, folder / "b", tokenizer=str(path), eod_token="</s>")
    yield lambda: IndexedDataset(folder / "a")[0][-1] == 256 and IndexedDataset(folder / "b")[0].tolist() == [0, 3]


def data_of_two_tokenizers(folder):
    paths, path = texts(folder, a__txt="one"), str(tokenizer_file(folder / "t.json", "</s>"))
    prefixes = [str(folder / name) for name in "abc"]
    for prefix, tokenizer in zip(prefixes, ("bytes", path, path), strict=True):
        prepare(paths, prefix, tokenizer=tokenizer)
    yield lambda: check_identity(prefixes[:2])
    check_identity(prefixes[1:])
    yield lambda: tokenizer_of(prefixes[1:]).encode("one") == [0]


def a_run_without_a_tokenizer(folder):
    prefix = str(folder / "a")
    prepare(texts(folder, a__txt="one"), prefix)
    os.remove(f"{prefix}.json")
    yield lambda: tokenizer_of([prefix]).encode("one")
    yield lambda: tokenizer_of([prefix], "bytes").encode("one") == [*b"one"]


def a_note_that_says_nothing(folder):
    prefix = str(folder / "a")
    prepare(texts(folder, a__txt="one"), prefix)
    (folder / "a.json").write_text("{}")
    yield lambda: tokenizer_of([prefix])
    (folder / "a.json").rename(folder / "moved.json")
    yield lambda: tokenizer_of([prefix], "bytes")


def names_of_own_datasets(folder):
    rows = [[0] * 33]
    given = config(data__blend=["a", "b"])
    said = said_by(lambda: check_own(given, {"a": rows}))
    yield lambda: check_own(given, {"a": rows})
    missing = re.search(r"and '(\w+)' is missing", said)[1]
    yield lambda: check_own(given, {"a": rows, missing: rows}) is None


def a_stream_as_a_dataset(folder):
    given = config(data__blend=["a"])
    stream = ([0] * 33 for _ in range(3))
    yield lambda: check_own(given, {"a": stream})
    yield lambda: check_own(given, {"a": list(stream)}) is None


def a_key_of_token_pairs(folder):
    rows = {"a": [[0] * 33]}
    given = config(data__blend=["a"], data__order="megatron", data__split="90,10,0")
    yield lambda: check_own(given, rows)
    left = {"data__order": "megatron", "data__split": "90,10,0"}
    while left:  # one key after the other, each as the text says
        said = said_by(lambda: check_own(config(data__blend=["a"], **left), rows))
        key, plain = re.search(r"^data\.(\w+) is .*: leave it (.*)$", said).groups()
        assert check_own_of(config(data__blend=["a"], **{f"data__{key}": ast.literal_eval(plain)}), rows)
        left.pop(f"data__{key}")
    yield lambda: check_own_of(config(data__blend=["a"]), rows)


def check_own_of(given, rows):
    """True where own datasets are taken."""
    check_own(given, rows)
    return True


def degrees_of_a_run(folder):
    keys = {"train__global_batch_size": 12, "train__micro_batch_size": 1, "parallel__dp": 4}
    said = said_by(lambda: sizes_of(config(**keys, elastic__dp=[5]), 4))
    yield lambda: sizes_of(config(**keys, elastic__dp=[5]), 4)
    batches = [int(word) for word in re.search(r"multiple of the second: (\d+) or (\d+) works", said).groups()]
    others = [sizes_of(config(**keys, elastic__dp=[3, 2]), 4)]
    assert all(batch % 5 == 0 for batch in batches)
    yield lambda: others == [(4, 3, 2)]


CASES = [
    ("prepare is not told what to read", inputs_that_are_no_files),
    ("a pair of that name exists", a_pair_that_exists),
    ("a tokenizer cannot be read", a_tokenizer_that_is_not_there),
    ("a file is no tokenizer.json", a_file_that_is_no_tokenizer),
    ("which token ends a document is not known", an_end_that_is_not_known),
    ("the end of a document is named for bytes", an_end_of_bytes),
    ("data of two tokenizers", data_of_two_tokenizers),
    ("nothing names the tokenizer", a_run_without_a_tokenizer),
    ("PREFIX.json does not say what made the pair", a_note_that_says_nothing),
    ("own datasets and data.blend name different ones", names_of_own_datasets),
    ("an own dataset is empty or cannot be read by number", a_stream_as_a_dataset),
    ("a key of token pairs beside own datasets", a_key_of_token_pairs),
    ("a number of ranks that the run cannot have", degrees_of_a_run),
]


@pytest.mark.parametrize(("heading", "case"), CASES)
def test_the_remedy_of_an_error_of_what_a_run_reads_gives_what_it_promises(heading, case, tmp_path):
    follow("gpt", heading, case(tmp_path))
