"""What stages exchange and batches are made of, of the kinds that users have."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, square_loss
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, gpipe, one_f_one_b
from sixfold.pipeline.from_torch import cut, joined


class Hidden(NamedTuple):
    """What a stage may return."""

    states: Tensor
    mask: Tensor


class Gives(nn.Module):
    """A layer, and ``form`` of its output and a mask."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.layer, self.form = layers(2)[0], form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layer(x), torch.ones(len(x), dtype=torch.bool))


class Takes(nn.Module):
    """A layer of what ``Gives`` gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layers(2)[1]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * mask[:, None]


def trained(modules: list[nn.Module]) -> list[list[Tensor | None]]:
    runner = PipelineRunner(gpipe(2, 2), [Stage(m, i) for i, m in enumerate(modules)], loss_fn=square_loss)
    runner.step(*batch(4))
    return [gradients(module) for module in modules]


@pytest.mark.parametrize("form", [lambda *parts: list(parts), Hidden], ids=["list", "NamedTuple"])
def test_a_list_or_a_named_tuple_travels_as_a_tuple(form):
    plain = trained([Gives(lambda *parts: parts), Takes()])
    assert all(map(equal_bits, trained([Gives(form), Takes()]), plain))


def test_a_named_tuple_is_cut_into_named_tuples_and_joined_to_one():
    whole = Hidden(torch.arange(6).reshape(6, 1), torch.ones(6, dtype=torch.bool))
    parts = cut(whole, 3, "args", equal=True)
    assert [type(part) for part in parts] == [Hidden] * 3 and parts[1].states.tolist() == [[2], [3]]
    again = joined(parts)
    assert type(again) is Hidden and torch.equal(again.states, whole.states) and torch.equal(again.mask, whole.mask)


class Subclass(Tensor):
    """Data elsewhere, as torch's wrappers have it."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Subclass:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*[arg.inner if isinstance(arg, Subclass) else arg for arg in args], **(kwargs or {}))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda x, mask: x.to_sparse(), r"torch.sparse_coo tensor; stages exchange dense ones: return x.to_dense\(\)"),
        (
            lambda x, mask: torch.nested.as_nested_tensor(list(x), layout=torch.jagged),
            r"a nested tensor; .* return its values\(\) and offsets\(\)",
        ),
        (
            lambda x, mask: (x, Subclass(x.detach())),
            "a Subclass, which holds other tensors",
        ),
        (lambda x, mask: {"x": x}, "the output of stage 0 is a dict"),
        (lambda x, mask: (x, (x, mask)), "the output of stage 0 holds a tuple"),
    ],
    ids=["sparse", "jagged", "wrapper", "dict", "nested tuple"],
)
def test_what_does_not_travel_is_refused_with_what_to_return(form, words):
    with pytest.raises(ScheduleError, match=words):
        trained([Gives(form), Takes()])


def test_a_batch_that_is_nested_is_asked_for_as_a_list():
    nested = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged)
    runner = PipelineRunner(gpipe(1, 2), Stage(nn.Linear(8, 8), 0), loss_fn=lambda y, t: y.sum())
    with pytest.raises(ScheduleError, match="inputs is a nested tensor; give a list of 2 microbatches"):
        runner.step(nested)


def evaluate_then_step(transport: Any, modules: list[nn.Module]) -> list[Tensor | None]:
    stage = Stage(modules[transport.rank], transport.rank)
    runner = PipelineRunner(one_f_one_b(2, 4), stage, transport, square_loss)
    with torch.inference_mode():
        runner.evaluate(*batch(8))
    runner.step(*batch(8))
    return gradients(stage.module)


def test_an_evaluation_under_inference_mode_leaves_nothing_to_a_step_over_threads():
    plain = layers(2)
    PipelineRunner(one_f_one_b(2, 4), [Stage(m, i) for i, m in enumerate(plain)], loss_fn=square_loss).step(*batch(8))
    found = values_or_raise(on_threads(2, evaluate_then_step, layers(2)))
    assert all(equal_bits(mine, gradients(module)) for mine, module in zip(found, plain, strict=True))


def test_a_step_under_inference_mode_says_so():
    runner = PipelineRunner(gpipe(1, 1), Stage(nn.Linear(8, 8), 0), loss_fn=square_loss)
    with torch.inference_mode(), pytest.raises(ScheduleError, match=r"step was called under torch\.inference_mode"):
        runner.step(*batch(2))


# ---- Batches as users have them


