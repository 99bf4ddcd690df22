"""Layouts near a configuration, or all that a world allows: which fit the memory, and in which order of throughput.

    PlannedConfig, world, Device --> candidates (this file) --> plan.py --> suggestions, ranking (this file)

A candidate is a set of keys that change. At the given tp, cp and ep these are pp, dp_replicate, schedule with its
stages per rank, sharding, micro-batch size and recomputation. Fewer of these are also tried at other degrees of tp, cp
and ep whose ranks are in one node. All other keys stay.

[Note: what is planned whole] Every candidate gets a time that it cannot beat: its busiest rank without a bubble. It
also gets a memory that it hardly falls below: as many microbatches in flight as ranks follow. Only candidates that may
fit and may still be among the best are planned whole, the most promising first, until the time for the search is over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from sixfold.gpt.config.rules import refusals
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.machine.devices import Device
from sixfold.gpt.plan.layout import Layout, device_costs
from sixfold.gpt.plan.plan import LayoutPlan, plan_layout
from sixfold.pipeline import ScheduleError

Changes = Mapping[str, Any]
_SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_RECOMPUTE = ("none", "selective", "full")
_SCHEDULES = (("one_f_one_b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2))
_LARGEST_MICRO_BATCH = 64
_SPLITS = (1, 2, 4, 8)  # degrees of tp, cp and ep that are tried
_DEEPEST_OF_FEW = 16
_FEW_SHARDINGS = ("no_shard", "optim", "optim_grads_params")
_PLAINEST = {  # what other splits are judged with
    "parallel.schedule": "one_f_one_b", "parallel.stages_per_rank": 1, "parallel.layers_per_stage": (),
    "parallel.dp_replicate": 1, "train.micro_batch_size": 1,
}  # fmt: skip
_LEAST_IN_FLIGHT = 0.9  # of 1F1B's microbatches in flight: no schedule that is searched holds fewer
_SAME_TIME = 0.02  # suggestions this much faster than what is given are no news


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout that was planned, and the keys that lead to it."""

    changes: Changes
    planned: LayoutPlan

    @property
    def overrides(self) -> str:
        """As they are written behind CONFIG."""
        return " ".join(f"{key}={_written(value)}" for key, value in self.changes.items()) or "(as given)"

    def beside(self, config: TrainConfig) -> Choice:
        """Without the changes that ``config`` has already."""
        left = {key: value for key, value in self.changes.items() if attrgetter(key)(config) != value}
        return replace(self, changes=left)

    @property
    def order(self) -> tuple[float, float, int]:
        """Best first: time, then bubble, then memory."""
        step = self.planned.step_s
        return (0.0 if step is None else step, self.planned.bubble_over_ideal, self.planned.peak_bytes)


