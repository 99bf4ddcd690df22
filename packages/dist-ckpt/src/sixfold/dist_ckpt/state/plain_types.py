"""Plain types: what may stand in common data besides torch's own list, written and read without running anything.

    weights_only.dump --> reduce (this file) --> a pickle of constructors with plain arguments
    weights_only.load --> allowed (this file) --> constructors that check their arguments

torch's weights-only reader knows dicts, lists, tuples, sets, numbers, texts and tensors. Trainers also keep numpy
arrays (the state of a random generator), argparse's namespaces, dates, paths. They are written as calls of their own
public constructors, which any reader of pickles, megatron-core's included, reads too.

[Note: numpy's own pickles] ``numpy.dtype.__setstate__`` takes offsets of fields unchecked: a file can name places
outside an array, and using it reads or writes foreign memory. So numpy's own way to rebuild is never called. Where a
peer's file asks for it, stand-ins take the state, and ``thaw`` makes arrays of number types from it.
"""

from __future__ import annotations

import io
import pathlib
import re
import sys
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Collection
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any

from torch.torch_version import TorchVersion

from sixfold.dist_ckpt.state import tree

_NUMBERS = re.compile(r"[<>|=]?(?:b1|[biufc](?:1|2|4|8|16)|[SU]\d{1,9})")
_WIDTHS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
_SCALARS = frozenset(["bool", "bool_", "str_", "bytes_", *(f"{kind}{n}" for kind in _WIDTHS for n in _WIDTHS[kind])])
_REBUILD = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_SCALAR = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")

