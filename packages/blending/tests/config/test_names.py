"""What a dataset is called in the order: its base name, or as ``dataset_names`` says; never how its path is written."""

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import ListDataset, config, dataset, sequences_of

from sixfold.blending import (
    BlendChange,
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    BlendingError,
    GPTDataset,
    Split,
)
from sixfold.blending.source import ListSource

SEQUENCES = {"wiki": sequences_of([9] * 40, 1), "code": sequences_of([7] * 60, 2)}


@pytest.fixture(autouse=True)
def any_folder(monkeypatch):
    """Every path opens by its last part, as pairs do that lie there."""

    class Pairs(dict):
        def __missing__(self, prefix):
            return ListSource(SEQUENCES[prefix.rstrip("/").rpartition("/")[2]])

    monkeypatch.setattr(ListDataset, "pairs", Pairs())


def build(prefixes, **fields):
    made = config(**({"blend": (prefixes, [1, 2]), "split": "1"} | fields))
    return BlendedMegatronDatasetBuilder(ListDataset, [50, 0, 0], lambda: True, made).build()[0]


FORMS = {
    "plain": "{}",
    "dot": "./{}",
    "absolute": f"{os.getcwd()}/{{}}",
    "slash": "{}/",
    "doubled": ".//{}",
    "up": "../here/{}",
    "folder": "data/2026/{}",
    "url": "s3://bucket/data/{}",
    "path": Path("data"),
}


@pytest.mark.parametrize("order", ["stateless", "apportioned"])
@pytest.mark.parametrize("form", FORMS)
def test_the_stream_does_not_depend_on_how_a_path_is_written(form, order):
    plain = build(["wiki", "code"], order=order)
    text = FORMS[form]
    prefixes = [text / name if isinstance(text, Path) else text.format(name) for name in ("wiki", "code")]
    other = build(prefixes, order=order)
    assert other.names == ["wiki", "code"]
    assert np.array_equal(plain.get_batch(range(50))["tokens"], other.get_batch(range(50))["tokens"])
    assert other.load_state_dict(json.loads(json.dumps(plain.state_dict(20)))) == 20


def test_a_linked_folder_gives_the_same_stream(tmp_path):
    indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")
    (tmp_path / "real").mkdir()
    for name, sequences in SEQUENCES.items():
        with indexed_data.IndexedDatasetBuilder(str(tmp_path / "real" / f"{name}.bin"), dtype=np.uint16) as builder:
            for sequence in sequences:
                builder.add_document(sequence)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    def tokens(folder):
        made = config(blend=([str(folder / "wiki"), folder / "code"], [1, 2]), split="1")
        (train, *_) = BlendedMegatronDatasetBuilder(GPTDataset, [50, 0, 0], lambda: True, made).build()
        return train.get_batch(range(50))["tokens"]

    assert np.array_equal(tokens(tmp_path / "real"), tokens(tmp_path / "link"))
    with pytest.raises(BlendingError, match=r"both named 'wiki'.*one file.*one entry with the sum"):
        config(blend=([f"{tmp_path}/real/wiki", f"{tmp_path}/link/wiki"], [1, 2]), split="1")


@pytest.mark.parametrize("order", ["stateless", "apportioned"])
def test_two_datasets_of_one_name_are_refused_and_the_error_asks_for_dataset_names(order):
    with pytest.raises(BlendingError, match=r"'en/wiki' and 'de/wiki' are both named 'wiki'.*dataset_names"):
        config(blend=(["en/wiki", "de/wiki"], [1, 2]), split="1", order=order)
    names = {"en/wiki": "en", "de/wiki": "de"}
    assert build(["en/wiki", "de/wiki"], dataset_names=names, order=order).names == ["en", "de"]
    made = config(order=order)
    parts = [
        GPTDataset(ListSource(SEQUENCES["wiki"]), path, range(40), 50, Split.train, made)
        for path in ("en/wiki", "de/wiki")
    ]
    with pytest.raises(BlendingError, match=r"two datasets are named 'wiki'.*dataset_names"):
        BlendedDataset(parts, [1, 2], 50, made)


def test_megatrons_order_takes_two_of_one_name_as_megatron_does():
    assert build(["en/wiki", "de/wiki"], order="megatron").names == ["wiki", "wiki"]


def test_a_change_may_write_the_path_of_a_dataset_in_another_way():
    change = BlendChange(at=20, blend=(["./data/wiki", f"{os.getcwd()}/data/code"], [5, 1]))
    written = build(["data/wiki", "data/code"], changes=[change])
    plain = build(["wiki", "code"], changes=[BlendChange(at=20, blend=(["wiki", "code"], [5, 1]))])
    assert written.names == ["wiki", "code"], "the datasets go on from their own counts"
    assert np.array_equal(written.get_batch(range(50))["tokens"], plain.get_batch(range(50))["tokens"])
    with pytest.raises(BlendingError, match=r"'\./wiki' more than once.*one entry with the sum"):
        config(blend=(["wiki", "./wiki"], [1, 2]), split="1")


def test_dataset_names_are_found_however_their_paths_are_written_and_one_for_no_prefix_is_refused():
    for key in ("data/wiki", "./data/wiki", Path("data/wiki"), f"{os.getcwd()}/data/wiki"):
        assert build(["data/wiki", "data/code"], dataset_names={key: "en"}).names == ["en", "code"]
    with pytest.raises(BlendingError, match=r"dataset_names has 'wiki', the base name of the prefix 'data/wiki'"):
        config(blend=(["data/wiki"], [1]), split="1", dataset_names={"wiki": "en"})
    with pytest.raises(BlendingError, match=r"dataset_names\['data/wiki'\] is 5; it is a name"):
        config(blend=(["data/wiki"], [1]), split="1", dataset_names={"data/wiki": 5})


def test_a_prefix_with_a_folder_is_taken_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(blend=(["data/wiki", "b/code"], [1, 2]), split="1")
        old = config(blend=(["data/wiki"], [1]), split="1", dataset_names={"data/wiki": "data/wiki"})
    assert old.name_of("data/wiki") == "data/wiki"


def test_a_state_of_a_folder_named_stream_is_refused_with_the_names_that_bring_it_back():
    state = build(["d/wiki", "d/code"], dataset_names={"d/wiki": "d/wiki", "d/code": "d/code"}).state_dict(20)
    now = build(["d/wiki", "d/code"])
    with pytest.raises(BlendingError, match=r"name was \"d/wiki\" and is \"wiki\".*dataset_names=\{'d/wiki': 'd/wiki'"):
        now.load_state_dict(state)


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_orders_whose_streams_have_no_names_go_on_from_a_state_with_other_folders(order):
    state = build(["wiki", "code"], order=order).state_dict(20)
    state["datasets"]["0"]["name"] = "old/folder/wiki"  # as release 0.1.0 wrote it
    assert build(["wiki", "code"], order=order).load_state_dict(state) == 20


@pytest.mark.parametrize("prefix", ["data/..", "."])
def test_a_prefix_that_ends_in_dots_is_called_as_the_folder_it_is(prefix):
    assert dataset(SEQUENCES["wiki"], name=prefix).name == os.path.basename(os.getcwd())
