"""The page that draws a step: every file and function on it is there, and a step passes them in its order."""

import ast
import re
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
from gpt_helpers import tiny_config

from sixfold.gpt import train
from sixfold.gpt.training import loop

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "guide" / "gpt-one-step.md"
PACKAGES = {"g": "gpt", "i": "indexed-data", "b": "blending", "p": "pipeline", "f": "fsdp", "c": "dist-ckpt"}
# What a run of one process on finite values with a save in the foreground does not pass.
ELSEWHERE = {
    "GroupComm.all_gather", "GroupComm.reduce_scatter", "Outgoing.send", "Incoming.post", "SharedOutgoing.send",
    "SharedIncoming.wait", "blamed", "first_nonfinite", "async_save", "build_optimizer",
    "documents_here", "gathered_keys", "ring",
}  # fmt: skip
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the page is in the repository, not in the package")


def drawn():
    """(file below src, function) of the page, in its order."""
    text = PAGE.read_text().split("```")[1]
    for package, file, names in re.findall(
        r"(?m)\b([gibpfc])/(\S+\.py) +([A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*)", text
    ):
        folder = PACKAGES[package]
        for name in names.split(", "):
            yield f"packages/{folder}/src/sixfold/{folder.replace('-', '_')}/{file}", name


@cache
def functions(path):
    """Names of the functions, classes and methods of a file, methods led by their class."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_every_function_on_the_page_is_in_its_file():
    on_page = list(drawn())
    assert len(on_page) > 40
    assert [(path, name) for path, name in on_page if name not in functions(path)] == []


def test_a_step_passes_the_functions_in_the_order_of_the_page(tmp_path, monkeypatch):
    passed = {}
    training = loop.Run.loop

    def look(frame, event, argument):
        if event == "call" and "/sixfold/" in frame.f_code.co_filename:
            file = frame.f_code.co_filename.rpartition("/sixfold/")[2]
            passed.setdefault((file, frame.f_code.co_qualname.partition(".<locals>")[0]), len(passed))

    def watched(run, flag):
        threading.setprofile(look)
        sys.setprofile(look)
        try:
            return training(run, flag)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    monkeypatch.setattr(loop.Run, "loop", watched)
    train(tiny_config(tmp_path, "train.steps=1", "model.num_layers=1", "train.global_batch_size=2"))
    here = [(path.rpartition("/sixfold/")[2], name) for path, name in drawn() if name not in ELSEWHERE]
    assert [one for one in here if one not in passed] == []
    in_order = [one for one in here if one[1] != "Prefetch.result"]  # of the thread that waits for the others
    assert in_order == sorted(in_order, key=passed.__getitem__)
