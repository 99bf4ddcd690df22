"""Common data and objects as bytes that torch's weights-only rules read back.

    common dict, object --> dump (this file) --> common.pt, object frames
    common.pt, object frames --> load (this file) --> values; nothing else is unpickled

What would not come back is refused at save, with its path, not at the load a week later.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import torch

from sixfold.dist_ckpt.errors import CorruptError, ShardingError, UnsafeError
from sixfold.dist_ckpt.tree import leaves, path_text

_GLOBAL = re.compile(r"GLOBAL (\S+)")  # how torch's weights-only reader names what it refuses


def dump(value: Any, name: str) -> bytes:
    """``torch.save`` of ``value``, proved to be readable.

    Args:
        name: what ``value`` is, for the error.
    Raises:
        ShardingError: with the path and type of the first leaf that would not be read back.
    """
    try:
        data = _save(value)
        _load(data, ())
    except Exception as error:  # pickle raises whatever an object's own code raises
        path, leaf, reason = _culprit(value, error)
        where = f"{name}: {path}" if path else name
        raise ShardingError(
            f"{where} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which a weights-only load will not read "
            f"back ({reason}); save plain values and tensors, or wrap it in LocalNonpersistentObject"
        ) from error
    return data


def load(data: bytes, name: str, safe_globals: Sequence[Any]) -> Any:
    """Read what ``dump`` (or a peer) wrote.

    Args:
        safe_globals: classes and functions that the pickle may name besides torch's own list.
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
                f"{name}: the pickle names {unsafe.group(1)}; nothing was run. If you trust the file, pass the "
                "class in safe_globals"
            ) from error
        raise CorruptError(f"{name} is damaged: {type(error).__name__}: {text.partition(chr(10))[0]}") from error


def _save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(_compact(value), buffer)
    return buffer.getvalue()


def _load(data: bytes, safe_globals: Sequence[Any]) -> Any:
    with torch.serialization.safe_globals(list(safe_globals)):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _compact(value: Any) -> Any:
    """Tensors as CPU tensors of their own: torch.save would write the whole storage behind a view."""
    if isinstance(value, dict):
        return {key: _compact(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_compact(part) for part in value]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        owns_all = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if owns_all else value.clone()
    return value


def _culprit(value: Any, error: Exception) -> tuple[str, Any, str]:
    for path, leaf in leaves(value):
        for part in (*path, leaf):
            try:
                _load(_save(part), ())
            except Exception as reason:  # as above
                return path_text(path), part, _reason(reason)
    return "", value, _reason(error)


def _reason(error: Exception) -> str:
    unsafe = _GLOBAL.search(str(error))
    return f"it names {unsafe.group(1)}" if unsafe else str(error).partition("\n")[0]
