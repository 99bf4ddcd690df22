"""The rules' own eyes: an offence in a made-up file is seen. A checker that sees nothing would pass everything."""

import ast

from repository_helpers import SourceFile, dotted, run_at_load
from test_architecture import default_group_use

SOURCE = """
from __future__ import annotations
import torch
from typing import TYPE_CHECKING
from . import order
from ..fsdp import layout
from sixfold import gpt
if TYPE_CHECKING:
    import numpy as np
try:
    import triton
except ImportError:
    triton = None
class A:
    import apex
    stream = torch.cuda.Stream()
    def late(self, event=torch.cuda.Event()):
        import tokenizers
        torch.cuda.synchronize()
"""


def example(tmp_path) -> SourceFile:
    path = tmp_path / "src/sixfold/blending/example.py"
    return SourceFile(path=path, tree=ast.parse(SOURCE), lines=SOURCE.count("\n"))


def test_relative_imports_are_made_absolute(tmp_path):
    modules = {line.module for line in example(tmp_path).imports}
    assert {"sixfold.blending", "sixfold.fsdp", "sixfold.gpt"} <= modules


def test_imports_know_when_they_run(tmp_path):
    imports = {line.module: line for line in example(tmp_path).imports}
    assert all(imports[name].at_load for name in ("torch", "triton", "apex"))
    assert not imports["tokenizers"].at_load
    assert not imports["numpy"].at_load
    assert imports["numpy"].for_types
    assert not imports["tokenizers"].for_types


def test_class_bodies_and_default_arguments_run_when_a_file_is_loaded(tmp_path):
    calls = [dotted(node.func) for node in run_at_load(example(tmp_path).tree) if isinstance(node, ast.Call)]
    assert sorted(calls) == ["torch.cuda.Event", "torch.cuda.Stream"]


def test_default_groups_are_seen_however_they_are_spelled():
    offences = [
        "dist.get_rank()",
        "get_world_size()",
        "dist.group.WORLD",
        "c10d._get_default_group()",
        "dist.init_process_group('gloo')",
    ]
    for text in offences:
        assert any(default_group_use(node) for node in ast.walk(ast.parse(text))), text
    for text in ("dist.get_rank(group)", "dist.get_world_size(group=group)", "mesh.get_rank()", "self.group.size()"):
        assert not any(default_group_use(node) for node in ast.walk(ast.parse(text))), text
