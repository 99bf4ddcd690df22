"""What lies in memory and what moved, as values for the user.

    engine/engine.py, setup/options.py --> report (this file) --> model.report()

Reads counts and sizes; sends nothing and reads no device value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sixfold.fsdp.buffers.unit import Unit, tied_in_root
from sixfold.fsdp.collectives.comm import Ranks
from sixfold.fsdp.collectives.communicators import Communicators
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.engine.gather import Gathering
from sixfold.fsdp.setup.build import Fp8
from sixfold.fsdp.setup.options import Options


def report(engine: Engine, options: Options, fp8: Fp8, communicators: Communicators) -> dict[str, Any]:
    """Bytes on this rank, and choices."""
    flat_buffers = [one for unit in engine.units for one in unit.flat_buffers]
    weights = [one.weights for one in flat_buffers]
    placement = engine.gathering.placement
    arena = placement.arena
    return {
        "strategy": options.sharding.value,
        "ranks": {"shard": engine.ranks.shard.size, "replicate": engine.ranks.outer.size},
        "own_meshes": _own_meshes(engine),
        "units": {
            unit.name: {
                "parameters": sum(record.spec.numel for record in unit.records),
                "gathered_bytes": unit.gathered_bytes,
                "wire_bytes": sum(one.weights.wire_bytes for one in unit.flat_buffers),
                "padding_bytes": sum(one.cut.layout.padding_bytes for one in unit.flat_buffers),
                "range": arena.range_of(unit.name) if unit.name in arena else None,
                "layout": [str(one.cut.layout) for one in unit.flat_buffers],
            }
            for unit in engine.units
        },
        "root": _root(engine),
        "whole_tensors": _owners(engine),
        "bytes": {
            "main_weights": sum(one.main.flat.nbytes for one in weights if not one.main_in_gathered),
            "gather_source": sum(one.source.nbytes for one in weights if one.shards_params and not one.aliased),
            "kept_gathered": placement.kept_bytes,
            "gather_arena": arena.nbytes + arena.own_bytes + arena.scratch_bytes + engine.gathering.waiting_bytes,
            "reduce_buffers": sum(engine.reduction.pool.slot_bytes),
            "reduce_scratch": engine.reduction.scratch_bytes,
            "local_gradients": sum(one.gradients.own_local_bytes for one in flat_buffers),
            "main_gradients": sum(one.gradients.home_bytes for one in flat_buffers),
            "fp8_scratch": fp8.scales.nbytes + sum(one.nan_bytes for one in weights),
            "fp8_transposed": 0 if fp8.transposes is None else fp8.transposes.nbytes,
        },
        "fp8": {
            "tensors": fp8.scales.tensors,
            "matmul": options.mixed_precision.fp8_matmul,
            "scale_reductions": fp8.scales.reductions,
            "transposes_made": 0 if fp8.transposes is None else fp8.transposes.made,
            "transposes_alive": () if fp8.transposes is None else fp8.transposes.alive,
        },
        "gathers": engine.gathering.gathers,
        "reductions": engine.reduction.reductions,
        "plan": _plan(engine.gathering, engine.units),
        "prefetch": "recorded order, " + ("one unit" if options.buffers.prefetch_bytes is None else "by bytes"),
        "bucket_bytes": engine.reduction.paths.bucket_bytes,
        "grad_sum": options.mixed_precision.grad_sum,
        "communicators": communicators.report(),
        "user_buffers": "off" if communicators.buffers is None else communicators.buffers.report(),
    }


def _root(engine: Engine) -> dict[str, Any]:
    """What the root unit need not hold, and what it must hold and costs.

    ``tied``: elements of a parameter that several modules register. Its gathered copy stays on every rank from forward
    to backward; its local sum has full size where one is kept (not where gradients are reduced as they come).
    """
    root = engine.units[0]
    tied = set(tied_in_root(root))
    return {
        "units_made": [unit.name for unit in engine.units if unit.large],
        "tied": {
            record.name: {
                "gathered_bytes": record.spec.numel * record.dtype.itemsize,
                "local_gradient_bytes": record.spec.numel
                * record.flat_buffer.weights.main_dtype.itemsize
                * (record.flat_buffer.gradients.own_local_bytes > 0),
            }
            for record in root.records
            if record.name in tied
        },
    }


def _plan(gathering: Gathering, units: Sequence[Unit]) -> dict[str, Any]:
    """Ranges of the arena and, under a byte budget, what a step gathers: as planned, as done, as bytes alone allow.

    Gathers are those of units in the arena: the root and units that are kept are gathered once besides. Padding is
    that of all units' layouts.
    """
    placement, given = gathering.placement, gathering.expected.given
    arena, assignment = placement.arena, placement.assignment
    found: dict[str, Any] = {
        "arena_bytes": arena.nbytes,
        "arena_used_bytes": arena.used_bytes,
        "padding_bytes": sum(one.cut.layout.padding_bytes for unit in units for one in unit.flat_buffers),
        "peak_bytes": placement.kept_bytes + arena.peak_bytes,
        "budget_bytes": placement.budget_bytes,
        "gathers_done": gathering.last_gathers,
        "order": "fixed" if placement.budget_bytes is None else "given" if given is not None else "recorded",
    }
    if assignment is None:
        return found
    least = placement.least(gathering.followed_uses())
    planned = placement.parked or assignment
    found |= {
        "gathers": given.gathers if given is not None and placement.parks else planned.gathers,
        "gathered_bytes": planned.gathered_bytes,
        "gathers_in_ranges": assignment.gathers,
        "copies_done": gathering.last_copies,
        "gathers_not_ahead": assignment.exposed,
        "least_gathers": least.gathers if given is None else given.gathers,
        "least_gathered_bytes": least.gathered_bytes,
        "least_is_proven": least.exact,
        "steps_off_plan": 0 if given is None else given.steps_left,
    }
    return found


def _owners(engine: Engine) -> list[dict[str, Any]]:
    """For each mesh with whole tensors to train (granularity ``"tensor"``): how unevenly ranks own them.

    ``imbalance``: bytes of the rank that owns most over the even share; in an optimizer step the others wait for it.
    """
    owned: dict[Ranks, list[int]] = {}
    for flat_buffer in (one for unit in engine.units for one in unit.trained if one.cut.parts > 1):
        before = owned.get(flat_buffer.ranks, [0] * flat_buffer.cut.parts)
        owned[flat_buffer.ranks] = [a + b for a, b in zip(before, flat_buffer.cut.layout.whole_bytes(), strict=True)]
    return [
        {"ranks": len(one), "most_bytes": max(one), "even_bytes": sum(one) / len(one), "imbalance": _over_even(one)}
        for one in owned.values()
        if any(one)
    ]


def _over_even(loads: list[int]) -> float:
    return max(loads) * len(loads) / sum(loads)


def _own_meshes(engine: Engine) -> dict[str, int]:
    """Parameters that are not on the main mesh, and the ranks that share each."""
    records = engine.records.values()
    return {one.name: one.flat_buffer.ranks.size for one in records if one.flat_buffer.ranks is not engine.ranks}
