"""Which parameters are gathered and freed together.

    module + selectors --> find_units (this file) --> buffer.py, engine.py

Reads the module tree and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from sixfold.fsdp.buffer import ParamAndGradBuffer
from sixfold.fsdp.errors import FsdpError

Selector = type | str | nn.Module


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """A unit: its first name, module, parameters in ``named_parameters`` order, and the units around it.

    ``depth`` counts the units around it; the root unit ``""`` has depth 0 and ``inside`` is empty.
    """

    name: str
    module: nn.Module
    inside: frozenset[str]
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """Units around this one."""
        return len(self.inside)


@dataclass(eq=False)
class Unit:
    """A unit at work: its buffers, its slot (None: memory of its own) and the stage that drives it (None: none)."""

    name: str
    index: int
    module: nn.Module
    around: tuple[Unit, ...]  # units that hold this one, the root left out
    trainable: ParamAndGradBuffer | None
    frozen: ParamAndGradBuffer | None
    device: torch.device
    slot: int | None = None
    stage: object | None = None

    def __post_init__(self) -> None:
        self.buffers = tuple(buffer for buffer in (self.trainable, self.frozen) if buffer is not None)
        self.gathered_bytes = sum(buffer.slot_bytes for buffer in self.buffers)


def find_units(module: nn.Module, selectors: Sequence[Selector]) -> list[UnitSpec]:
    """The root unit, then every matched module in ``named_modules`` order.

    A parameter belongs to the innermost unit that registers it; one registered in two units, or in a unit
    and outside, to the root unit. Names are the first ones (a tied parameter has one).

    Raises:
        FsdpError: a selector that matches no module, or is no class, class name or module.
    """
    matched = _matches(module, selectors)
    first_name: dict[nn.Module, str] = {}
    around: dict[nn.Module, set[nn.Module]] = {}
    for path, found in module.named_modules(remove_duplicate=False):
        if found in matched:
            first_name.setdefault(found, path)
            around.setdefault(found, set()).update(_units_above(module, path, matched))
    units = {module: UnitSpec("", module, frozenset())}
    for found, name in first_name.items():
        inside = frozenset({""} | {first_name[outer] for outer in around[found]})
        units[found] = UnitSpec(name, found, inside)
    owner: dict[nn.Parameter, nn.Module] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        prefix = path.rpartition(".")[0]
        holding = module.get_submodule(prefix)
        above = _units_above(module, prefix, matched)
        innermost = holding if holding in matched else above[-1] if above else module
        owner[parameter] = module if owner.get(parameter, innermost) is not innermost else innermost
    for name, parameter in module.named_parameters():
        units[owner[parameter]].parameters.append((name, parameter))
    return list(units.values())


def _matches(module: nn.Module, selectors: Sequence[Selector]) -> set[nn.Module]:
    """Modules that a selector names, the root left out: it is a unit anyway."""
    everything = list(module.modules())
    matched: set[nn.Module] = set()
    for selector in selectors:
        if isinstance(selector, nn.Module):
            hits = [found for found in everything if found is selector]
        elif isinstance(selector, type):
            hits = [found for found in everything if isinstance(found, selector)]
        elif isinstance(selector, str):
            hits = [found for found in everything if type(found).__name__ == selector]
        else:
            raise FsdpError(f"fsdp_unit_modules has {selector!r}; an entry is a class, a class name or a module")
        if not hits:
            shown = f"a {type(selector).__name__}" if isinstance(selector, nn.Module) else repr(selector)
            raise FsdpError(f"fsdp_unit_modules entry {shown} matches no module of {type(module).__name__}")
        matched.update(hits)
    matched.discard(module)
    return matched


def _units_above(module: nn.Module, path: str, matched: set[nn.Module]) -> list[nn.Module]:
    """Matched modules strictly above ``path``, outermost first."""
    above: list[nn.Module] = []
    here = module
    for part in path.split(".")[:-1] if path else []:
        here = here.get_submodule(part)
        if here in matched:
            above.append(here)
    return above
