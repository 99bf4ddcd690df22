"""Where two runs first differ, bit by bit, from what they have recorded.

    run_record.py --> compare (this file) --> Comparison --> commands/verify_run.py, with what checkpoints add

[Note: the order within a step] Step n reads the weights after step n - 1. So numbers of one step stand in the order of
their causes: learning rate and batch; loss; gradient norm; weights after the step (and the optimizer's state); an
evaluation with them. The first of them that differs says where to look.

Pure: numbers and texts only. Floats are compared as they were computed: JSON has the shortest text that reads back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sixfold.gpt.observe.run_record import EVALUATION, Attempt, RunRecord
from sixfold.pipeline.schedules import registered

WEIGHTS, STATE = "weights", "optimizer state"
_RANKS = {"lr": 0, "batch_size": 0, "samples": 0, "tokens": 0, "loss": 1, "grad_norm": 3, WEIGHTS: 4, STATE: 5}
_BY_DATASET, _EVALUATION = 2, 6

# Keys that change no bit of a run: where it lies, what it writes, when it saves.
_IDLE_TABLES = ("run", "log", "checkpoint", "eval", "elastic", "pipeline")
_IDLE_KEYS = ("data.cache_dir", "data.max_epochs", "train.recompute", "train.offload_activations")
_COUNTS = ("run.device", "checkpoint.init_from", "eval.batches")  # of those tables, nevertheless
# Keys that only change in which order numbers are added: not even that with grad_sum = "tree".
_LAYOUT_KEYS = ("pp", "dp", "dp_replicate", "schedule", "stages_per_rank", "layers_per_stage", "sharding")
_FSDP_ORDER = ("grad_reduce", "bucket_bytes", "align_bytes")  # when gradients are sent, and from where in a buffer
_FSDP_BITS = ("reduce_dtype", "main_dtype", "grad_sum", "grad_dtype", "cast_inputs")
# Schedules whose gradients are of older weights, and what says of how old.
_OF_OLDER_WEIGHTS = tuple(entry.name for entry in registered() if not entry.flushed)
_SETS_AGE = ("parallel.schedule", "parallel.pp", "parallel.layers_per_stage")
_SUMS = ("parallel.grad_sum", "fsdp.grad_sum")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing of one step that differs: a scalar, ``weights`` or ``optimizer state``."""

    step: int
    what: str

    @property
    def order(self) -> tuple[int, int, str]:
        """Earlier ones first: see the note."""
        rank = _EVALUATION if self.what.startswith(EVALUATION) else _RANKS.get(self.what, _BY_DATASET)
        return self.step, rank, self.what


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigDifference:
    """A key that differs. ``effect``: "none", "order" of sums, or "values"."""

    key: str
    a: Any
    b: Any
    effect: str


@dataclass(kw_only=True, slots=True)
class Comparison:
    """What two runs, or two attempts of one, have in common and where they part.

    Attributes:
        scalar_steps, digest_steps: steps of which both have numbers, and digests.
        first: the first difference; ``firsts``: that of each scalar and of the weights.
        scalars: at the first difference's step: both values of each scalar that both have.
        tensors: names whose digests differ at the first step whose digests do; ``tensors_of``: how many both have.
        only_in_a, only_in_b: tensors of one run alone, at that step or the last.
    """

    scalar_steps: list[int]
    digest_steps: list[int]
    firsts: list[Difference] = field(default_factory=list)
    scalars: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)
    tensors_of: int = 0
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        """The first difference of all."""
        return min(self.firsts, key=lambda one: one.order, default=None)

    @property
    def steps(self) -> list[int]:
        """Steps of which anything was compared."""
        return sorted({*self.scalar_steps, *self.digest_steps})


def compare(a: Attempt, b: Attempt) -> Comparison:
    """Compare what both have, step by step. Cost: what both have recorded."""
    found = Comparison(
        scalar_steps=sorted(a.scalars.keys() & b.scalars.keys()),
        digest_steps=sorted(a.digests.keys() & b.digests.keys()),
    )
    firsts: dict[str, int] = {}
    for step in found.scalar_steps:
        x, y = a.scalars[step], b.scalars[step]
        for name in x.keys() & y.keys():
            if not same(x[name], y[name]):
                firsts.setdefault(name, step)
    for step in found.digest_steps:
        if a.digests[step] != b.digests[step]:
            firsts[WEIGHTS] = step
            break
    _compare_tensors(found, a, b, firsts.get(WEIGHTS))
    found.firsts = sorted((Difference(step=step, what=name) for name, step in firsts.items()), key=lambda d: d.order)
    if found.first is not None:
        x, y = (side.scalars.get(found.first.step, {}) for side in (a, b))
        found.scalars = {name: (x[name], y[name]) for name in x if name in y}
    return found


def same(x: float | None, y: float | None) -> bool:
    """Whether two numbers of a record have the same bits; what was not finite is None on both sides."""
    if isinstance(x, float) and isinstance(y, float):
        return x.hex() == y.hex()
    return x == y


