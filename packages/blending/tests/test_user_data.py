"""What users hand over: masks, replaced pairs, other lists, other folders. Taken for what it means, or refused."""

import dataclasses
import json
import os
import pickle
import types
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from blending_helpers import ListDataset, Tokenizer, blend, config, dataset, numbered

from sixfold.blending import (
    BlendChange,
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    BlendingError,
    GPTDataset,
    GPTDatasetConfig,
    Split,
)
from sixfold.blending.source import ListSource

LENGTHS = [5] * 100
SOURCE = ListSource(numbered(LENGTHS))


def of(indices, source=SOURCE, **fields):
    return GPTDataset(source, "a", indices, 100, Split.train, config(**fields))


def ids_read(data):
    """Every id that one epoch of ``data`` reads."""
    return set(np.concatenate([data.get_batch(range(200))["tokens"].ravel()]).tolist())


def ids_of(documents):
    return {1 + 5 * document + place for document in documents for place in range(5)}


# ---- numbers that look alike


@pytest.mark.parametrize("as_list", [False, True])
def test_a_mask_keeps_the_documents_that_it_marks(as_list):
    mask = np.zeros(100, dtype=bool)
    mask[50:] = True
    mask[60] = False
    data = of(mask.tolist() if as_list else mask)
    assert ids_read(data) == ids_of([number for number in range(50, 100) if number != 60])


@pytest.mark.parametrize(
    "indices",
    [[10.9], np.array([3.0]), [True, 3], ["1"], [b"1"], np.ones((1, 3), int), [None], np.ones(7, bool), 5, "12"],
    ids=repr,
)
def test_indices_that_are_no_numbers_of_sequences_are_refused(indices):
    with pytest.raises(BlendingError, match=r"(indices are|a mask of shape)"):
        of(indices)


def test_the_caller_may_use_an_array_of_indices_again():
    indices = np.array([3, 5, 8])
    data = of(indices)
    before = data.get_batch(range(20))["tokens"]
    indices[:] = 99
    assert np.array_equal(of([3, 5, 8]).get_batch(range(20))["tokens"], before)
    assert np.array_equal(data.get_batch(range(20))["tokens"], before)
    with pytest.raises(ValueError, match="read-only"):
        data.indices[0] = 4


@pytest.mark.parametrize("number", [True, False, np.True_, 1.0, "1"], ids=repr)
def test_a_sample_number_that_is_none_is_refused(number):
    with pytest.raises(BlendingError, match="positions are"):
        of(range(10))[number]
    with pytest.raises(BlendingError, match="positions are"):
        of(range(10)).get_batch([number, 1])


# ---- data that was replaced


@pytest.fixture
def pair(tmp_path):
    """(prefix, write): ``write(lengths)`` makes the pair anew, with ids that count."""
    indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")

    def write(lengths, begin=1, name="wiki"):
        with indexed_data.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.int32) as builder:
            for sequence in numbered(lengths, begin):
                builder.add_document(sequence)
        return str(tmp_path / name)

    return write


def built(prefix, **fields):
    made = config(blend=([prefix], None), split="1", **fields)
    return BlendedMegatronDatasetBuilder(GPTDataset, [50, 0, 0], lambda: True, made).build()[0]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("lengths", [[6] * 90, [7] * 70, [5] * 20], ids=["other lengths", "equal sum", "fewer"])
def test_a_pickled_dataset_refuses_a_pair_that_was_replaced_since(pair, lengths, mmap):
    """As a spawned worker of a DataLoader gets it in the second epoch."""
    prefix = pair([5] * 98)
    data = built(prefix, mmap_bin_files=mmap)
    kept = pickle.dumps(data)
    assert np.array_equal(pickle.loads(kept).get_batch(range(9))["tokens"], data.get_batch(range(9))["tokens"])
    pair(lengths)
    with pytest.raises(ValueError, match=r"wiki.*(replaced|other than the one)"):
        pickle.loads(kept)