class Masked(nn.Module):
    """Takes a mask beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layers(2)[0]

    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor | None = None, sign: int = 1) -> Tensor:
        return self.layer(x * mask) * (sign if scale is None else sign * scale)


def dict_loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return (((output - target["labels"]) * target["weight"][:, None]) ** 2).mean()


def test_a_tuple_of_inputs_a_dict_of_targets_and_a_dict_of_keywords_are_cut():
    (x, y), mask = batch(8), torch.arange(8.0)[:, None].remainder(3)
    weight, scale = torch.linspace(0, 1, 8), torch.linspace(1, 2, 8)[:, None]
    found, plain = Masked(), Masked()
    runner = PipelineRunner(gpipe(1, 4), Stage(found, 0), loss_fn=dict_loss)
    losses = runner.step((x, mask), {"labels": y, "weight": weight}, kwargs={"scale": scale, "sign": -1}).losses
    for k, part in enumerate(torch.arange(8).chunk(4)):
        out = plain(x[part], mask[part], scale=scale[part], sign=-1)
        loss = dict_loss(out, {"labels": y[part], "weight": weight[part]})
        (loss / 4).backward()
        assert torch.equal(loss.detach(), losses[k])
    assert equal_bits(gradients(found), gradients(plain))


@pytest.mark.parametrize(
    ("batch_", "words"),
    [
        (
            (batch(8)[0], torch.ones(6, 1)),
            r"inputs\[1\] has 6 rows, the batch 8; all of inputs is cut along dim 0",
        ),
        ({"input_ids": batch(8)[0]}, "inputs is a dict; give a tensor, a tuple of tensors, or a list of 4"),
    ],
)
def test_a_batch_that_cannot_be_cut_so_is_named(batch_, words):
    runner = PipelineRunner(gpipe(1, 4), Stage(Masked(), 0), loss_fn=square_loss)
    with pytest.raises(ScheduleError, match=words):
        runner.step(batch_, batch(8)[1])


@pytest.mark.parametrize("several", [False, True])
def test_an_embedding_in_front_of_the_pipeline_gets_its_gradient(several):
    ids, (_, y) = torch.arange(8).remainder(5), batch(8)
    embeddings = [nn.Embedding(5, 8), nn.Embedding(5, 8)]
    embeddings[1].load_state_dict(embeddings[0].state_dict())
    modules = [[Masked() if several else layers(2)[0], layers(2)[1]] for _ in range(2)]
    mask = torch.ones(8, 1)
    runner = PipelineRunner(one_f_one_b(2, 4), [Stage(m, i) for i, m in enumerate(modules[0])], loss_fn=square_loss)
    for _ in range(2):
        hidden = embeddings[0](ids)
        runner.step((hidden, mask) if several else hidden, y)
        other = embeddings[1](ids)
        out = modules[1][1](modules[1][0](other, mask) if several else modules[1][0](other))
        square_loss(out, y).backward()
    torch.testing.assert_close(embeddings[0].weight.grad, embeddings[1].weight.grad)
    for mine, plain in zip(modules[0], modules[1], strict=True):
        torch.testing.assert_close(gradients(mine), gradients(plain))


# ---- What one dict of keyword arguments, or a batch of targets, holds beside tensors


class Sees(nn.Module):
    """A layer that remembers its keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = layers(1)[0], list[Any]()

    def forward(self, x: Tensor, held: Any = None) -> Tensor:
        self.seen.append(held)
        return self.layer(x)


def given_to(place: str, value: Any, m: int = 4) -> list[Any]:
    """What m microbatches of eight rows see of ``value``: a keyword argument, or part of a tuple or dict of targets."""
    module, (x, y) = Sees(), batch(8)
    seen = []

    def loss(output: Tensor, target: Any) -> Tensor:
        seen.append(target if isinstance(target, Tensor) else target["held"] if place == "dict" else target[1])
        return output.square().mean()

    runner = PipelineRunner(gpipe(1, m), Stage(module, 0), loss_fn=loss)
    if place == "kwargs":
        runner.step(x, y, kwargs={"held": value})
        return module.seen
    runner.step(x, {"y": y, "held": value} if place == "dict" else (y, value))
    return seen


@dataclass
class Record:
    """As a library holds what belongs together."""

    value: Any
    other: int = 3


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


