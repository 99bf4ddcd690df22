"""Index files: the peer's are used here and ours by it, and nothing that does not fit is ever used or unpickled."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import write_pair
from megatron_peer import Tokenizer, build_peer

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.cache import index_files as cache
from sixfold.blending.cache import indices
from sixfold.blending.source import ListSource

pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")

LENGTHS = {"wiki": [30, 0, 7, 55, 2, 19, 80], "code": [8, 90, 41, 13]}
FILES = ("document_index.npy", "sample_index.npy", "shuffle_index.npy", "dataset_index.npy", "dataset_sample_index.npy")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # it guards against a power cut, which no test makes


@pytest.fixture
def prefixes(tmp_path):
    for name, lengths in LENGTHS.items():
        write_pair(tmp_path / name, lengths)
    return [str(tmp_path / name) for name in LENGTHS]


def fields_of(prefixes, folder, **more):
    blend = {"blend": (prefixes, [0.7, 0.3]), "split": "1", "path_to_cache": None if folder is None else str(folder)}
    return {"random_seed": 5, "sequence_length": 8} | blend | more


def build(prefixes, folder, size=60, **more):
    config = GPTDatasetConfig(tokenizer=Tokenizer(), order="megatron", **fields_of(prefixes, folder, **more))
    return BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, config).build()[0]


def contents(data):
    """Every index as lists; of a blend, its datasets' first."""
    if isinstance(data, GPTDataset):
        return [np.array(part).tolist() for part in (data.document_index, data.sample_index, data.shuffle_index)]
    of_datasets = [array for dataset in data.datasets for array in contents(dataset)]
    return [*of_datasets, data.dataset_index.tolist(), data.dataset_sample_index.tolist()]


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}


@pytest.fixture
def no_building(monkeypatch):
    """From the call on, whoever builds an index fails."""

    def forbid(*names):
        def fail(*_, **__):
            raise AssertionError(f"one of {names} was called")

        for name in names:
            monkeypatch.setattr(indices, name, fail)

    return forbid


def test_a_cache_of_the_peer_is_used_as_it_is_and_read_in_full_only_once(prefixes, tmp_path, no_building):
    expected = contents(build(prefixes, None))
    build_peer(fields_of(prefixes, tmp_path / "cache"), [60, 0, 0])
    before = times(tmp_path / "cache")
    no_building("build_indices", "build_blend")
    assert contents(build(prefixes, tmp_path / "cache")) == expected
    after = times(tmp_path / "cache")
    assert {name: after[name] for name in before} == before
    assert sorted(name.split("-", 1)[1] for name in after.keys() - before.keys()) == [
        "BlendedDataset-train-sixfold.json", *["GPTDataset-train-sixfold.json"] * 2,
    ]  # fmt: skip
    no_building("build_indices", "build_blend", "indices_fit")
    assert contents(build(prefixes, tmp_path / "cache")) == expected


def test_a_cache_of_ours_is_used_by_the_peer(prefixes, tmp_path):
    ours = build(prefixes, tmp_path / "cache")
    before = times(tmp_path / "cache")
    theirs = build_peer(fields_of(prefixes, tmp_path / "cache"), [60, 0, 0])[0]
    assert contents(ours)[-2:] == [theirs.dataset_index.tolist(), theirs.dataset_sample_index.tolist()]
    assert isinstance(theirs.dataset_index, np.memmap), "loaded and not built"
    assert times(tmp_path / "cache") == before


def test_without_a_folder_a_dataset_keeps_its_files_beside_the_data_as_the_peer_does(prefixes):
    build(prefixes[:1], None, blend=(prefixes[:1], None))
    beside = Path(prefixes[0], "cache", "GPTDataset_indices")
    ours = {path.name: path.read_bytes() for path in beside.iterdir() if path.suffix != ".json"}
    for path in beside.iterdir():
        path.unlink()
    build_peer(fields_of(prefixes, None, blend=(prefixes[:1], None)), [60, 0, 0])
    assert ours == {path.name: path.read_bytes() for path in beside.iterdir()}


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def pickled_array(path, trap):
    np.save(path, np.array([Trap(trap)], dtype=object), allow_pickle=True)


