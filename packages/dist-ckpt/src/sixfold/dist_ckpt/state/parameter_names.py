"""Which parameter of an optimizer is which: by the names that the modules beside it give.

    modules of a state dict --> modules_in, names_in --> names_of (this file) --> kept in common data at a save
    names of the save + names of the load --> numbers_of_then (this file) --> what stateful.py asks for

[Note: state by name] torch numbers the parameters of an optimizer by their place. A model whose layers are made in
another order would get the moments of other weights, while weights go by name. So the names are kept beside the groups,
under ``KEY``, where torch and older versions do not look. A load asks for the state of each parameter by the number
that it had. A parameter that is new has no state then, and that of one that is gone is passed over; both are logged.
A weight that stands in the state dict more than once, as a tied one does or that of a module under two keys, has all
its names, and its state is found by any. torch's ``get_state_dict`` has names for numbers, and an optimizer that was
made with ``named_parameters()`` has names of its own, ``param_names``. Where both sides have none of these, state goes
by place.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from sixfold.dist_ckpt.errors import MismatchError
from sixfold.dist_ckpt.state import module_names, tree

KEY = "parameter_names"
_MOST_SHOWN = 8
_log = logging.getLogger("sixfold.dist_ckpt")


class Name(NamedTuple):
    """Of a parameter: where its module stands in the state dict, and the name within."""

    module: str
    within: str

    @property
    def key(self) -> str:
        """The name of its weight in the checkpoint."""
        return f"{self.module}.{self.within}"


def modules_in(state: Any) -> list[tuple[tree.KeyPath, torch.nn.Module]]:
    """The modules of a state dict, out of the wrappers around the whole."""
    found = ((path, module_names.inside(leaf)) for path, leaf in tree.leaves(state))
    return [(path, module) for path, module in found if isinstance(module, torch.nn.Module)]


def names_in(modules: Sequence[tuple[tree.KeyPath, torch.nn.Module]]) -> dict[int, list[Name]]:
    """``id(parameter)`` -> its names by alphabet, for the modules of a state dict, which has been taken of each."""
    found = defaultdict[int, set[Name]](set)
    for path, module in modules:
        named = [*module.named_parameters(remove_duplicate=False)]
        plain = module_names.plain_names(module, [name for name, _ in named])
        for name, parameter in named:
            found[id(parameter)].add(Name(tree.key_text(path), plain.get(name, name)))
    return {parameter: sorted(names) for parameter, names in found.items()}


def names_of(owner: torch.optim.Optimizer, known: Mapping[int, list[Name]]) -> list[list[Name]]:
    """The names of each of an optimizer's parameters in its order; none if one of them has none."""
    found = [known.get(id(parameter), []) for group in owner.param_groups for parameter in group["params"]]
    return found if all(found) else []


def kept(names: Sequence[Sequence[Name]]) -> list[str | list[str]]:
    """What a save keeps of ``names_of``: of a parameter its name, or all of them."""
    keys = [[name.key for name in each] for each in names]
    return [each if len(each) > 1 else each[0] for each in keys]


def numbers_of_then(
    own: Sequence[Mapping[str, Any]],
    now: Sequence[Sequence[Name]],
    stored: Any,
    key: str,
    has_state: Callable[[], bool],
    *,
    tells: bool = False,
) -> dict[Any, Any]:
    """For each number of a parameter in its optimizer, under which one its state was saved; {} where that is the same.

    Args:
        own: groups of the optimizer's state dict; now: names of its parameters.
        stored: what common data has of the optimizer; key: the optimizer's name.
        has_state: whether any state is stored beside the groups.
        tells: names of parameters that came or went are logged.
    Raises:
        MismatchError: there are more or fewer groups, or parameters without names. A parameter was in another group.
            All state that is stored is of other parameters.
    """
    groups = tree.get(stored, ("param_groups",))
    if type(groups) is not list or not all(map(_has_parameters, groups)):
        return {}
    mine, theirs = ([list[Any](group["params"]) for group in each] for each in (own, groups))
    numbers, ids = ([number for one in each for number in one] for each in (mine, theirs))
    labels, then = _labels(own, now, groups, ids, tree.get(stored, (KEY,)))
    sizes, before = ([len(group) for group in each] for each in (mine, theirs))
    if len(sizes) != len(before) or (sizes != before and not then):
        raise MismatchError(
            f"{key}: it was saved with {_counts(before)}, and this one has {_counts(sizes)}. Make it with the groups "
            f"of then, and name model and optimizer in one state dict in save and load; or leave {key} out"
        )
    if not then:
        return {}
    was = _places_of_then(labels, then)
    came = [names[0] for at, names in enumerate(labels) if at not in was]
    found_again = {*was.values()}
    gone = [names[0] for at, names in enumerate(then) if at not in found_again]
    if not was and has_state():
        raise MismatchError(
            f"{key}: the checkpoint has state of {_some(gone)} alone, and this one holds {_some(came)}. Name the model "
            f"in the state dict as in the save; or leave {key} out, and this one begins without state"
        )
    group_now, group_then = _groups_of(mine), _groups_of(theirs)
    for at, at_then in sorted(was.items()):
        if group_now[at] != group_then[at_then]:
            raise MismatchError(
                f"{key}: {labels[at][0]} was in group {group_then[at_then]}, and is in group {group_now[at]} now. Make "
                f"the optimizer with the groups of then; or leave {key} out, and this one begins without state"
            )
    if tells and came:
        _log.warning("%s: no saved state goes to %s, which begins without", key, _some(came))
    if tells and gone:
        _log.warning("%s: it does not hold %s, whose saved state is passed over", key, _some(gone))
    found = {n: ids[was[at]] if at in was else f"{labels[at][0]} of now" for at, n in enumerate(numbers)}
    return {} if [*found] == [*found.values()] and sizes == before else found


