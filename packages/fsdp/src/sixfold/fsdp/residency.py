"""Which units to gather, keep and free under a byte budget.

    recorded order + bytes --> plan (this file) --> gather.py

Not in this version: "double" and "all" gather by their own fixed rule and take no plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sixfold.fsdp.config import LATER
from sixfold.fsdp.errors import FsdpError


def plan(
    uses: Sequence[str], unit_bytes: Mapping[str, int], *, budget_bytes: int, keep: Collection[str] = ()
) -> list[object]:
    """Refused in this version: plans of gathers and frees come with the fsdp issue."""
    raise FsdpError(f"residency.plan for {budget_bytes} bytes: a byte budget {LATER}; use 'double' or 'all'")
