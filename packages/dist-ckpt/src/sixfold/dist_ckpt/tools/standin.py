"""Common data and objects of any checkpoint as plain values, for looking and comparing only.

    bytes of common.pt, of objects --> stand_ins (this file) --> safe_globals of a load: inert classes for unknown ones

megatron puts its ``argparse.Namespace`` and enums into common data. A load refuses the user's classes unless they
are allowed by name; a tool that only shows or compares needs no class: each unknown one is replaced by a stand-in
that holds what the pickle says of it, and nothing of it is imported or run.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

from sixfold.dist_ckpt.state import plain


class _StandIn:
    """An object of a class that is not imported: its name, arguments and state."""

    name = ""
    arguments: tuple[Any, ...] = ()  # a pickle may make an object without calling its class
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _StandIn)
            and self.name == other.name
            and equal(self.arguments, other.arguments)
            and equal(self.state, other.state)
        )

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name}>"


def stand_ins(files: Iterable[bytes]) -> list[tuple[type, str]]:
    """``safe_globals`` for a load of these bytes."""
    names = set[str]()
    for data in files:
        with suppress(Exception):  # damaged bytes raise whatever they like; the load tells it
            found = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
            names |= set(found) - {name for _, name in plain.allowed(data, ())}
    return [(type("_StandIn", (_StandIn,), {"name": name}), name) for name in names]


def equal(a: Any, b: Any) -> bool:
    """Whether two values of common data are the same, tensors, arrays and NaN included."""
    if hasattr(a, "shape") or hasattr(b, "shape"):  # tensors, and arrays and numbers of numpy
        if not isinstance(b, torch.Tensor if isinstance(a, torch.Tensor) else type(a)):
            return False
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Namespace | SimpleNamespace) and type(a) is type(b):
        return equal(vars(a), vars(b))
    return bool(a == b) or (a != a and b != b and type(a) is type(b))