def _places_of_then(labels: Sequence[Sequence[str]], then: Sequence[Sequence[str]]) -> dict[int, int]:
    """Place of a parameter now -> its place then, for those with a name that they had. Each place is given once."""
    by_name = {name: at for at, names in enumerate(labels) for name in names}
    was = dict[int, int]()
    for at_then, names in enumerate(then):
        at = next((by_name[name] for name in names if name in by_name and by_name[name] not in was), None)
        if at is not None:
            was[at] = at_then
    return was


def _labels(
    own: Sequence[Mapping[str, Any]], now: Sequence[Sequence[Name]], groups: Sequence[Any], ids: list[Any], saved: Any
) -> tuple[list[list[str]], list[list[str]]]:
    """Names of each parameter now, and of each then: the first kind of names that both sides have.

    Both are empty where there is none; state goes by place then. An optimizer's own names may be anything, so they
    count only if the two sides have one in common.

    Args:
        own, now: groups of the optimizer, and names of its parameters by the modules beside it.
        groups, ids, saved: groups of the save, the numbers in them, and the names that it kept under ``KEY``.
    """
    whole = set[str].intersection(*({name.module for name in names} for names in now)) if now else set[str]()
    keys = [[name.key for name in names] for names in now]
    within = [sorted({name.within for name in names if name.module in whole}) for names in now] if whole else []
    mine, theirs = _own_names(own), _own_names(groups)
    for labels, found, are_own in (
        (keys, saved, False),
        (within, ids, False),  # of get_state_dict, which has names for numbers
        (within, theirs, True),
        (mine, theirs, True),
    ):
        then = [[name] if isinstance(name, str) else name for name in found] if type(found) is list else []
        if not labels or len(then) != len(ids) or not all(map(_is_names, then)):
            continue
        if are_own:
            labels, then = ([[*map(module_names.unwrapped, names)] for names in each] for each in (labels, then))
        names_now, names_then = ([name for names in each for name in names] for each in (labels, then))
        is_unique = all(len({*names}) == len(names) for names in (names_now, names_then))
        if is_unique and (not are_own or {*names_now} & {*names_then}):
            return labels, then
    return [], []


def _own_names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What torch's optimizers keep of ``named_parameters()``; none if a group lacks it."""
    found = [group.get("param_names") for group in groups]
    if any(not _is_names(each) or len(each) != len(group["params"]) for each, group in zip(found, groups, strict=True)):
        return []
    return [[name] for each in found for name in each or ()]


def _is_names(names: Any) -> TypeGuard[list[str]]:
    return type(names) is list and bool(names) and all(isinstance(name, str) for name in names)


def _groups_of(groups: Sequence[Sequence[Any]]) -> list[int]:
    """For each parameter the number of its group."""
    return [number for number, group in enumerate(groups) for _ in group]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_SHOWN]) + f" and {len(names) - _MOST_SHOWN} more" * (len(names) > _MOST_SHOWN)


def _counts(sizes: Sequence[int]) -> str:
    return f"groups of {', '.join(map(str, sizes))} parameters"


def _has_parameters(group: Any) -> bool:
    return type(group) is dict and type(group.get("params")) is list


def without_names(own: Any) -> Any:
    """What an optimizer gets: its state dict without names of then, and without state of parameters that it has not.

    torch would keep that under the number of another parameter. In place of ``param_names`` it keeps those that it has.
    """
    groups, state = (tree.get(own, (part,)) for part in ("param_groups", "state"))
    if type(own) is not dict or type(groups) is not list or type(state) is not dict:
        return own
    numbers = {number for group in groups for number in group.get("params", ())}
    kinds = tuple({int} | ({str} & {*map(type, numbers)}))
    state = {number: part for number, part in state.items() if number in numbers or not isinstance(number, kinds)}
    groups = [{name: value for name, value in group.items() if name != "param_names"} for group in groups]
    return {name: part for name, part in own.items() if name != KEY} | {"state": state, "param_groups": groups}
