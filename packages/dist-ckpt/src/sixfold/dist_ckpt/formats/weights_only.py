"""Common data and objects as bytes that torch's weights-only rules read back.

    common dict, object --> dump (this file) --> common.pt, object frames
    common.pt, object frames --> load (this file) --> values; nothing else is unpickled

What would not come back, of the same type, is refused at save, with its path, not at the load a week later.

[Note: what the C unpickler may call] torch's weights-only reader runs some lines of Python for each opcode: for the
common data of a small model a sixth of the whole load. So dicts, lists, numbers, texts and usual tensors are read by
the unpickler in C. It calls what ``find_class`` gives it, and methods of what it has made. Here that is OrderedDict,
and stand-ins without attributes that make tensors, whose bounds torch checks. For any other name, and for all that is
odd, ``read_usual`` gives up; torch's reader then reads the bytes or says what is wrong with them. Bytes without a
digest do not come here: a mangled number makes the C unpickler allocate tens of gigabytes.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import CorruptError, ShardingError, UnsafeError
from sixfold.dist_ckpt.formats import frame as frames
from sixfold.dist_ckpt.state import plain_types
from sixfold.dist_ckpt.state.placeholders import Placeholder
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase
from sixfold.dist_ckpt.state.tensor_memory import check_readable, is_dtensor, is_freed
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
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            check_readable(path_text(path), leaf)
        where = f"{name}: {path_text(path)}" if path else name
        unsafe = _GLOBAL.search(str(reason))
        why = f"it names {unsafe.group(1)}" if unsafe else str(reason).partition("\n")[0]
        raise ShardingError(
            f"{where} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which a weights-only load will not read "
            f"back ({why}); {_remedy(leaf, unsafe)}"
        ) from error


def load(data: bytes, name: str, safe_globals: Sequence[Any], *, trusted_bytes: bool = False) -> Any:
    """Read what ``dump`` (or a peer) wrote.

    Args:
        trusted_bytes: a digest has shown that they are what was written: [Note: what the C unpickler may call].
        safe_globals: classes and functions that the pickle may name besides torch's own list and ours (``plain``).
    Raises:
        UnsafeError: the pickle names another global; nothing was run.
        CorruptError: not such a file.
    """
    if trusted_bytes:
        is_usual, value = read_usual(data)
        if is_usual:
            return value
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
    if isinstance(leaf, torch.Tensor) and not frames.has_form(leaf.dtype):
        return "save its bytes, as .view(torch.uint8)"
    if unsafe and _is_read_if_named(leaf):
        return (
            f"call torch.serialization.add_safe_globals([{unsafe.group(1)}]) before save and load (safe_globals= of "
            "load does for one load), save plain values and tensors instead, or wrap it in LocalNonpersistentObject"
        )
    if isinstance(leaf, list):
        return "save list(value), which comes back as a list, or wrap it in LocalNonpersistentObject"
    return "save plain values and tensors, or wrap it in LocalNonpersistentObject"


def _is_read_if_named(leaf: Any) -> bool:
    """Whether a weights-only load reads a value if its class is let through, as it does not for a kind of list."""
    try:
        with torch.serialization.safe_globals([leaf if hasattr(leaf, "__qualname__") else type(leaf)]):
            _proved(leaf)
    except Exception:  # of the class of a user
        return False
    return True


_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Float": torch.float32,
        "Double": torch.float64,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}


class _UnusualError(Exception):
    """A value that torch's own reader reads."""


class _Storage(NamedTuple):
    """The memory of a tensor, or of several."""

    dtype: torch.dtype
    memory: torch.UntypedStorage


class _MakeTensor:
    """Stands for ``torch._utils._rebuild_tensor_v2``; without attributes, so that no file can set one."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any) -> Any:
        if type(storage) is not _Storage or requires_grad is not False or hooks:
            raise _UnusualError
        return torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage.memory, offset, size, stride)


class _MakeMeta:
    """Stands for ``torch._utils._rebuild_meta_tensor_no_storage``."""

    __slots__ = ()

    def __call__(self, dtype: Any, size: Any, stride: Any, requires_grad: Any) -> Any:
        return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=requires_grad)


_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _MakeTensor(),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _MakeMeta(),
    **{("torch", str(dtype)[6:]): dtype for dtype in _STORAGES.values()},
    **{("torch", name): name for name in _STORAGES},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: Any) -> None:
        super().__init__(io.BytesIO(archive.get_record("data.pkl")), encoding="utf-8")
        self._archive, self._storages = archive, dict[str, _Storage]()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            raise _UnusualError from None

    def persistent_load(self, pid: Any) -> Any:
        kind, name, key, location, count = pid
        if kind != "storage" or location != "cpu":
            raise _UnusualError
        if key not in self._storages:
            data, dtype = self._archive.get_record(f"data/{key}"), _STORAGES[name]
            if len(data) != count * dtype.itemsize:
                raise _UnusualError
            memory = torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
            self._storages[key] = _Storage(dtype, memory)
        return self._storages[key]


def read_usual(data: bytes) -> tuple[bool, Any]:
    """Whether ``load`` need not ask torch for a value, and then the value. See [Note: what the C unpickler may call].

    Args:
        data: what ``torch.save`` wrote, byte for byte: a digest has shown it.
    """
    try:
        archive = torch._C.PyTorchFileReader(io.BytesIO(data))
        if archive.get_record("byteorder").decode() != sys.byteorder:
            return False, None
        return True, _Unpickler(archive).load()
    except Exception:  # whatever it is, torch's reader meets it too, and it is named
        return False, None
