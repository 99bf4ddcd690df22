"""Documents that are taken down, and datasets that left and were deleted: nothing before changes."""

import json
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import blend, config, numbered

from sixfold.blending import BlendChange, BlendedMegatronDatasetBuilder, BlendingError, GPTDataset
from sixfold.blending.samples import packed_rows

PACKINGS = ("concatenate", "best_fit")
LENGTHS = {"a": [5, 9, 30, 3, 12, 7] * 4, "b": [20, 4, 11] * 6}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(packed_rows, "WINDOW_AT_LEAST", 16)


def texts():
    return {"a": numbered(LENGTHS["a"]), "b": numbered(LENGTHS["b"], begin=10_000)}


def made(*changes, **fields):
    fields = {"create_document_ids": True, "changes": changes} | fields
    return blend(texts(), [0.6, 0.4], 400, **fields)


@pytest.mark.parametrize("packing", PACKINGS)
def test_from_the_position_on_a_dropped_document_is_padding_without_loss(packing, level):
    at, gone = 37, {"a": [2, 7], "b": [0]}
    plain, dropped = made(packing=packing), made(BlendChange(at, drop=gone), packing=packing)
    before, after = plain.get_batch(range(200)), dropped.get_batch(range(200))
    assert np.array_equal(before["dataset_id"], after["dataset_id"])
    ids = [token for name, some in gone.items() for number in some for token in texts()[name][number]]
    for name in ("tokens", "labels", "loss_mask", "position_ids", "document_ids"):
        assert np.array_equal(before[name][:at], after[name][:at]), "nothing before the change moves"
    hidden = np.isin(before["tokens"][at:], ids)
    unseen = np.isin(before["labels"][at:], ids)
    assert hidden.any()
    assert np.array_equal(after["tokens"][at:], np.where(hidden, 0, before["tokens"][at:]))
    assert np.array_equal(after["labels"][at:], np.where(unseen, 0, before["labels"][at:]))
    assert np.array_equal(after["loss_mask"][at:], np.where(unseen, 0, before["loss_mask"][at:]))
    assert not np.isin(after["tokens"][at:], ids).any()
    for row in range(at, 200):  # a hole is a document by itself
        numbers, holes = after["document_ids"][row], hidden[row - at]
        assert not set(numbers[holes]) & set(numbers[~holes])


@pytest.mark.parametrize("packing", PACKINGS)
def test_why_says_what_is_dropped_and_a_state_holds_it(packing):
    changes = (BlendChange(20, drop={"a": [2, 7]}), BlendChange(40, blend=(["a", "b"], [0.5, 0.5])))
    data = made(*changes, packing=packing)
    marked = {(p, r.document) for p in range(60) for r in data.why(p).ranges if r.dropped}
    assert marked
    assert all(position >= 20 and document in (2, 7) for position, document in marked)
    state = json.loads(json.dumps(data.state_dict(30)))
    assert data.load_state_dict(state) == 30
    assert made(*changes, packing=packing, max_epochs=9).load_state_dict(state) == 30
    for other in (changes[1:], (BlendChange(20, drop={"a": [2]}), changes[1])):
        with pytest.raises(BlendingError, match=r"what the BlendChange at 20 takes down of 'a' is another list"):
            made(*other, packing=packing).load_state_dict(state)
    both = {"a": [2], "b": [3]}
    state = json.loads(json.dumps(made(BlendChange(20, drop=both), packing=packing).state_dict(30)))
    turned = BlendChange(20, drop=dict(reversed(both.items())))
    assert made(turned, packing=packing).load_state_dict(state) == 30, "their order says nothing"
    with pytest.raises(BlendingError, match=r"what the BlendChange at 20 takes down of 'b' is another list"):
        made(BlendChange(20, drop=both | {"b": [4]}), packing=packing).load_state_dict(state)
    early = json.loads(json.dumps(made(packing=packing).state_dict(20)))
    assert "drops" not in early
    assert data.load_state_dict(early) == 20, "what comes later is free"


def test_documents_that_are_not_there_are_refused():
    with pytest.raises(BlendingError, match=r"document 24 is dropped, and it has documents 0\.\.23"):
        made(BlendChange(5, drop={"a": [24]}))
    with pytest.raises(BlendingError, match="the change at 5 drops documents of 'c', which is none of the datasets"):
        made(BlendChange(5, drop={"c": [1]}))
    with pytest.raises(BlendingError, match=r"drop\['a'\]\[0\] is -1; it is a whole number >= 0"):
        config(changes=[BlendChange(5, drop={"a": [-1]})])
    with pytest.raises(BlendingError, match="changes nothing; give blend, sequence_length or drop"):
        config(changes=[BlendChange(5, drop={})])


# ---- datasets that left


def write_pair(prefix, lengths):
    indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")
    with indexed_data.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for length in lengths:
            builder.add_document(np.arange(length) + 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": [1, 2]},
        {"weights": None},
        {"weights": None, "packing": "best_fit"},
        {"weights": [1, 2], "packing": "best_fit", "blend_unit": "tokens"},
    ],
    ids=str,
)
def test_what_a_state_says_of_a_deleted_dataset_is_enough(tmp_path, fields):
    for name, lengths in LENGTHS.items():
        write_pair(tmp_path / name, lengths)
    prefixes = [str(tmp_path / name) for name in LENGTHS]
    fields = dict(fields)
    made = config(
        blend=(prefixes, fields.pop("weights")),
        split="1",
        changes=[BlendChange(30, blend=(prefixes[1:], [1]))],
        **fields,
    )

    def build(state=None):
        builder = BlendedMegatronDatasetBuilder(GPTDataset, [200, 0, 0], lambda: True, made, state=state)
        return builder.build()[0]

    there = build()
    state = json.loads(json.dumps(there.state_dict(60)))
    expected = there.get_batch(range(60, 100))["tokens"]
    for end in ("idx", "bin"):
        Path(f"{prefixes[0]}.{end}").unlink()
    if made.blend[1] is None:
        with pytest.raises(BlendingError, match=r"a\.idx or \S+a\.bin is missing"):
            build()
    with pytest.warns(UserWarning, match="has left the blend and its files are missing"):
        gone = build(state)
    assert gone.load_state_dict(state) == 60
    assert np.array_equal(gone.get_batch(range(60, 100))["tokens"], expected)
    assert np.array_equal(gone.counts(80), there.counts(80))
    later = json.loads(json.dumps(gone.state_dict(80)))
    assert later == there.state_dict(80), "a state of the run without the files is the one with them"
    with pytest.warns(UserWarning, match="has left the blend and its files are missing"):
        assert build(later).load_state_dict(later) == 80
    with pytest.raises(
        BlendingError, match=r"read it; bring the pair back, or resume from a position after the change"
    ):
        gone.get_batch(range(30))


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_without_weights_a_builder_lets_all_packed_epochs_end_together(tmp_path, unit):
    write_pair(tmp_path / "half", [5] * 160)
    write_pair(tmp_path / "full", [4] * 320)
    prefixes = [str(tmp_path / name) for name in ("half", "full")]
    made = config(blend=(prefixes, None), split="1", packing="best_fit", blend_unit=unit)
    train = BlendedMegatronDatasetBuilder(GPTDataset, [320, 0, 0], lambda: True, made).build()[0]
    assert train.counts(320).tolist() == [160, 160]
