"""Remedies of blending's errors: the error is provoked, its remedy is done, and gives what it promises.

The form of a case is in remedy_helpers.py. Where an error gives the value of its remedy, the case reads it there.
"""

import ast
import os
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from remedy_data import EOD, pair, texts
from remedy_helpers import follow, said_by

from sixfold.blending import (
    BlendChange,
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    Prefetcher,
    Split,
)
from sixfold.blending.source import ListSource
from sixfold.blending.torch import PositionSampler
from sixfold.indexed_data import IndexedDataset, build


def config(**fields):
    return GPTDatasetConfig(**{"random_seed": 1, "sequence_length": 8, "tokenizer": SimpleNamespace(eod=EOD)} | fields)


def built(sizes=(64, 0, 0), kind=GPTDataset, **fields):
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config(**fields)).build()[0]


def stream(prefixes, weights=None, sizes=(64, 0, 0), **fields):
    return built(sizes, blend=(prefixes, weights), split="1,0,0", **fields)


def documents(source, name="wiki", samples=0, split=Split.train):
    given = config(blend=([name], None), split="1,0,0")
    return GPTDataset(source, name, range(len(source.sequence_lengths)), samples, split, given)


def a_pair_that_is_missing(folder):
    prefix = pair(folder / "wiki")
    yield lambda: stream([f"{prefix}.bin"])
    yield lambda: stream([prefix]).get_batch([0])["tokens"].shape == (1, 8)


def a_blend_without_split(folder):
    blend = ([pair(folder / "wiki", 100)], None)
    split = re.search(r'such as "([\d,]+)"', said_by(lambda: config(blend=blend)))[1]
    yield lambda: config(blend=blend)
    yield lambda: len(built(blend=blend, split=split))


def two_ways_to_say_a_blend(folder):
    train, valid = ([pair(folder / "a")], None), ([pair(folder / "b")], None)
    yield lambda: config(blend=train, blend_per_split=[train, valid, None])
    yield lambda: len(built(blend=train, split="98,2,0")) and len(built(blend_per_split=[train, valid, None]))


def the_form_of_a_blend(folder):
    args = ["0.7", pair(folder / "a"), "0.3", pair(folder / "b")]
    yield lambda: built(blend=args, split="1,0,0")
    blend = (args[1::2], [float(w) for w in args[0::2]])
    yield lambda: built(blend=blend, split="1,0,0").counts(1000).tolist() == [700, 300]


def a_weight_below_zero(folder):
    prefixes = [pair(folder / "a"), pair(folder / "b")]
    yield lambda: stream(prefixes, [1, -1])
    yield lambda: stream(prefixes, [1, 0]).counts(64).tolist() == [64, 0]


def a_weight_of_nothing_in_megatrons_order(folder):
    prefixes, order = [pair(folder / "a"), pair(folder / "b")], {"order": "megatron"}
    order["tokenizer"] = SimpleNamespace(eod=EOD, unique_identifiers={})
    yield lambda: stream(prefixes, [1, 0], **order)
    yield lambda: stream(prefixes[:1], [1], **order).get_batch([0]) and stream(prefixes, [1, 0]).get_batch([0])


def one_dataset_twice(folder):
    a, b = pair(folder / "a"), pair(folder / "b")
    yield lambda: stream([a, b, a], [0.25, 0.5, 0.25])
    yield lambda: stream([a, b], [0.25 + 0.25, 0.5]).counts(100).tolist() == [50, 50]


def two_datasets_of_one_name(folder):
    for language in ("en", "de"):
        (folder / language).mkdir()
    prefixes = [pair(folder / "en/wiki"), pair(folder / "de/wiki")]
    said = said_by(lambda: stream(prefixes, [1, 1]))
    names = ast.literal_eval(re.search(r"dataset_names=(\{.*?\})", said)[1])
    yield lambda: stream(prefixes, [1, 1])
    yield lambda: stream(prefixes, [1, 1], dataset_names=names).counts(100).tolist() == [50, 50]