def _written(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def changed(config: TrainConfig, changes: Changes) -> TrainConfig:
    """``config`` with other values.

    Raises:
        ConfigError: they do not go together.
    """
    tables: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return replace(config, **{table: replace(getattr(config, table), **keys) for table, keys in tables.items()})


def _planned(config: TrainConfig, changes: Changes, world: int, device: Device, memory: int | None) -> Choice | None:
    """None where the keys do not go together at this world."""
    try:
        return Choice(
            changes=changes, planned=plan_layout(changed(config, changes), world, device, memory_bytes=memory)
        )
    except (ConfigError, ScheduleError):
        return None


# ---- near what is given


def suggestions(planned: LayoutPlan, *, most: int = 3) -> list[Choice]:
    """Changes of one or two keys that fit the memory, fastest first; where what is given fits, faster ones alone."""
    config, found = planned.config, []
    if planned.parallel.schedule == "plan":  # a search for each would take its time: the schedule that it begins with
        base = replace(config.parallel, schedule=config.parallel.entry.name)
        config = replace(config, parallel=base, pipeline=type(config.pipeline)())
    for changes in _near(planned):
        choice = _planned(config, changes, planned.world, planned.device, planned.memory_bytes)
        if choice is not None and choice.planned.fits:
            found.append(choice)
    now = planned.step_s
    if planned.fits:
        faster = [one for one in found if now is not None and (one.planned.step_s or now) < now * (1 - _SAME_TIME)]
        return sorted(faster, key=lambda one: one.order)[:most]
    return sorted(found, key=lambda one: one.order)[:most]


def _near(planned: LayoutPlan) -> Iterator[Changes]:
    config, parallel = planned.config, planned.parallel
    single: list[Changes] = [{"train.recompute": value} for value in _RECOMPUTE if value != config.train.recompute]
    single += [{"parallel.sharding": value} for value in _SHARDINGS if value != parallel.sharding]
    micro = config.train.micro_batch_size
    single += [{"train.micro_batch_size": value} for value in (micro // 2, micro * 2) if value]
    single += [{"parallel.pp": value, "parallel.dp": 0} for value in (parallel.pp // 2, parallel.pp * 2) if value]
    if config.fsdp.reduce_buffers > 1:
        single.append({"fsdp.reduce_buffers": 1})
    if parallel.pp > 1 and parallel.stages_per_rank == 1:
        single.append({"parallel.schedule": "zb_h1"})
    yield from single
    if planned.fits:
        return
    for one in single[: len(_RECOMPUTE) - 1]:
        for other in single[len(_RECOMPUTE) - 1 :]:
            yield {**one, **other}


# ---- all of a world


@dataclass(frozen=True)
class Ranking:
    """What a search found: layouts that fit, best first; how many were looked at, and how many were planned whole."""

    best: list[Choice]
    candidates: int
    planned: int
    complete: bool


def search(
    config: TrainConfig,
    world: int,
    device: Device,
    *,
    memory_bytes: int | None = None,
    most: int = 10,
    time_limit_s: float = 4.0,
) -> Ranking:
    """Rank the layouts of ``world`` ranks that fit. [Note: what is planned whole]"""
    began = time.perf_counter()
    memory = device.memory_bytes if memory_bytes is None else memory_bytes
    bounds: list[tuple[float, int, Changes]] = []
    count, complete = 0, True
    for changes in _all(config, world, device.per_node):
        if time.perf_counter() - began > time_limit_s / 2:
            complete = False
            break
        count += 1
        bound = _bound(config, changes, world, device, memory)
        if bound is not None:
            bounds.append((bound, count, changes))
    found: list[Choice] = []
    planned = 0
    for bound, _, changes in sorted(bounds, key=lambda one: one[:2]):
        if len(found) >= most and bound > 0 and bound >= (found[most - 1].planned.step_s or 0.0):
            break
        if time.perf_counter() - began > time_limit_s:
            complete = False
            break
        planned += 1
        choice = _planned(config, changes, world, device, memory)
        if choice is not None and choice.planned.fits:
            found = sorted([*found, choice], key=lambda one: one.order)
    return Ranking(found[:most], count, planned, complete)


def _all(config: TrainConfig, world: int, node: int) -> Iterator[Changes]:
    """Every candidate: those at the given splits of one model first, the plainest of them before the others."""
    yield from _candidates(config, world)
    given = config.parallel
    for tp, cp, ep in product(_SPLITS, _SPLITS, _SPLITS if config.model.num_experts else (given.ep,)):
        if (tp, cp, ep) == (given.tp, given.cp, given.ep) or max(tp * cp, tp * ep) > node or world % (tp * cp):
            continue
        split = {"parallel.tp": tp, "parallel.cp": cp, "parallel.ep": ep, "parallel.dp": 0}
        try:
            other = changed(config, {**split, "parallel.pp": 1, **_PLAINEST})
        except ConfigError:
            continue
        if len(refusals(other)) <= len(refusals(config)):
            yield from ({**split, **changes} for changes in _candidates(other, world, few=True))


def _candidates(config: TrainConfig, world: int, *, few: bool = False) -> Iterator[Changes]:
    """At the tp, cp and ep of ``config``, the plainest first; ``few``: of micro-batches, depths and strategies."""
    parallel, batch = config.parallel, config.train.global_batch_size
    ranks = world // (parallel.cp * parallel.tp)
    micros = [1 << power for power in range(_LARGEST_MICRO_BATCH.bit_length()) if batch % (1 << power) == 0]
    depths = [pp for pp in range(1, min(ranks, config.model.num_layers) + 1) if ranks % pp == 0]
    if few:
        micros, depths = micros[:2], [pp for pp in depths if pp <= _DEEPEST_OF_FEW]
    for pp, recompute, micro in product(depths, _RECOMPUTE, micros):
        dp = ranks // pp
        if batch % (micro * dp):
            continue
        schedules = _SCHEDULES[: 2 if few else None] if pp > 1 else _SCHEDULES[:1]
        for schedule, chunks in schedules:
            if pp * chunks > config.model.num_layers:
                continue
            for sharding, copies in _shardings(dp * parallel.cp, dp):
                if few and sharding not in _FEW_SHARDINGS:
                    continue
                yield {
                    "parallel.pp": pp,
                    "parallel.dp": dp,
                    "parallel.schedule": schedule,
                    "parallel.stages_per_rank": chunks,
                    "parallel.layers_per_stage": (),
                    "parallel.sharding": sharding,
                    "parallel.dp_replicate": copies,
                    "train.micro_batch_size": micro,
                    "train.recompute": recompute,
                }


def _shardings(ranks: int, dp: int) -> Iterator[tuple[str, int]]:
    """Strategies that differ at ``ranks`` of a shard group; the last also as copies of eight ranks (HSDP)."""
    if ranks == 1:
        yield "no_shard", 1
        return
    for sharding in _SHARDINGS:
        yield sharding, 1
    if ranks == dp and dp > 8 and dp % 8 == 0:
        yield "optim_grads_params", dp // 8


def _bound(config: TrainConfig, changes: Changes, world: int, device: Device, memory: int | None) -> float | None:
    """Seconds that a candidate cannot beat; None where it cannot be or cannot fit."""
    try:
        candidate = changed(config, changes)
        layout = Layout(candidate, candidate.parallel, device.kind)
        if layout.parallel.world != world:
            return None
        ranks, count = range(layout.parallel.pp), layout.microbatches
        if memory is not None:
            for rank in {0, layout.parallel.pp - 1}:
                stages = layout.stages_of(rank)
                flight = max(_LEAST_IN_FLIGHT * min(count, layout.parallel.pp - rank), 1.0)
                held = flight * sum(map(layout.held_bytes, stages)) + layout.temporary_bytes(stages)
                if layout.stored(stages).total + held > memory:
                    return None
        if device.flops_of(candidate.train.precision) is None:
            return 0.0
        costs = device_costs(layout, device)
        work = [f + i + w for f, i, w in zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)]
        return count * max(sum(work[stage] for stage in layout.stages_of(rank)) for rank in ranks)
    except (ConfigError, ScheduleError):
        return None
