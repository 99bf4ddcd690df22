"""When communication hides behind computation, and what a rank holds: the formulas, and the command that prints them.

    cost/formulas.py, buffers/stored_bytes.py --> names (this file) --> the user, sixfold.gpt
    python -m sixfold.fsdp.cost_model [flags] (this file) --> cost/command.py --> text or JSON

No torch, no processes. What the slides leave out (latency, ring factor, attention, replicas) is in cost/terms.py.
"""

from __future__ import annotations

import sys

from sixfold.fsdp.buffers.microbatch_tree import slots_for
from sixfold.fsdp.buffers.stored_bytes import BufferFormats, StoredBytes, StreamSizes, stored_bytes
from sixfold.fsdp.cost.command import run_command
from sixfold.fsdp.cost.formulas import (
    collectives,
    memory_bytes,
    node_bandwidth,
    slides_tables,
    tokens_to_hide_backward,
    tokens_to_hide_forward,
)

__all__ = [
    "BufferFormats",
    "StoredBytes",
    "StreamSizes",
    "collectives",
    "main",
    "memory_bytes",
    "node_bandwidth",
    "slides_tables",
    "slots_for",
    "stored_bytes",
    "tokens_to_hide_backward",
    "tokens_to_hide_forward",
]


def main(argv: list[str] | None = None) -> int:
    """Print the slides' tables, or the costs of a given model on a given cluster; see cost/command.py."""
    return run_command(argv)


if __name__ == "__main__":
    sys.exit(main())