def weights_without_a_size(folder):
    prefixes, none = [pair(folder / "a"), pair(folder / "b")], (None, 0, 0)
    yield lambda: stream(prefixes, [1, 2], none)
    yield lambda: len(stream(prefixes, [1, 2], (30, 0, 0))) >= 30 and len(stream(prefixes, None, none)) > 30


def weights_in_unequal_number(folder):
    both = [documents(IndexedDataset(pair(folder / name)), name) for name in "ab"]
    yield lambda: BlendedDataset(both, [1], 20, config())
    yield lambda: BlendedDataset(both, [1, 3], 20, config()).counts(20).sum() == 20


def made_for_one_epoch(folder):
    source = IndexedDataset(pair(folder / "wiki"))
    yield lambda: BlendedDataset([documents(source, samples=None)], [1], 500, config())
    said = said_by(lambda: BlendedDataset([documents(source, samples=None)], [1], 500, config()))
    samples = int(re.search(r"num_samples=(\d+)", said)[1])
    yield lambda: BlendedDataset([documents(source, samples=samples)], [1], 500, config()).get_batch([499])


def a_part_without_tokens(folder):
    prefix, valid = pair(folder / "a", 10), pair(folder / "held-out")
    yield lambda: built((10, 2, 0), blend=([prefix], None), split="99,1,0")
    per_split = [([prefix], None), ([valid], None), None]
    yield (
        lambda: (
            built((10, 2, 0), blend=([prefix], None), split="80,20,0").get_batch([0])
            and built((10, 2, 0), blend_per_split=per_split).get_batch([0])
        )
    )


def a_name_that_is_none(folder):
    prefix, of_peer = pair(folder / "a"), SimpleNamespace(eod=EOD, unique_identifiers={})
    named = re.findall(r'"(\w+)"', said_by(lambda: config(order="greedy")))
    yield lambda: config(order="greedy")
    streams = [stream([prefix], order=name, tokenizer=of_peer) for name in named]
    yield lambda: len(named) == 3 and all(one.get_batch([0])["tokens"].shape == (1, 8) for one in streams)


