"""Every private name of torch that the package uses is listed in one module, with the public way that it replaces."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sixfold.fsdp import torch_private

SOURCES = sorted(Path(torch_private.__file__).parent.rglob("*.py"))
TEXTBOOK = {"_C.DisableTorchFunctionSubclass"}  # torch's notes on extending tell of it
ROOTS = {"torch": "", "dist": "distributed.", "nn": "nn.", "graph": "autograd.graph.", "pytree": "utils._pytree."}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def asked(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        root, _, rest = dotted(node).partition(".")
        if rest and root in ROOTS:
            yield ROOTS[root] + rest
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield from (f"{node.module}.{alias.name}".removeprefix("torch.") for alias in node.names)


def private(name: str) -> bool:
    parts = name.split(".")
    return any(part.startswith("_") and not part.startswith(("__", "_foreach_")) for part in parts)


def used() -> dict[str, str]:
    """Names with a private part that sources ask of torch, each with a file that does."""
    return {
        name: path.name
        for path in SOURCES
        if path.name != "torch_private.py"
        for name in asked(ast.parse(path.read_text()))
        if private(name)
    }


def is_listed(name: str) -> bool:
    known = [*torch_private.PRIVATE, *TEXTBOOK]
    return any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in known)


@pytest.mark.slow
def test_every_private_name_of_torch_that_a_source_uses_is_listed():
    found = used()
    assert len(found) > 20
    assert {name: file for name, file in found.items() if not is_listed(name)} == {}


def test_only_one_file_reads_frames_of_the_stack():
    readers = {"_getframe", "_current_frames", "f_back", "f_locals", "f_globals"}
    reading = {
        path.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in readers
    }
    assert reading == {"torch_private.py"}


def test_this_torch_has_them_all_and_a_copy_without_one_lacks_that_one():
    assert torch_private.missing() == []
    rest = {name: getattr(torch, name) for name in vars(torch) if name != "_scaled_mm"}
    rest["utils"], rest["_guards"] = torch.utils, torch._guards
    assert torch_private.missing(SimpleNamespace(**rest)) == ["torch._scaled_mm"]


@pytest.mark.slow
def test_a_torch_that_lacks_one_is_refused_by_one_sentence_with_the_versions_that_have_all():
    program = """
import torch
del torch._scaled_mm
try:
    from sixfold.fsdp import fully_shard
except ImportError as error:
    print(error)
try:
    import sixfold.fsdp.wrapper.fully_sharded
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == 2 * [
        f"torch {torch.__version__} has no torch._scaled_mm, which sixfold-fsdp uses; it is known to work with torch "
        "2.11 to 2.14: install one of these"
    ]