HOLDERS = {
    "array": lambda rows: torch.zeros(rows, 2).numpy(),
    "dataclass": lambda rows: Record(torch.zeros(rows, 2)),
    "object": lambda rows: SimpleNamespace(value=(1, {"mask": torch.zeros(rows)})),
    "slots": lambda rows: Slotted(torch.zeros(rows).numpy()),
    "nested": lambda rows: Record([Record(torch.zeros(rows))]),
}


@pytest.mark.parametrize("place", ["kwargs", "tuple", "dict"])
@pytest.mark.parametrize("form", list(HOLDERS))
def test_what_has_the_rows_of_the_batch_and_is_not_cut_is_refused_by_name(form, place):
    pytest.importorskip("numpy", reason="an array of a user's")
    name = {"kwargs": r"kwargs\['held'\]", "tuple": r"targets\[1\]", "dict": r"targets\['held'\]"}[place]
    lists = "dicts" if place == "kwargs" else "microbatches"
    with pytest.raises(ScheduleError, match=rf"{name} is a \w+ .*of 8 rows, which are not cut.* a list of 4 {lists}"):
        given_to(place, HOLDERS[form](8))
    value = HOLDERS[form](5)
    assert all(seen is value for seen in given_to(place, value))


LISTS = {
    "lengths": lambda n: list(range(n)),
    "names": lambda n: tuple("abcdefghij"[:n]),
    "pairs": lambda n: [(1, 2)] * n,
    "some": lambda n: [None] * (n - 1) + [3],
}


@pytest.mark.parametrize("place", ["kwargs", "tuple", "dict"])
@pytest.mark.parametrize("form", list(LISTS))
def test_a_list_with_an_entry_per_row_is_refused_by_name(form, place):
    name = {"kwargs": r"kwargs\['held'\]", "tuple": r"targets\[1\]", "dict": r"targets\['held'\]"}[place]
    with pytest.raises(ScheduleError, match=rf"{name} is a (list|tuple) of 8 rows, which are not cut"):
        given_to(place, LISTS[form](8))
    assert given_to(place, LISTS[form](5)) == [LISTS[form](5)] * 4


@pytest.mark.parametrize("value", ["a" * 8, [None] * 8, torch.Size([2] * 8), dict.fromkeys(range(8), 1)])
def test_what_is_no_list_of_rows_reaches_each_microbatch(value):
    assert given_to("kwargs", value) == [value] * 4


def test_a_list_of_tensors_as_long_as_the_batch_is_cut_tensor_by_tensor():
    seen = given_to("kwargs", [torch.arange(8)] * 8)
    assert [[part.tolist() for part in one] for one in seen] == [[[2 * k, 2 * k + 1]] * 8 for k in range(4)]


def test_a_list_alone_is_refused_where_the_rows_of_the_batch_are_not_known():
    runner = PipelineRunner(gpipe(1, 4), Stage(layers(1)[0], 0), loss_fn=lambda output, _: output.sum())
    parts = list(batch(8)[0].chunk(4))
    with pytest.raises(ScheduleError, match=r"targets\['names'\] is a list of 8 rows, which are not cut"):
        runner.step(parts, {"names": list("abcdefgh")})


def test_an_array_alone_is_refused_where_the_rows_of_the_batch_are_not_known():
    pytest.importorskip("numpy", reason="an array of a user's")
    module, (x, y) = layers(1)[0], batch(8)
    runner = PipelineRunner(gpipe(1, 4), Stage(module, 0), loss_fn=square_loss)
    with pytest.raises(ScheduleError, match=r"targets\['y'\] is a ndarray of 8 rows, which are not cut"):
        runner.step(list(x.chunk(4)), {"y": y.numpy()})


@pytest.mark.parametrize("place", ["kwargs", "dict"])
@pytest.mark.parametrize("make", [OrderedDict, UserDict, lambda given: defaultdict(list, given)])
def test_a_mapping_arrives_as_its_own_kind(make, place):
    value = make({"ids": torch.arange(8), "name": "a"})
    seen = given_to(place, value)
    assert [type(one) for one in seen] == [type(value)] * 4
    assert [one["ids"].tolist() for one in seen] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(list(one) == ["ids", "name"] for one in seen) and value["ids"].shape == (8,)


