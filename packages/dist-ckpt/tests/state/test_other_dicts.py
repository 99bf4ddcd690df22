"""Dicts of the users' own classes, which answer to attributes: taken as dicts, their tensors like any others."""

from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from torch import nn

from sixfold import dist_ckpt
from sixfold.dist_ckpt import PerRank, ShardingError, hugging_face


class DotDict(dict):
    """As in many recipes: any name is a key, and an unknown one is None."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


class Strict(dict):
    """As in others: an unknown name is a KeyError."""

    __getattr__ = dict.__getitem__


class AttributeDict(dict):
    """Its attributes are its items."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.__dict__ = self


class EasyDict(dict):
    """It keeps each item as an attribute too, and makes dicts within it of its own kind."""

    def __init__(self, **named):
        super().__init__()
        self.parent = None
        for name, value in named.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name != "parent":
            super().__setitem__(name, value)

    def __getitem__(self, name):
        found = super().__getitem__(name)
        return EasyDict(**found) if type(found) is dict else found


class Ordered(OrderedDict):
    pass


class Lists(defaultdict):
    pass


KINDS = [DotDict, Strict, AttributeDict, EasyDict, Ordered]


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_as_a_dict_and_its_tensors_are_tensors_of_the_checkpoint(tmp_path, kind):
    inner = kind(weight=torch.arange(30_000.0), rate=0.1)
    dist_ckpt.save(kind(model=inner, steps=[kind(at=1)], pair=(kind(at=2),)), tmp_path / "c", group=None)
    assert dist_ckpt.load_tensors_metadata(tmp_path / "c").keys() == {"model.weight"}
    mine = kind(model=kind(weight=torch.zeros(30_000), rate=0.0), steps=[], pair=None)
    loaded = dist_ckpt.load(mine, tmp_path / "c", group=None)
    assert torch.equal(mine["model"]["weight"], torch.arange(30_000.0)), "filled in place"
    assert loaded["model"]["rate"] == 0.1 and loaded["steps"] == [{"at": 1}] and loaded["pair"] == ({"at": 2},)
    plain = OrderedDict if kind is Ordered else dict
    assert type(loaded["model"]) is type(loaded["steps"][0]) is plain and type(loaded["pair"][0]) is plain
    assert type(inner) is kind, "the caller's own are not touched"


def test_what_it_is_besides_a_dict_stays(tmp_path):
    made = Lists(list, a=[1])
    dist_ckpt.save({"lists": made, "counts": Counter("aab")}, tmp_path / "c", group=None)
    loaded = dist_ckpt.load({}, tmp_path / "c", group=None)
    assert type(loaded["lists"]) is defaultdict and loaded["lists"]["b"] == [] and loaded["lists"]["a"] == [1]
    ordered = Ordered(a=1)
    ordered.scale = torch.full((2,), 3.0)
    dist_ckpt.save({"one": ordered, "pair": (ordered, made)}, tmp_path / "d", group=None)
    again = dist_ckpt.load({}, tmp_path / "d", group=None)
    assert type(again["pair"][1]) is defaultdict and again["pair"][1]["b"] == []
    for found in (again["one"], again["pair"][0]):
        assert type(found) is OrderedDict and found == {"a": 1} and found.scale.tolist() == [3.0, 3.0]
    assert loaded["counts"] == Counter("aab") and type(loaded["counts"]) is Counter


def test_it_may_hold_modules_and_stand_in_values_of_ranks(tmp_path):
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    dist_ckpt.save(DotDict(model=first, own=PerRank(DotDict(at=3))), tmp_path / "c", group=None)
    loaded = dist_ckpt.load(DotDict(model=second, own=PerRank(None)), tmp_path / "c", group=None)
    assert torch.equal(first.weight, second.weight) and loaded["own"] == {"at": 3}


def test_it_may_be_exported(tmp_path):
    pytest.importorskip("safetensors", reason="export to Hugging Face is an extra")
    first = nn.Linear(2, 2)
    hugging_face.export(Strict(model=first), tmp_path / "e", group=None)
    into = nn.Linear(2, 2)
    hugging_face.load(Strict(model=into), tmp_path / "e", group=None)
    assert torch.equal(first.weight, into.weight)


def test_what_it_holds_besides_its_items_is_an_error_whose_remedy_works(tmp_path):
    made = Lists(list, weight=torch.ones(2))
    made.scale = torch.full((2,), 3.0)
    with pytest.raises(ShardingError, match=r"model is a Lists, .* without its attributes \(scale\). Pass its items"):
        dist_ckpt.save({"model": made}, tmp_path / "c", group=None)
    dist_ckpt.save({"model": dict(made), "scale": made.scale}, tmp_path / "c", group=None)
    assert dist_ckpt.load({"scale": torch.zeros(2)}, tmp_path / "c", group=None)["scale"].tolist() == [3.0, 3.0]
