"""What a collective over an axis of the model says when another of its ranks is lost or late.

    tensor_parallel.py, context_parallel.py, expert_dispatch.py, loss.py --> axis_collective  (this file) --> TrainError
    step.py, moe.py, weight_versions.py                                  --> group_collective (this file) -----^
    agreement.py                                                         --> is_lost_rank     (this file)

torch says only how the wire broke; here stand what was being done, between which ranks, and for how long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist

from sixfold.gpt.errors import TrainError
from sixfold.gpt.parallel.axes import Axis

# How torch's CPU back end says that a peer is gone; its errors are plain RuntimeErrors.
WIRE_WORDS = ("gloo", "Connection closed by peer", "Timed out waiting", "Application timeout")


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether torch raised ``error`` because another rank died or hangs."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in WIRE_WORDS)


def axis_collective(axis: Axis, what: str) -> AbstractContextManager[None]:
    """`group_collective` of the ranks of ``axis``."""
    return group_collective(axis.group, what)


@contextmanager
def group_collective(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """A collective of the ranks of ``group``, or a wait for one.

    Args:
        what: what is done, with the axis's name, as "all-gather of the sequence over tp".
    Raises:
        TrainError: another of its ranks died or did not come before the deadline.
    """
    begin = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error) or group is None:
            raise
        ranks, seconds = dist.get_process_group_ranks(group), time.monotonic() - begin
        others = ", ".join(str(rank) for at, rank in enumerate(ranks) if at != group.rank())
        raise TrainError(
            f"{what} of ranks {', '.join(map(str, ranks))}: rank {ranks[group.rank()]} waited {seconds:.1f} s and "
            f"another rank died or did not come. Look at the output and the process of rank {others}. A rank that "
            f"is only slow needs a longer run.timeout_seconds. The back end says: {error}"
        ) from error
