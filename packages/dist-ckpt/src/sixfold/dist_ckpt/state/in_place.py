"""The caller's tensors as a load leaves them: filled, and known to autograd as changed.

    result of a load + state dict that was asked for --> in_place.py (this file) --> loading.py

[Note: autograd hears of a load] Bytes are put where tensors lie, past torch. A backward pass that needs the values
from before the load must fail as after ``copy_``, so the version of each tensor is raised.

[Note: plain tensors are filled too] A DTensor is filled in place, so the plain tensors beside it are: buffers of an
FSDP2 model, whole models. Those of another shape or dtype stay as they are, and the result holds what was saved; the
log tells.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.dense import check_writable, has_values
from sixfold.dist_ckpt.state.dtensor import is_dtensor
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedTensor

_MOST_SHOWN = 10
_log = logging.getLogger("sixfold.dist_ckpt")


def raise_versions(tensors: Iterable[torch.Tensor]) -> None:
    """See [Note: autograd hears of a load]."""
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def written_by(records: Iterable[ShardedBase], state: Any) -> list[torch.Tensor]:
    """What a load of these records into a state dict writes: their data, and the DTensors around it."""
    data = [record.data for record in records if isinstance(record, ShardedTensor) and record.data is not None]
    return data + [leaf for _, leaf in tree.leaves(state) if is_dtensor(leaf)]


def fill_plain(asked: Any, result: Any, is_first: bool) -> None:
    """Put what was saved as common data into the caller's plain tensors, which ``result`` then holds.

    See [Note: plain tensors are filled too]. ``is_first``: this rank writes the log.
    """
    left = list[str]()
    for path, target in tree.leaves(asked):
        if type(target) not in (torch.Tensor, torch.nn.Parameter) or target.is_meta:  # which ``assign=True`` replaces
            continue
        found = tree.get(result, path)
        if not isinstance(found, torch.Tensor) or _share_memory(found, target):
            continue
        if found.shape == target.shape and found.dtype == target.dtype and _is_writable(target) and has_values(found):
            own = target.detach()
            own.copy_(found)
            tree.put(result, path, own)
        else:
            left.append(tree.key_text(path))
    if left and is_first:
        shown = ", ".join(left[:_MOST_SHOWN]) + (", ..." if len(left) > _MOST_SHOWN else "")
        what = "Saved with another shape or dtype, or yours cannot be written"
        _log.warning("%s: the result holds them, your tensors do not: %s", what, shown)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return has_values(one) and has_values(other) and one.data_ptr() == other.data_ptr() and one.numel() > 0


def _is_writable(tensor: torch.Tensor) -> bool:
    try:
        check_writable("", tensor)
    except ShardingError:
        return False
    return not tensor.is_inference()
