"""A byte budget for gathered weights as a plan of the step's program: which units to gather, keep and free.

    program --> unit_uses (this file) --> sixfold.fsdp.residency.plan --> model.use_plan

Pure: a program, names of units and bytes. ``fsdp.gathered_bytes = "double"`` and ``"all"`` gather by fsdp's own fixed
rule and come not here.

[Note: units of one size] A plan says which units are there, not where. Of units of one size any that is freed makes
room for any other. Of several sizes (an embedding beside layers) ranges clash. A plan followed to the letter then
gathers a unit again that bytes alone would keep. fsdp's own way records the order of a step and moves units instead. It
comes to the fewest gathers from the second step on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sixfold.fsdp import residency
from sixfold.pipeline import Kind, Program

_FORWARD = (Kind.F, Kind.RECOMPUTE)
_BACKWARD = (Kind.B, Kind.I)


def unit_uses(program: Program, rank: int, units: Mapping[int, Sequence[str]]) -> list[str]:
    """The units that ``rank`` uses in a step, in order.

    A forward uses those of its stage in order, a backward (whole, or of inputs) the other way round; the gradient of a
    weight reads no weight.

    Args:
        units: names of each local stage's units, in the order of its forward.
    """
    uses: list[str] = []
    for action in (part for entry in program.ranks[rank] for part in entry.each()):
        if action.kind in _FORWARD:
            uses += units[action.stage]
        elif action.kind in _BACKWARD:
            uses += reversed(units[action.stage])
    return uses


def stage_units(names: Sequence[str], stages: Collection[int]) -> dict[int, list[str]]:
    """Units by stage, of a container keyed by stage: ``2.layers.3`` is a unit of stage 2. The root unit is nobody's."""
    found: dict[int, list[str]] = {stage: [] for stage in stages}
    for name in names:
        if name:
            found[int(name.partition(".")[0])].append(name)
    return found


def gather_plan(
    program: Program, rank: int, unit_bytes: Mapping[str, int], *, budget_bytes: int
) -> list[residency.Action] | None:
    """Gathers, uses and frees of a step of ``rank`` within ``budget_bytes``: the fewest there are.

    None where fsdp does better by itself. [Note: units of one size]

    Args:
        unit_bytes: of every unit of the rank, the root unit ``""`` included, in the order of their modules.
        budget_bytes: of all gathered weights; the root unit always stays, and the others share what it leaves.
    """
    if len({nbytes for name, nbytes in unit_bytes.items() if name}) != 1:
        return None
    stages = [stage for stage, place in enumerate(program.placement) if place == rank]
    uses = unit_uses(program, rank, stage_units(list(unit_bytes), stages))
    return residency.plan(uses, unit_bytes, budget_bytes=budget_bytes - unit_bytes.get("", 0))