def test_a_pickled_dataset_is_small_and_what_it_opens_gives_the_same(pair):
    data = built(pair([3] * 20_000))
    data.get_batch(range(5))
    data.state_dict(5)
    assert len(pickle.dumps(data)) < 5_000, "20,000 documents are 240 KB of index"
    again = pickle.loads(pickle.dumps(data))
    assert again.why(3) == data.why(3) and again.state_dict(7) == data.state_dict(7)


# ---- resumed runs


def test_other_indices_of_equal_lengths_are_another_past():
    state = of(range(50)).state_dict(9)
    assert of(range(50)).load_state_dict(json.loads(json.dumps(state))) == 9
    for other in (range(50, 100), [*range(49), 99], [1, 0, *range(2, 50)]):
        with pytest.raises(BlendingError, match=r"datasets\.0\.members was"):
            of(other).load_state_dict(state)


def test_two_swapped_neighbours_of_many_documents_are_another_past():
    many = 140_000
    source = ListSource([[1]] * many)
    indices = np.arange(many)[::-1].copy()
    state = of(indices, source).state_dict(9)
    indices[[70_001, 70_002]] = indices[[70_002, 70_001]]
    with pytest.raises(BlendingError, match=r"datasets\.0\.members was"):
        of(indices, source).load_state_dict(state)


@pytest.mark.parametrize("order", ["stateless", "apportioned", "megatron"])
def test_other_ids_of_the_same_lengths_are_another_past(order):
    one, other = (dataset(numbered([5] * 40, begin), order=order) for begin in (1, 1000))
    with pytest.raises(BlendingError, match=r"datasets\.0\.ids was"):
        other.load_state_dict(one.state_dict(9))


def test_a_list_in_another_order_is_refused_and_the_order_that_the_error_gives_is_the_stream_of_then(pair):
    prefixes = [pair([5] * 40, begin, name) for begin, name in ((1, "a"), (500, "b"), (900, "c"))]
    weights = dict(zip(prefixes, [1, 1, 1], strict=True))

    def stream(listed, **names):
        made = config(blend=(listed, [weights[prefix] for prefix in listed]), split="1", **names)
        return BlendedMegatronDatasetBuilder(GPTDataset, [100, 0, 0], lambda: True, made).build()[0]

    then = stream(prefixes)
    state = then.state_dict(80)
    with pytest.raises(BlendingError, match="list them as") as refused:
        stream([prefixes[1], prefixes[2], prefixes[0]]).load_state_dict(state)
    assert "dataset_names" not in str(refused.value), "other names would be the other's tokens"
    told = str(refused.value).split("list them as ")[1].split(", each")[0]
    listed = json.loads(told.replace("'", '"'))
    again = stream(listed)
    assert again.load_state_dict(state) == 80
    assert np.array_equal(again.get_batch(range(80, 90))["tokens"], then.get_batch(range(80, 90))["tokens"])
    with pytest.raises(BlendingError, match=r"datasets\.0\.(ids|sample|members) was"):  # who tries names all the same
        names = {prefixes[1]: "a", prefixes[0]: "b"}
        stream([prefixes[1], prefixes[0], prefixes[2]], dataset_names=names).load_state_dict(state)


def test_a_state_of_position_0_fixes_nothing():
    state = blend({"a": numbered([20])}, [1]).state_dict(0)
    assert blend({"b": numbered([30])}, [1], random_seed=7).load_state_dict(json.loads(json.dumps(state))) == 0


# ---- paths


@pytest.fixture
def two_folders(pair, tmp_path, monkeypatch):
    """Folders "one" and "two", each with a pair "wiki" of other ids; the current one is "one"."""
    for folder, begin in (("one", 1), ("two", 5000)):
        (tmp_path / folder).mkdir()
        pair([5] * 40, begin, name=f"{folder}/wiki")
    monkeypatch.chdir(tmp_path / "one")
    return tmp_path


