"""Stateful objects: leaves with a state dict of their own, as ``torch.distributed.checkpoint`` takes them.

    Stateful --> its state_dict() --> factory.py: records and common data
    loaded values --> hand_over (this file) --> its load_state_dict, last of all

Modules, optimizers, schedulers and data loaders are such objects; what counts is that both methods are there, as
torch's own protocol says, which is not imported for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

KeyPath = tuple[Any, ...]


class Handover(NamedTuple):
    """An object, where it stands, and what its ``load_state_dict`` is to get."""

    path: KeyPath
    owner: Any
    values: Any


def is_stateful(leaf: Any) -> bool:
    """Whether a leaf has a state dict of its own; classes, dicts, lists and tensors have none."""
    if isinstance(leaf, type | dict | list | torch.Tensor):
        return False
    return callable(getattr(leaf, "state_dict", None)) and callable(getattr(leaf, "load_state_dict", None))


def hand_over(found: Iterable[Handover]) -> None:
    """Give each object its values, in the order of the state dict, inner objects before those that hold them."""
    open_ones: list[Handover] = []
    for each in found:
        while open_ones and each.path[: len(open_ones[-1].path)] != open_ones[-1].path:
            _give(open_ones.pop())
        open_ones.append(each)
    for each in reversed(open_ones):
        _give(each)


def _give(each: Handover) -> None:
    each.owner.load_state_dict(each.values)
