"""A user's own datasets: an order that is computed, items that are checked, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from context_helpers import put_back
from gpt_helpers import tiny_config
from run_helpers import lines, losses, world_of

from sixfold.blending.order import deal
from sixfold.gpt import ConfigError, TrainError, global_batches
from sixfold.gpt.data.own_data import open_own
from sixfold.gpt.data.token_stream import TokenStream
from sixfold.gpt.parallel.sequence_parts import SequencePart
from sixfold.gpt.training.loop import train_in


class Numbered:
    """Item i is i, i+1, ... modulo 251; plain rows of one id more than a sample has."""

    def __init__(self, size, width=32):
        self.size, self.width = size, width

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        if not 0 <= number < self.size:
            raise IndexError(number)
        return torch.arange(number, number + self.width + 1) % 251


def own_config(tmp_path, *overrides, **kwargs):
    named = ('data.blend=["a", "b"]', "data.weights=[0.75, 0.25]", "data.split=98,2,0", *overrides)
    return tiny_config(tmp_path, *named, **kwargs)


TWO = {"a": Numbered(10), "b": Numbered(7)}


def test_each_epoch_reads_every_item_once_in_another_order_and_datasets_take_turns_by_weight(tmp_path):
    data, valid = open_own(own_config(tmp_path, "data.max_epochs=0"), TWO)
    dataset, sample = data.locate(range(400))
    assert valid == {} and np.bincount(dataset).tolist() == [300, 100]
    for number, size in enumerate((10, 7)):
        mine = sample[dataset == number]
        assert mine.tolist() == list(range(len(mine)))
        epochs = [[data.item(number, e * size + i) for i in range(size)] for e in range(len(mine) // size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) > len(epochs) // 2
    assert data.epochs(400).tolist() == [30, 100 / 7]
    other, _ = open_own(replace(own_config(tmp_path, "data.max_epochs=0", "train.seed=7")), TWO)
    assert [other.item(0, i) for i in range(10)] != [data.item(0, i) for i in range(10)]


def test_parts_of_rows_are_cut_and_counted_as_those_of_token_pairs(tmp_path):
    class Packed(Numbered):
        def __getitem__(self, number):
            ids = super().__getitem__(number)
            counted = (torch.arange(self.width) % 5 > 0).float()
            return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": counted, "documents": ids[:-1] // 7}

    config = own_config(tmp_path, "data.max_epochs=0")
    data, _ = open_own(config, {"a": Packed(10), "b": Packed(7)})
    whole = TokenStream(data, config).microbatch(3, 2)
    parts = [TokenStream(data, config, part=SequencePart(rank, 2)).microbatch(3, 2) for rank in range(2)]
    assert torch.equal(put_back([part.tokens for part in parts]), whole.tokens)
    for key in ("labels", "loss_mask", "position_ids"):
        assert torch.equal(put_back([part.kwargs[key] for part in parts]), whole.kwargs[key])
    assert sum(part.targets for part in parts) == whole.targets
    assert torch.equal(parts[0].rows.targets + parts[1].rows.targets, whole.rows.targets)
    assert all(torch.equal(part.rows.dataset, whole.rows.dataset) for part in parts)


def test_a_batch_is_its_items_whatever_it_is_cut_into(tmp_path):
    config = own_config(tmp_path, "data.max_epochs=0")
    data, _ = open_own(config, TWO)
    whole = data.get_batch(range(3, 11))
    for at in range(8):
        row = data.get_batch(range(3 + at, 4 + at))
        [dataset], [sample] = data.locate([3 + at])
        ids = TWO["ab"[dataset]][data.item(dataset, sample)].numpy()
        assert (row["tokens"][0] == ids[:-1]).all() and (row["labels"][0] == ids[1:]).all()
        for name in ("tokens", "labels", "loss_mask", "dataset_id"):
            assert (whole[name][at] == row[name][0]).all()
        why = data.why(3 + at)
        assert why.dataset_name == "ab"[dataset] and why.ranges[0].document == ids[0]
    assert whole["cu_seqlens"].tolist() == list(range(0, 8 * 32 + 1, 32))
    first = next(iter(global_batches(config, datasets=TWO)))
    assert (first.tokens.numpy() == data.get_batch(deal(0, 8, 0, 1).tolist())["tokens"]).all()


def test_documents_within_an_item_have_boundaries(tmp_path):
    class Packed(Numbered):
        def __getitem__(self, number):
            row = super().__getitem__(number)
            return {"tokens": row[:-1], "labels": row[1:], "documents": torch.arange(32) // (10 + number)}

    data, _ = open_own(own_config(tmp_path, "data.max_epochs=0"), {"a": Packed(1), "b": Packed(1)})
    assert data.get_batch(range(2))["cu_seqlens"].tolist() == [0, 10, 20, 30, 32, 42, 52, 62, 64]


ITEMS = {
    "short": (torch.arange(32), r"shape \(32,\); it is one row of data.seq_length \+ 1 = 33 ids"),
    "floats": (torch.zeros(33), "is of float32; ids are whole numbers"),
    "negative": (torch.arange(33) - 5, "has the id -5"),
    "large": (torch.arange(33) + 250, r"a: document \d+, token 7 is id 257; model.vocab_size is 257"),
    "large label": (
        {"tokens": np.arange(32), "labels": np.arange(32) + 240},
        r"a: document \d+, label 17 is id 257; model.vocab_size is 257, ids lie below it",
    ),
    "large label that does not count": (
        {"tokens": np.arange(32), "labels": [257] + [1] * 31, "loss_mask": np.arange(32) > 0},
        r"a: document \d+, label 0 is id 257; model.vocab_size is 257",
    ),
    "large last label": (
        {"tokens": np.arange(32), "labels": [1] * 31 + [300]},
        r"a: document \d+, label 31 is id 300; model.vocab_size is 257",
    ),
    "large token": (
        {"tokens": [1] * 31 + [300], "labels": [999] * 32},
        r"a: document \d+, token 31 is id 300; model.vocab_size is 257",
    ),
    "no labels": ({"tokens": torch.arange(32)}, r"has \['tokens'\]; it has tokens, labels"),
    "strange": ({"tokens": 0, "labels": 0, "input_ids": 0}, "input_ids"),
    "mask": ({"tokens": np.arange(32), "labels": [1] * 32, "loss_mask": np.full(32, np.nan)}, "loss_mask"),
    "weights of targets": (
        {"tokens": np.arange(32), "labels": [1] * 32, "loss_mask": np.full(32, 0.5)},
        r"a\[\d+\]\['loss_mask'\] has 0\.5; it is 0 \(does not count\) or 1",
    ),
    "raises": (None, r"a\[\d+\] raised KeyError: 'gone'"),
}


@pytest.mark.parametrize("case", ITEMS)
@pytest.mark.slow
def test_an_item_that_is_none_is_named_with_dataset_and_number(tmp_path, case):
    item, says = ITEMS[case]

    class Odd(Numbered):
        def __getitem__(self, number):
            if item is None:
                raise KeyError("gone")
            return item

    config = own_config(tmp_path, 'data.blend=["a"]', "data.weights=[]", "data.max_epochs=0")
    with pytest.raises(TrainError, match=says):
        train_in(config, world_of(0, 1), datasets={"a": Odd(3)})


@pytest.mark.parametrize(
    ("overrides", "datasets", "says"),
    [
        ([], {"a": Numbered(3)}, "'b' is missing in one"),
        ([], {**TWO, "c": Numbered(3)}, "'c' is missing in one"),
        ([], {"a": Numbered(3), "b": Numbered(0)}, "'b' has 0 items"),
        ([], {"a": Numbered(3), "b": iter([])}, "without len"),
        (["data.order=megatron"], TWO, "data.order is 'megatron'"),
        (["data.eod_mask_loss=true"], TWO, "data.eod_mask_loss is True"),
        (["data.split=90,10,0"], TWO, "data.split is '90,10,0'"),
        (['data.names=["x", "y"]'], TWO, r"data\.names is \['x', 'y'\].*leave it \[\]"),
    ],
)
def test_what_does_not_go_together_is_refused_before_a_folder_is_made(tmp_path, overrides, datasets, says):
    config = own_config(tmp_path, *overrides)
    with pytest.raises(ConfigError, match=says):
        train_in(config, world_of(0, 1), datasets=datasets)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_resumes_in_the_same_order_and_not_in_another(tmp_path):
    options = ("data.max_epochs=0", 'data.valid=["v"]', "eval.every=2", "eval.batches=1")
    own = {**TWO, "v": Numbered(5)}
    whole, cut = (own_config(tmp_path, *options, "schedule.shape=constant", run=run) for run in ("whole", "cut"))
    half = own_config(tmp_path, *options, "schedule.shape=constant", "train.steps=2", run="cut")
    for config in (whole, half, cut):
        train_in(config, world_of(0, 1), datasets=own)
    assert losses(cut) == losses(whole)
    assert [entry["loss"] for entry in lines(cut, "eval")] == [entry["loss"] for entry in lines(whole, "eval")]
    assert lines(whole, "start")[0]["epochs"] == {"a": 2.4, "b": 8 / 7}
    assert set(lines(whole, "step")[0]["loss_by_dataset"]) == {"a", "b"}
    with pytest.raises(ConfigError, match=r"'items': 10.*'items': 11"):
        train_in(cut, world_of(0, 1), datasets={**own, "a": Numbered(11)})
    pairs = tiny_config(tmp_path, run="pairs")
    train_in(pairs, world_of(0, 1))
    text = pairs.to_toml().replace(str(tmp_path / "wiki"), "wiki").replace(str(tmp_path / "code"), "code")
    named = type(pairs).from_text(text, ["data.split=98,2,0"])
    with pytest.raises(ConfigError, match=r"data\.split|token pairs"):
        train_in(named, world_of(0, 1), datasets={"wiki": Numbered(3), "code": Numbered(3)})


def test_the_order_of_datasets_is_part_of_what_a_checkpoint_keeps(tmp_path):
    alike = {"a": Numbered(10), "b": Numbered(10)}
    one, other = (
        open_own(own_config(tmp_path, "data.weights=[]", "data.max_epochs=0", f"data.blend={names}"), alike)[0]
        for names in ('["a", "b"]', '["b", "a"]')
    )
    assert one.load_state_dict(one.state_dict(8)) == 8
    assert one.get_batch(range(4))["tokens"].tolist() != other.get_batch(range(4))["tokens"].tolist()
    with pytest.raises(ConfigError, match="datasets"):
        other.load_state_dict(one.state_dict(8))


def test_datasets_that_are_read_often_are_told(tmp_path):
    with pytest.warns(UserWarning, match=r"training reads b 8\.0 times; data\.max_epochs is 4"):
        open_own(own_config(tmp_path), {"a": Numbered(100), "b": Numbered(1)})


def test_an_evaluation_that_reads_own_samples_twice_is_told_of(tmp_path):
    options = ('data.valid=["c"]', "data.max_epochs=1e9", "eval.every=2")
    with pytest.warns(UserWarning, match=r"an evaluation of eval\.batches = 100 .*eval\.batches = \d+ reads it once"):
        open_own(own_config(tmp_path, *options, "eval.batches=100"), {**TWO, "c": Numbered(40)})