def _compare_tensors(found: Comparison, a: Attempt, b: Attempt, step: int | None) -> None:
    if step is None:
        step = next((one for one in reversed(found.digest_steps) if one in a.tensors and one in b.tensors), -1)
    x, y = a.tensors.get(step, {}), b.tensors.get(step, {})
    if x and y:
        found.tensors = sorted((name for name in x.keys() & y.keys() if x[name] != y[name]), key=in_order)
        found.tensors_of = len(x.keys() & y.keys())
        found.only_in_a = sorted(x.keys() - y.keys(), key=in_order)
        found.only_in_b = sorted(y.keys() - x.keys(), key=in_order)


def in_order(name: str) -> list[tuple[int, int, str]]:
    """Sorts names of tensors as a model has them: layers.2 before layers.10, the embedding first, the head last."""
    first = {"embedding": 0, "norm": 2, "head": 3}.get(name.partition(".")[0], 1)
    parts = [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in name.split(".")]
    return [(first, 0, ""), *parts]


def repeats(run: RunRecord) -> list[tuple[int, Comparison]]:
    """(Number of an attempt, its comparison with the one before) for each that did steps again, or began with them."""
    found = []
    for number, (before, after) in enumerate(zip(run.attempts, run.attempts[1:], strict=False), start=2):
        again = compare(before, after)
        if again.steps:
            found.append((number, again))
    return found


def config_differences(a: RunRecord, b: RunRecord) -> list[ConfigDifference]:
    """Keys of the configurations, and of what the runs ran on, that differ; those that can change bits first."""
    x, y = _told(a), _told(b)
    summed_alike = all(any(side.get(key) == "tree" for key in _SUMS) for side in (x, y))
    found = [
        ConfigDifference(key=key, a=x.get(key), b=y.get(key), effect=_effect(key, summed_alike, (x, y)))
        for key in sorted(x.keys() | y.keys())
        if x.get(key) != y.get(key)
    ]
    return sorted(found, key=lambda one: ("values", "order", "none").index(one.effect))


def _told(run: RunRecord) -> dict[str, Any]:
    """The keys of the last start, and the degrees, ranks and versions that it told."""
    last = run.attempts[-1]
    told = dict(run.config or {})
    told |= {f"parallel.{axis}": size for axis, size in last.layout.items()}
    told |= {f"parallel.{key}": getattr(last, key) for key in ("sharding", "schedule") if getattr(last, key)}
    return told | {f"version of {name}": version for name, version in last.versions.items()}


def _effect(key: str, summed_alike: bool, told: Iterable[Mapping[str, Any]]) -> str:
    table, _, name = key.partition(".")
    if key in _COUNTS or key.startswith("version of "):
        return "values"
    if any(one.get("parallel.schedule") in _OF_OLDER_WEIGHTS for one in told) and key in _SETS_AGE:
        return "values"
    if table == "fsdp" and name in _FSDP_ORDER:
        return "none" if summed_alike else "order"
    if table in _IDLE_TABLES or key in _IDLE_KEYS or (table == "fsdp" and name not in _FSDP_BITS):
        return "none"
    if table == "parallel" and name in _LAYOUT_KEYS:
        return "none" if summed_alike else "order"
    return "values"


def hexadecimal(value: float | None) -> str:
    """The bits of a number: a float as C's %a, an integer as it is."""
    if value is None:
        return "not finite"
    return value.hex() if isinstance(value, float) else str(value)


def relative(x: float | None, y: float | None) -> float | None:
    """The difference of two numbers, relative to the larger; None where one is not finite."""
    if x is None or y is None:
        return None
    largest = max(abs(x), abs(y))
    return abs(x - y) / largest if largest else 0.0


def spans(steps: Iterable[int]) -> str:
    """``1-4, 6, 8-20``; steps of an even distance as ``0-100 by 10``."""
    left, parts = sorted(steps), list[str]()
    while left:
        n = 1
        gap = left[1] - left[0] if len(left) > 1 else 1
        while n < len(left) and left[n] - left[n - 1] == gap:
            n += 1
        if n < 3 and gap > 1:
            n = 1
        by = f" by {gap}" if gap > 1 and n > 2 else ""
        parts.append(f"{left[0]}-{left[n - 1]}{by}" if n > 1 else str(left[0]))
        left = left[n:]
    return ", ".join(parts)


def as_object(scalars: Mapping[str, tuple[float | None, float | None]]) -> list[dict[str, Any]]:
    """Scalars of both runs as JSON has them, with their bits."""
    return [
        {
            "name": name,
            "a": a,
            "b": b,
            "a_bits": hexadecimal(a),
            "b_bits": hexadecimal(b),
            "same": same(a, b),
            "relative": relative(a, b),
        }
        for name, (a, b) in scalars.items()
    ]
