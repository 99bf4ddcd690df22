"""Which parameters belong together."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, make_net
from torch import nn

from sixfold.fsdp import FsdpError
from sixfold.fsdp.setup.unit_selection import find_units


def names(module: nn.Module, selectors: list) -> dict[str, list[str]]:
    return {unit.name: [name for name, _ in unit.parameters] for unit in find_units(module, selectors)}


@pytest.mark.parametrize("selector", [Block, "Block"])
def test_matched_modules_are_units_and_the_rest_is_the_root(selector):
    units = names(make_net(layers=2), [selector])
    assert list(units) == ["", "blocks.0", "blocks.1"]
    assert units[""] == ["embedding.weight", "norm.weight", "norm.bias", "head.weight"]
    assert units["blocks.0"][0] == "blocks.0.norm.weight" and len(units["blocks.0"]) == 5


def test_a_module_itself_is_a_unit():
    net = make_net(layers=1)
    assert list(names(net, [net.embedding])) == ["", "embedding"]


def test_a_unit_inside_a_unit_takes_its_parameters_out_of_the_outer_one():
    net = make_net(layers=1)
    units = names(net, [Block, net.blocks[0].up])
    assert units["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert "blocks.0.up.weight" not in units["blocks.0"]
    by_name = {unit.name: unit for unit in find_units(net, [Block, net.blocks[0].up])}
    assert by_name["blocks.0.up"].around == {"", "blocks.0"}


def test_a_parameter_of_two_units_belongs_to_the_root_under_its_first_name():
    net = make_net(layers=2, tied=True)
    net.blocks[1].up.bias = net.blocks[0].up.bias = nn.Parameter(net.blocks[0].up.bias.detach())
    units = names(net, [Block, net.embedding])
    assert units[""] == ["embedding.weight", "blocks.0.up.bias", "norm.weight", "norm.bias"]
    assert units["embedding"] == []


def test_a_module_registered_twice_is_one_unit():
    shared = nn.Linear(2, 2)
    units = names(nn.ModuleDict({"a": shared, "b": shared}), [nn.Linear])
    assert units == {"": [], "a": ["a.weight", "a.bias"]}


@pytest.mark.parametrize(
    ("selector", "says"), [("Blok", "'Blok'"), (nn.Conv2d, "Conv2d"), (nn.Linear(2, 2), "a Linear"), (3, "3")]
)
def test_a_selector_that_matches_nothing_is_refused(selector, says):
    with pytest.raises(FsdpError, match=says):
        find_units(make_net(), [selector])


class Model(nn.Module):
    """``parts`` by name; a block is 4 x 4."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        for name, part in parts.items():
            setattr(self, name, part)


class Scaled(nn.Module):
    """A parameter of its own and a child."""

    def __init__(self, child: nn.Module, numel: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(numel))
        self.child = child

    def forward(self, x):
        return self.child(x)


def all_names(module: nn.Module, selectors: list) -> dict[str, list[str]]:
    units = find_units(module, selectors, root_units=True)
    return {unit.name: [name for name, _ in unit.parameters] for unit in units}


def test_an_embedding_and_a_head_larger_than_the_smallest_unit_are_units():
    net = Model(embedding=nn.Embedding(6, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 6, bias=False))
    units = find_units(net, [net.first], root_units=True)
    assert [(unit.name, unit.large) for unit in units] == [
        ("", False), ("first", False), ("embedding", True), ("head", True)
    ]  # fmt: skip
    assert units[0].parameters[0][0] == "norm.weight"
    assert list(names(net, [net.first])) == ["", "first"]


def test_a_module_of_as_many_bytes_as_the_smallest_unit_stays_with_the_root():
    net = Model(same=nn.Linear(4, 4), more=nn.Embedding(21, 1))
    assert list(all_names(net, [net.first])) == ["", "first", "more"]


def test_bytes_count_and_not_elements():
    net = Model(narrow=nn.Embedding(30, 1, dtype=torch.bfloat16), wide=nn.Embedding(30, 1))
    assert list(all_names(net, [net.first])) == ["", "first", "wide"]


def test_without_units_nothing_says_what_is_large():
    assert list(all_names(Model(embedding=nn.Embedding(100, 4)), [])) == [""]


def test_a_unit_without_parameters_is_not_the_smallest():
    net = Model(act=nn.ReLU(), norm=nn.LayerNorm(2))
    assert list(all_names(net, [net.first, nn.ReLU])) == ["", "first", "act"]


def test_tied_weights_stay_in_the_root_unit_and_make_no_unit():
    net = Model(embedding=nn.Embedding(100, 4), head=nn.Linear(4, 100, bias=False))
    net.head.weight = net.embedding.weight
    units = all_names(net, [net.first])
    assert list(units) == ["", "first"] and units[""] == ["embedding.weight"]


def test_a_module_of_one_tied_and_one_own_weight_counts_its_own_alone():
    net = Model(embedding=nn.Embedding(100, 4), head=nn.Linear(4, 100))
    net.head.weight = net.embedding.weight
    units = all_names(net, [net.first])
    assert units == {
        "": ["embedding.weight"], "first": ["first.weight", "first.bias"], "head": ["head.bias"]
    }  # fmt: skip


def test_a_module_around_a_unit_and_one_inside_a_unit_make_none():
    inner = nn.Linear(4, 4)
    net = Model(outer=Scaled(inner, 100), unit=Scaled(nn.Embedding(100, 4), 30))
    units = all_names(net, [net.first, inner, net.unit])
    assert list(units) == ["", "first", "outer.child", "unit"] and units[""] == ["outer.scale"]


def test_a_large_module_takes_its_children_along():
    net = Model(outer=Scaled(nn.Embedding(100, 4), 100))
    assert all_names(net, [net.first])["outer"] == ["outer.scale", "outer.child.weight"]


def test_a_large_module_called_in_two_places_is_one_unit():
    shared = nn.Embedding(100, 4)
    assert list(all_names(Model(a=shared, b=shared), [nn.Linear])) == ["", "first", "a"]


def test_modules_that_nobody_calls_make_no_unit():
    weighted = torch.nn.utils.parametrizations.weight_norm(nn.Linear(9, 9))
    net = Model(
        listed=nn.ParameterList([torch.ones(100)]),
        attention=nn.MultiheadAttention(8, 2, bias=False, kdim=1, vdim=1),
        weighted=weighted,
    )
    units = all_names(net, [net.first])
    assert list(units) == ["", "first", "attention"]
    assert "attention.out_proj.weight" in units["attention"]
    small = Model(attention=nn.MultiheadAttention(2, 1, bias=False))
    small.attention.out_proj = nn.Linear(9, 9)
    assert list(all_names(small, [small.first])) == ["", "first"]