@pytest.mark.parametrize("order", ["stateless", "apportioned", "megatron"])
def test_a_relative_prefix_is_the_one_of_the_folder_in_which_it_was_written_down(two_folders, monkeypatch, order):
    made = config(
        blend=(["wiki"], None), split="1", order=order, path_to_cache="cache" if order != "stateless" else None
    )
    expected = BlendedMegatronDatasetBuilder(GPTDataset, [50, 0, 0], lambda: True, made).build()[0]
    monkeypatch.chdir(two_folders / "two")
    for later in (made, dataclasses.replace(made, max_epochs=9), pickle.loads(pickle.dumps(made))):
        data = BlendedMegatronDatasetBuilder(GPTDataset, [50, 0, 0], lambda: True, later).build()[0]
        assert np.array_equal(data.get_batch(range(20))["tokens"], expected.get_batch(range(20))["tokens"])
        assert later.place_of("wiki") == f"{two_folders}/one/wiki"
    again = pickle.loads(pickle.dumps(expected))  # in a worker that changed its folder
    assert np.array_equal(again.get_batch(range(20))["tokens"], expected.get_batch(range(20))["tokens"])
    assert sorted(os.listdir(two_folders / "two")) == ["wiki.bin", "wiki.idx"], "no cache appears in another folder"


NAMES = [b"wiki\xff", "wiki\udcff", os.fsencode("gr\u00fc\u00df"), "\u4e2d\u6587"]


@pytest.mark.parametrize("order", ["stateless", "apportioned", "megatron"])
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_prefix_of_bytes_or_without_utf8_is_read_as_any(pair, tmp_path, name, order):
    plain = pair([5] * 40)
    whole = os.path.join(os.fsencode(tmp_path), name) if isinstance(name, bytes) else f"{tmp_path}/{name}"
    for end in ("bin", "idx"):
        os.rename(f"{plain}.{end}", os.fsencode(os.fsdecode(whole) + "." + end))
    made = config(
        blend=([whole], [1]), split="1", order=order, path_to_cache=str(tmp_path) if order != "stateless" else None
    )
    data = BlendedMegatronDatasetBuilder(GPTDataset, [20, 0, 0], lambda: True, made).build()[0]
    assert data.load_state_dict(json.loads(json.dumps(data.state_dict(9)))) == 9
    assert data.get_batch(range(20))["tokens"].min() >= 1
    assert config(blend=([whole], [1]), split="1", dataset_names={whole: "w"}).name_of(whole) == "w"


@pytest.mark.parametrize("blend", [b"wiki", ([5], [1]), (b"wiki", [1]), ([None], None)], ids=repr)
def test_a_blend_of_no_paths_is_refused(blend):
    with pytest.raises(BlendingError, match="it is a pair"):
        config(blend=blend, split="1")


def test_prefixes_that_end_alike_are_refused_with_names_that_can_be_copied():
    prefixes = ["wiki/train_text_document", "code/train_text_document", "math"]
    with pytest.raises(BlendingError, match="dataset_names=") as refused:
        config(blend=(prefixes, [1, 1, 1]), split="1")
    names = json.loads(str(refused.value).split("dataset_names=")[1].replace("'", '"'))
    made = config(blend=(prefixes, [1, 1, 1]), split="1", dataset_names=names)
    assert [made.name_of(prefix) for prefix in prefixes] == ["wiki", "code", "math"]
    for alike in (["a/x/t", "b/x/t"], ["t", "a/t"]):
        with pytest.raises(BlendingError, match="dataset_names=") as refused:
            config(blend=(alike, [1, 1]), split="1")
        names = json.loads(str(refused.value).split("dataset_names=")[1].replace("'", '"'))
        made = config(blend=(alike, [1, 1]), split="1", dataset_names=names)
        assert len({made.name_of(prefix) for prefix in alike}) == 2


