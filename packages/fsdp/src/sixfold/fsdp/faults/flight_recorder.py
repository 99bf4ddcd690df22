"""What torch's flight recorder knows of collectives that did not end, as lines.

ring buffer (TORCH_FR_BUFFER_SIZE) --> active_collectives (this file) --> deadlines.py prints it before an abort
"""

from __future__ import annotations

import json
from typing import Any

from torch._C import _distributed_c10d

_MOST = 16  # lines


def active_collectives() -> list[str]:
    """The oldest first; empty where nothing is recorded. Never raises: it is asked while a model fails."""
    dump: Any = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=True))["entries"]
    except (TypeError, ValueError, KeyError, RuntimeError):  # no recorder, nothing recorded, or another form
        return []
    return [_line(entry) for entry in entries[:_MOST]]


def _line(entry: dict[str, Any]) -> str:
    group = entry.get("process_group", "")
    name = " ".join(map(str, group)) if isinstance(group, list) else str(group)
    sizes = f"{entry.get('input_sizes', '')} -> {entry.get('output_sizes', '')}"
    what, number, state = (entry.get(key, "?") for key in ("profiling_name", "collective_seq_id", "state"))
    return f"{what} number {number} of group {name}, {sizes}, {state}"
