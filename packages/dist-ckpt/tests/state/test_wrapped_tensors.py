"""Tensors of a subclass around others, as torchao's quantised weights are, in plain state dicts.

Oracle: a copy of the tensors within, made before the save.
"""

import pytest
import torch
from torch import nn

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, ShardedTensor, ShardedTensorFactory, ShardingError
from sixfold.dist_ckpt.stores import MemoryStore

aten = torch.ops.aten
COPIES = (aten.detach.default, aten.clone.default, aten.alias.default)


class Scaled(torch.Tensor):
    """Rows of numbers of one byte, with a factor for each; what computes with it sees the product."""

    @staticmethod
    def __new__(cls, numbers, factors, note=""):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32, device=numbers.device)

    def __init__(self, numbers, factors, note=""):
        self.numbers, self.factors, self.note = numbers, factors, note

    def __tensor_flatten__(self):
        return ["numbers", "factors"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner, about, size, stride):
        return cls(inner["numbers"], inner["factors"], about["note"])

    def __repr__(self):
        return f"Scaled({self.numbers}, {self.factors})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in COPIES:
            return cls(func(args[0].numbers), func(args[0].factors), args[0].note)
        raise NotImplementedError(f"{func}: nothing here shall compute, or copy as the subclass does")


def scaled(start, rows=3, note=""):
    numbers = (torch.arange(rows * 4) + start).to(torch.int8).reshape(rows, 4)
    return Scaled(numbers, torch.arange(rows) + 0.5 + start, note)


def nested(start):
    return Scaled(scaled(start), torch.ones(3) + start)


def parts(tensor):
    if not isinstance(tensor, Scaled):
        return [tensor.clone()]
    return [part for name in ("numbers", "factors") for part in parts(getattr(tensor, name))]


@pytest.fixture(autouse=True)
def _allowed():
    with torch.serialization.safe_globals([Scaled]):
        yield


def equal(one, other):
    return all(map(torch.equal, parts(one), parts(other)))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("make", [scaled, nested, lambda start: nn.Parameter(scaled(start), requires_grad=False)])
def test_a_wrapped_tensor_of_a_plain_state_dict_is_filled_where_it_is(tmp_path, make, background):
    then, mine = make(1), make(50)
    state, memory = {"model": {"w": then, "b": torch.ones(3)}, "l": [then]}, parts(then)
    if background:
        dist_ckpt.async_save(state, tmp_path / "c").wait()
    else:
        dist_ckpt.save(state, tmp_path / "c")
    places = [part.data_ptr() for part in (mine.factors, mine.numbers) if not isinstance(part, Scaled)]
    asked = {"model": {"w": mine, "b": torch.zeros(3)}, "l": [make(70)]}
    loaded = dist_ckpt.load(asked, tmp_path / "c")
    assert all(map(torch.equal, parts(mine), memory))
    assert equal(asked["l"][0], then)
    found = loaded["model"]["w"]
    assert type(found) is Scaled
    assert [part.data_ptr() for part in (found.factors, found.numbers) if not isinstance(part, Scaled)] == places


UNLIKE = {
    "of another shape": (scaled(1, rows=2), scaled(50), "asked for into a Scaled of shape (3, 4), saved as a Scaled"),
    "with another note": (scaled(1, note="x"), scaled(50), "saved as a Scaled of another form"),
    "wrapping another kind": (nested(1), scaled(50), "saved as a Scaled of another form"),
    "that was plain": (torch.ones(3, 4), scaled(50), "asked for into a Scaled of shape (3, 4), saved as a Tensor"),
}


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "ignore_all"])
@pytest.mark.parametrize(("then", "mine", "words"), UNLIKE.values(), ids=UNLIKE)
def test_a_wrapped_tensor_that_cannot_be_filled_is_an_error_and_its_remedy_works(then, mine, words, strict):
    store, before = MemoryStore("c"), parts(mine)
    dist_ckpt.save({"model": {"w": then}}, store)
    with pytest.raises(MismatchError) as caught:
        dist_ckpt.load({"model": {"w": mine}}, store, strict=strict)
    assert str(caught.value).startswith("model.w: ") and words in str(caught.value)
    assert all(map(torch.equal, parts(mine), before))
    assert equal(dist_ckpt.load({"model": {"w": None}}, store)["model"]["w"], then)


def unlike_on_one(rank, ranks, folder):
    with torch.serialization.safe_globals([Scaled]):
        dist_ckpt.save({"w": scaled(1)}, folder)
        with pytest.raises(MismatchError, match="w: asked for into a Scaled"):
            dist_ckpt.load({"w": scaled(50, rows=3 + rank)}, folder, timeout_s=20)
        mine = scaled(60 + rank)
        dist_ckpt.load({"w": mine}, folder)
        return equal(mine, scaled(1))


def test_ranks_of_which_one_cannot_fill_its_own_raise_together(tmp_path):
    assert run_ranks(unlike_on_one, 2, tmp_path / "c") == [True, True]


def described(tensor, rank, ranks):
    """What the error of such a record says to make: its rows are cut over the ranks."""

    def build(key, tensor, replica_id, flattened_range):
        cut = (0, rank, ranks)
        return {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", getattr(tensor, name), cut, replica_id=replica_id)
            for name in ("numbers", "factors")
        }

    return ShardedTensorFactory("w", tensor, build, lambda parts: Scaled(parts["numbers"], parts["factors"]))


def by_its_parts(rank, ranks, folder):
    record = ShardedTensor("w", scaled(rank), torch.float32, (3, 4), (3 * ranks, 4), (3 * rank, 0), (ranks, 1))
    with pytest.raises(ShardingError, match=r"pass what it wraps \(numbers, factors\).* ShardedTensorFactory"):
        dist_ckpt.save({"w": record}, folder)
    dist_ckpt.save({"w": described(scaled(10 * rank), rank, ranks)}, folder)
    mine = scaled(50)
    found = dist_ckpt.load({"w": described(mine, rank, ranks)}, folder)["w"]
    return equal(found, scaled(10 * rank)) and equal(mine, found)


def test_a_wrapped_shard_of_several_ranks_is_refused_with_a_remedy_that_works(tmp_path):
    assert run_ranks(by_its_parts, 2, tmp_path / "c") == [True, True]