def test_what_hugging_face_makes_arrives_as_its_own_kind():
    transformers = pytest.importorskip("transformers", reason="Hugging Face's mappings")
    output = transformers.modeling_outputs.BaseModelOutput(
        last_hidden_state=torch.arange(8), hidden_states=(torch.arange(8),)
    )
    for k, one in enumerate(given_to("kwargs", output)):
        assert type(one) is type(output) and one[0] is one.last_hidden_state and one.attentions is None
        assert one.hidden_states[0].tolist() == [2 * k, 2 * k + 1] == one.last_hidden_state.tolist()
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(8)})
    assert [one.input_ids.tolist() for one in given_to("dict", encoding)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


class Frozen(UserDict[str, Any]):
    """A mapping that nobody writes to once it is made."""

    def __setitem__(self, key: str, item: Any) -> None:
        if key in self.data:
            raise TypeError("it is frozen")
        super().__setitem__(key, item)


def test_a_mapping_that_cannot_be_made_of_parts_is_refused_by_name():
    words = r"kwargs\['held'\] is a Frozen, of which no copy .*it is frozen\); give a dict, or a list of 4 dicts"
    with pytest.raises(ScheduleError, match=words):
        given_to("kwargs", Frozen({"ids": torch.arange(8)}))


@pytest.mark.parametrize("place", ["kwargs", "tuple", "dict"])
def test_a_tensor_without_rows_is_called_so(place):
    with pytest.raises(ScheduleError, match=r"is a tensor of no dimension, which has no rows to cut; give its number"):
        given_to(place, torch.tensor(3.0))
    assert given_to(place, 3.0) == [3.0] * 4


# ---- Keyword arguments and targets out of a graph of the caller's

GIVEN = {  # how four microbatches get it, and the name of what they share
    "one": (lambda held: {"held": held}, r"\['held'\]"),
    "list of parts": (lambda held: [{"held": part} for part in held.chunk(4)], r"\[1\]\['held'\]"),
    "list of one": (lambda held: [{"held": [1, held]}] * 4, r"\[1\]\['held'\]\[1\]"),
}


@pytest.mark.parametrize("place", ["kwargs", "targets"])
@pytest.mark.parametrize("form", list(GIVEN))
def test_a_graph_that_microbatches_would_share_is_refused_by_name(form, place):
    (x, y), (give, name) = batch(8), GIVEN[form]
    runner = PipelineRunner(gpipe(1, 4), Stage(Sees(), 0), loss_fn=lambda output, target: output.square().mean())
    held = torch.ones(8, 8, requires_grad=True).exp()
    words = rf"{place}{name} comes out of an autograd graph .* detach it, or give it as an input"
    with pytest.raises(ScheduleError, match=words):
        runner.step(x, **{"targets": y, place: give(held)})
    runner.step(x, **{"targets": y, place: give(held.detach())})
    runner.evaluate(x, **{"targets": y, place: give(held)})


def test_a_graph_of_one_microbatch_and_a_leaf_of_all_get_their_gradients():
    (x, y), weight = batch(8), torch.ones(8, 1, requires_grad=True)
    for m in (1, 4):
        each = [{"scale": part.exp()} for part in weight.split(8 // m)]
        for kwargs in (each, {"scale": weight.exp()} if m == 1 else {"scale": weight}):
            module, mask = Masked(), torch.ones(8, 1)
            runner = PipelineRunner(gpipe(1, m), Stage(module, 0), loss_fn=square_loss)
            weight.grad = None
            runner.step((x, mask), y, kwargs=kwargs)
            mine, weight.grad = weight.grad, None
            square_loss(module(x, mask, scale=weight if kwargs is not each and m > 1 else weight.exp()), y).backward()
            torch.testing.assert_close(mine, weight.grad)


class Notes:
    """What a module collects of its microbatches."""

    def __init__(self) -> None:
        self.values: list[int] = []


class Noting(nn.Module):
    """Puts the rows that it saw into whatever it is given."""

    def forward(self, x: Tensor, *, names: list[int], found: dict[str, int], notes: Notes) -> Tensor:
        names.append(len(x))
        found["rows"] = len(x)
        notes.values.append(len(x))
        return x


def test_containers_of_keywords_are_made_anew_for_each_microbatch_and_other_objects_and_dicts_of_a_list_are_not():
    x, names, found, notes = torch.ones(4, 8), [], {}, Notes()
    runner = PipelineRunner(gpipe(1, 2), Stage(Noting(), 0), None, square_loss)
    given = {"names": names, "found": found, "notes": notes}
    runner.forward(x, kwargs=given)
    assert (names, found, notes.values) == ([], {}, [2, 2])
    runner.forward(x, kwargs=[given, given])
    assert (names, found, notes.values) == ([2, 2], {"rows": 2}, [2, 2, 2, 2])
