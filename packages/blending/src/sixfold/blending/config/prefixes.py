"""The name of a dataset in the keys of the order; whether two ways to write a path mean one place.

    prefix --> base_name, canonical_path (this file) --> config.py

Text alone: files are looked at for the words of an error only.
"""

import os
from collections.abc import Iterable
from os import PathLike
from pathlib import PurePosixPath

Prefix = str | bytes | PathLike[str] | PathLike[bytes]


def text_of(prefix: Prefix) -> str:
    """A path as text. Bytes that are no UTF-8 become surrogates, as everywhere in Python; TypeError for no path."""
    return os.fsdecode(prefix)


def current_folder() -> str:
    """The folder that relative paths are of; "." where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.curdir


def located(path: str, folder: str) -> str:
    """``path``, which was written down in ``folder``, as it is found from the current folder."""
    if "://" in path or os.path.isabs(path) or folder == current_folder():
        return path
    return f"{folder}/{path}"


def names_apart(prefixes: Iterable[str]) -> dict[str, str]:
    """A name for each of some prefixes that end alike: its folder if no other has that, else the whole prefix."""
    found = list(prefixes)
    folders = [PurePosixPath(prefix).parent.name for prefix in found]
    return {
        prefix: folder if folder not in ("", "..") and folders.count(folder) == 1 else prefix
        for prefix, folder in zip(found, folders, strict=True)
    }


def base_name(prefix: Prefix) -> str:
    """The last part of a path or URL, whatever folder stands before it: "wiki" of ``./data/wiki`` and ``s3://b/wiki``.

    Of a path that ends in dots it is the name of the folder that they mean.
    """
    text = text_of(prefix)
    name = PurePosixPath(text).name
    if name in ("", "..") and text:
        name = os.path.basename(os.path.abspath(text))
    return name or text


def canonical_path(prefix: Prefix, folder: str) -> str:
    """One text for every way to write a path: absolute from ``folder``, without ``.`` and doubled slashes.

    ``..`` stays: behind a linked folder it means another place than the text says.
    """
    text = text_of(prefix)
    scheme, mark, path = text.partition("://")
    if not mark:
        scheme, path = "", text if text.startswith("/") else f"{folder}/{text}"
    return f"{scheme}{mark}/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def same_file(first: Prefix, second: Prefix) -> bool:
    """Whether two prefixes lead to one ``.idx``, by links for instance; false where that cannot be seen."""
    try:
        return os.path.samefile(f"{text_of(first)}.idx", f"{text_of(second)}.idx")
    except OSError:
        return False
