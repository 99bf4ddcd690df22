"""Objects with a state dict: what of them is saved, and what a load asks for in their name.

    object --> state_of (this file) --> its state dict, which factory.py expands

[Note: wrappers] DistributedDataParallel and torch.compile put a prefix before each name of the model inside. The model
inside is saved, so that a checkpoint does not depend on them. One that an older version saved with the prefix is asked
for with it.

[Note: an optimizer without state] An optimizer that has made no step has no moments, and its state dict asks for none.
So each stored one is asked for: laid out like its parameter if it has the parameter's shape, else whole.
``load_state_dict`` then gets them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from sixfold.dist_ckpt.geometry.manifest import Stored
from sixfold.dist_ckpt.state import tree


def is_stateful(leaf: Any) -> bool:
    """Whether a leaf has a state dict of its own, as torch's protocol of that name, which is not imported, says.

    Modules, optimizers, schedulers and data loaders are such objects; classes, dicts, lists and tensors are none.
    """
    if isinstance(leaf, type | dict | list | torch.Tensor):
        return False
    return callable(getattr(leaf, "state_dict", None)) and callable(getattr(leaf, "load_state_dict", None))


def inside(leaf: Any, path: tree.KeyPath, names: Collection[str] | None) -> Any:
    """The object whose state dict is saved or loaded. See [Note: wrappers].

    ``names``: of the tensors of a checkpoint that is loaded; None at a save.
    """
    while isinstance(leaf, torch.nn.Module):
        prefix = _prefix(leaf)
        if prefix is None or any(name.startswith(f"{tree.key_text(path)}.{prefix}.") for name in names or ()):
            break
        leaf = getattr(leaf, prefix)
    return leaf


def _prefix(module: torch.nn.Module) -> str | None:
    """What a wrapper puts before the names of the model inside."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return "module"
    return "_orig_mod" if [*module._modules] == ["_orig_mod"] else None  # of torch.compile, whose class loads much


def state_of(owner: Any, path: tree.KeyPath, stored: Mapping[str, Stored] | None) -> Any:
    """The state dict of an object; of an optimizer at a load with what is stored and not made yet.

    See [Note: an optimizer without state]. ``stored``: the tensors of the checkpoint; None at a save.
    """
    own = owner.state_dict()
    if not stored or not isinstance(owner, torch.optim.Optimizer) or type(own) is not dict:
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
    prefix, made = tree.key_text((*path, "state")) + ".", dict(state)
    for key in stored:
        if not key.startswith(prefix):
            continue
        text, _, name = key.removeprefix(prefix).partition(".")
        number = int(text) if text.isdecimal() else text
        if number not in parameters or "." in name or name in made.get(number, {}):
            continue
        made[number] = {**made.get(number, {}), name: _like(parameters[number], stored[key])}
    return own | {"state": made}


def _like(parameter: torch.Tensor, stored: Stored) -> torch.Tensor:
    if stored.shape and stored.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=stored.dtype)
    return torch.zeros(stored.shape, dtype=stored.dtype, device="cpu")
