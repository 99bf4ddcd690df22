"""Memory of this package that is used again, and a mode of tests that makes each late read of it visible.

freed memory --> recycled (this file) --> writer.py, relay.py, arena.py: the next who needs memory

[Note: freed memory is filled] With ``CHECK.fills`` memory is filled with bytes 0xFF when its last user gives it back.
That is NaN in every float and -1 in every integer. Whoever still reads it then saves or loads values that no test
takes for right. ``pytest packages/dist-ckpt/tests --fill-recycled`` runs the tests so, their ranks included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Check:
    """``fills``: see [Note: freed memory is filled]."""

    fills: bool = False


CHECK = Check()


def recycled(memory: torch.Tensor) -> None:
    """Nobody reads this memory any more."""
    if CHECK.fills and memory.numel():
        memory.view(torch.uint8).fill_(0xFF)
