"""Objects with a state dict: what of them is saved, and what a load asks for in their name.

    object --> state_of (this file) --> its state dict, which factory.py expands

[Note: an optimizer without state] An optimizer that has made no step has no moments, and its state dict asks for none.
So each stored one is asked for: laid out like its parameter if it has the parameter's shape, else whole.
``load_state_dict`` then gets them. Moments that it has and the checkpoint has not are not asked for: after the load it
has none, as after torch's own. A learning rate that is a tensor may be the caller's, and that of other optimizers: it
is read into a copy, which the group then has.

[Note: state that grows] A data loader, a metric or the extra state of a module may hold more now than at the save, or
less. Its tensors of another shape, and elements of a longer list, are not filled: the object gets what was saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import getattr_static
from itertools import chain
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import MismatchError, ShardingError
from sixfold.dist_ckpt.geometry.manifest import Stored
from sixfold.dist_ckpt.state import module_names, parameter_names, schedulers, tree
from sixfold.dist_ckpt.state.parameter_names import Name
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject
from sixfold.dist_ckpt.state.tensor_memory import PLAIN_TENSORS, has_values, is_dtensor, local_of, memory_of


class Saved(NamedTuple):
    """What a checkpoint holds, for a load: its tensors, the keys of its objects, its common data.

    ``tells``: this rank logs what is odd.
    """

    tensors: Mapping[str, Stored]
    objects: Collection[str]
    common: Any
    tells: bool = True


def is_stateful(leaf: Any) -> bool:
    """Whether a leaf has a state dict of its own, as torch's protocol of that name, which is not imported, says.

    Modules, optimizers, schedulers and data loaders are such objects; classes, dicts, lists and tensors are none.
    """
    if isinstance(leaf, type | dict | list | torch.Tensor):
        return False
    try:
        return callable(getattr(leaf, "state_dict", None)) and callable(getattr(leaf, "load_state_dict", None))
    except Exception:  # of a user's __getattr__, which takes any name
        return False


def given_state(owner: Any, path: tree.KeyPath) -> Any:
    """The state dict that an object gives; a data loader may give None until it begins.

    Raises:
        ShardingError: None comes from an object that answers to any name, as a mock does: nothing would be saved.
    """
    found = owner.state_dict()
    if found is None and getattr_static(owner, "state_dict", None) is None:
        raise ShardingError(
            f"{tree.path_text(path)} is a {type(owner).__module__}.{type(owner).__qualname__}, which answers to any "
            "name, and its state_dict() gives None: what it holds would be lost. Save what it stands for, or wrap it "
            "in LocalNonpersistentObject"
        )
    return found


def named_state_of(module: torch.nn.Module, key: str, names: Collection[str] | None) -> tuple[Any, dict[str, str]]:
    """The state dict of a module under the names that a checkpoint has, and by them the names that the module has.

    See [Note: wrappers]. ``names``: of the tensors of a checkpoint that is loaded; None at a save.
    """
    own = module.state_dict()
    if not tree.is_dict(own) or not all(isinstance(name, str) for name in own):
        return own, {}
    plain = module_names.plain_names(module, own)
    state = module_names.renamed(own, plain)
    asked = {} if names is None else module_names.asked_names(state, key, names)
    back = {plain_name: name for name, plain_name in plain.items()}
    found = {asked.get(name, name): back.get(name, name) for name in state} if plain or asked else {}
    return module_names.renamed(state, asked), found


def state_of(
    owner: Any, own: Any, path: tree.KeyPath, saved: Saved | None, known: Callable[[], Mapping[int, list[Name]]]
) -> Any:
    """The state dict of an object; at a load with what is stored and not made yet, and without what is not stored.

    See [Note: an optimizer without state] and [Note: state that grows]. ``saved``: None at a save. ``known``: names of
    parameters, for optimizers.
    """
    is_optimizer = isinstance(owner, torch.optim.Optimizer)
    if saved is None:
        names = parameter_names.names_of(owner, known()) if is_optimizer and type(own) is dict else []
        return {parameter_names.KEY: parameter_names.kept(names)} | own if names else own
    if not is_optimizer:
        schedulers.check_is_same(owner, own, tree.get(saved.common, path), tree.key_text(path))
        return _without_grown(own, path, saved, is_module=isinstance(owner, torch.nn.Module))
    if type(own) is not dict:
        return own
    state, groups = own.get("state"), own.get("param_groups")
    if type(state) is not dict or type(groups) is not list:
        return own
    pairs = zip(groups, owner.param_groups, strict=True)
    parameters = {
        number: parameter
        for named, group in pairs
        for number, parameter in zip(named["params"], group["params"], strict=True)
    }
    stored, key = tree.get(saved.common, path), tree.key_text(path)
    _check_was_an_optimizer(owner, stored, key)
    _check_is_same(owner, groups, stored, key)
    _check_is_whole(stored, saved, key)
    names = parameter_names.names_of(owner, known())
    where = (*path, "state")
    start, state_then = f"{tree.key_text(where)}.", tree.get(stored, ("state",))

    def has_state() -> bool:
        return (type(state_then) is dict and bool(state_then)) or any(name.startswith(start) for name in saved.tensors)

    then = parameter_names.numbers_of_then(groups, names, stored, key, has_state, tells=saved.tells)
    if then:
        parameters, state = (
            {then.get(number, number): of for number, of in each.items()} for each in (parameters, state)
        )
        groups = [
            group | {"params": LocalNonpersistentObject([then[number] for number in group["params"]])}
            for group in groups
        ]
    moments = _moments(start, state_then, parameters, saved.tensors)
    labels = dict(zip(parameters, names, strict=False))
    _check_shapes(owner, parameters, moments, {number: f" ({of[0].key})" for number, of in labels.items()}, key)
    made = dict(_without_new(state, where, saved))
    for name, found in moments.items():
        for number, tensor in found.items():
            if not isinstance(tensor, torch.Tensor) and name not in made.get(number, {}):
                made[number] = {**made.get(number, {}), name: _like(parameters[number], tensor)}
    return own | {"state": made, "param_groups": tree.mapped(groups, _copied, same=tree.BRANCHES)}


def _copied(_: tree.KeyPath, leaf: Any) -> Any:
    return leaf.detach().clone() if type(leaf) in PLAIN_TENSORS else leaf


def _moments(
    prefix: str, common: Any, parameters: Mapping[Any, torch.Tensor], stored: Mapping[str, Stored]
) -> dict[str, dict[Any, Stored | torch.Tensor]]:
    """By name, then by number of a parameter, what is stored of it below ``prefix`` or in common data."""
    found = dict[str, dict[Any, Stored | torch.Tensor]]()
    for number, part in common.items() if type(common) is dict else ():
        for name, leaf in part.items() if type(part) is dict and number in parameters else ():
            if isinstance(leaf, torch.Tensor):
                found.setdefault(name, {})[number] = leaf
    for key, tensor in stored.items():
        if key.startswith(prefix):
            text, _, name = key.removeprefix(prefix).rpartition(".")
            number = int(text) if text.isdecimal() else text
            if number in parameters:
                found.setdefault(name, {})[number] = tensor
    return found


# Of torch's optimizers: what has the shape of its parameter. Adafactor and LBFGS hold other shapes beside.
LIKE_PARAMETERS = {"acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"} | {
    *("momentum_buffer", "prev", "square_avg", "step_size", "sum")
}


def _check_shapes(
    owner: torch.optim.Optimizer,
    parameters: Mapping[Any, torch.Tensor],
    moments: Mapping[str, Mapping[Any, Stored | torch.Tensor]],
    labels: Mapping[Any, str],
    key: str,
) -> None:
    """MismatchError where a moment has another shape than its parameter: torch would take it.

    The names of torch's optimizers tell which state that is. Of others it is what has, for all parameters together, the
    shapes of the parameters in another order.
    """
    kinds = {kind.__module__ for kind in type(owner).__mro__} - {torch.optim.Optimizer.__module__}
    is_torchs = any(kind.startswith("torch.optim.") for kind in kinds)
    with_state = set[Any]().union(*moments.values())
    for name, found in moments.items():
        shapes = {number: (tuple(tensor.shape), tuple(parameters[number].shape)) for number, tensor in found.items()}
        then, now = (Counter(each[at] for each in shapes.values()) for at in (0, 1))
        if name not in LIKE_PARAMETERS if is_torchs else then != now or with_state != shapes.keys():
            continue
        for number, (was, shape) in shapes.items():
            if was != shape:
                raise MismatchError(
                    f"{key}: {name} of parameter {number}{labels.get(number, '')} was saved with shape {was}, and the "
                    f"parameter has {shape}. Make the optimizer over the parameters of then, in their order; or leave "
                    f"{key} out, and this one begins without state"
                )


_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}


def _check_was_an_optimizer(owner: torch.optim.Optimizer, stored: Any, name: str) -> None:
    """MismatchError where what was saved under this name is no state of an optimizer."""
    if stored is tree.GONE or type(tree.get(stored, ("param_groups",))) is list:
        return
    has = ", ".join(sorted(map(str, stored))[:2]) if isinstance(stored, dict) and stored else repr(stored)[:40]
    raise MismatchError(
        f"{name} is {type(owner).__name__}, and what was saved there has {has} and no param_groups. If "
        "get_optimizer_state_dict of torch has flattened it, pass what that gives with the same options, and the "
        f"result to set_optimizer_state_dict; or leave {name} out, and this one begins without state"
    )


def _check_is_same(owner: torch.optim.Optimizer, groups: list[Any], stored: Any, name: str) -> None:
    """MismatchError where the optimizer that was saved has other moments."""
    kept = tree.get(stored, ("param_groups",))
    then = [group for group in kept if type(group) is dict] if type(kept) is list else []
    for mine, theirs in zip(groups, then, strict=False):
        lacking = owner.defaults.keys() - theirs.keys()
        if lacking and (beyond := theirs.keys() - mine.keys() - {"params", "param_names"} - _OF_SCHEDULERS):
            raise MismatchError(
                f"{name} is {type(owner).__name__}, and another optimizer was saved: it had {min(beyond)} and no "
                f"{min(lacking)}. Make that one; or leave {name} out, and this one begins without state"
            )


def _check_is_whole(stored: Any, saved: Saved, name: str) -> None:
    """MismatchError where one half of an optimizer's state dict was saved: torch's own error would name a key alone."""
    below = [key.removeprefix(f"{name}.") for key in (*saved.tensors, *saved.objects) if key.startswith(f"{name}.")]
    parts = {key.partition(".")[0] for key in below} | {*(stored if tree.is_dict(stored) else ())}
    is_bare = stored is tree.GONE  # of plain DCP, which keeps no empty dict
    if parts & {"state", "param_groups"} and not parts >= {"param_groups", *["state"] * (not is_bare)}:
        has, lacks = ("param_groups", "state") if "param_groups" in parts else ("state", "param_groups")
        raise MismatchError(
            f"{name}: the checkpoint has its {has} and not its {lacks}, as a conversion of some keys leaves it. Load "
            f"it from the checkpoint that was converted; or leave {name} out, and this one begins without state"
        )


def hand_over_all(found: Iterable[tuple[Any, Any]]) -> None:
    """Give each object its state."""
    for owner, own in found:
        hand_over(owner, own)


def hand_over(owner: Any, own: Any) -> None:
    """Give an object its state.

    The tensors of a module have been filled where they are. It gets them themselves, since torch would copy what only
    shares their memory: all of a model once more.
    """
    if isinstance(owner, torch.nn.Module) and tree.is_dict(own):
        held = (owner.named_parameters(remove_duplicate=False), owner.named_buffers(remove_duplicate=False))
        for name, mine in chain(*held):
            if _is_same(mine, own.get(name)):
                own[name] = mine
    if isinstance(owner, torch.optim.Optimizer):
        own = parameter_names.without_names(own)
    owner.load_state_dict(own)


def _is_same(mine: Any, value: Any) -> bool:
    if is_dtensor(mine) and is_dtensor(value):
        mine, value = local_of(mine), local_of(value)
    is_plain = type(mine) in PLAIN_TENSORS and type(value) in PLAIN_TENSORS and has_values(mine) and has_values(value)
    return is_plain and (memory := memory_of(mine)) is not None and memory == memory_of(value)


def _without_new(state: dict[Any, Any], path: tree.KeyPath, saved: Saved) -> dict[Any, Any]:
    """The state of an optimizer without tensors that are not stored, if its groups are."""
    if tree.get(saved.common, (*path[:-1], "param_groups")) is tree.GONE:
        return state

    def change(at: tree.KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or _is_saved(at, saved):
            return leaf
        return tree.GONE if isinstance(at[-1], str) else None

    kept = tree.mapped(state, change, path, same=tree.BRANCHES)
    return {} if kept is tree.GONE else kept


def _without_grown(own: Any, path: tree.KeyPath, saved: Saved, *, is_module: bool) -> Any:
    """The state of an object with None, which a load fills with what was saved, in place of tensors that do not fit."""

    def change(at: tree.KeyPath, leaf: Any) -> Any:
        if type(leaf) not in PLAIN_TENSORS or (is_module and not is_extra_state(at)):
            return leaf
        stored = saved.tensors.get(tree.key_text(at))
        if stored is not None:
            return leaf if stored.shape == tuple(leaf.shape) else None
        is_beyond = type(tree.get(saved.common, at[:-1])) is list and not _is_saved(at, saved)
        return None if is_beyond else leaf

    return tree.mapped(own, change, path, same=tree.BRANCHES)


def is_extra_state(path: tree.KeyPath) -> bool:
    """Whether a place is within what a module has beside its tensors."""
    return any(isinstance(name, str) and name.endswith("_extra_state") for name in path)


def _is_saved(path: tree.KeyPath, saved: Saved) -> bool:
    return tree.key_text(path) in saved.tensors or tree.get(saved.common, path) is not tree.GONE


def _like(parameter: torch.Tensor, stored: Stored) -> torch.Tensor:
    if stored.shape and stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=stored.dtype)  # all of it is read
    return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
