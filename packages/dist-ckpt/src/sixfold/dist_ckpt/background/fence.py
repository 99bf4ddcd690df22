"""The fence of a lazy save, in the worker: what is written is committed when the trainer has called it.

LazyCopy.pass_fence --> ProgressCounter.fence --> await_fence (this file) --> the rank's share, or an error of all
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING

from sixfold.dist_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from sixfold.dist_ckpt.background.arena import ProgressCounter

_LOOK_S = 0.002


class Fence(enum.IntEnum):
    """What is known of the values of a job."""

    PASSED = 0  # they are those of the call
    AWAITED = 1
    BROKEN = 2


def await_fence(counter: ProgressCounter, who: str, timeout_s: float) -> None:
    """Return when the trainer has called ``fence``.

    Raises:
        CheckpointError: a tensor had changed, or there was none in time.
    """
    until = time.monotonic() + timeout_s
    while (state := counter.fence) is Fence.AWAITED:
        counter.add(0)  # nothing stands still
        time.sleep(_LOOK_S)
        if time.monotonic() > until:
            raise CheckpointError(
                f"{who} has not called fence() within timeout_s={timeout_s:g} after a lazy save began; call it before "
                "anything changes the tensors that are saved, such as optimizer.step()"
            )
    if state is Fence.BROKEN:
        raise CheckpointError(
            f"a tensor of {who} changed before fence() of a lazy save; the error of that fence names it. Call fence() "
            "before what changes it, such as optimizer.step()"
        )
