"""How many bytes of tensors were alive at most, as the allocator saw it.

tests of streamed state and of start values --> peak_bytes (this file)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(action: Callable[[], Any]) -> int:
    """Most bytes alive at a time in ``action`` beyond what was alive before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    assert changes, "the profiler saw no allocation"
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
