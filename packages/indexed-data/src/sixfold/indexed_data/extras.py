"""Packages that are not always installed, imported where they are used.

name of an extra --> extra (this file) --> its module, or an error that says what to install
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sixfold.indexed_data.errors import IndexedDataError

_EXTRAS = {  # module: the extra of this package that brings it
    "fsspec": "remote",
    "pyarrow": "parquet",
    "sentencepiece": "sentencepiece",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "zstandard": "zstd",
}


def extra(name: str, what: str) -> Any:
    """The module ``name``; IndexedDataError if its package is not installed: ``what`` needs it."""
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError as error:
        remedy = f"pip install 'sixfold-indexed-data[{_EXTRAS[package]}]'"
        raise IndexedDataError(f"{what} needs the {package} package: {remedy}") from error
