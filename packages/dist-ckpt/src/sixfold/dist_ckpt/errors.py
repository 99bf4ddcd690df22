"""Errors of the package: one base, six children, each for one party at fault.

    errors.py (this file) --> everything else

``ShardingError`` blames the state dict, and ``MismatchError`` what was asked against what is stored. ``CorruptError``
blames the bytes, ``UnsafeError`` a pickle or a path, ``StorageError`` the operating system. ``LostPeerError`` blames
a rank that died or hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Value = TypeVar("_Value")


class CheckpointError(RuntimeError):
    """Base of every error that this package raises on purpose."""


#: The name that code written for the reference guide catches.
CheckpointingException = CheckpointError


class ShardingError(CheckpointError):
    """The state dict cannot be saved or asked for: holes, overlaps, unlike shapes or types."""


class MismatchError(CheckpointError):
    """What was asked for is not what is stored: keys, shapes, types, or not a checkpoint at all."""


class CorruptError(CheckpointError):
    """Bytes on disk are not the bytes that were written, or a save never finished."""


class UnsafeError(CheckpointError):
    """A pickle names a global that was not asked for, or a path leaves the folder. Nothing was run."""


class StorageError(CheckpointError):
    """The operating system refused; ``errno`` is its number, or None for a rule of this package."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class LostPeerError(CheckpointError):
    """A rank of the group died, is absent, or missed the deadline."""


#: How an error travels between ranks: by the name of its class.
BY_NAME = {kind.__name__: kind for kind in [*CheckpointError.__subclasses__(), CheckpointError]}


def retold(error: CheckpointError, text: str) -> CheckpointError:
    """An error of the same class with another text."""
    return StorageError(text, error.errno) if isinstance(error, StorageError) else type(error)(text)


def at(place: object, action: Callable[[], _Value]) -> _Value:
    """The result of ``action``; errors have the place before their text."""
    try:
        return action()
    except CheckpointError as error:
        raise retold(error, f"{place}: {error}") from error


#: What Python raises where it starts no thread, without a class of its own for that.
_NO_THREADS = ("can't start new thread", "can't create new thread", "cannot schedule new futures after")


def typed(action: Callable[[], _Value]) -> _Value:
    """The result of ``action``; errors of the operating system become StorageError, endless nesting a ShardingError,
    and a thread that cannot be started a CheckpointError."""
    try:
        return action()
    except RecursionError as error:
        raise ShardingError("the state dict is nested too deep, or a dict or list of it contains itself") from error
    except RuntimeError as error:
        if not str(error).startswith(_NO_THREADS):
            raise
        raise CheckpointError(
            f"no thread can be started ({error}): call this before the interpreter ends, not in an atexit handler or "
            "in a thread that outlives the main one. Or raise the limit of threads (ulimit -u)"
        ) from error
    except OSError as error:
        name = f": {error.filename}" if error.filename else ""
        raise StorageError(f"{error.strerror or error}{name}", error.errno) from error


def naming(arguments: Mapping[str, str]) -> Callable[[Callable[_Given, _Value]], Callable[_Given, _Value]]:
    """A decorator: an argument of ``arguments``, which another package's function takes, is a CheckpointError that says
    what to write."""

    def decorate(call: Callable[_Given, _Value]) -> Callable[_Given, _Value]:
        @wraps(call)
        def checked(*positional: _Given.args, **given: _Given.kwargs) -> _Value:
            for name in given:
                if name in arguments:
                    raise CheckpointError(f"{name} is no argument of {call.__name__}; {arguments[name]}")
            return call(*positional, **given)

        return checked

    return decorate
