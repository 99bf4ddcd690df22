"""What lies in memory and what moved, as values for the user.

engine.py, options.py --> report (this file) --> model.report()
"""

from __future__ import annotations

from typing import Any

from sixfold.fsdp.alloc import TemporaryBucketAllocator
from sixfold.fsdp.build import Fp8
from sixfold.fsdp.engine import Engine
from sixfold.fsdp.options import Options
from sixfold.fsdp.units import tied_in_root


def report(
    engine: Engine, options: Options, slots: TemporaryBucketAllocator, pool: TemporaryBucketAllocator, fp8: Fp8
) -> dict[str, Any]:
    """Bytes on this rank, and choices."""
    streams = [stream for unit in engine.units for stream in unit.streams]
    weights = [stream.weights for stream in streams]
    return {
        "strategy": options.sharding.value,
        "ranks": {"shard": engine.ranks.shard.size, "replicate": engine.ranks.outer.size},
        "units": {
            unit.name: {
                "parameters": sum(record.spec.numel for record in unit.records),
                "gathered_bytes": unit.gathered_bytes,
                "wire_bytes": sum(stream.weights.wire_bytes for stream in unit.streams),
                "padding_bytes": sum(stream.cut.layout.padding_bytes for stream in unit.streams),
                "slot": unit.slot,
                "layout": [str(stream.cut.layout) for stream in unit.streams],
            }
            for unit in engine.units
        },
        "root": _root(engine),
        "bytes": {
            "main_weights": sum(one.main.flat.nbytes for one in weights if not one.main_in_gathered),
            "gather_source": sum(one.source.nbytes for one in weights if one.shards_params and not one.aliased),
            "kept_gathered": sum(unit.gathered_bytes for unit in engine.units if unit.slot is None),
            "gather_slots": sum(slots.slot_bytes),
            "reduce_buffers": sum(pool.slot_bytes),
            "local_gradients": sum(stream.gradients.own_local_bytes for stream in streams),
            "main_gradients": sum(stream.gradients.home_bytes for stream in streams),
            "fp8_scratch": fp8.scales.nbytes,
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
        "prefetch": "recorded order, " + ("one unit" if options.buffers.prefetch_bytes is None else "by bytes"),
        "grad_sum": options.mixed_precision.grad_sum,
        "user_buffers": "off: registration with NCCL is not supported",
    }


def _root(engine: Engine) -> dict[str, Any]:
    """What the root unit need not hold, and what it must hold and costs.

    ``tied``: elements of a parameter that several modules register. Its gathered copy stays on every rank from forward
    to backward, and its local sum has full size for as long.
    """
    root = engine.units[0]
    tied = set(tied_in_root(root))
    return {
        "units_made": [unit.name for unit in engine.units if unit.large],
        "tied": {
            record.name: {
                "gathered_bytes": record.spec.numel * record.dtype.itemsize,
                "local_gradient_bytes": record.spec.numel * record.buffer.weights.main_dtype.itemsize,
            }
            for record in root.records
            if record.name in tied
        },
    }