def test_a_name_for_no_dataset_is_refused():
    with pytest.raises(BlendingError, match=r"dataset_names has 'wikis', which is no prefix.*'wiki', 'code'"):
        config(blend=(["wiki", "code"], [1, 1]), split="1", dataset_names={"wikis": "w"})
    assert config(dataset_names={"a": "w"}).name_of("a") == "w", "without a blend the caller makes the datasets"


# ---- configurations


def test_a_config_that_is_made_from_one_without_a_blend_has_its_rules():
    base = config()
    with pytest.raises(BlendingError, match="blend is given without split"):
        dataclasses.replace(base, blend=(["wiki"], None))
    train = dataclasses.replace(base, blend=(["wiki"], None), split="1")
    assert train.split_matrix == config(blend=(["wiki"], None), split="1").split_matrix
    each = dataclasses.replace(base, blend_per_split=[(["wiki"], None), None, None])
    assert each.split is None and each.split_matrix is None
    assert dataclasses.replace(base, random_seed=5).split == "1,1,1", "still without a blend, as the peer"
    given = config(split="1,1,1")
    assert dataclasses.replace(given, blend=(["wiki"], None)).split == "1,1,1", "who says it has it"


@pytest.mark.parametrize("order", ["stateless", "apportioned", "megatron"])
def test_numbers_of_numpy_are_plain_in_a_state(order):
    number = np.int64
    changes = [BlendChange(number(20), (["a", "b"], np.array([1, 2])), number(8))] if order == "stateless" else []
    made = config(
        random_seed=number(7), sequence_length=number(8), order=order, changes=changes, max_epochs=np.float32(9),
        blend=(["a", "b"], np.array([1, 3], np.float32)), split="1", num_dataset_builder_threads=number(1),
    )  # fmt: skip
    ListDataset.pairs.clear()
    ListDataset.pairs |= {name: ListSource(numbered([5] * 200)) for name in ("a", "b")}
    data = BlendedMegatronDatasetBuilder(ListDataset, [number(60), 0, 0], lambda: True, made).build()[0]
    assert data.load_state_dict(json.loads(json.dumps(data.state_dict(number(40))))) == 40
    json.dumps(dataclasses.asdict(dataclasses.replace(made, tokenizer=None, token_dtype=None or np.int64)), default=str)


def test_a_config_owns_what_it_was_given():
    prefixes, weights, names, changes = ["a", "b"], [1.0, 1.0], {"a": "x"}, [BlendChange(9, sequence_length=4)]
    made = config(blend=(prefixes, weights), split="1", dataset_names=names, changes=changes)
    prefixes[0], weights[0], names["a"] = "z", -1.0, "y"
    changes.clear()
    assert made.blend == (["a", "b"], [1.0, 1.0]) and made.name_of("a") == "x" and len(made.changes) == 1


@pytest.mark.parametrize(
    "fields",
    [{"random_seed": True}, {"sequence_length": True}, {"blend": (["a", "b"], [True, 2]), "split": "1"},
     {"changes": [BlendChange(True, sequence_length=4)]}],
    ids=str,
)  # fmt: skip
def test_a_bool_is_no_number_of_a_config(fields):
    with pytest.raises(BlendingError, match="True"):
        config(**fields)


