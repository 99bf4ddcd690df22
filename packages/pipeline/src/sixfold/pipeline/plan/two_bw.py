"""PipeDream-2BW's planner: how many replicas of how deep a pipeline.

    profiles of one layer, devices, batch, cap --> depth, width, microbatch, recompute (this file)

Torch-free. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", arXiv 2006.09503, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from sixfold.pipeline.errors import ScheduleError, number, whole

__all__ = ["LayerProfile", "Plan2BW", "plan_2bw"]


@dataclass(frozen=True)
class LayerProfile:
    """One of the equal layers, measured at one microbatch size. Seconds and bytes.

    Attributes:
        forward_s, backward_s: of one microbatch.
        weight_bytes: of one version; the gradient is as large.
        activation_bytes: what the layer keeps of one microbatch until its backward.
        input_bytes: what remains of that with recomputation.
        hop_s: sending one microbatch to the next stage.
        reduce_s: reducing the layer's gradient over the replicas.
    """

    forward_s: float
    backward_s: float
    weight_bytes: float
    activation_bytes: float
    input_bytes: float
    hop_s: float
    reduce_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = number(f"LayerProfile.{field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            if not (math.isfinite(value) and value >= 0):
                raise ScheduleError(f"LayerProfile.{field.name} is {value}; it is finite and >= 0")
        if self.forward_s + self.backward_s <= 0:
            raise ScheduleError("LayerProfile.forward_s and backward_s are 0; a layer takes time")


@dataclass(frozen=True, kw_only=True)
class Plan2BW:
    """``width`` replicas of a pipeline of ``depth`` stages.

    Attributes:
        microbatch: samples in one microbatch of one replica.
        recompute: whether stages keep their input alone and run their forward again.
        samples_per_s: of the whole job.
        memory: bytes of the fullest device (weights, gradient, activations).
    """

    depth: int
    width: int
    microbatch: int
    recompute: bool
    samples_per_s: float
    memory: float


def plan_2bw(
    profiles: Mapping[int, LayerProfile], *, layers: int, devices: int, batch: int, memory_cap: float
) -> Plan2BW:
    """The fastest arrangement that fits; of equally fast ones the shallowest.

    Args:
        profiles: microbatch size -> one layer measured at it.
        layers: equal layers of the model.
        batch: samples of one optimizer step over all replicas.
        memory_cap: bytes of one device.
    Raises:
        ScheduleError: profiles are no such mapping, a number is below one, no depth and microbatch size divide the
            batch, or nothing fits; it says the least memory that any arrangement needs.
    """
    counts = {"layers": layers, "devices": devices, "batch": batch}
    layers, devices, batch = (whole(name, value, least=1) for name, value in counts.items())
    profiles = _profiles(profiles)
    memory_cap = number("memory_cap", memory_cap)
    if not profiles:
        raise ScheduleError("profiles is empty; give one layer measured at one microbatch size at least")
    if math.isnan(memory_cap):
        raise ScheduleError("memory_cap is nan; it is a number of bytes")
    arrangements = list(_arrangements(profiles, layers, devices, batch))
    if not arrangements:
        raise ScheduleError(
            f"batch {batch} on {devices} devices with {layers} layers: no depth divides both so that a microbatch "
            f"size of {sorted(profiles)} gives a whole number of microbatches, at least as many as stages"
        )
    fitting = [plan for plan in arrangements if plan.memory <= memory_cap]
    if not fitting:
        least = min(plan.memory for plan in arrangements)
        raise ScheduleError(
            f"memory_cap is {memory_cap:.12g} bytes; the least that any arrangement needs is {least:.12g}"
        )
    return max(fitting, key=lambda plan: (plan.samples_per_s, -plan.depth))


def _profiles(given: object) -> dict[int, LayerProfile]:
    form = "give {1: LayerProfile(...)}: microbatch size -> one layer measured at it"
    if not isinstance(given, Mapping):
        raise ScheduleError(f"profiles is a {type(given).__name__}; {form}")
    for size, layer in given.items():
        if not isinstance(layer, LayerProfile):
            raise ScheduleError(f"profiles[{size!r}] is a {type(layer).__name__}; {form}")
    return {whole("microbatch", size, least=1): layer for size, layer in given.items()}


def _arrangements(profiles: Mapping[int, LayerProfile], layers: int, devices: int, batch: int) -> Iterator[Plan2BW]:
    """Every depth, microbatch size and use of recomputation that the numbers allow, whatever its memory."""
    for depth in range(1, min(devices, layers) + 1):
        if devices % depth or layers % depth:
            continue
        width, deep = devices // depth, layers // depth
        for microbatch, layer in sorted(profiles.items()):
            microbatches, rest = divmod(batch, width * microbatch)
            if rest or microbatches < depth:
                continue
            for recompute in (False, True):
                kept = depth * (layer.input_bytes if recompute else layer.activation_bytes * deep)
                working = layer.activation_bytes * deep if recompute else 0.0
                times = layer.forward_s * (2 if recompute else 1) + layer.backward_s
                compute = deep * times + (2 * layer.hop_s if depth > 1 else 0.0)
                reduce = deep * layer.reduce_s / microbatches if width > 1 else 0.0
                yield Plan2BW(
                    depth=depth,
                    width=width,
                    microbatch=microbatch,
                    recompute=recompute,
                    samples_per_s=width * microbatch / max(compute, reduce),
                    memory=3 * layer.weight_bytes * deep + kept + working,
                )
