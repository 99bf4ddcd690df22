"""Which units to gather, keep and free under a byte budget.

    recorded order + bytes --> plan (this file) --> gather.py

Not supported: "double" and "all" gather by their own fixed rule and take no plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sixfold.fsdp.errors import FsdpError


def plan(
    uses: Sequence[str], unit_bytes: Mapping[str, int], *, budget_bytes: int, keep: Collection[str] = ()
) -> list[object]:
    """Refused: gathers and frees follow the rule of ``gathered_bytes``."""
    raise FsdpError(
        f"residency.plan for {budget_bytes} bytes: a byte budget is not supported; use gathered_bytes 'double' or 'all'"
    )
