"""What this package uses of torch that is private: all names, looked at before the first is used, and all frames.

    first name of sixfold.fsdp that needs torch --> nothing is missing (this file) --> all that needs torch
    engine/, optimizers/, buffers/ --> which function of torch runs (this file) --> frames of the stack

Each name stands beside the public way that it replaces. A torch that lacks one is refused with one sentence, and not
by an AttributeError in the midst of a step. No other file reads a frame. Public although it looks private, and so not
listed: ``torch._C.DisableTorchFunctionSubclass`` (torch's notes on extending tell of it) and ``torch._foreach_*``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import torch
import torch.distributed as dist
import torch.optim._muon
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import nn
from torch.autograd import graph

__all__ = [
    "KNOWN",
    "PRIVATE",
    "backward_inputs",
    "calling_frame",
    "functions_of",
    "in_backward",
    "missing",
    "runs_anywhere",
    "runs_still",
    "step_frame",
]

KNOWN = "2.11 to 2.14"  # the tests ran with 2.11, 2.13 and 2.14

# Name: the public way in its place, and why it does not do.
PRIVATE = {
    "_C._current_graph_task_id": "torch.autograd.graph has no question 'does a backward run, and which'",
    "_C._will_engine_execute_node": "a hook on each parameter would tell only after its gradient is there",
    "_C._autograd._pop_saved_tensors_default_hooks": "graph.saved_tensors_hooks is a with block; calls end in hooks",
    "_C._autograd._push_saved_tensors_default_hooks": "as above",
    "_C._autograd._top_saved_tensors_default_hooks": "nothing public tells whose hooks are in force (a checkpoint's)",
    "_C._autograd._unsafe_set_version_counter": "torch.autograd._unsafe_preserve_version_counter, private too",
    "_C._dynamo.eval_frame": "torch.compiler.disable imports the compiler: seconds where nobody compiles",
    "_C.TensorBase.data": "Tensor.data, the same descriptor, which the subclass replaces",
    "_C._distributed_c10d.AllgatherOptions": "torch.distributed.all_gather_into_tensor takes registered groups only",
    "_C._distributed_c10d.AllreduceOptions": "as above, for all_reduce",
    "_C._distributed_c10d.AllToAllOptions": "as above, for all_to_all_single",
    "_C._distributed_c10d.BroadcastOptions": "as above, for broadcast",
    "_C._distributed_c10d.ReduceScatterOptions": "as above, for reduce_scatter_tensor",
    "_C._distributed_c10d.PrefixStore": "torch.distributed.PrefixStore, the same class, untyped",
    "_C._distributed_c10d.Store": "torch.distributed.Store, the same class, untyped",
    "_C._functorch.get_interpreter_stack": "nothing public tells whether a transform of torch.func runs, and which",
    "_C._functorch.peek_interpreter_stack": "as above, faster",
    "_C._functorch.TransformType": "as above",
    "_C._functorch.get_unwrapped": "nothing public gives the tensor on which autograd records beneath torch.vmap",
    "_C._functorch.is_batchedtensor": "as above",
    "_C._get_dispatch_mode": "nothing public tells whether a FakeTensorMode is active",
    "_C._TorchDispatchModeKey": "as above",
    "_C._storage_Use_Count": "nothing public tells whether a user's tensor lies on a storage",
    "_guards.CompileContext.current_compile_id": "torch.compiler.is_compiling is False where it asks a tensor class",
    "_scaled_mm": "torch.nn.functional.scaled_mm names its recipes by private enums",
    "autograd.Variable._execution_engine.queue_callback": "no public callback at the end of a backward (DDP's too)",
    "autograd.graph._engine_run_backward": "nothing public tells what autograd.grad was asked for",
    "distributed.ProcessGroup._get_backend": "torch.distributed.get_backend takes registered groups, gives a name",
    "distributed.ProcessGroup._register_backend": "torch.distributed.new_group needs every rank of the default group",
    "distributed.ProcessGroup._set_default_backend": "as above",
    "distributed.ProcessGroup._set_group_name": "as above",
    "distributed.ProcessGroupGloo._Options": "the options of gloo have no public name (those of NCCL have)",
    "nn.Module._call_impl": "no hook runs when a call ends by an interrupt; its frame tells",
    "nn.modules.batchnorm._BatchNorm": "BatchNorm1d, 2d, 3d one by one would leave out users' subclasses",
    "optim.Muon._init_group": "a step hook cannot leave a parameter out",
    "optim._muon._adjust_lr": "written anew it would not have torch's bits for ever",
    "optim._muon._zeropower_via_newtonschulz": "as above",
    "utils._python_dispatch.is_traceable_wrapper_subclass": "no public question for subclasses that hold tensors",
    "utils._pytree.tree_leaves": "torch has no public one; torch's, so that users' registered classes are seen",
    "utils._pytree.tree_map": "as above",
}


def _of_objects() -> Iterator[tuple[object, tuple[str, ...]]]:
    """Private attributes that only objects have; where they are used, the code says why."""
    yield torch.empty(0), ("_version", "_backward_hooks")
    yield nn.Identity(), ("_parameters", "_buffers", "_non_persistent_buffers_set", "_forward_hooks")
    if hasattr(getattr(dist, "ProcessGroupGloo", None), "_Options"):
        yield dist.ProcessGroupGloo._Options(), ("_devices", "_threads", "_timeout")  # type: ignore[attr-defined]
    yield sys, ("_current_frames", "_getframe")


def missing(module: object = torch) -> list[str]:
    """Those that ``module``, torch, does not have."""
    gone: list[str] = []
    for name in PRIVATE:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, gone)
        if found is gone:
            gone.append(f"torch.{name}")
    for thing, names in _of_objects():
        gone += [f"{type(thing).__name__}.{name}" for name in names if not hasattr(thing, name)]
    return gone


if _gone := missing():
    raise ImportError(
        f"torch {torch.__version__} has no {', '.join(_gone)}, which sixfold-fsdp uses; it is known to work with "
        f"torch {KNOWN}: install one of these"
    )

_STEP = "wrapper", "torch.optim.optimizer"  # what Optimizer.profile_hook_step makes

in_backward: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside


def backward_inputs() -> frozenset[int] | None:
    """``id`` of each of the ``inputs`` that the backward that runs now was given; None: it was given none.

    Autograd does not say whether a parameter was left out or is not in the graph. So the frame of torch's function
    that enters autograd is read. It is on this thread, or on another one where a device's thread runs the backward.
    """
    here = sys._getframe(1)
    found = _entered(here)
    if found is None:
        others = (_entered(one) for one in sys._current_frames().values() if one is not here)
        candidates = [one for one in others if one is not None]
        found = candidates[0] if len(candidates) == 1 else None  # of two backwards nobody says which this is
    if found is None:
        return None
    inputs = (found.f_locals["args"][3:4] or (found.f_locals["kwargs"].get("inputs"),))[0]
    return frozenset(map(id, inputs)) if inputs else None


def _entered(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from ``frame`` outwards that entered autograd."""
    while frame is not None and frame.f_code is not graph._engine_run_backward.__code__:
        frame = frame.f_back
    return frame


def calling_frame() -> FrameType | None:
    """The innermost call of a module on the stack."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here.f_code.co_name != "_call_impl":
        here = here.f_back
    return here


def runs_still(frame: FrameType) -> bool:
    """``frame`` is on this thread's stack."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is frame


def runs_anywhere(frame: FrameType) -> bool:
    """``frame`` is on the stack of a thread."""
    if runs_still(frame):
        return True
    for here in sys._current_frames().values():
        while here is not None and here is not frame:
            here = here.f_back  # type: ignore[assignment]
        if here is frame:
            return True
    return False


def step_frame() -> FrameType | None:
    """The innermost ``optimizer.step()`` on the stack: torch's function around it, which calls its hooks."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and (here.f_code.co_name, here.f_globals.get("__name__")) != _STEP:
        here = here.f_back
    return here


def functions_of(module: str, most: int = sys.maxsize) -> list[str]:
    """Names of functions of ``module`` among the ``most`` innermost frames of this thread's stack, innermost first."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and most:
        if frame.f_globals.get("__name__") == module:
            names.append(frame.f_code.co_name)
        frame, most = frame.f_back, most - 1
    return names
