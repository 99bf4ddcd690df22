"""English that every reader already has: the documentation inside their own CPython.

    pydoc_data.topics, docstrings of the standard library --> corpus (this file) --> prepare.py --> three pairs

One document per topic or docstring, exact duplicates dropped. Documents whose sha256 starts below 0x1a are validation
text (10 %). The text differs between Python versions, so its sha256 goes with every figure made from it. Nothing is
redistributed, nothing is downloaded; standard library only.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sixfold.gpt.errors import ConfigError

VALID_BELOW = 0x1A  # of 256: 10 % of the documents
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Documents as UTF-8 bytes, in a fixed order.

    Attributes:
        train: documents by dataset name, ``topics`` and ``docstrings``.
        valid: validation documents, topics first.
        sha256: of all documents of both parts, each ended by a zero byte, in the order they were found.
    """

    train: dict[str, list[bytes]]
    valid: list[bytes]
    sha256: str


def topics() -> list[bytes]:
    """The help topics of the language reference, by name.

    Raises:
        ConfigError: this Python was built without ``pydoc_data``.
    """
    try:
        found: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ConfigError(
            "this Python has no module pydoc_data.topics, half of the demo's text; use a Python from python.org or "
            "uv, or a distribution's full package, or `sixfold prepare` with text of your own"
        ) from error
    return [found[name].strip().encode(errors="replace") for name in sorted(found)]


def source_files(folder: Path) -> list[Path]:
    """Python files under ``folder`` in sorted order, tests and installed packages left out."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        found += [Path(root, name) for name in sorted(files) if name.endswith(".py") and not name.startswith("test_")]
    return found


def docstrings(path: Path) -> Iterator[bytes]:
    """Docstrings of one file, outermost first; none from a file that this Python cannot parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parsed file, not of ours
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and text.strip():
                yield text.strip().encode(errors="replace")


def is_valid(document: bytes) -> bool:
    """Whether a document is validation text: decided by its bytes alone, so no split depends on the order."""
    return hashlib.sha256(document).digest()[0] < VALID_BELOW


def cpython_corpus(folder: Path | None = None) -> Corpus:
    """Extract the corpus from this Python's installation.

    Args:
        folder: the standard library; the running Python's own by default.
    Raises:
        ConfigError: the installation has no topics or no source files.
    Cost: about 3 s, nearly all of it parsing 12 MB of source.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = source_files(folder)
    if not files:
        raise ConfigError(f"no Python source under {folder}; the demo's text is the docstrings of the standard library")
    parts = {"topics": topics(), "docstrings": [text for path in files for text in docstrings(path)]}
    digest, seen = hashlib.sha256(), set[bytes]()
    train: dict[str, list[bytes]] = {name: [] for name in parts}
    valid: list[bytes] = []
    for name, documents in parts.items():
        for document in documents:
            if not document or document in seen:
                continue
            seen.add(document)
            digest.update(document + b"\0")
            (valid if is_valid(document) else train[name]).append(document)
    return Corpus(train=train, valid=valid, sha256=digest.hexdigest())