def test_a_cache_without_the_order_that_has_one_is_told(tmp_path):
    with pytest.warns(UserWarning, match=r'path_to_cache is .*order="megatron"'):
        GPTDatasetConfig(random_seed=1, sequence_length=8, tokenizer=Tokenizer(), path_to_cache=str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(path_to_cache=str(tmp_path), order="megatron")


def test_a_cache_beside_a_pair_without_the_order_that_has_one_is_told(pair):
    prefix = pair([5] * 40)
    built(prefix, order="megatron")
    with pytest.warns(UserWarning, match=r'wiki/cache.*order="megatron"'):
        built(prefix)


# ---- datasets that are not what they seem


def test_one_file_under_two_names_is_refused_unless_its_parts_differ(pair, tmp_path):
    prefix = pair([5] * 40)
    for end in ("idx", "bin"):
        os.symlink(f"{prefix}.{end}", tmp_path / f"linked.{end}")
        os.link(f"{prefix}.{end}", tmp_path / f"hard.{end}")
    for other in ("linked", "hard"):
        for order in ("stateless", "apportioned"):
            with pytest.raises(BlendingError, match=rf"wiki' and .*{other}' are one file under two names"):
                stream([prefix, str(tmp_path / other)], [1, 1], order=order)
        with pytest.warns(UserWarning, match="one file under two names.*its samples repeat"):
            stream([prefix, str(tmp_path / other)], [1, 1], order="megatron")
    made = config()
    source = GPTDataset.build_low_level_dataset(prefix, made)
    halves = [GPTDataset(source, name, part, 0, Split.train, made) for name, part in HALVES.items()]
    assert BlendedDataset(halves, [1, 1], 20, made).get_batch(range(20))["tokens"].shape == (20, 8)


HALVES = {"a": range(20), "b": range(20, 40)}


def stream(prefixes, weights, size=100, cls=GPTDataset, **fields):
    made = config(**({"blend": (prefixes, weights), "split": "1"} | fields))
    return BlendedMegatronDatasetBuilder(cls, [size, 0, 0], lambda: True, made).build()[0]


def test_a_multimodal_pair_is_refused_and_the_class_that_the_error_names_reads_it(tmp_path):
    indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")
    with indexed_data.IndexedDatasetBuilder(tmp_path / "a.bin", np.uint16, multimodal=True) as builder:
        for number in range(20):
            builder.add_document([number] * 5, [2, 3], [0, 1])
    prefix = str(tmp_path / "a")
    with pytest.raises(BlendingError, match=r"multimodal pair.*return IndexedDataset\(prefix\)"):
        stream([prefix], None)

    class AllTheSame(GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            return indexed_data.IndexedDataset(dataset_path)

    with pytest.warns(UserWarning, match="40 sequences in 20 documents"):
        data = stream([prefix], None, cls=AllTheSame)
    assert data.get_batch(range(9))["tokens"].max() < 20


def test_sequences_of_documents_are_told_apart_by_why_and_by_a_word(tmp_path):
    indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")
    for name, lengths in (("several", [2, 3]), ("one", None)):
        with indexed_data.IndexedDatasetBuilder(tmp_path / f"{name}.bin", np.uint16) as builder:
            for number in range(20):
                builder.add_document([number] * 5, lengths)
    with pytest.warns(UserWarning, match=r"several has 40 sequences in 20 documents.*as one sequence"):
        data = stream([str(tmp_path / "several")], None)
    for position in range(12):
        tokens, at = data.get_batch([position])["tokens"][0], 0
        for part in data.why(position).ranges:
            if at < len(tokens):
                assert tokens[at] == part.document, "ids are numbers of documents here"
                assert part.sequence is not None and part.sequence // 2 == part.document
                assert f"document {part.document} sequence {part.sequence} [" in str(part)
            at += part.length
    with warnings.catch_warnings():  # the remedy
        warnings.simplefilter("error")
        whole = stream([str(tmp_path / "one")], None)
    assert whole.why(3).ranges[0].sequence is None


def test_ends_of_documents_that_are_not_the_configs_are_told():
    ending = numbered([5] * 30)
    for document in ending:
        document[-1] = 7
    with pytest.warns(UserWarning, match=r"16 of 16 sampled documents of a .*the tokenizer's eod, 0; one ends with 7"):
        dataset(ending, create_cu_seqlens=True, reset_position_ids=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset(ending)  # nothing that needs it
        dataset(ending, tokenizer=type("T", (), {"eod": 7})(), create_cu_seqlens=True, reset_position_ids=True)
        dataset(ending, tokenizer=type("T", (), {"eod": -1})(), create_cu_seqlens=True)


def test_a_dataset_and_a_blend_print_what_they_are():
    train = dataset(numbered([5] * 30))
    blend = BlendedDataset([train], [1.0], 40, train.config)
    assert f"{train}; {blend}" == "GPTDataset(train of a); BlendedDataset(40 samples, train of a)"


def test_options_that_look_for_an_eod_warn_if_the_data_has_none():
    """What the warning names instead does see the documents."""
    without = type("T", (), {"eod": -1})()
    documents = [[number] * 5 for number in range(1, 31)]
    with pytest.warns(UserWarning, match=r"^reset_position_ids without effect: .*create_cu_seqlens and") as told:
        data = dataset(documents, tokenizer=without, reset_position_ids=True, create_cu_seqlens=True)
    assert len(told) == 1
    sample = data[0]
    assert sample["position_ids"].tolist() == [*range(8)]
    boundaries = np.flatnonzero(np.diff(sample["tokens"])) + 1
    assert 1 <= boundaries.size <= 2
    assert sample["cu_seqlens"].tolist() == [0, *boundaries, 8]


def test_an_id_beyond_the_vocabulary_is_refused_and_added_tokens_count():
    documents = [[5, 6, 7, 8, 300]] * 30

    def tokens(**fields):
        return dataset(documents, tokenizer=type("T", (), {"eod": 8, **fields})()).get_batch(range(9))["tokens"]

    for wrong in ({"vocab_size": 256}, {"vocab_size": 300}):
        with pytest.raises(BlendingError, match=r"sample 0 of the batch has the id 300 at token .*len\(tokenizer\)"):
            tokens(**wrong)
    for right in ({"vocab_size": 301}, {}, {"vocab_size": 256, "eos": 300}, {"vocab_size": 0}):
        assert tokens(**right).max() == 300
    last = dataset([[1] * 8 + [9]], tokenizer=type("T", (), {"eod": 8, "vocab_size": 9})(), num_samples=None)
    with pytest.raises(BlendingError, match="id 9 at token 8"):
        last.get_batch([0])


class Filtered:
    """Every second sequence of another source, in place: a source with gaps."""

    def __init__(self, whole):
        self.tokens, self.dtype = whole.tokens, whole.dtype
        self.sequence_lengths, self.pointers = whole.sequence_lengths[::2], whole.sequence_pointers[::2]

    def get(self, idx, offset=0, length=None):
        begin = int(self.pointers[idx]) // self.dtype.itemsize + offset
        return self.tokens[begin : begin + (int(self.sequence_lengths[idx]) - offset if length is None else length)]


def test_a_source_with_gaps_is_told_what_to_leave_out_and_reads_without_it():
    source = Filtered(ListSource(numbered([5] * 40)))
    source.sequence_pointers = source.pointers
    with pytest.raises(BlendingError, match=r"If your source leaves gaps .* give it no sequence_pointers"):
        GPTDataset(source, "a", range(20), 50, Split.train, config()).get_batch(range(20))
    del source.sequence_pointers
    data = GPTDataset(source, "a", range(20), 50, Split.train, config())
    assert ids_read(data) == ids_of(range(0, 40, 2))


# ---- datasets that left


def test_a_run_goes_on_without_a_dataset_that_left_the_blend_and_was_deleted(pair):
    a, b = pair([5] * 40, 1, "a"), pair([7] * 30, 5000, "b")
    fields = {"changes": [BlendChange(50, ([a], [1]))]}
    then = stream([a, b], [1, 1], **fields)
    state, expected = then.state_dict(80), then.get_batch(range(80, 99))["tokens"]
    early = then.state_dict(20)
    for end in ("bin", "idx"):
        os.unlink(f"{b}.{end}")
    with pytest.warns(UserWarning, match="b has left the blend and its files are missing"):
        now = stream([a, b], [1, 1], **fields)
    assert now.load_state_dict(json.loads(json.dumps(state))) == 80
    assert np.array_equal(now.get_batch(range(80, 99))["tokens"], expected)
    assert np.array_equal(now.counts(80), then.counts(80)) and now.state_dict(90)["datasets"]["1"]["name"] == "b"
    later = now.state_dict(90)
    assert now.load_state_dict(later) == then.load_state_dict(later) == 90
    with pytest.raises(BlendingError, match=r"b\.idx and \.bin are not there"):
        now.load_state_dict(early)
    with pytest.raises(BlendingError, match=r"b\.idx and \.bin are not there"):
        now.get_batch(range(50))
    for still_read in ({"changes": [BlendChange(50, ([a, b], [1, 2]))]}, {"changes": []}):
        with pytest.raises(BlendingError, match=r"b\.idx or .*is missing"):
            stream([a, b], [1, 1], **still_read)
    pair([7] * 30, 5000, "b")  # the remedy
    assert np.array_equal(
        stream([a, b], [1, 1], **fields).get_batch(range(50))["tokens"], then.get_batch(range(50))["tokens"]
    )


# ---- caches


def test_a_full_disk_is_told_as_that(pair, tmp_path, monkeypatch):
    def full(file, array, **_):
        raise OSError(f"{array.size} requested and 992 written")  # as numpy says it

    prefix = pair([5] * 40)
    monkeypatch.setattr(np, "save", full)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(BlendingError, match=r"the disk is full, \d+ bytes are needed and 100 are free; set"):
        stream([prefix], [1], order="megatron", path_to_cache=str(tmp_path / "cache"))


# ---- arrays that are handed out, ids that are none


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_arrays_that_samples_are_looked_up_in_cannot_be_changed_by_who_gets_them(order):
    made = config(order=order)
    parts = [GPTDataset(ListSource(numbered([5] * 40)), name, range(40), 60, Split.train, made) for name in ("a", "b")]
    data = BlendedDataset(parts, [1, 1], 60, made)
    arrays = [data.dataset_index, data.dataset_sample_index, parts[0].document_index, parts[0].sample_index]
    for array in [*arrays, parts[0].shuffle_index, SOURCE.get(3)]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("wrong", ["0", 1.5, True, [1, 2], b"0"], ids=repr)
def test_an_eod_that_is_no_id_is_refused(wrong):
    with pytest.raises(BlendingError, match=r"tokenizer\.eod is .*an int"):
        dataset(numbered([9]), tokenizer=type("T", (), {"eod": wrong})(), create_cu_seqlens=True)
    assert dataset(numbered([9]), tokenizer=type("T", (), {"eod": np.uint16(7)})()).layout.eod == 7


def test_a_tokenizer_of_hugging_face_is_told_what_to_give_in_its_place():
    class HuggingFace:  # its pad() pads lists of ids
        eos_token_id = 3

        def __len__(self):
            return 1000

        def __repr__(self):
            return "a page of added tokens " * 100

        def pad(self, encoded_inputs):
            """Of a list of inputs."""

    tokenizer = HuggingFace()
    with pytest.raises(BlendingError, match=r"tokenizer\.pad is a method") as told:
        dataset(numbered([9]), tokenizer=tokenizer)[0]
    assert len(str(told.value)) < 400
    remedy = str(told.value).partition("pass ")[2]
    given = eval(remedy, {"types": types, "tokenizer": tokenizer})
    assert dataset(numbered([9]), tokenizer=given, create_cu_seqlens=True).layout.eod == 3


@pytest.mark.parametrize("wrong", [True, 1.5, "0", -1, 7], ids=repr)
def test_a_dataset_number_that_is_none_is_refused(wrong):
    with pytest.raises(BlendingError, match="dataset"):
        blend({"a": numbered([20])}, [1]).find(wrong, 0)
