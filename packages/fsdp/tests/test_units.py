"""Which parameters belong together."""

from __future__ import annotations

import pytest
from fsdp_helpers import Block, make_net
from torch import nn

from sixfold.fsdp import FsdpError
from sixfold.fsdp.units import find_units


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
    assert by_name["blocks.0.up"].inside == {"", "blocks.0"}


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
