"""The copy of a lazy save: made beside what the trainer does next, and committed when the trainer says so.

    AsyncSaver --> LazyCopy (this file) --> Arena.settle, in the thread of the handle --> worker: frames
    trainer --> AsyncSave.fence --> LazyCopy.fence (this file) --> ProgressCounter.fence --> worker: commit

[Note: when a copy is trusted] torch counts a change of a tensor when the operation has ended. A copy that ran beside it
may be a mixture though the count is still the old one. So nothing is committed before ``fence``. It is called by the
thread that changes tensors, whose changes of before are counted then.

[Note: what torch does not count] Fused kernels change weights and moments, and batch_norm its running statistics, and
no count is raised. So a step of any optimizer marks what it holds, by torch's hook for all of them. What a forward
changes is small: buffers of modules, and all tensors up to ``_SMALL_BYTES``, are copied in the call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from sixfold.dist_ckpt.background.fence import Fence
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.tensor_memory import has_values

_SMALL_BYTES = 2**16


def copied_at_once(state: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with copies in place of those that a forward may change. See [Note: what torch does not count].

    Args:
        state: the state dict that they are of.
    """
    modules = [leaf for _, leaf in tree.leaves(tree.checked(state)) if isinstance(leaf, torch.nn.Module)]
    buffers = set[int]().union(*(_storages(buffer) for module in modules for buffer in module.buffers()))
    return [
        tensor.detach().clone() if tensor.nbytes <= _SMALL_BYTES or _storages(tensor) & buffers else tensor
        for tensor in tensors
    ]


def _storages(tensor: torch.Tensor) -> set[int]:
    """Where the memory of a tensor begins, or of those that it wraps, as a DTensor does."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return set[int]().union(*(_storages(part) for part in parts if isinstance(part, torch.Tensor)))
    return {tensor.untyped_storage().data_ptr()} if has_values(tensor) else set()


class LazyCopy:
    """Tensors that are still to be copied.

    Args:
        named: with a name each, of errors. timeout_s: for the copy.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], timeout_s: float) -> None:
        # Of tensors of inference mode torch counts no changes, and allows none outside of it.
        self._changes = [(name, t, t._version) for name, t in named if not t.is_inference()]
        self._stepped = list[str]()  # names of what an optimizer holds that has made a step
        seen = weakref.WeakMethod(self._saw_step)  # a save that fails before its fence leaves no hook
        # Behind the step: a hook before it may call ``fence``.
        self._hook = register_optimizer_step_post_hook(lambda one, *_: (saw := seen()) and saw(one))
        weakref.finalize(self, self._hook.remove)
        self._timeout_s, self._copied = timeout_s, threading.Event()
        self._error: CheckpointError | None = None
        self._is_passed = False

    def make(self, copy: Callable[[], object]) -> None:
        """Copy, in the thread of the handle.

        Raises:
            CheckpointError: what went wrong.
        """
        try:
            copy()
        except CheckpointError as error:
            self._error = error
        except BaseException as error:
            self._error = CheckpointError(f"the copy of a lazy save failed: {type(error).__name__}: {error}")
        self._copied.set()
        if self._error is not None:
            raise self._error

    def _saw_step(self, optimizer: torch.optim.Optimizer) -> None:
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        held += [leaf for _, leaf in tree.leaves([*optimizer.state.values()]) if isinstance(leaf, torch.Tensor)]
        changed = set[int]().union(*map(_storages, held))
        self._stepped += [name for name, tensor, _ in self._changes if _storages(tensor) & changed]

    def pass_fence(self, tell: Callable[[Fence], object]) -> None:
        """Return when all is copied; ``tell`` is given what came of it. May be called again.

        Raises:
            CheckpointError: a tensor was changed before; nothing is committed. Or what made the copy fail.
        """
        if not self._copied.wait(self._timeout_s):
            raise LostPeerError(f"the copy of a lazy save has not ended within timeout_s={self._timeout_s:g}")
        if not self._is_passed:
            self._hook.remove()
            counted = [name for name, tensor, version in self._changes if tensor._version != version]
            changed = [*dict.fromkeys(counted + self._stepped)]
            if changed and self._error is None:
                more = f" and {len(changed) - 1} other tensors" * (len(changed) > 1)
                self._error = CheckpointError(
                    f"{changed[0]}{more} changed before fence() of a lazy save: its copy may be of two steps. Call "
                    "fence() before what changes it, such as optimizer.step()"
                )
            self._changes.clear()
            self._is_passed = True
            tell(Fence.PASSED if self._error is None else Fence.BROKEN)
        if self._error is not None:
            raise self._error
