"""The copy of a lazy save: made beside what the trainer does next, and committed when the trainer says so.

    AsyncSaver --> LazyCopy (this file) --> Arena.settle, in the thread of the handle --> worker: frames
    trainer --> AsyncSave.fence --> LazyCopy.fence (this file) --> ProgressCounter.fence --> worker: commit

[Note: when a copy is trusted] torch counts a change of a tensor when the operation has ended. A copy that ran beside it
may be a mixture though the count is still the old one. So nothing is committed before ``fence``. It is called by the
thread that changes tensors, whose changes of before are counted then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from sixfold.dist_ckpt.background.fence import Fence
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError


class LazyCopy:
    """Tensors that are still to be copied.

    Args:
        names: one for each tensor, of errors. timeout_s: for the copy.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], timeout_s: float) -> None:
        # Of tensors of inference mode torch counts no changes, and allows none outside of it.
        self._changes = [(n, t, t._version) for n, t in zip(names, tensors, strict=True) if not t.is_inference()]
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

    def pass_fence(self, tell: Callable[[Fence], object]) -> None:
        """Return when all is copied; ``tell`` is given what came of it. May be called again.

        Raises:
            CheckpointError: a tensor was changed before; nothing is committed. Or what made the copy fail.
        """
        if not self._copied.wait(self._timeout_s):
            raise LostPeerError(f"the copy of a lazy save has not ended within timeout_s={self._timeout_s:g}")
        if not self._is_passed:
            changed = [name for name, tensor, version in self._changes if tensor._version != version]
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
