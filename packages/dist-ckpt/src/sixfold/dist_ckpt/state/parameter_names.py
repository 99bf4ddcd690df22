"""Which parameter of an optimizer is which: by the names that the modules beside it give.

    modules of a state dict --> names_in --> names_of (this file) --> kept in common data at a save
    names of the save + names of the load --> numbers_of_then (this file) --> what stateful.py asks for

[Note: state by name] torch numbers the parameters of an optimizer by their place. A model whose layers are made in
another order would get the moments of other weights, while weights go by name. So the names are kept beside the groups,
under ``KEY``, where torch and older versions do not look. A load asks for the state of each parameter by the number
that it had. A parameter that is new has no state then, and that of one that is gone is passed over; both are logged.
torch's ``get_state_dict`` has names for numbers. Where a parameter belongs to no module of the state dict, the names of
none are known, and state goes by place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


def names_in(state: Any) -> dict[int, Name]:
    """``id(parameter)`` -> its name, for the modules of a state dict. Of several names it is the first by alphabet."""
    found = dict[int, Name]()
    for path, leaf in tree.leaves(state):
        module = module_names.inside(leaf)
        if not isinstance(module, torch.nn.Module):
            continue
        named = [*module.named_parameters(remove_duplicate=False)]
        plain = module_names.plain_names(module, [name for name, _ in named])
        for name, parameter in named:
            own = Name(tree.key_text(path), plain.get(name, name))
            found[id(parameter)] = min(own, found.get(id(parameter), own))
    return found


def names_of(owner: torch.optim.Optimizer, known: Mapping[int, Name]) -> list[Name]:
    """The names of an optimizer's parameters in its order; none if not all are known."""
    found = [known.get(id(parameter)) for group in owner.param_groups for parameter in group["params"]]
    names = [name for name in found if name is not None]
    return names if len(names) == len(found) else []


def numbers_of_then(
    own: Sequence[Mapping[str, Any]], now: Sequence[Name], stored: Any, key: str, *, tells: bool = False
) -> dict[Any, Any]:
    """For each number of a parameter in its optimizer, under which one its state was saved; {} where that is the same.

    Args:
        own: groups of the optimizer's state dict; now: names of its parameters.
        stored: what common data has of the optimizer; key: the optimizer's name.
        tells: names of parameters that came or went are logged.
    Raises:
        MismatchError: there are more or fewer groups, or parameters without names. A parameter was in another group, or
            the groups have names of their own in another order.
    """
    groups = tree.get(stored, ("param_groups",))
    if type(groups) is not list or not all(map(_has_parameters, groups)):
        return {}
    mine, theirs = ([list[Any](group["params"]) for group in each] for each in (own, groups))
    numbers, ids = ([number for one in each for number in one] for each in (mine, theirs))
    then, labels = tree.get(stored, (KEY,)), [name.key for name in now]
    if type(then) is not list and len({name.module for name in now}) == 1:  # of get_state_dict
        then, labels = ids, [name.within for name in now]
    is_known = now and type(then) is list and len(then) == len(ids) and all(isinstance(name, str) for name in then)
    sizes, before = ([len(group) for group in each] for each in (mine, theirs))
    if len(sizes) != len(before) or (sizes != before and not is_known):
        raise MismatchError(
            f"{key}: it was saved with {_counts(before)}, and this one has {_counts(sizes)}. Make it with the groups "
            f"of then, and name model and optimizer in one state dict in save and load; or leave {key} out"
        )
    if not is_known:
        return {}
    was, at = dict(zip(then, ids, strict=True)), _places(mine)
    of_group = dict(zip(then, _places(theirs), strict=True))
    is_named = any("param_names" in group for group in (*own, *groups))
    for number, (label, place) in enumerate(zip(labels, at, strict=True)):
        stood = then[number] if number < len(then) else None
        if (before_at := of_group.get(label, place)) != place and sizes != before:
            raise MismatchError(
                f"{key}: {label} was in group {before_at}, and is in group {place} now. Make the optimizer with the "
                f"groups of then; or leave {key} out, and this one begins without state"
            )
        if label != stood and (before_at != place or (is_named and label in was)):
            raise MismatchError(other_order(key, label, str(stood)))
    came, gone = [label for label in labels if label not in was], sorted(was.keys() - {*labels})
    if tells and came:
        _log.warning("%s: nothing is saved of its state for %s, which begins without", key, _some(came))
    if tells and gone:
        _log.warning("%s: it holds no more %s, whose saved state is passed over", key, _some(gone))
    found = {number: was.get(label, label) for number, label in zip(numbers, labels, strict=True)}
    return {} if [*found] == [*found.values()] and sizes == before else found


def _places(groups: Sequence[Sequence[Any]]) -> list[int]:
    """For each parameter the position of its group."""
    return [at for at, one in enumerate(groups) for _ in one]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_SHOWN]) + f" and {len(names) - _MOST_SHOWN} more" * (len(names) > _MOST_SHOWN)


def _counts(sizes: Sequence[int]) -> str:
    return f"groups of {', '.join(map(str, sizes))} parameters"


def _has_parameters(group: Any) -> bool:
    return type(group) is dict and type(group.get("params")) is list


def without_names(own: Any) -> Any:
    """What an optimizer gets: its state dict without ``KEY``, and without state of parameters that it has not.

    torch would keep that under the number of another parameter.
    """
    groups, state = (tree.get(own, (part,)) for part in ("param_groups", "state"))
    if type(own) is not dict or type(groups) is not list or type(state) is not dict:
        return own
    numbers = {number for group in groups for number in group.get("params", ())}
    kinds = tuple(({int} if KEY in own else set()) | ({str} & {*map(type, numbers)}))
    state = {number: part for number, part in state.items() if number in numbers or not isinstance(number, kinds)}
    return {name: part for name, part in own.items() if name != KEY} | {"state": state}


def other_order(key: str, mine: str, theirs: str) -> str:
    """What an error says of parameters that stand in another order, or group."""
    return (
        f"{key}: its parameters had another order: {mine} stands where {theirs} stood, and state goes by "
        "place. Make the optimizer with its parameters in the order of then"
    )
