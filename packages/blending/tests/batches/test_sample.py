"""From ids to arrays: the peer's meanings, document boundaries, padding, ownership."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from blending_helpers import EOD, Tokenizer, blend, config, dataset, numbered, sequences_of

from sixfold.blending import BlendChange, BlendingError, GPTDataset, Split
from sixfold.blending.batches.gpt_arrays import SampleLayout, pad_token
from sixfold.blending.config.splits import parse_split, split_matrix
from sixfold.blending.source import ListSource

PEER = json.loads((Path(__file__).parents[1] / "golden" / "peer.json").read_text())


def layout_of(text, flags, pad, **more):
    """The arrays of one text of S + 1 ids."""
    tokenizer = SimpleNamespace(eod=PEER["eod"], pad=pad)
    layout = SampleLayout(config(tokenizer=tokenizer, **flags, **more))
    rows = layout.new_rows(1, len(text) - 1)
    rows.tokens[0], rows.labels[0] = text[:-1], text[1:]
    return layout.batch(rows)


def test_arrays_are_those_of_megatron_core():
    assert len(PEER["samples"]) == 64, "every set of flags"
    for flags, text, expected in PEER["samples"]:
        batch = layout_of(text, flags, PEER["pad"], create_attention_mask=True)
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert batch[name][0].tolist() == expected[name], (flags, text, name)
        assert batch["attention_mask"].shape == (1, 1, 12, 12)
        assert np.packbits(batch["attention_mask"][0]).tolist() == expected["attention_mask"], (flags, text)


@pytest.mark.parametrize(("split", "expected"), PEER["splits"], ids=str)
def test_splits_are_those_of_megatron_core(split, expected):
    assert split_matrix(parse_split(split)) == [None if part is None else tuple(part) for part in expected]


def test_types_and_shapes():
    options = {"create_cu_seqlens": True, "create_document_ids": True, "create_attention_mask": True}
    batch = blend({"a": [[1, 2, 3] * 9]}, [1], **options).get_batch(range(5))
    shapes = {name: (array.dtype.name, array.shape) for name, array in batch.items() if name != "cu_seqlens"}
    assert shapes == {
        "tokens": ("int64", (5, 8)),
        "labels": ("int64", (5, 8)),
        "loss_mask": ("float32", (5, 8)),
        "position_ids": ("int64", (5, 8)),
        "document_ids": ("int32", (5, 8)),
        "attention_mask": ("bool", (5, 1, 8, 8)),
        "dataset_id": ("int64", (5,)),
    }
    assert batch["cu_seqlens"].dtype == np.int32
    assert dataset([[1] * 30], token_dtype=np.int32)[0]["tokens"].dtype == np.int32


@pytest.mark.parametrize("seed", range(4))
def test_documents_begin_where_a_range_begins_and_behind_each_eod(seed):
    lengths = np.random.default_rng(seed).integers(0, 9, 30).tolist()
    sequences = sequences_of(lengths, seed, eod_every=2)
    sequences[3] = [EOD, EOD, 7, EOD]
    data = dataset(sequences, create_cu_seqlens=True, create_document_ids=True)
    batch = data.get_batch(range(40))
    flat = []
    for row in range(40):
        begins, column = {0}, 0
        for part in data.why(row).ranges:
            begins.add(column)
            column += part.length
        tokens = batch["tokens"][row].tolist()
        begins |= {place + 1 for place, token in enumerate(tokens[:-1]) if token == EOD}
        assert data[row]["cu_seqlens"].tolist() == [*sorted(begins), 8]
        assert batch["document_ids"][row].tolist() == [sum(b <= i for b in begins) - 1 for i in range(8)]
        flat += [row * 8 + begin for begin in sorted(begins)]
    assert batch["cu_seqlens"].tolist() == [*flat, 40 * 8]


def test_the_range_that_gives_only_the_last_label_is_no_document_of_the_sample():
    data = dataset(
        [[5] * 8], create_cu_seqlens=True
    )  # every sample is the whole sequence; its label is the next epoch's
    assert data[3]["cu_seqlens"].tolist() == [0, 8]


def test_a_kept_partial_sample_is_padded_and_masked():
    options = {"sequence_length": 8, "drop_last_partial_validation_sequence": False}
    sequences = numbered([6, 5])  # 11 tokens: one whole sample and 3 tokens of which 2 have labels
    for pad in (None, 200):
        tokenizer = SimpleNamespace(eod=EOD, pad=pad)
        data = dataset(sequences, None, split=Split.valid, tokenizer=tokenizer, **options)
        assert len(data) == 2
        batch = data.get_batch([0, 1])
        short = int(np.flatnonzero(batch["loss_mask"].sum(axis=1) == 2)[0])
        assert batch["loss_mask"][short].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
        assert batch["tokens"][short, 3:].tolist() == [0] * 5
        assert batch["labels"][short, 2:].tolist() == [0] * 6
        assert batch["tokens"][short, 1:3].tolist() == batch["labels"][short, :2].tolist()
        assert sum(part.length for part in data.why(short).ranges) == 3
        assert batch["loss_mask"][1 - short].tolist() == [1] * 8


@pytest.mark.parametrize("rows", ["packed", "a short last sample", "a document taken down"])
def test_padding_ends_no_document_of_data_without_an_eod(rows, level):
    """eod=-1 says so, and padding is -1 until it becomes 0. The oracle: 99, which no token is either."""
    sequences, found = [[1] * 3, [2] * 9, [3] * 2], []
    options = {"sequence_length": 16, "create_cu_seqlens": True, "create_document_ids": True}
    options |= {"create_attention_mask": True, "reset_position_ids": True, "reset_attention_mask": True}
    for eod in (-1, 99):
        asked = options | {"tokenizer": SimpleNamespace(eod=eod)}
        if rows == "a document taken down":
            data = blend(
                {"a": sequences}, [1.0], 10, changes=[BlendChange(0, drop={"a": [1]})], max_epochs=None, **asked
            )
        elif rows == "packed":
            data = dataset(sequences, None, packing="best_fit", **asked)
        else:
            data = dataset(sequences, None, split=Split.valid, drop_last_partial_validation_sequence=False, **asked)
        found.append(data.get_batch([0]))
    assert (found[1]["tokens"] == 0).any(), "some padding"
    for name, array in found[1].items():
        assert np.array_equal(found[0][name], array), name


def test_without_the_extra_token_the_last_label_is_padding_and_an_epoch_is_t_div_s():
    data = dataset(numbered([16]), None, add_extra_token_to_sequence=False)
    assert len(data) == 2
    batch = data.get_batch([0, 1])
    assert batch["labels"][:, :-1].tolist() == batch["tokens"][:, 1:].tolist()
    assert batch["labels"][:, -1].tolist() == [0, 0]
    assert batch["loss_mask"][:, -1].tolist() == [0, 0]
    assert sorted(batch["tokens"].ravel().tolist()) == list(range(1, 17))


@pytest.mark.parametrize(
    ("special", "allow", "pad"),
    [
        ({"eod": 0}, False, -1),
        ({"eod": 0, "pad": 5}, False, 5),
        ({"eod": 0, "pad": 0}, False, -1),
        ({"eod": 0, "pad": 0}, True, 0),
        ({"eod": 0, "pad": 7, "eos": 7}, False, -1),
        ({"eod": 0, "pad": 7, "special_tokens_dict": {"pad_token": 7, "bos_token": 3}}, False, 7),
        ({"eod": 0, "pad": 7, "special_tokens_dict": {"pad_token": 7, "bos_token": 7}}, False, -1),
    ],
    ids=str,
)
def test_padding_never_masks_real_text_unless_asked_to(special, allow, pad):
    assert pad_token(SimpleNamespace(**special), allow) == pad


def test_none_is_sample_0_without_loss():
    data = blend({"a": numbered([50])}, [1])
    filler, first = data[None], data[0]
    assert filler["tokens"].tolist() == first["tokens"].tolist()
    assert filler["loss_mask"].tolist() == [0.0] * 8
    assert first["loss_mask"].tolist() == [1.0] * 8


def test_arrays_belong_to_the_caller():
    data = blend({"a": numbered([50])}, [1])
    one, two = data.get_batch([0, 1]), data.get_batch([0, 1])
    for name, array in one.items():
        array[...] = 77
        assert not np.shares_memory(array, two[name])
    assert data.get_batch([0, 1])["tokens"].tolist() == two["tokens"].tolist()
    assert data.get_batch([0, 1])["position_ids"].tolist() == two["position_ids"].tolist()


def test_out_is_filled_in_place_and_must_fit():
    data = blend({"a": numbered([50]), "b": numbered([33])}, None, create_cu_seqlens=True, create_document_ids=True)
    fresh, out = data.get_batch(range(6)), data.get_batch(range(100, 106))
    held = {name: array for name, array in out.items() if name != "cu_seqlens"}
    returned = data.get_batch(range(6), out=out)
    assert returned is out
    for name, array in held.items():
        assert out[name] is array, f"{name} was replaced"
        assert np.array_equal(array, fresh[name])
    assert np.array_equal(out["cu_seqlens"], fresh["cu_seqlens"])
    with pytest.raises(BlendingError, match=r"out\['tokens'\] is int64 \(6, 8\); this batch needs int64 \(5, 8\)"):
        data.get_batch(range(5), out=out)
    with pytest.raises(BlendingError, match=r"out\['loss_mask'\] is float64"):
        data.get_batch(range(6), out={"loss_mask": np.zeros((6, 8))})
    with pytest.raises(BlendingError, match=r"out\['dataset_id'\] is int64 \(2, 6\); this batch needs int64 \(6,\)"):
        data.get_batch(range(6), out={"dataset_id": np.zeros((2, 6), np.int64)})


def test_positions_may_be_any_row_of_whole_numbers():
    data = blend({"a": numbered([50]), "b": numbered([33])}, None)
    expected = data.get_batch([3, 1])["tokens"].tolist()
    for positions in ((3, 1), range(3, 0, -2), np.array([3, 1], dtype=np.uint8), [np.int64(3), 1]):
        assert data.get_batch(positions)["tokens"].tolist() == expected
        assert data[positions]["tokens"].tolist() == expected
    assert data.get_batch([])["tokens"].shape == (0, 8)
    for wrong in ([0.5], [[1]], 3):
        with pytest.raises(BlendingError, match="they are whole numbers"):
            data.get_batch(wrong)
    for far in (-1, 2**62, 2**63 - 1):
        with pytest.raises(IndexError, match=f"position {far} is not in"):
            data.get_batch([0, far])
    for outside in (-1, len(data)):
        with pytest.raises(IndexError):
            data[outside]


@pytest.mark.parametrize(
    ("stored", "value", "token_dtype"),
    [(np.uint16, 40_000, np.int16), (np.int64, 2**31, np.int32), (np.int64, -(2**31) - 1, np.int32),
     (np.float32, 70.5, np.int64)],
)  # fmt: skip
def test_ids_that_the_token_dtype_does_not_hold_are_refused_and_not_cut(stored, value, token_dtype):
    source = ListSource([[value] * 60], stored)
    data = GPTDataset(source, "a", range(1), 10, Split.train, config(token_dtype=token_dtype))
    with pytest.raises(BlendingError, match=f"id {value} of {np.dtype(stored)}; {np.dtype(token_dtype)} does not"):
        data.get_batch([0])


@pytest.mark.parametrize(
    "option",
    ["reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_cu_seqlens", "create_document_ids"],
)
def test_options_about_documents_need_the_end_of_document_token(option):
    with pytest.raises(BlendingError, match=f"{option} needs to know the end-of-document token"):
        config(tokenizer=None, **{option: True})
    assert getattr(config(tokenizer=Tokenizer(), **{option: True}), option)