def plain_pickle(path, trap):
    path.write_bytes(pickle.dumps(Trap(trap)))


def one_number_changed(path, trap):
    array = np.load(path).copy()
    array.flat[array.size // 2] += 1
    np.save(path, array)


DAMAGE = {
    "cut": lambda path, trap: os.truncate(path, path.stat().st_size - 8),
    "empty": lambda path, trap: os.truncate(path, 0),
    "header cut": lambda path, trap: os.truncate(path, 20),
    "missing": lambda path, trap: path.unlink(),
    "pickled array": pickled_array,
    "plain pickle": plain_pickle,
    "another type": lambda path, trap: np.save(path, np.load(path).astype(np.float32)),
    "a row less": lambda path, trap: np.save(path, np.load(path)[:-1]),
    "one number changed": one_number_changed,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_built_anew_and_nothing_is_unpickled(damage, prefixes, tmp_path):
    expected = contents(build(prefixes, tmp_path / "cache"))
    for what in FILES:
        path = min((tmp_path / "cache").glob(f"*-{what}"))
        DAMAGE[damage](path, tmp_path / "trap")
        assert contents(build(prefixes, tmp_path / "cache")) == expected, path.name
        assert contents_on_disk(tmp_path / "cache") == contents_on_disk(fresh(prefixes, tmp_path)), path.name
    assert not (tmp_path / "trap").exists()


def fresh(prefixes, tmp_path):
    if not (tmp_path / "fresh").exists():
        build(prefixes, tmp_path / "fresh")
    return tmp_path / "fresh"


def contents_on_disk(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


@pytest.mark.parametrize("side_file", [True, False])
def test_a_cache_of_other_data_is_built_anew(side_file, prefixes, tmp_path):
    before = contents(build(prefixes, tmp_path / "cache"))
    if not side_file:
        for path in (tmp_path / "cache").glob("*-sixfold.json"):
            path.unlink()
    write_pair(prefixes[0], LENGTHS["wiki"][::-1])  # as many documents and tokens: the peer goes on with the old one
    after = contents(build(prefixes, tmp_path / "cache"))
    assert after != before
    assert after == contents(build(prefixes, tmp_path / "other"))


@pytest.mark.parametrize("side_file", [True, False])
def test_a_cache_of_other_options_is_built_anew(side_file, prefixes, tmp_path):
    names = set()
    for extra in (True, False, True):
        data = build(prefixes, tmp_path / "cache", add_extra_token_to_sequence=extra)
        assert contents(data) == contents(build(prefixes, None, add_extra_token_to_sequence=extra))
        names.add(frozenset(contents_on_disk(tmp_path / "cache")))
        if not side_file:
            for path in (tmp_path / "cache").glob("*-sixfold.json"):
                path.unlink()
    assert len(names) == 1, "the peer's names do not tell these options apart"


@pytest.mark.parametrize("same_options", [True, False])
def test_files_that_another_process_puts_in_place_meanwhile_are_used_only_if_they_fit(
    same_options, prefixes, tmp_path, monkeypatch
):
    expected = contents(build(prefixes, None, add_extra_token_to_sequence=False))
    write, meanwhile = cache._write, []

    def writes_first(entry, *arguments):
        written = write(entry, *arguments)
        if not meanwhile:
            meanwhile.append(entry)  # the other one is not disturbed in turn
            for path in (tmp_path / "cache").iterdir():
                path.unlink()
            build(prefixes, tmp_path / "cache", add_extra_token_to_sequence=not same_options)
        return written

    monkeypatch.setattr(cache, "_write", writes_first)
    assert contents(build(prefixes, tmp_path / "cache", add_extra_token_to_sequence=False)) == expected
    assert meanwhile


def test_a_write_that_dies_leaves_no_description_and_no_temporary_file(prefixes, tmp_path, monkeypatch):
    replace, done = os.replace, []

    def dying(source, target):
        if len(done) == dies_at:
            raise OSError("no space left")
        done.append(target)
        replace(source, target)

    for dies_at in range(5):
        done.clear()
        monkeypatch.setattr(os, "replace", dying)
        with pytest.raises(BlendingError, match=r"cannot write the index .*no space left; set path_to_cache"):
            build(prefixes[:1], tmp_path / "cache", blend=(prefixes[:1], None))
        found = [path.name for path in (tmp_path / "cache").iterdir()]
        assert not any(name.endswith("description.txt") or name.startswith(".") for name in found)
        assert len(found) == dies_at
        monkeypatch.setattr(os, "replace", replace)
    whole = build(prefixes[:1], tmp_path / "cache", blend=(prefixes[:1], None))
    assert contents(whole) == contents(build(prefixes[:1], None, blend=(prefixes[:1], None)))


def test_what_a_killed_writer_left_goes_after_an_hour_and_nothing_else(prefixes, tmp_path):
    build(prefixes, tmp_path / "cache")
    before = contents_on_disk(tmp_path / "cache")
    name = min(before)
    old, young = (tmp_path / "cache" / f".{name}.4711-{number:08x}" for number in range(2))
    others = [tmp_path / "cache" / other for other in (".notes", f"{name}.4711-00000000", f".{name}.swp")]
    for path in (old, young, *others):
        path.write_bytes(b"half of it")
    for path in (old, *others):
        os.utime(path, (path.stat().st_mtime - 3700,) * 2)
    build(prefixes, tmp_path / "cache")
    assert not old.exists()
    assert young.exists()
    assert all(path.exists() for path in others)
    assert {name: contents_on_disk(tmp_path / "cache")[name] for name in before} == before


def test_a_folder_that_cannot_be_written_to_is_named(prefixes, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BlendingError, match=r"cannot write the index .*file.*; set path_to_cache"):
        build(prefixes, tmp_path / "file")


def test_a_built_blend_is_located_found_counted_saved_and_pickled(prefixes, tmp_path):
    data = build(prefixes, tmp_path / "cache")
    assert len(data) == 60
    dataset, sample = data.locate(range(60))
    assert [data.find(*pair) for pair in zip(dataset.tolist(), sample.tolist(), strict=True)] == list(range(60))
    assert data.counts(60).tolist() == [42, 18]
    assert data.counts(1).tolist() == [1, 0]
    with pytest.raises(BlendingError, match="sample 42 of dataset 0 comes at no position"):
        data.find(0, 42)
    with pytest.raises(IndexError):
        data.get_batch([60])
    batch = data.get_batch(range(60))
    again = pickle.loads(pickle.dumps(data)).get_batch(range(60))
    assert {name: array.tolist() for name, array in again.items()} == {k: v.tolist() for k, v in batch.items()}
    state = data.state_dict(30)
    assert build(prefixes, None).load_state_dict(state) == 30
    with pytest.raises(BlendingError, match=r"index\.size was 60 and is 62.*; restore it$"):
        build(prefixes, None, size=61).load_state_dict(state)
    alone = build(prefixes[:1], None, blend=(prefixes[:1], None))
    assert alone.load_state_dict(alone.state_dict(3)) == 3


def test_a_pickled_blend_maps_its_files_again_and_refuses_others(prefixes, tmp_path):
    data = build(prefixes, tmp_path / "cache", 5000)
    text = pickle.dumps(data)
    assert len(text) < 10_000, "names, not numbers"
    again = pickle.loads(text)
    assert not again.dataset_index.flags.owndata, "mapped"
    assert contents(again) == contents(data)
    path = next((tmp_path / "cache").glob("*-dataset_index.npy"))
    one_number_changed(path, None)
    with pytest.raises(BlendingError, match="has changed since it was mapped"):
        pickle.loads(text)
    path.unlink()
    with pytest.raises(BlendingError, match="cannot be mapped again"):
        pickle.loads(text)


def test_a_blend_that_needs_more_than_was_built_names_dataset_and_surplus(tmp_path):
    prefixes = [str(tmp_path / name) for name in "abcdef"]
    write_pair(prefixes[0], [17])  # two samples of 8, which are all that half of 4 asks
    for prefix in prefixes[1:]:
        write_pair(prefix, [90])
    # But a tenth of 4 is rounded up to one sample of each other: there are 7 positions to give half of.
    fields = {"blend": (prefixes, [5, 1, 1, 1, 1, 1]), "mid_level_dataset_surplus": 0.0}
    with pytest.raises(
        BlendingError, match=r"needs 3 samples of dataset 0 \(.*a\), which was built with 2; raise mid_lev"
    ):
        build(prefixes, tmp_path / "cache", 4, **fields)
    with pytest.raises(IndexError, match="oversamples"):
        build_peer(fields_of(prefixes, None, **fields), [4, 0, 0])
    assert len(build(prefixes, tmp_path / "cache", 4, **fields | {"mid_level_dataset_surplus": 0.5})) == 7


REFUSED = [
    ({"blend": (["a", "b"], [1.0, 0.0])}, r"blend: weight 1 is 0\.0; this order has weights > 0"),
    ({"random_seed": -1}, "random_seed is -1"),
    ({"random_seed": 2**32}, "random_seed is 4294967296"),
    ({"mid_level_dataset_surplus": -0.1}, r"surplus is -0\.1"),
    ({"mid_level_dataset_surplus": float("nan")}, "surplus is nan"),
    ({"blend": ([str(number) for number in range(32_767)], [1.0] * 32_767)}, "32767 datasets"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED, ids=range(len(REFUSED)))
def test_what_this_order_cannot_do_is_refused_when_the_config_is_made(fields, problem):
    with pytest.raises(BlendingError, match=problem):
        GPTDatasetConfig(order="megatron", **fields_of(["a", "b"], None, **fields))


def test_an_order_of_indices_has_no_changes():
    from sixfold.blending import BlendChange

    with pytest.raises(BlendingError, match='changes are given with order "megatron"'):
        GPTDatasetConfig(
            order="megatron", **fields_of(["a"], None, blend=(["a"], [1]), changes=[BlendChange(5, (["b"], None))])
        )


def test_a_prefix_twice_is_allowed_with_a_warning_as_the_peer_allows_it(prefixes, tmp_path):
    with pytest.warns(UserWarning, match="more than once; give it one entry"):
        data = build(prefixes, tmp_path / "cache", blend=([prefixes[0], prefixes[0]], [0.5, 0.5]))
    assert data.names == ["wiki"] * 2
    assert np.array_equal(data[0]["tokens"], data[1]["tokens"])


def test_a_tokenizer_without_identifiers_is_named(prefixes, tmp_path):
    fields = fields_of(prefixes, tmp_path / "cache")
    config = GPTDatasetConfig(order="megatron", tokenizer=object(), **fields)
    with pytest.raises(BlendingError, match="unique_identifiers: a dict of JSON values"):
        BlendedMegatronDatasetBuilder(GPTDataset, [60, 0, 0], lambda: True, config).build()


@pytest.mark.parametrize("size", [5, None])
def test_a_part_without_tokens_is_refused_at_once_where_the_peer_loops_for_ever(size, prefixes, tmp_path):
    write_pair(tmp_path / "empty", [0, 0])
    blend = ([prefixes[0], str(tmp_path / "empty")], None if size is None else [1, 1])
    with pytest.raises(BlendingError, match=r"the train part of '.*empty' has 2 sequences and no tokens"):
        build(prefixes, None, size, blend=blend)


def test_lengths_that_do_not_fit_their_pointers_raise_before_anything_is_built():
    source = ListSource([[1] * 9, [2] * 5, [3] * 4])
    source.sequence_lengths = np.array([9, 4, 5], dtype=np.int32)
    config = GPTDatasetConfig(random_seed=5, sequence_length=8, order="megatron")
    with pytest.raises(BlendingError, match=r"sequence 1 has length 4; its pointers .* need 5"):
        GPTDataset(source, None, range(3), 2, Split.train, config)


def test_data_that_changes_while_it_is_open_raises(prefixes):
    data = build(prefixes[:1], None, blend=(prefixes[:1], None))
    data.order.arrays["sample_index"] = np.array(data.sample_index)
    data.order.arrays["sample_index"][1:, 0] = 0
    with pytest.raises(BlendingError, match="the data changed under the index"):
        data.get_batch(range(60))
