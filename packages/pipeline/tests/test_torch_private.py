"""Every private name of torch that the package uses is listed in one module and looked for before it is used."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
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


@pytest.mark.slow
def test_every_private_name_of_torch_that_a_source_uses_is_listed():
    assert not used() - set(torch_private.PRIVATE), "list them in torch_private.py"


def test_this_torch_has_them_all_and_another_is_told_what_it_lacks():
    assert torch_private.missing() == []
    there = {"_C": torch._C, "_foreach_add_": torch._foreach_add_, "autograd": torch.autograd, "Tensor": torch.Tensor}
    gone = torch_private.missing(SimpleNamespace(**there))
    assert gone == [f"torch.{name}" for name in torch_private.PRIVATE if name.startswith(("nn.", "overrides."))]


@pytest.mark.slow
def test_no_other_source_reads_frames_of_threads_or_locals_of_functions():
    reading = {"f_locals", "_current_frames"}
    for path in SOURCES:
        nodes = ast.walk(ast.parse(path.read_text()))
        found = {node.attr for node in nodes if isinstance(node, ast.Attribute)} & reading
        assert not found or path.name == "torch_private.py", f"{path.name} reads {found}"


def test_a_torch_whose_function_that_enters_autograd_takes_other_arguments_is_told():
    def enters(t_outputs: object, *given: object, **options: object) -> None: ...

    autograd = SimpleNamespace(graph=SimpleNamespace(_engine_run_backward=enters), Variable=torch.autograd.Variable)
    there = {"_C": torch._C, "_foreach_add_": torch._foreach_add_, "nn": torch.nn, "Tensor": torch.Tensor}
    there["overrides"] = torch.overrides
    gone = torch_private.missing(SimpleNamespace(**there, autograd=autograd))
    assert gone == [f"torch.autograd.graph._engine_run_backward({name})" for name in ("args", "kwargs")]


def test_what_a_backward_was_asked_for_is_read_of_each_of_torchs_calls():
    """By name, by place, through Tensor.backward and autograd.grad."""
    seen: list[object] = []

    def look(gradient: torch.Tensor) -> None:
        frame = sys._getframe()
        while frame is not None and frame.f_code is not torch_private.ENTRY:
            frame = frame.f_back
        assert frame is not None, "torch entered autograd by another function"
        seen.append([id(one) for one in torch_private.asked_of(frame)])

    x, w = (torch.ones(2, requires_grad=True) for _ in range(2))
    for call in (
        lambda y: y.backward(inputs=[x]),
        lambda y: torch.autograd.backward(y, inputs=[x]),
        lambda y: torch.autograd.grad(y, [x]),
        lambda y: y.backward(),
    ):
        y = x * w
        y.register_hook(look)
        call(y.sum())
    assert seen == [[id(x)], [id(x)], [id(x)], []]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch is such a one")
def test_a_torch_that_neither_holds_nor_forgets_what_a_thread_is_shown_trains_alike():
    """As 2.11, which has no _remove_obj_from_tls and does not hold what it shows."""
    code = """if True:
        import torch
        import ctypes
        forget, show, give_back = torch._C._remove_obj_from_tls, torch._C._stash_obj_in_tls, ctypes.pythonapi.Py_DecRef
        give_back.argtypes = [ctypes.py_object]

        def show_for_nothing(key, value):
            show(key, value)
            give_back(value)  # the reference that showing takes

        torch._C._stash_obj_in_tls = show_for_nothing
        del torch._C._remove_obj_from_tls
        import sixfold.pipeline.torch_private
        torch._C._remove_obj_from_tls, torch._C._stash_obj_in_tls = forget, show  # this torch uses them too
        from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
        from sixfold.pipeline import PipelineRunner, Stage, zb_h1
        modules, oracle = layers(2), layers(2)
        runner = PipelineRunner(zb_h1(2, 4), [Stage(m, i) for i, m in enumerate(modules)], loss_fn=square_loss)
        x, y = batch(16)
        runner.step(x, y)
        plain_loop(oracle, list(x.tensor_split(4)), list(y.tensor_split(4)))
        assert all(equal_bits(gradients(a), gradients(b)) for a, b in zip(modules, oracle)), "other gradients"
        import gc
        del runner
        gc.collect()
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # outside, nothing is left of it
    """
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": folders})
