"""Common data and objects as bytes that torch's weights-only rules read back.

    common dict, object --> dump (this file) --> common.pt, object frames
    common.pt, object frames --> load (this file) --> values; nothing else is unpickled

What would not come back, of the same type, is refused at save, with its path, not at the load a week later.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from sixfold.dist_ckpt.errors import CorruptError, ShardingError, UnsafeError
from sixfold.dist_ckpt.state import plain_types
from sixfold.dist_ckpt.state.placeholders import Placeholder
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase
from sixfold.dist_ckpt.state.tensor_memory import is_dtensor, is_freed
from sixfold.dist_ckpt.state.tree import KeyPath, path_text

#: How torch's weights-only reader names what it refuses: to look up, or to fill in.
_GLOBAL = re.compile(r"(?:GLOBAL |add_safe_globals`, but got <class ')([^\s']+)")


def dump(value: Any, name: str) -> bytes:
    """``torch.save`` of ``value``, proved to be readable.

    A tensor is written with its own elements alone, wherever it stands, not with the whole storage behind a view.

    Args:
        name: what ``value`` is, for the error.
    Raises:
        ShardingError: with the path and type of the first value that would not be read back.
    """
    try:
        return _proved(value)
    except Exception as error:  # pickle raises whatever an object's own code raises
        path, leaf, reason = _culprit(value, error)
        where = f"{name}: {path_text(path)}" if path else name
        unsafe = _GLOBAL.search(str(reason))
        why = f"it names {unsafe.group(1)}" if unsafe else str(reason).partition("\n")[0]
        raise ShardingError(
            f"{where} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which a weights-only load will not read "
            f"back ({why}); {_remedy(leaf, unsafe)}"
        ) from error


def load(data: bytes, name: str, safe_globals: Sequence[Any]) -> Any:
    """Read what ``dump`` (or a peer) wrote.

    Args:
        safe_globals: classes and functions that the pickle may name besides torch's own list and ours (``plain``).
    Raises:
        UnsafeError: the pickle names another global; nothing was run.
        CorruptError: not such a file.
    """
    try:
        return _load(data, safe_globals)
    except Exception as error:  # damaged bytes raise whatever they like
        text = str(error)
        unsafe = _GLOBAL.search(text)
        if unsafe:
            raise UnsafeError(
                f"{name}: the pickle names {unsafe.group(1)}; nothing was run. If you trust the file, pass the class "
                f"in safe_globals, or call torch.serialization.add_safe_globals([{unsafe.group(1)}]) first"
            ) from error
        raise CorruptError(f"{name} is damaged: {type(error).__name__}: {text.partition(chr(10))[0]}") from error


class _Pickler(pickle.Pickler):
    """torch.save's pickler for plain types and for tensors of their own; see ``plain``."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            own = _own(value)
            return NotImplemented if own is value else own.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        if isinstance(value, type | FunctionType):  # which is written by its name
            return NotImplemented
        if isinstance(value, Placeholder):
            like = value.like if value.like.is_meta else _own(value.like)
            make, arguments, *rest = like.__reduce_ex__(2)  # type: ignore[no-untyped-call]
            if isinstance(like, torch.nn.Parameter):
                arguments = (Placeholder(arguments[0]), *arguments[1:])
            return (make, arguments, *rest)
        if isinstance(value, ShardedBase | LocalNonpersistentObject):
            raise plain_types.NotPlain("records stand in dicts and lists")
        return plain_types.reduce(value)


_PICKLE = SimpleNamespace(__name__="pickle", Pickler=_Pickler)  # the module that torch.save is given


def _proved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_PICKLE, pickle_protocol=2)
    _load(buffer.getvalue(), ())
    return buffer.getvalue()


def _load(data: bytes, safe_globals: Sequence[Any]) -> Any:
    given = [*torch.serialization.get_safe_globals(), *safe_globals]
    allowed = plain_types.allowed(data, {_name_of(entry) for entry in given})
    with torch.serialization.safe_globals([*allowed, *safe_globals]):
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return plain_types.thaw(value) if b"numpy" in data else value


def _name_of(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy on the CPU whose storage holds nothing else."""
    if is_dtensor(tensor):
        raise plain_types.NotPlain("a DTensor stands in dicts and lists")
    if tensor.is_meta:
        raise plain_types.NotPlain("a meta tensor holds no values")
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor if tensor.device.type == "cpu" else tensor.detach().cpu()
    if is_freed(tensor):
        raise plain_types.NotPlain("its storage was freed and holds no values")
    nbytes = tensor.numel() * tensor.element_size()
    owns_all = tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == nbytes
    if owns_all and tensor.is_leaf and not vars(tensor):  # else: no graph, and no attributes that frameworks hang on
        return tensor
    copy = tensor.detach().cpu()
    copy = copy.clone() if copy.untyped_storage().nbytes() != nbytes else copy
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def _culprit(value: Any, error: Exception, path: KeyPath = ()) -> tuple[KeyPath, Any, Exception]:
    """The innermost value that fails by itself, where it stands, and why."""
    for name, part in plain_types.parts_of(value):
        for candidate, where in ((name, path), (part, (*path, name))):
            try:
                _proved(candidate)
            except Exception as reason:  # as above
                return _culprit(candidate, reason, where)
    return path, value, error


def _remedy(leaf: Any, unsafe: re.Match[str] | None) -> str:
    if isinstance(leaf, torch.Generator):
        return "save its .get_state()"
    if unsafe:
        return (
            f"call torch.serialization.add_safe_globals([{unsafe.group(1)}]) before save and load (safe_globals= of "
            "load does for one load), save plain values and tensors instead, or wrap it in LocalNonpersistentObject"
        )
    return "save plain values and tensors, or wrap it in LocalNonpersistentObject"
