"""What a caller gives as a path, as a str: every other module gets its paths from here.

str, bytes, os.PathLike --> local_path, output_prefix (this file) --> reader.py, writer.py, text/
"""

from __future__ import annotations

import os
import re
from typing import Any

from sixfold.indexed_data.errors import IndexedDataError

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def path_text(what: str, path: Any) -> str:
    """``path`` as a str; IndexedDataError if it is not a path. The message calls it ``what``."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise IndexedDataError(f"{what} is {path!r}; it is a path: str, bytes or os.PathLike") from None
    if not name or "\0" in name:
        raise IndexedDataError(f"{what} is {name!r}; a path is not empty and has no NUL in it")
    return name


def local_path(what: str, path: Any, remedy: str = "copy the file here first, or mount the store") -> str:
    """``path`` as a path of this machine, as it was given.

    Raises:
        IndexedDataError: no path, a URL, or a ~ that no shell has expanded.
    """
    name = path_text(what, path)
    if is_url(name):
        raise IndexedDataError(f"{what} is the URL {name}; local paths are read and written: {remedy}")
    first, slash, _ = name.partition("/")
    if first.startswith("~") and slash and not os.path.lexists(first):
        raise IndexedDataError(f"{what} is {name!r}; only shells expand ~, use os.path.expanduser({name!r})")
    return name


def output_file(what: str, path: Any) -> str:
    """``path`` as the path of a file to write; IndexedDataError if it is no local path or ends in no name."""
    name = local_path(what, path, "write the pair here, then copy both files")
    if os.path.basename(name) in ("", ".", ".."):
        raise IndexedDataError(f"{what} is {name!r}, which has no file name at its end; give the path of a file")
    return name


def anchored(name: str) -> str:
    """``name`` as an absolute path, so that a change of the current folder does not move the file.

    As it was given where no absolute path leads to its folder: one above it may be closed to this user, or removed.
    """
    try:
        whole = os.path.abspath(name)
        same = os.path.samefile(os.path.dirname(whole), os.path.dirname(name) or os.curdir)
    except OSError:
        return name
    return whole if same else name  # abspath takes link/../name for name


def is_url(name: str) -> bool:
    """Whether it is a URL: ``os.path`` would take s3://a/b for the file b in the folder s3:/a."""
    return _URL.match(name) is not None


def input_prefix(path: Any) -> str:
    """``path`` as the path prefix of a pair to read."""
    remedy = "IndexedDataset reads stores with mmap=False and open_bytes; else copy both files here first"
    return local_path("path_prefix", path, remedy)


def output_prefix(path: Any) -> str:
    """``path`` as the path prefix of a pair to write.

    Raises:
        IndexedDataError: it is no local path, ends in no name, or has the extension of one of the two files.
    """
    prefix = local_path("output", path, "write the pair here, then copy both files")
    if os.path.basename(prefix) in ("", ".", ".."):
        raise IndexedDataError(f"{prefix!r} has no name at its end; an output is a path prefix, such as folder/wiki")
    if prefix.endswith((".bin", ".idx")):
        raise IndexedDataError(
            f"output is {prefix!r}; an output is a path prefix without extension: {prefix[:-4]!r} names "
            f"{prefix[:-4]}.bin and {prefix[:-4]}.idx"
        )
    return prefix
