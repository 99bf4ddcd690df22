"""What ``sixfold plan --mtbf-hours`` says: goodput, hours lost by cause, the best interval, memory of snapshots.

    LayoutPlan, FailureFlags --> plan_failures (this file) --> FailurePlan --> as_lines, as_json (this file)
    goodput.py has the formula, sixfold.dist_ckpt the memory that snapshots take

No ranks, no clock. Nothing needs torch but sixfold.dist_ckpt, which is imported when it is asked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from sixfold.gpt.errors import ConfigError
from sixfold.gpt.plan.goodput import FailureCosts, Goodput, best_interval, goodput, young_interval
from sixfold.gpt.plan.plan import LayoutPlan

# What is taken for granted where a flag does not say it; `sixfold doctor --run` measures it.
ASSUMED = {
    "snapshot_seconds": 0.0,
    "save_seconds": 1.0,
    "written_seconds": 60.0,
    "detect_seconds": 1.0,
    "recover_seconds": 30.0,
    "from_checkpoint": 1.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureFlags:
    """The flags of the command, by their names; None where one was not given. See `FailureCosts`.

    Attributes:
        mtbf_hours: mean time between failures of the whole job. rank_mtbf_hours: of one rank.
    """

    mtbf_hours: float | None = None
    rank_mtbf_hours: float | None = None
    step_seconds: float | None = None
    snapshot_seconds: float | None = None
    save_seconds: float | None = None
    written_seconds: float | None = None
    detect_seconds: float | None = None
    recover_seconds: float | None = None
    restart_seconds: float | None = None
    from_checkpoint: float | None = None

    def __post_init__(self) -> None:
        if self.mtbf_hours is not None or self.rank_mtbf_hours is not None:
            return
        given = [name for name in (field.name for field in fields(self)[2:]) if getattr(self, name) is not None]
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise ConfigError(f"{flag} is given and no time between failures; add --mtbf-hours or --rank-mtbf-hours")

    @property
    def asks(self) -> bool:
        """There is a time between failures."""
        return self.mtbf_hours is not None or self.rank_mtbf_hours is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class FailurePlan:
    """Goodput of a layout.

    Attributes:
        interval: steps between saves, as the configuration says. best: the interval with the highest goodput.
        steps: of the run.
        assumed: flags that were not given and that have no figure of the plan.
        domain_bytes: memory for snapshots, of the host that needs most; 0: there are none. hosts: how many.
        copies: of each snapshot, on other hosts.
    """

    costs: FailureCosts
    interval: int
    configured: str
    found: Goodput
    best: int
    at_best: Goodput
    steps: int
    assumed: tuple[str, ...]
    domain_bytes: int
    hosts: int
    copies: int


def plan_failures(planned: LayoutPlan, flags: FailureFlags) -> FailurePlan:
    """What failures cost the run of ``planned``.

    Raises:
        ConfigError: the time of a step is not known.
    """
    step_s = flags.step_seconds or planned.step_s
    if step_s is None:
        raise ConfigError(
            f"the time of a step is not known for {planned.device.name}; give --step-seconds, --tflops, --device or "
            "--machine FILE of doctor's"
        )
    if flags.mtbf_hours is not None:
        hours = flags.mtbf_hours
    else:
        assert flags.rank_mtbf_hours is not None, "the one or the other"
        hours = flags.rank_mtbf_hours / planned.world
    assumed = tuple(name for name in ASSUMED if getattr(flags, name) is None)
    used = {name: getattr(flags, name) if name not in assumed else value for name, value in ASSUMED.items()}
    costs = FailureCosts(
        mtbf_s=hours * 3600,
        step_s=step_s,
        snapshot_s=used["snapshot_seconds"],
        save_s=used["save_seconds"],
        written_s=max(used["written_seconds"], used["save_seconds"]),
        detect_s=used["detect_seconds"],
        recover_s=used["recover_seconds"],
        restart_s=flags.restart_seconds,
        from_checkpoint=used["from_checkpoint"],
    )
    interval, configured = _interval(planned, costs)
    steps = max(1, planned.config.train.steps)
    best = best_interval(costs, steps)
    hosts = -(-planned.world // planned.device.per_node)
    elastic = planned.config.elastic
    copies = min(elastic.memory_replicas, hosts - 1) if elastic.memory_every else 0
    return FailurePlan(
        costs=costs,
        interval=interval,
        configured=configured,
        found=goodput(costs, interval),
        best=best,
        at_best=goodput(costs, best),
        steps=steps,
        assumed=assumed,
        domain_bytes=_domain_bytes(planned, copies) if elastic.memory_every else 0,
        hosts=hosts,
        copies=copies,
    )


def _interval(planned: LayoutPlan, costs: FailureCosts) -> tuple[int, str]:
    """Steps between saves, and the key that says so: the one that comes first."""
    every, minutes = planned.config.checkpoint.every, planned.config.checkpoint.every_minutes
    found = [(max(1, planned.config.train.steps), "at the end alone")]
    if minutes:
        found.append((max(1, round(minutes * 60 / costs.update_s)), f"checkpoint.every_minutes = {minutes:g}"))
    if every:
        found.append((every, f"checkpoint.every = {every}"))
    return min(found)


def _domain_bytes(planned: LayoutPlan, copies: int) -> int:
    from sixfold.dist_ckpt.memory_tier import bytes_per_domain

    per_node = planned.device.per_node
    hosts = [f"host {rank // per_node}" for rank in range(planned.world)]
    return max(bytes_per_domain(planned.saved_bytes_R, hosts, copies).values())


def as_json(plan: FailurePlan) -> dict[str, Any]:
    """The object below ``goodput`` of ``sixfold plan --json``. Hours are those of the whole run."""
    hours = _hours(plan)
    return {
        "goodput": plan.found.useful,
        "interval_steps": plan.interval,
        "run_hours": hours,
        "hours_lost": None if hours is None else {cause: share * hours for cause, share in plan.found.lost.items()},
        "best_interval_steps": plan.best,
        "best_goodput": plan.at_best.useful,
        "young_interval_steps": _young(plan),
        "costs": asdict(plan.costs),
        "assumed": list(plan.assumed),
        "snapshots": {"hosts": plan.hosts, "copies": plan.copies, "bytes_per_host": plan.domain_bytes},
    }


def _young(plan: FailurePlan) -> float | None:
    """Steps; None where no failure needs a checkpoint."""
    return young_interval(plan.costs) / plan.costs.update_s if plan.costs.from_checkpoint else None


def _hours(plan: FailurePlan) -> float | None:
    """Of the whole run; None where it would never end."""
    useful = plan.found.useful
    return plan.steps * plan.costs.step_s / useful / 3600 if useful > 0 else None


def as_lines(plan: FailurePlan) -> list[str]:
    """The lines of ``sixfold plan``."""
    costs, hours, young = plan.costs, _hours(plan), _young(plan)
    lines = [
        f"goodput {plan.found.useful:.1%}, if a failure comes each {_time(costs.mtbf_s)} and a save is made each "
        f"{plan.interval:,} steps ({plan.configured})"
    ]
    if hours is None:
        lines.append("  no step would ever stay")
    else:
        ideal = plan.steps * costs.step_s
        lost = ", ".join(
            f"{_time(share * hours * 3600)} to {_CAUSES[cause]}" for cause, share in plan.found.lost.items() if share
        )
        lines.append(
            f"  {plan.steps:,} steps take {_time(hours * 3600)}, {_time(ideal)} without failures; lost: {lost}"
        )
    beside = "" if young is None else f"; Young's sqrt(2 C M) is {young:,.0f}"
    lines.append(
        f"  best: a save each {plan.best:,} steps ({_time(plan.best * costs.update_s)}), goodput "
        f"{plan.at_best.useful:.1%}{beside}"
    )
    if plan.assumed:
        words = ", ".join(f"--{name.replace('_', '-')} {ASSUMED[name]:g}" for name in plan.assumed)
        lines.append(f"  assumed: {words}; `sixfold doctor --run RUN` measures a run")
    copies = f"a copy on {plan.copies} other" if plan.copies else "no copy elsewhere"
    if not plan.domain_bytes:
        return [*lines, "  no snapshots in memory (elastic.memory_every = 0)"]
    lines.append(
        f"  snapshots in memory: {plan.domain_bytes / 1e9:,.2f} GB on each of {plan.hosts:,} "
        f"host{'s' * (plan.hosts > 1)}, {copies}"
    )
    return lines


_CAUSES = {
    "snapshots": "snapshots",
    "saves": "saves",
    "detection": "detection",
    "recovery": "recovery",
    "redone": "steps done again",
}


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"
