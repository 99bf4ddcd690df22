"""What this package uses of torch that is private: all names, looked at before the first of them is used.

    first use of a name that needs torch --> all private names are there (this file) --> executor, stage, ...

A torch without one of them is refused with one sentence, and not by an AttributeError in the midst of a step.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.modules.module
from torch import nn

__all__ = ["ENTRY", "KNOWN", "PRIVATE", "asked_of", "frame_of", "hide", "missing", "show", "shown"]

KNOWN = "2.11 to 2.14"  # the tests ran with 2.11, 2.13 and 2.14
PRIVATE = (
    "_C._FunctionBase",
    "_C._VariableFunctions.embedding",
    "_C._are_functorch_transforms_active",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._current_autograd_node",
    "_C._current_graph_task_id",
    "_C._get_obj_in_tls",
    "_C._is_any_autocast_enabled",
    "_C._is_key_in_tls",
    "_C._is_torch_function_mode_enabled",
    "_C._nn.linear",
    "_C._set_grad_enabled",
    "_C._stash_obj_in_tls",
    "_C._storage_Use_Count",
    "_C._will_engine_execute_node",
    "_foreach_add_",
    "Tensor._is_view",
    "autograd.graph._engine_run_backward",
    "autograd.Variable._execution_engine.run_backward",
    "nn.modules.module._global_backward_hooks",
    "nn.modules.module._global_is_full_backward_hook",
    "nn.modules.module._has_any_global_hook",
    "overrides._get_current_function_mode_stack",
)
_OF_AN_OBJECT = (
    (torch.empty(0), ("_version", "_backward_hooks", "_base")),
    (torch.empty(0).untyped_storage(), ("_cdata",)),
    (nn.Identity(), ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_modules")),
    (sys, ("_current_frames", "_getframe")),
)
_LOCALS = ("args", "kwargs")  # of torch's function that enters autograd, which ``asked_of`` reads


def asked_of(frame: FrameType) -> Iterable[Any]:
    """The ``inputs`` that a backward was given, by the frame of torch's function that entered autograd; () for none."""
    given = frame.f_locals
    found: Iterable[Any] | None = (given["args"][3:4] or (given["kwargs"].get("inputs"),))[0]
    return found or ()


def frame_of(thread: int) -> FrameType | None:
    """What a thread runs now."""
    return sys._current_frames().get(thread)


def missing(module: object = torch) -> list[str]:
    """Those that ``module``, torch, does not have."""
    gone: list[str] = []
    for name in PRIVATE:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, gone)
        if found is gone:
            gone.append(f"torch.{name}")
    for thing, names in _OF_AN_OBJECT:
        gone += [f"{type(thing).__name__}.{name}" for name in names if not hasattr(thing, name)]
    entry = getattr(getattr(module, "autograd", None), "graph", None)
    if (code := getattr(getattr(entry, "_engine_run_backward", None), "__code__", None)) is not None:
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
        gone += [f"torch.autograd.graph._engine_run_backward({name})" for name in _LOCALS if name not in names]
    return gone


if _gone := missing():
    raise ImportError(
        f"torch {torch.__version__} has no {', '.join(_gone)}, which sixfold-pipeline uses; it is known to work "
        f"with torch {KNOWN}: install one of these"
    )

_OPEN = "sixfold.pipeline.store"
_show: Callable[[str, Any], None] = torch._C._stash_obj_in_tls
_forget: Callable[[str], None] = getattr(torch._C, "_remove_obj_from_tls", None) or (lambda key: _show_alive(key, None))
_keep = ctypes.pythonapi.Py_IncRef
_keep.argtypes, _keep.restype = [ctypes.py_object], None


def _show_alive(key: str, value: Any) -> None:
    """For a torch that gives back a reference which it did not take, as 2.11 does."""
    _keep(value)
    _show(key, value)


def _takes_none() -> bool:
    """Whether torch takes no reference to what it shows."""
    probe = object()
    before = sys.getrefcount(probe)
    _show(_OPEN, probe)
    taken = sys.getrefcount(probe) - before
    if not taken:
        _keep(probe)
    _forget(_OPEN)
    return not taken


# What this thread is shown, the threads of its backward see. An older torch cannot forget it, and shows None.
show: Callable[[Any], None] = functools.partial(_show_alive if _takes_none() else _show, _OPEN)
hide: Callable[[], None] = functools.partial(_forget, _OPEN)


def shown() -> Any:
    """What ``show`` was given, in the thread of the step or of its backward; None behind ``hide``."""
    return torch._C._get_obj_in_tls(_OPEN) if torch._C._is_key_in_tls(_OPEN) else None


ENTRY: CodeType = torch.autograd.graph._engine_run_backward.__code__
