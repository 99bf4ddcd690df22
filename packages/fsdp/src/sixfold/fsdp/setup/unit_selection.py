"""Which parameters are gathered and freed together.

    module + selectors --> find_units, UnitSpec (this file) --> wrappable.py; a Unit of each: trainable_and_frozen.py

Reads the module tree and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from sixfold.fsdp.errors import FsdpError

Selector = type | str | nn.Module


_SHOWN = 5  # classes in an error


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """A unit: its first name, module, parameters in ``named_parameters`` order, and the units around it.

    ``depth`` counts the units around it; the root unit ``""`` is around all others. ``large``: no
    selector named it, ``large_modules`` did. ``beside``: modules that were merged into it.
    """

    name: str
    module: nn.Module
    around: frozenset[str]
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    large: bool = False
    beside: tuple[nn.Module, ...] = ()

    @property
    def depth(self) -> int:
        """Units around this one."""
        return len(self.around)


def find_units(module: nn.Module, selectors: Sequence[Selector], *, root_units: bool = False) -> list[UnitSpec]:
    """The root unit, then every matched module in ``named_modules`` order.

    A class names no children of ``nn.MultiheadAttention``, which reads their weights itself and never calls them.
    A parameter belongs to the innermost unit that registers it; one registered in two units, or in a unit
    and outside, to the root unit. Names are the first ones (a tied parameter has one).

    Args:
        root_units: modules that ``large_modules`` finds (an embedding, a head) are units too, as if selected.
    Raises:
        FsdpError: a selector that matches no module, or is no class, class name or module.
    """
    matched = _matches(module, selectors)
    if not root_units:
        return _cut(module, matched)
    chosen = large_modules(module, _cut(module, matched))
    return _cut(module, matched.union(chosen), frozenset(chosen)) if chosen else _cut(module, matched)


def large_modules(module: nn.Module, units: Sequence[UnitSpec]) -> list[nn.Module]:
    """Modules with more bytes of their own than the smallest unit, and no unit around or inside: best units themselves.

    Left in the root unit they would be gathered for good and reduced last, without overlap. Only parameters that the
    module alone registers count: a tied one belongs to the root unit whatever is chosen. Modules that nobody calls are
    left out, because no hook could gather them: those without a forward (``ParameterList``), parametrisations, and
    children of ``MultiheadAttention``, which reads their weights itself.

    Returns:
        [] where no unit has parameters: then nothing says what is large.
    """
    sizes = [sum(_nbytes(p) for _, p in unit.parameters) for unit in units if unit.around]
    smallest = min((size for size in sizes if size), default=None)
    if smallest is None:
        return []
    taken = {part for unit in units if unit.around for part in unit.module.modules()}
    holds_unit = {unit.module for unit in units if unit.around}
    registrations = Counter(parameter for part in module.modules() for parameter in part._parameters.values())
    chosen: list[nn.Module] = []
    for part in module.modules():
        if part is module or part in taken or holds_unit.intersection(part.modules()):
            continue
        if isinstance(part, nn.MultiheadAttention):
            taken.update(child for child in part.modules() if child is not part)
        alone = [p for p in part._parameters.values() if p is not None and registrations[p] == 1]
        if sum(map(_nbytes, alone)) > smallest and _is_called(part):
            chosen.append(part)
            taken.update(part.modules())
    return chosen


def merge_neighbours(
    specs: Sequence[UnitSpec],
    merge_bytes: int,
    itemsize: int,
    *,
    layers: Mapping[str, nn.Module | None] | None = None,
) -> list[UnitSpec]:
    """Units that follow each other, with the same units around them and none inside, become one while they are small.

    The modules of such a unit are gathered at the call of the first and reduced after the backward of the last; the
    engine sees one unit that is called several times. Its name says from where to where.

    Args:
        merge_bytes: the most that a merged unit's elements take at ``itemsize`` bytes each.
        layers: by name, the units that may be merged, each with others of the same block; None: all.
    """
    holds_units = {name for spec in specs for name in spec.around}
    found: list[UnitSpec] = []
    runs: list[tuple[UnitSpec, int]] = []  # that the last unit of ``found`` is made of, and their bytes

    def mergeable(spec: UnitSpec) -> bool:
        return bool(spec.around) and spec.name not in holds_units and (layers is None or spec.name in layers)

    def beside(one: UnitSpec, other: UnitSpec) -> bool:
        in_one_block = layers is None or layers.get(one.name) is layers.get(other.name)
        return mergeable(one) and mergeable(other) and one.around == other.around and in_one_block

    for spec in specs:
        nbytes = itemsize * sum(parameter.numel() for _, parameter in spec.parameters)
        if runs and beside(runs[-1][0], spec) and sum(size for _, size in runs) + nbytes <= merge_bytes:
            runs.append((spec, nbytes))
            found[-1] = _merged([one for one, _ in runs])
        else:
            runs = [(spec, nbytes)]
            found.append(spec)
    return found


def single_layers(
    module: nn.Module, selectors: Sequence[Selector], specs: Sequence[UnitSpec]
) -> dict[str, nn.Module | None]:
    """Units that are merged unasked: layers without a module inside, and the block that each is part of.

    A block is the innermost module around the layer that is an element of a list, else the outermost one below
    ``module``. Stages of a pipeline hold whole blocks, so none parts what was merged. Modules that a selector names one
    by one, and those that ``large_modules`` chose, stay as they are.
    """
    named = [one for one in selectors if isinstance(one, nn.Module)]
    found: dict[str, nn.Module | None] = {}
    for spec in specs:
        chosen = spec.large or any(spec.module is one for one in named)
        if not spec.name or chosen or any(True for _ in spec.module.children()):
            continue
        block: nn.Module | None = None
        here = module
        for part in spec.name.split(".")[:-1]:
            inside = here.get_submodule(part)
            if block is None or isinstance(here, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                block = inside
            here = inside
        found[spec.name] = block
    return found


def _merged(specs: Sequence[UnitSpec]) -> UnitSpec:
    first, *others = specs
    return UnitSpec(
        f"{first.name} to {specs[-1].name}",
        first.module,
        first.around,
        [named for spec in specs for named in spec.parameters],
        large=all(spec.large for spec in specs),
        beside=tuple(spec.module for spec in others),
    )


def _nbytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.dtype.itemsize


def _is_called(part: nn.Module) -> bool:
    forward = getattr(type(part), "forward", None)
    return forward is not nn.Module.forward and not isinstance(part, ParametrizationList)


def _cut(module: nn.Module, matched: set[nn.Module], large: frozenset[nn.Module] = frozenset()) -> list[UnitSpec]:
    first_name: dict[nn.Module, str] = {}
    around: dict[nn.Module, set[nn.Module]] = {}
    for path, found in module.named_modules(remove_duplicate=False):
        if found in matched:
            first_name.setdefault(found, path)
            around.setdefault(found, set()).update(_units_above(module, path, matched))
    units = {module: UnitSpec("", module, frozenset())}
    for found, name in first_name.items():
        names = frozenset({""} | {first_name[outer] for outer in around[found]})
        units[found] = UnitSpec(name, found, names, large=found in large)
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
    read_by_others = {
        part for found in everything if isinstance(found, nn.MultiheadAttention) for part in found.modules()
    }.difference(found for found in everything if isinstance(found, nn.MultiheadAttention))
    matched: set[nn.Module] = set()
    for selector in selectors:
        if isinstance(selector, nn.Module):
            hits = [found for found in everything if found is selector]
        elif isinstance(selector, type):
            hits = [found for found in everything if isinstance(found, selector) and found not in read_by_others]
        elif isinstance(selector, str):
            hits = [found for found in everything if type(found).__name__ == selector and found not in read_by_others]
        else:
            raise FsdpError(f"fsdp_unit_modules has {selector!r}; an entry is a class, a class name or a module")
        if not hits:
            shown = f"a {type(selector).__name__}" if isinstance(selector, nn.Module) else repr(selector)
            raise FsdpError(
                f"fsdp_unit_modules entry {shown} matches no module of {type(module).__name__}; classes that it has "
                f"several times: {_repeated(everything)}"
            )
        matched.update(hits)
    matched.discard(module)
    return matched


def _repeated(modules: Sequence[nn.Module]) -> str:
    """Classes with parameters that occur more than once, those with most elements first."""
    sizes: dict[str, list[int]] = {}
    for part in modules:
        sizes.setdefault(type(part).__name__, []).append(sum(one.numel() for one in part.parameters()))
    found = sorted(
        ((sum(all_of), name, len(all_of)) for name, all_of in sizes.items() if len(all_of) > 1), reverse=True
    )
    return ", ".join(f"{name} ({count})" for numel, name, count in found[:_SHOWN] if numel) or "none"


def _units_above(module: nn.Module, path: str, matched: set[nn.Module]) -> list[nn.Module]:
    """Matched modules strictly above ``path``, outermost first."""
    above: list[nn.Module] = []
    here = module
    for part in path.split(".")[:-1] if path else []:
        here = here.get_submodule(part)
        if here in matched:
            above.append(here)
    return above