_HARMLESS: tuple[tuple[Any, str], ...] = (
    (Namespace, "argparse.Namespace"),
    (SimpleNamespace, "types.SimpleNamespace"),
    (defaultdict, "collections.defaultdict"),
    (deque, "collections.deque"),
    *((kind, f"datetime.{kind.__name__}") for kind in (date, datetime, time, timedelta, timezone)),
    (io.BytesIO, "_io.BytesIO"),
    (TorchVersion, "torch.torch_version.TorchVersion"),
    *(
        (getattr(pathlib, name), f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    ),
    # Kinds of values that a defaultdict makes, and small values of their own. "__builtin__" is what protocol 2 writes.
    *(
        (kind, f"{module}.{kind.__name__}")
        for module in ("builtins", "__builtin__")
        for kind in (bool, bytes, dict, float, frozenset, int, list, range, set, slice, str, tuple)
    ),
)


class NotPlain(TypeError):
    """A value that would not come back as it is; the text says why."""


def reduce(value: Any) -> Any:
    """How to write ``value``: a constructor and its arguments; NotImplemented for values that pickle knows itself.

    Raises:
        NotPlain: an array of objects or records, a long double, a dict with attributes.
    """
    kind = type(value)
    if kind is defaultdict:
        return defaultdict, (value.default_factory, dict(value))
    if kind is deque:
        return deque, (list(value), value.maxlen)
    if tree.is_other_dict(value):  # in a tuple, say
        if lost := tree.lost_attributes(value):
            raise NotPlain(f"it would come back as a dict, without its attributes {', '.join(lost[:3])}")
        plain = tree.rebuilt(value, tree.children(value))
        if type(plain) is dict:
            return dict, (plain,)
        return reduce(plain) if type(plain) is defaultdict else plain.__reduce_ex__(2)
    if kind.__module__.partition(".")[0] != "numpy":
        return NotImplemented
    numpy = sys.modules["numpy"]
    if kind is numpy.ndarray:
        if not _NUMBERS.fullmatch(value.dtype.str):
            raise NotPlain(f"it holds {value.dtype}; arrays of numbers, truth values and texts come back")
        order = "F" if value.flags.fnc else "C"  # as it lies in memory; what has gaps or steps comes back in C order
        own = (value.shape, value.dtype.str, bytearray(value.tobytes(order)))
        return numpy.ndarray, own if order == "C" else (*own, 0, None, order)
    if isinstance(value, numpy.generic):
        if kind.__name__ not in _SCALARS:
            raise NotPlain(f"a {kind.__name__} has no plain form")
        return kind, (value.item(),)
    if isinstance(value, numpy.dtype):
        return numpy.dtype, (value.str,)
    return NotImplemented


def allowed(data: bytes, given: Collection[str]) -> list[tuple[Any, str]]:
    """What ``torch.serialization.safe_globals`` may let a pickle name, with the names.

    Args:
        data: the pickle; numpy is imported only if it is named in it.
        given: names that the caller lets through as they are; they replace ours.
    """
    found = list(_HARMLESS)
    if b"numpy" in data:
        with suppress(ImportError):  # the error of the reader then names what is missing
            numpy = _numpy()
            found += [(getattr(numpy, name), f"numpy.{name}") for name in _SCALARS if hasattr(numpy, name)]
            found += [(make_array, "numpy.ndarray"), (FrozenArray, "sixfold.dist_ckpt array")]
            found += [(FrozenArray.shell, name) for name in _REBUILD]
            found += [(make_scalar, name) for name in _SCALAR]
            if not any(name in given for name in _REBUILD + _SCALAR):  # numpy's own functions need numpy's dtypes
                found.append((FrozenDtype, "numpy.dtype"))
    return [entry for entry in found if entry[1] not in given]


def _numpy() -> Any:
    """numpy, where a value or a file has it; this package needs torch alone."""
    return import_module("numpy")


def make_array(shape: Any, code: Any, data: Any, start: Any = 0, strides: Any = None, order: Any = "C") -> Any:
    """``numpy.ndarray(shape, code, data)`` for number types, of the right size; ``order`` is C or Fortran."""
    numpy, dtype = _numpy(), _dtype(code)
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no numpy array {dtype} of shape {shape}")
    if (start, strides) != (0, None) or order not in ("C", "F"):
        raise ValueError(f"a numpy array starts at {start!r} with strides {strides!r} in order {order!r}")
    if not len(data):
        return numpy.empty(shape, dtype)
    return numpy.frombuffer(bytearray(data), dtype).reshape(shape, order=order)


def make_scalar(dtype: Any, data: Any) -> Any:
    """One number of a numpy type, from its bytes."""
    return make_array((), _code_of(dtype), bytes(data))[()]


def _code_of(dtype: Any) -> Any:
    """Of a stand-in, or of numpy's own dtype where the caller lets that through."""
    return dtype.plain() if isinstance(dtype, FrozenDtype) else getattr(dtype, "str", None)


def _dtype(code: Any) -> Any:
    if not isinstance(code, str) or not _NUMBERS.fullmatch(code):
        raise ValueError(f"numpy dtype {code!r} is none of numbers, truth values or texts")
    return _numpy().dtype(code)


class FrozenDtype:
    """What a pickle of numpy says of a dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        self._code, self._order = code, None

    def __setstate__(self, state: Any) -> None:
        version, self._order, *fields = state
        if version != 3 or any(part is not None for part in fields[:3]):
            raise ValueError(f"numpy dtype {self._code!r} has fields or other content")

    def plain(self) -> str:
        """``<f8``; checked where it is used."""
        return str(self._code) if self._order is None else f"{self._order}{self._code}"


class FrozenArray:
    """What a pickle of numpy says of an array; ``thaw`` puts the array in its place."""

    value: Any = None

    @classmethod
    def shell(cls, *_: Any) -> FrozenArray:
        """What numpy's ``_reconstruct`` stands for."""
        return cls()

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        array = make_array(tuple(reversed(shape)) if is_fortran else shape, _code_of(dtype), data)
        self.value = array.T if is_fortran else array


def thaw(node: Any, seen: dict[int, Any] | None = None) -> Any:
    """``node`` with arrays in place of what stood for them; containers are changed in place, tuples made anew."""
    seen = {} if seen is None else seen
    if isinstance(node, FrozenArray | FrozenDtype):
        return node.value if isinstance(node, FrozenArray) else _dtype(node.plain())
    if id(node) in seen or isinstance(node, str | bytes | int | float | type(None)):
        return seen.get(id(node), node)
    seen[id(node)] = node
    if isinstance(node, tuple):
        parts = [thaw(part, seen) for part in node]
        if any(new is not old for new, old in zip(parts, node, strict=True)):
            seen[id(node)] = type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
        return seen[id(node)]
    if isinstance(node, list | deque):
        for place, part in enumerate(node):
            node[place] = thaw(part, seen)
    elif isinstance(node, dict):
        for key, part in node.items():
            node[key] = thaw(part, seen)
    for name, part in vars(node).items() if hasattr(node, "__dict__") and not isinstance(node, type) else ():
        vars(node)[name] = thaw(part, seen)
    return node


def parts_of(node: Any) -> list[tuple[Any, Any]]:
    """What a value that is not walked through holds, by name or place; nothing for a value without parts."""
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, list | tuple | deque | set | frozenset):
        return list(enumerate(node))
    if isinstance(node, Namespace | SimpleNamespace):
        return list(vars(node).items())
    return []
