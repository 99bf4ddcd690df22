"""Paths: the forms in which the place of a checkpoint may be written, told apart at this one spot.

    str or PathLike --> located (this file) --> a local Path, or a URL as text

[Note: what is no place] A URL that has gone through ``Path`` has lost a slash (``memory:/run``), a ``~`` is the shell's
to expand, ``""`` would be the working folder. Each of them names a local folder that nobody meant: a save would make
``./memory:`` or ``./~`` and return, and a resume would find no checkpoint and begin from zero. They are refused
before anything is looked at. Who means a local folder of such a name writes it from its root.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.errors import CheckpointError, StorageError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_CUT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/")
_LOCAL = ("file://", "local://")


def located(place: Any, name: str = "checkpoint_dir") -> Path | str:
    """A local path as a Path, ``file://`` taken off; any other URL as text without slashes at its end.

    Args:
        name: what the caller calls it.
    Raises:
        CheckpointError: neither a str nor a path, or a form of [Note: what is no place].
    """
    text = os.fspath(place) if isinstance(place, str | os.PathLike) else place
    if not isinstance(text, str):
        raise CheckpointError(f"{name} is {place!r}; it is a str or a Path{_or_a_store(place)}")
    if "\0" in text:
        raise CheckpointError(f"{text!r} is no path: it holds a zero byte")
    if text.startswith(_LOCAL):
        text = text.partition("://")[2]
        if not text.startswith("/"):
            raise CheckpointError(f"{name} is {place!r}; behind file:// stands a path from the root: file:///data/run")
    elif _URL.match(text):
        return text if text.endswith("://") else text.rstrip("/")
    if _CUT_URL.match(text):
        raise CheckpointError(
            f"{name} is {place!r}: a URL with one slash, as Path('s3://bucket/run') makes it; pass URLs as str with "
            "'://', and a local folder of this name by its path from the root"
        )
    if text.partition("/")[0].startswith("~"):
        raise CheckpointError(f"{name} is {place!r}; '~' is not expanded here: pass os.path.expanduser({text!r})")
    if not text:
        raise CheckpointError(f"{name} is {place!r}; name a folder, '.' for the working one")
    return Path(text)


def _or_a_store(place: Any) -> str:
    """What an object lacks that seems to be meant as a store."""
    methods = ("name", "list_files", "read", "create", "delete")
    lacking = [method for method in methods if not hasattr(place, method)]
    if len(lacking) == len(methods):
        return ", or a store (stores.ByPointer)"
    text = f"has no {', '.join(lacking)}" if lacking else "does not derive from it"
    return f", or a store, which derives from stores.ByPointer; {type(place).__name__} {text}"


def local(place: Any, what: str) -> Path:
    """A local path.

    Raises:
        CheckpointError: as ``located``; or a URL or a store, with ``what`` as the remedy.
    """
    is_store = hasattr(place, "list_files") and hasattr(place, "commit")
    found: Path | str = place.local_folder or place.name if is_store else located(place)
    if isinstance(found, str):
        raise CheckpointError(f"{found}: {what}")
    return found


def resolved(place: Path) -> Path:
    """From the root and without links.

    Raises:
        StorageError: links that lead in a circle; the working folder of this process is gone.
    """
    try:
        return place.resolve()
    except (OSError, RuntimeError) as error:
        raise StorageError(f"{place}: {error}", getattr(error, "errno", None)) from error


def child(root: Path | str, name: str) -> Path | str:
    """``root/name`` for what ``located`` gave."""
    if isinstance(root, Path):
        return root / name
    return f"{root}{name}" if root.endswith("/") else f"{root}/{name}"
