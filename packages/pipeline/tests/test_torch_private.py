"""Every private name of torch that the package uses is listed in one module and looked for before it is used."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import torch

import sixfold.pipeline
from sixfold.pipeline import torch_private

SOURCES = sorted(Path(sixfold.pipeline.__file__).parent.rglob("*.py"))


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def used() -> set[str]:
    """Names with a private part that sources ask of torch itself."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = dotted(node)
            if name.startswith("torch.") and "._" in name and "__" not in name:
                found.add(name.removeprefix("torch."))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [f"{node.module}.{alias.name}".removeprefix("torch.") for alias in node.names]
                found |= {name for name in names if name.rsplit(".", 1)[-1].startswith("_")}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)} - {"_C", "_C._autograd"}


def test_every_private_name_of_torch_that_a_source_uses_is_listed():
    assert not used() - set(torch_private.PRIVATE), "list them in torch_private.py"


def test_this_torch_has_them_all_and_another_is_told_what_it_lacks():
    assert torch_private.missing() == []
    there = {"_C": torch._C, "_foreach_add_": torch._foreach_add_, "autograd": torch.autograd, "Tensor": torch.Tensor}
    gone = torch_private.missing(SimpleNamespace(**there))
    assert gone == [f"torch.{name}" for name in torch_private.PRIVATE if name.startswith("nn.")]
