"""Names of a module's state dict without the prefixes of wrappers, as torch's get_model_state_dict has them.

    module --> plain_names (this file) --> what is saved and asked for --> renamed --> load_state_dict

[Note: wrappers] DistributedDataParallel, torch.compile and checkpoint_wrapper put a prefix before each name of the
module inside, be it the whole model or one block of it. Names are saved without, so that a checkpoint does not depend
on them. A name that an older version saved with a prefix is asked for with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from sixfold.dist_ckpt.state import tree

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
VERSIONS = "_metadata"  # torch's attribute of a module's state dict
_SOLE_CHILDREN = WRAPPERS - {"module"}  # a user's module may have a child called "module", and no other one


def inside(leaf: Any) -> Any:
    """The module in the wrappers around the whole, or what is no wrapper itself."""
    while isinstance(leaf, torch.nn.Module) and (prefix := _prefix(leaf)) in ("module", "_orig_mod"):
        leaf = getattr(leaf, prefix)  # FSDP and checkpoint_wrapper have a hook in the state dict that takes it away
    return leaf


def plain_names(module: torch.nn.Module, own: Any) -> dict[str, str]:
    """Each name of the module's own state dict, without prefixes of wrappers. Nothing if none has one.

    Names stay as they are if two would become one.
    """
    if all(_prefix(part) is None for part in module.modules()):
        return {}
    found = {name: _plain(module, name) for name in own}
    return found if len({*found.values()}) == len(found) else {}


def asked_names(names: Collection[str], key: str, stored: Collection[str]) -> dict[str, str]:
    """By which names a load asks for those of a module: the stored one that differs by a wrapper's prefix alone.

    ``stored``: names of all tensors of the checkpoint. A name that is stored as it is stays.
    """
    lacking = [name for name in names if f"{key}.{name}" not in stored]
    if not lacking:
        return {}
    start, taken = f"{key}.", {f"{key}.{name}" for name in names}
    other = [name.removeprefix(start) for name in stored if name.startswith(start) and name not in taken]
    counts = Counter(map(unwrapped, other))
    by_plain = {unwrapped(name): name for name in other if counts[unwrapped(name)] == 1}
    return {name: by_plain[unwrapped(name)] for name in lacking if unwrapped(name) in by_plain}


def unwrapped(key: str) -> str:
    """The key without what wrappers put before the names of the module inside."""
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def renamed(state: Any, names: Mapping[str, str]) -> Any:
    """A copy of a module's state dict with other names."""
    return tree.rebuilt(state, [(names.get(name, name), part) for name, part in state.items()]) if names else state


def versions_of_then(own: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """For each module what was saved of its versions, also under other wrappers; of a new one its own."""
    plain = {unwrapped(name): version for name, version in then.items()}
    return {name: then.get(name, plain.get(unwrapped(name), version)) for name, version in own.items()}


def _plain(module: torch.nn.Module, name: str) -> str:
    kept, at = list[str](), module
    for part in name.split("."):
        prefix = _prefix(at)
        while prefix is not None and prefix != part:  # which a hook of the wrapper has taken away
            at = getattr(at, prefix)
            prefix = _prefix(at)
        if prefix is None:
            kept.append(part)
        below = dict(at._modules.items()).get(part)  # of TorchScript ``_modules`` is no dict
        at = _NONE if below is None else below
    return ".".join(kept)


def _prefix(module: torch.nn.Module) -> str | None:
    """What a wrapper puts before the names of the module inside."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return "module"
    children = [*module._modules.keys()]
    return children[0] if len(children) == 1 and children[0] in _SOLE_CHILDREN else None  # by name: a class loads much


_NONE = torch.nn.Module()
