"""What a dataset is called in the order, and when two ways to write a path mean one place.

    prefix --> base_name, place (this file) --> config.py

Text alone: no file is looked at, but for the words of an error.
"""

import os
from os import PathLike, fspath
from pathlib import PurePosixPath

Prefix = str | PathLike[str]


def base_name(prefix: Prefix) -> str:
    """The last part of a path or URL, whatever folder stands before it: "wiki" of ``./data/wiki`` and ``s3://b/wiki``.

    Of a path that ends in dots it is the name of the folder that they mean.
    """
    text = fspath(prefix)
    name = PurePosixPath(text).name
    if name in ("", "..") and text:
        name = os.path.basename(os.path.abspath(text))
    return name or text


def place(prefix: Prefix, folder: str) -> str:
    """One text for every way to write a path: absolute from ``folder``, without ``.`` and doubled slashes.

    ``..`` stays: behind a linked folder it means another place than the text says.
    """
    text = fspath(prefix)
    scheme, mark, path = text.partition("://")
    if not mark:
        scheme, path = "", text if text.startswith("/") else f"{folder}/{text}"
    return f"{scheme}{mark}/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def same_file(first: Prefix, second: Prefix) -> bool:
    """Whether two prefixes lead to one ``.idx``, by links for instance; false where that cannot be seen."""
    try:
        return os.path.samefile(f"{fspath(first)}.idx", f"{fspath(second)}.idx")
    except OSError:
        return False
