"""What a load asks for against what is stored: keys of records, parts of one object, plain values.

    state dict of a load + common data --> requested_keys.py (this file) --> loading.py --> what ``strict`` says

[Note: half of an object] An optimizer of FSDP2 that has made no step has no moments in its state dict. Its learning
rate would be loaded and its moments would not. So it is an error to ask for something below a name of the state dict,
if no rank asks for the rest that is stored there. Another ``strict`` than the default allows it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.geometry.manifest import Manifest, Stored
from sixfold.dist_ckpt.plans.shard_table import listed
from sixfold.dist_ckpt.state import dcp_names, tree
from sixfold.dist_ckpt.state.factory import Merge
from sixfold.dist_ckpt.state.in_place import Leaves
from sixfold.dist_ckpt.state.module_names import unwrapped
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase, ShardedObject
from sixfold.dist_ckpt.state.tensor_memory import check_readable

_MOST_SHOWN = 4
_log = logging.getLogger("sixfold.dist_ckpt")
_MAKE_STATE = (
    "An optimizer that has made no step has no state to load into: pass the optimizer itself in place of its state "
    "dict, or make its state first by get_optimizer_state_dict(model, optimizer) of "
    "torch.distributed.checkpoint.state_dict. "
)
_BY_NAME = (
    "State of the optimizer was saved by the names of its parameters, as torch's get_state_dict gives it: pass what "
    "get_optimizer_state_dict(model, optimizer) gives, and the result to set_optimizer_state_dict. "
)
_FLAT = (
    "State of the optimizer was saved by the names of its parameters, as one flat dict: pass what "
    "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)) gives, "
    "and the result to set_optimizer_state_dict with the same options. "
)
_BY_NUMBER = "State of the optimizer was saved by the numbers of its parameters: pass the optimizer itself. "
_BY_ITEM = (
    "Lists of sharded tensors in an optimizer's state, as LBFGS has them, are filled item by item, and its own are of "
    "another length: have it make as many steps before the load as were made before the save, or leave it out and it "
    "begins without state. "
)
_ITEM = re.compile(r".+\.state\.\d+\.[^.]+\.\d+$")
_STATE = re.compile(r"(.+?)\.state\.(\d+\.[^.]+(?:\.\d+)?$)?")  # an optimizer's name, and a value by number


class StrictHandling(Enum):
    """What a load does with keys that only one side knows.

    *Unexpected* keys are asked for and not stored; *missing* keys are stored and asked for by no
    rank (torch's words the other way round).
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @property
    def raises_unexpected(self) -> bool:
        """Unexpected keys are an error."""
        return self.value in ("assume_ok_unexpected", "raise_unexpected", "raise_all")

    @property
    def logs(self) -> bool:
        """Keys become a warning."""
        return self.value.startswith("log")

    @property
    def returns(self) -> bool:
        """``load`` returns (state, missing, unexpected)."""
        return self.value.startswith("return")

    @property
    def minds_missing(self) -> bool:
        """Missing keys count too."""
        return self.value in ("log_all", "raise_all", "return_all")


def parse_strict(strict: StrictHandling | str) -> StrictHandling:
    """The enum of a value or its string."""
    try:
        return StrictHandling(strict)
    except ValueError:
        raise CheckpointError(f"strict is {strict!r}; it is one of {[mode.value for mode in StrictHandling]}") from None


def check_keys(
    strict: StrictHandling, missing: Iterable[str], unexpected: Iterable[str], tensors: Iterable[str]
) -> None:
    """MismatchError that lists every key, if ``strict`` says that they are an error. ``tensors``: all stored ones."""
    stored, wrong = sorted(missing), sorted(unexpected) if strict.raises_unexpected else []
    lines = [f"{key}: asked for, not in the checkpoint" for key in wrong]
    if strict is StrictHandling.RAISE_ALL:
        lines += [f"{key}: in the checkpoint, asked for by no rank" for key in stored]
    if lines:
        kinds = ["Unexpected keys (not found in the checkpoint)"] * bool(wrong)
        kinds += ["Missing keys (asked for by no rank)"] * (len(lines) > len(wrong))
        what = "1 key does not match" if len(lines) == 1 else f"{len(lines)} keys do not match"
        remedy = "correct them, or leave them out by strict='log_unexpected'" if wrong else "ask for them too"
        remedy = _of_optimizer(wrong, tensors).rstrip(". ") or remedy
        raise MismatchError(listed(f"{', '.join(kinds)}: {what} (strict={strict.value!r}); {remedy}", lines))


def _of_optimizer(asked: Collection[str], stored: Iterable[str]) -> str:
    """What to do where state of an optimizer is asked for by numbers of its parameters and stored by names, or so."""
    own = _is_by_name(asked)
    for name, is_named in sorted(_is_by_name(stored).items()):
        if is_named and any(key.startswith(f"{name}.param_groups.0.params") for key in asked):
            return _FLAT
        if own.get(name, is_named) != is_named:
            return _BY_NAME if is_named else _BY_NUMBER
    return ""


def _is_by_name(keys: Iterable[str]) -> dict[str, bool]:
    """Of each optimizer, whether its state goes by names of parameters: those of a Sequential begin with a number."""
    found = dict[str, bool]()
    for state in filter(None, map(_STATE.match, keys)):
        found[state[1]] = found.get(state[1], True) and state[2] is None
    return found


def warn_of_keys(missing: set[str], unexpected: set[str]) -> None:
    """One line on the logger ``sixfold.dist_ckpt`` for each kind of keys; a warning would be shown only once."""
    if unexpected:
        _log.warning("Unexpected keys (asked for, not found in the checkpoint): %s", ", ".join(sorted(unexpected)))
    if missing:
        _log.warning("Missing keys (in the checkpoint, asked for by no rank): %s", ", ".join(sorted(missing)))


def given_keys(names: set[str], stored: Manifest) -> set[str]:
    """Keys as users give them to records: of a cell of objects its grid's key, as megatron-core returns them."""
    return {name if name in stored.tensors else dcp_names.record_of(name).key for name in names}


def other_wrappers(unexpected: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Keys that are asked for, with the stored ones from which they differ by the prefix of a wrapper alone."""
    inner = {unwrapped(key): key for key in stored}
    return {key: inner[unwrapped(key)] for key in sorted(unexpected) if unwrapped(key) in inner}


def check_wrappers(others: Mapping[str, str]) -> None:
    """MismatchError if there are such keys; it comes before ``check_whole``, whose keys these may be too."""
    if others:
        lines = [f"{key}: stored is {stored}" for key, stored in [*others.items()][:_MOST_SHOWN]]
        lines += [f"and {len(others) - _MOST_SHOWN} more"] * (len(others) > _MOST_SHOWN)
        title = (
            "names differ from the stored ones by the prefix of a wrapper, such as DDP's 'module.' or torch.compile's "
            "'_orig_mod.'. Rename the keys of the state dict to the stored ones, or save the state dict of the model "
            "inside (model.module, model._orig_mod)"
        )
        raise MismatchError(listed(title, lines))


def owners(state: Mapping[Any, Any], merges: Sequence[Merge], parts: tree.Split, common: Any) -> frozenset[str]:
    """Names of what is asked for in part: dicts and lists at the top of a state dict, Stateful objects anywhere.

    Only of those whose content is stored under their own name, as common data or with keys that are paths.
    """
    tops = [(name,) for name, node in state.items() if (type(node) in tree.BRANCHES or isinstance(node, dict)) and node]
    places = {*tops, *(step.path for step in merges if step.owner is not None)}
    by_path = {path for path, record in parts.records if record.key == tree.key_text(path)}
    named = {path[:depth] for path in by_path for depth in range(1, len(path))} & places
    return frozenset(
        tree.key_text(place) for place in places if place in named or tree.get(common, place) is not tree.GONE
    )


def local_names(parts: tree.Split) -> frozenset[str]:
    """Names of what the caller keeps for itself: it need not be asked for.

    An empty dict is kept where plain DCP stores none (dcp_names.py), and holds nothing.
    """
    local = ((path, leaf.unwrap()) for path, leaf in parts.local)
    return frozenset(tree.key_text(path) for path, value in local if not tree.is_dict(value) or value)


def _remedy_of_state(keys: Sequence[str]) -> str:
    """What to do about keys of an optimizer's state that nobody asks for."""
    if all(_is_by_name(keys).values()):
        return _BY_NAME
    return _BY_ITEM if all(map(_ITEM.match, keys)) else _MAKE_STATE


def check_whole(missing: Iterable[str], owners: Iterable[str], local: Iterable[str]) -> None:
    """MismatchError for stored keys below the name of an object that is asked for in part.

    See [Note: half of an object].
    """
    below, kept = {f"{name}.": name for name in owners}, tuple(local)
    if not below:
        return
    starts, excused = tuple(below), tuple(f"{name}." for name in kept)
    lost = sorted(
        key for key in missing if key.startswith(starts) and key not in kept and not (kept and key.startswith(excused))
    )
    if not lost:
        return
    name = max((name for start, name in below.items() if lost[0].startswith(start)), key=len)
    more = f" and {len(lost) - _MOST_SHOWN} more" if len(lost) > _MOST_SHOWN else ""
    remedy = "Ask for them too; a model has the layers that it had when it was saved. "
    if state := [key for key in lost if key.startswith(f"{name}.state.")]:
        remedy = _remedy_of_state(state)
    raise MismatchError(
        f"{', '.join(lost[:_MOST_SHOWN])}{more}: in the checkpoint, asked for by no rank, while other state of "
        f"{name!r} is. {remedy}strict='raise_unexpected' loads the rest without them"
    )


def plain_keys(expanded: Any, leaves: Leaves, common: Any) -> tuple[set[str], set[str]]:
    """Plain tensors that are stored and not asked for, and plain leaves that are asked for and not stored."""
    missing = {
        tree.key_text(path)
        for path, leaf in tree.leaves(common)
        if isinstance(leaf, torch.Tensor) and tree.get(expanded, path) is tree.GONE
    }
    unexpected = {
        tree.key_text(path)
        for path, leaf in leaves
        if not isinstance(leaf, ShardedBase | LocalNonpersistentObject)
        and type(leaf) not in tree.BRANCHES
        and tree.get(common, path) is tree.GONE
    }
    return missing, unexpected


def tensors_not_stored(leaves: Leaves, common: Any) -> set[str]:
    """Plain tensors that are asked for and not stored: they would stay as they are, as no sharded one does."""
    return {
        tree.key_text(path)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and tree.get(common, path) is tree.GONE
    }


def object_mismatches(
    objects: Sequence[ShardedObject], manifest: Manifest, strict: StrictHandling
) -> tuple[list[str], set[str]]:
    """Objects whose grid is another than the saved one, and objects that are not stored at all.

    Both are not stored where ``strict`` raises for neither.
    """
    absent = [record for record in objects if record.unique_key not in manifest.objects]
    names = [] if not absent else [name for name in manifest.objects if not dcp_names.is_plain(name)]
    grids = {record.key: record.global_shape for record in map(dcp_names.record_of, names)}
    lines, unknown = [], set()
    for record in absent:
        grid = grids.get(record.key, record.global_shape)
        if grid != record.global_shape and strict.raises_unexpected:
            lines.append(
                f"{record.key}: asked for a grid {record.global_shape} of objects, saved was {grid}; objects cannot be "
                "cut anew"
            )
        else:
            unknown.add(record.unique_key)
    return lines, unknown


def asked_as_common(
    leaves: Leaves, objects: Sequence[ShardedObject], manifest: Manifest, common: Any, strict: StrictHandling
) -> list[str]:
    """What is wrong where a value is asked for like common data, and each rank has saved one of its own there."""
    if not strict.raises_unexpected:
        return []
    cells = [dcp_names.record_of(name) for name in manifest.objects if not dcp_names.is_plain(name)]
    grids = {cell.key: cell.global_shape for cell in cells} if cells else {}
    for record in objects:
        grids.pop(record.key, None)
    found = dict[str, str]()
    for path, leaf in leaves if grids else ():
        if isinstance(leaf, ShardedBase | LocalNonpersistentObject):
            continue
        for depth in range(1, len(path) + 1):
            key = tree.key_text(path[:depth])
            if key in grids and tree.get(common, path[:depth]) is tree.GONE:
                found[key] = (
                    f"{key}: asked for as a common value, saved as a grid {grids[key]} of objects; ask for it as "
                    "PerRank(None), or as the ShardedObject that was saved"
                )
    return [*found.values()]


def check_have_memory(merges: Sequence[Merge], expanded: Any, common: Any, stored: Mapping[str, Stored]) -> None:
    """A copy into a tensor on the meta device changes nothing: torch warns of it, and the object has no values."""
    for path, _, owner, _, _ in merges:
        if not isinstance(owner, torch.nn.Module | torch.optim.Optimizer):
            continue
        for below, leaf in tree.leaves(tree.get(expanded, path), path):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
                continue
            if tree.key_text(below) in stored or isinstance(tree.get(common, below), torch.Tensor):
                check_readable(tree.key_text(below), leaf)


def told_of_buffers(mismatches: Sequence[str], merges: Sequence[Merge]) -> list[str]:
    """The lines; of buffers of another shape also what a module does that resizes them in its ``load_state_dict``."""
    ways = {
        f"{tree.key_text(step.path)}.{name}: asked for global shape": "".join(f"[{part!r}]" for part in step.path)
        for step in merges
        if isinstance(step.owner, torch.nn.Module)
        for name, _ in step.owner.named_buffers(remove_duplicate=False)
    }
    told = list[str]()
    for line in mismatches:
        start, found, _ = line.partition(" asked for global shape")
        way = ways.get(start + found)
        more = f". A module that resizes it takes it by load_state_dict(load({{}}, path){way})" if way else ""
        told.append(line + more)
    return told