def a_size_that_is_a_float(folder):
    prefix = pair(folder / "a")
    yield lambda: stream([prefix], sizes=(640 / 10, 0, 0))
    yield lambda: stream([prefix], sizes=(640 // 10, 0, 0)).get_batch([63])


def packing_in_megatrons_order(folder):
    prefix = pair(folder / "a", tokens=7)
    yield lambda: stream([prefix], packing="best_fit", order="megatron")
    yield lambda: stream([prefix], packing="best_fit", order="stateless").get_batch([0])


def a_change_in_an_order_with_an_index(folder):
    prefixes = [pair(folder / "a"), pair(folder / "b")]
    changes = [BlendChange(at=20, blend=(prefixes[1:], [1]))]
    wrong = partial(stream, prefixes, [1, 1], order="megatron", changes=changes)
    order = re.search(r'use order="(\w+)"', said_by(wrong))[1]
    yield wrong
    changed = stream(prefixes, [1, 1], order=order, changes=changes)
    yield lambda: set(changed.locate(range(20, 60))[0]) == {1} and set(changed.locate(range(20))[0]) == {0, 1}


def a_tokenizer_in_the_names_of_files(folder):
    prefix = pair(folder / "a")
    plain, named = SimpleNamespace(eod=EOD), SimpleNamespace(eod=EOD, unique_identifiers={"class": "MyTokenizer"})
    yield lambda: stream([prefix], order="megatron", tokenizer=plain)
    yield lambda: stream([prefix], order="megatron", tokenizer=named).get_batch([0])


def an_index_that_cannot_be_written(folder):
    prefix, named = pair(folder / "a"), SimpleNamespace(eod=EOD, unique_identifiers={})
    (folder / "file").write_text("")
    wrong = partial(stream, [prefix], order="megatron", tokenizer=named, path_to_cache=str(folder / "file/cache"))
    yield wrong
    yield (
        lambda: (
            stream([prefix], order="megatron", tokenizer=named, path_to_cache=str(folder / "cache"))
            and os.listdir(folder / "cache")
            and stream([prefix], path_to_cache=str(folder / "file/cache")).get_batch([0])  # stateless: no files
        )
    )


def changes_out_of_order(folder):
    prefix = pair(folder / "a")
    changes = [BlendChange(at=32, sequence_length=4), BlendChange(at=16, sequence_length=6)]
    yield lambda: stream([prefix], changes=changes)
    sorted_by_at = sorted(changes, key=lambda change: change.at)
    yield lambda: stream([prefix], changes=sorted_by_at).get_batch([20])["tokens"].shape == (1, 6)


def positions_without_an_eod(folder):
    prefix = pair(folder / "a")
    yield lambda: stream([prefix], tokenizer=None, reset_position_ids=True)
    right = stream([prefix], tokenizer=SimpleNamespace(eod=EOD), reset_position_ids=True).get_batch(range(30))
    tokens, positions = right["tokens"], right["position_ids"]
    none = stream([prefix], tokenizer=SimpleNamespace(eod=-1), create_cu_seqlens=True).get_batch(range(30))
    yield lambda: (positions[:, 1:][tokens[:, :-1] == EOD] == 0).all() and len(none["cu_seqlens"]) > 31


def hybrid_context_parallelism(folder):
    prefix = pair(folder / "a")
    yield lambda: stream([prefix], hybrid_context_parallel=True)
    yield lambda: "cu_seqlens" in stream([prefix], create_cu_seqlens=True).get_batch([0])


def a_config_without_a_blend(folder):
    prefix = pair(folder / "a")
    mock = SimpleNamespace(vocab_size=100, eod=0)
    yield lambda: built()
    yield (
        lambda: (
            stream([prefix]).get_batch([0]) and built(kind=MockGPTDataset, tokenizer=mock, split="1,0,0").get_batch([0])
        )
    )


def datasets_of_several_kinds(folder):
    parts = [
        documents(IndexedDataset(pair(folder / name)), name, split=split)
        for name, split in (("a", Split.train), ("b", Split.valid))
    ]
    yield lambda: BlendedDataset(parts, [1, 1], 10, config())
    yield lambda: all(BlendedDataset([part], [1], 10, config()).get_batch([0]) for part in parts)


def sequences_that_a_source_has_not(folder):
    source = ListSource([[1, 2, 3, 4, 5, 6, 7, 8, EOD] * 3])
    given = config(blend=(["wiki"], None), split="1,0,0")
    yield lambda: GPTDataset(source, "wiki", range(5), 0, Split.train, given)
    every = range(len(source.sequence_lengths))
    yield lambda: GPTDataset(source, "wiki", every, 0, Split.train, given).get_batch([0])


def a_list_for_an_eod(folder):
    prefix, of_model = pair(folder / "a"), SimpleNamespace(eos_token_id=EOD)
    yield lambda: stream([prefix], tokenizer=SimpleNamespace(eod=[1, 2]))
    yield lambda: stream([prefix], tokenizer=SimpleNamespace(eod=of_model.eos_token_id, vocab_size=257)).get_batch([0])


def a_state_of_another_configuration(folder):
    prefixes = [pair(folder / "a"), pair(folder / "b")]
    state = stream(prefixes, [1, 1]).state_dict(16)
    wrong = stream(prefixes, [1, 3])
    yield lambda: wrong.load_state_dict(state)
    back = stream(prefixes, [1, 1]).load_state_dict(state)
    changed = stream(prefixes, [1, 1], changes=[BlendChange(at=16, blend=(prefixes, [1, 3]))])
    yield lambda: back == changed.load_state_dict(state) == 16


def a_blend_in_another_order(folder):
    prefixes = [pair(folder / "a"), pair(folder / "b")]
    state = stream(prefixes, [1, 3]).state_dict(16)
    yield lambda: stream(prefixes[::-1], [3, 1]).load_state_dict(state)
    yield lambda: stream(prefixes, [1, 3]).load_state_dict(state) == 16


def no_state_of_a_stream(folder):
    data = stream([pair(folder / "a")])
    yield lambda: data.load_state_dict({})
    yield lambda: data.load_state_dict(data.state_dict(8)) == 8


def no_state_of_a_sampler(folder):
    data = stream([pair(folder / "a")])
    sampler = PositionSampler(0, 4, data=data)
    yield lambda: sampler.load_state_dict({"data": data.state_dict(4)})
    steps = iter(sampler)
    next(steps)
    again = PositionSampler(0, 4, data=data)
    again.load_state_dict(sampler.state_dict())
    yield lambda: next(iter(again)) == next(steps)


def a_dataset_that_is_read_too_often(folder):
    prefix = pair(folder / "a", 2)
    wrong = partial(stream, [prefix], [1], (500, 0, 0), max_epochs_error=True)
    yield wrong
    yield lambda: wrong(max_epochs=None).get_batch([499]) and wrong(max_epochs=1000).get_batch([499])


def a_change_inside_a_step(folder):
    prefix = pair(folder / "a")

    def sampler(at):
        data = stream([prefix], changes=[BlendChange(at=at, sequence_length=4)])
        return PositionSampler(0, 4, 0, 2, data=data)

    said = said_by(lambda: sampler(21))
    yield lambda: sampler(21)
    yield lambda: all(next(iter(sampler(int(at)))) for at in re.search(r"at (\d+) or at (\d+)", said).groups())


def an_id_beyond_the_vocabulary(folder):
    prefix = pair(folder / "a", first=100)
    wrong = SimpleNamespace(eod=0, vocab_size=100)
    yield lambda: stream([prefix], tokenizer=wrong).get_batch(range(30))
    right = [SimpleNamespace(eod=EOD, vocab_size=257), SimpleNamespace(eod=EOD)]
    yield lambda: all(stream([prefix], tokenizer=tokenizer).get_batch(range(30)) for tokenizer in right)


def ids_that_do_not_fit(folder):
    prefix = pair(folder / "a", dtype=np.int32, first=0)
    yield lambda: stream([prefix], token_dtype=np.int8).get_batch(range(30))
    yield lambda: stream([prefix], token_dtype=np.int64).get_batch(range(30))["tokens"].max() == EOD


def a_position_that_does_not_occur(folder):
    data = stream([pair(folder / "a"), pair(folder / "b")], [1, 0])
    yield lambda: data.find(1, 0)
    [dataset], [sample] = data.locate([5])
    yield lambda: data.find(int(dataset), int(sample)) == 5


def positions_of_two_lengths(folder):
    data = stream([pair(folder / "a")], changes=[BlendChange(at=10, sequence_length=4)])
    yield lambda: data.get_batch(range(8, 12))
    moved = stream([pair(folder / "b")], changes=[BlendChange(at=12, sequence_length=4)])
    yield lambda: [moved.get_batch(range(at, at + 4))["tokens"].shape for at in (8, 12)] == [(4, 8), (4, 4)]


def arrays_given_as_out(folder):
    data = stream([pair(folder / "a")])
    yield lambda: data.get_batch(range(4), out={"tokens": np.empty((6, 8), np.int64)})
    out = {name: np.empty_like(array) for name, array in data.get_batch(range(4)).items()}
    data.get_batch(range(4, 8), out=out)
    yield lambda: np.array_equal(out["tokens"], data.get_batch(range(4, 8))["tokens"])


def a_rank_of_a_sampler(folder):
    yield lambda: PositionSampler(0, 4, rank=4, ranks=4)
    said = said_by(lambda: PositionSampler(0, 4, rank=4, ranks=4))
    first, last = map(int, re.search(r"it is (\d+)\.\.(\d+)", said).groups())
    yield lambda: [next(iter(PositionSampler(0, 4, rank=rank, ranks=4)))[0] for rank in (first, last)] == [0, 12]


def a_deal_of_a_sampler(folder):
    said = said_by(lambda: PositionSampler(0, 4, deal="random"))
    yield lambda: PositionSampler(0, 4, deal="random")
    named = [*re.findall(r'"(\w+)"', said), None]
    yield lambda: len(named) == 3 and all(sorted(next(iter(PositionSampler(0, 4, deal=deal)))) for deal in named)


def the_timeout_of_a_prefetcher(folder):
    data = stream([pair(folder / "a")])
    yield lambda: Prefetcher(data, [[0]], timeout_s=0)
    with Prefetcher(data, [[0]], timeout_s=60) as batches:
        [batch] = batches
    yield lambda: batch["tokens"].shape == (1, 8)


def a_file_that_no_pair_knows(folder):
    [path] = texts(folder, a__jsonl="".join('{"text": "abcdefghijklmnop"}\n' for _ in range(20)))
    build([path], folder / "plain")
    build([path], folder / "known", provenance=True)
    yield lambda: stream([str(folder / "plain")]).find_line(path, 3, 64)
    name = IndexedDataset(folder / "known").provenance.files[0]
    yield lambda: stream([str(folder / "known")]).find_line(name, 3, 64)


CASES = [
    ("a pair is missing", a_pair_that_is_missing),
    ("blend is given without split", a_blend_without_split),
    ("blend and blend_per_split together", two_ways_to_say_a_blend),
    ("the form of a blend", the_form_of_a_blend),
    ("weights of a blend", a_weight_below_zero),
    ("weights of a blend", a_weight_of_nothing_in_megatrons_order),
    ("weights and datasets in unequal number", weights_in_unequal_number),
    ("one dataset twice", one_dataset_twice),
    ("two datasets of one name", two_datasets_of_one_name),
    ("sizes and weights that do not go together", weights_without_a_size),
    ("made for one epoch, and asked for more", made_for_one_epoch),
    ("a part without tokens", a_part_without_tokens),
    ("a name that is none of the field's values", a_name_that_is_none),
    ("a whole number that is none", a_size_that_is_a_float),
    ("packed documents", packing_in_megatrons_order),
    ("orders with an index", a_change_in_an_order_with_an_index),
    ("cache files that cannot be named", a_tokenizer_in_the_names_of_files),
    ("an index that cannot be written", an_index_that_cannot_be_written),
    ("changes of a run", changes_out_of_order),
    ("options that need the end-of-document token", positions_without_an_eod),
    ("hybrid context parallelism", hybrid_context_parallelism),
    ("mock data and real data", a_config_without_a_blend),
    ("datasets of several kinds", datasets_of_several_kinds),
    ("sequences that a source has not", sequences_that_a_source_has_not),
    ("a token of the tokenizer that is no number", a_list_for_an_eod),
    ("the saved state does not fit", a_state_of_another_configuration),
    ("the saved state does not fit", a_blend_in_another_order),
    ("no state of a stream", no_state_of_a_stream),
    ("no state of a sampler", no_state_of_a_sampler),
    ("a dataset is read too often", a_dataset_that_is_read_too_often),
    ("a change of the sequence length inside a step", a_change_inside_a_step),
    ("an id beyond the vocabulary", an_id_beyond_the_vocabulary),
    ("ids that do not fit a batch", ids_that_do_not_fit),
    ("positions that a stream has not", a_position_that_does_not_occur),
    ("positions of a batch", positions_of_two_lengths),
    ("arrays given as out", arrays_given_as_out),
    ("ranks and ends of a sampler", a_rank_of_a_sampler),
    ("how positions are dealt to ranks", a_deal_of_a_sampler),
    ("the timeout of a Prefetcher", the_timeout_of_a_prefetcher),
    ("a file that no pair knows", a_file_that_no_pair_knows),
]


@pytest.mark.parametrize(("heading", "case"), CASES)
def test_the_remedy_of_an_error_of_blends_gives_what_it_promises(heading, case, tmp_path):
    follow("blending", heading, case(tmp_path))
