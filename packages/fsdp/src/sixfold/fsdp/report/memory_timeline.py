"""What this rank holds while a step runs: every byte that is the wrapper's, by purpose, at every moment.

    moves of gathers and reductions --> Recorder --> Timeline (this file) --> text here, SVG in memory_picture.py

A moment is a move of a unit's weights or gradients. A gather starts, is done or is given up; a reduction starts or is
done. Between moves nothing of ours changes.

[Note: what is ours] Main weights, what gathers send and where they arrive, local sums, main gradients, and the
optimizer's state if the optimizer is given. Activations, the gradients that autograd makes before they are added,
temporaries of layers and optimizers, the back end's own memory and the caching allocator's rest are not:
torch.profiler with profile_memory=True and torch.cuda.memory._snapshot() show those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sixfold.fsdp.buffers.reduction_sizes import OPEN
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.report.memory_picture import draw_svg

WEIGHTS = {"empty": ".", "gathering": "g", "ready": "G"}
SUMS = {"idle": ".", "summing": "s", "reducing": "r"}
_ROOT = "(root)"
_COLUMNS = 140  # of a text picture; longer steps lose moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What was held just after a move.

    Attributes:
        move: ``"begin"``, ``"gather"``, ``"wait"`` (gathered), ``"free"``, ``"put"`` (its backward is done),
            ``"reduce"`` (sent), ``"drain"`` (reduced) or ``"end"``.
        unit: the unit that moves. None for begin and end.
        weights: a letter for each unit: ``.`` empty, ``g`` being gathered, ``G`` gathered.
        sums: a letter for each unit: ``.`` none, ``s`` being summed here, ``r`` being reduced.
        gathering, gathered, summing, reducing: bytes of the units with these letters. They lie in memory of ``held``.
        held: bytes of all memory of this package, used or not.
    """

    move: str
    unit: str | None
    weights: str
    sums: str
    gathering: int
    gathered: int
    summing: int
    reducing: int
    held: int

    @property
    def busy(self) -> int:
        """Bytes of temporary memory in use: weights that are there or coming, sums and what is being reduced."""
        return self.gathering + self.gathered + self.summing + self.reducing


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The memory of a rank over what was recorded. ``str()`` draws it as text, ``svg()`` as a picture.

    Attributes:
        units: their names, in the order of the letters of ``moments``.
        purposes: bytes held at the end, as in ``report()["bytes"]``, and ``"optimizer"`` if it was given.
        moments: the first is "begin", the last "end".
    """

    units: tuple[str, ...]
    purposes: Mapping[str, int]
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment at which most temporary memory is in use."""
        return max(self.moments, key=lambda moment: moment.busy)

    @property
    def held_peak(self) -> int:
        """Most bytes that were held."""
        return max(moment.held for moment in self.moments)

    def __str__(self) -> str:
        return _text(self)

    def svg(self) -> str:
        """An SVG document: bytes over moments by purpose, and below it what each unit holds."""
        return draw_svg(self)


def _text(timeline: Timeline) -> str:
    moments = _sampled(timeline.moments, _COLUMNS)
    width = max(len(name or _ROOT) for name in (*timeline.units, *timeline.purposes)) + 2
    peak = timeline.peak
    whose = "" if peak.unit is None else f" of {peak.unit or _ROOT}"
    lines = [f"{timeline.moments[-1].held:,} bytes are held, {timeline.held_peak:,} at most"]
    lines += [f"  {name:{width}}{nbytes:>16,}" for name, nbytes in timeline.purposes.items() if nbytes]
    lines.append(f"in use at most {peak.busy:,} bytes of gathered weights and sums, at {peak.move}{whose}")
    lines.append("weights: g on the way, G there")
    lines += _rows(timeline.units, [moment.weights for moment in moments], width)
    lines.append("local gradients: s summed here, r on the way")
    lines += _rows(timeline.units, [moment.sums for moment in moments], width)
    tenths = "".join(str(min(9, 10 * moment.busy // max(1, peak.busy))) for moment in moments)
    lines.append(f"  {'in use, tenths':{width}}{tenths}")
    return "\n".join(lines) + "\n"


def _rows(units: Sequence[str], letters: Sequence[str], width: int) -> list[str]:
    """A line for each unit that ever holds something."""
    rows = {unit or _ROOT: "".join(column[at] for column in letters) for at, unit in enumerate(units)}
    return [f"  {name:{width}}{row}" for name, row in rows.items() if row.strip(".")]


def _sampled(moments: Sequence[Moment], most: int) -> Sequence[Moment]:
    if len(moments) <= most:
        return moments
    return [moments[at * (len(moments) - 1) // (most - 1)] for at in range(most)]


# ---- recording


class Watched(Protocol):
    """A state machine that tells its moves."""

    watch: Callable[[str, str], None] | None


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """A unit's state at a moment: keys of WEIGHTS and SUMS, and the bytes that they stand for."""

    weights: str
    sums: str
    gathered: int
    summed: int


class Recorder:
    """Takes a moment at each move.

    Args:
        units: names.
        look: what a unit holds now.
        purposes: bytes held now, by purpose.
    """

    def __init__(
        self,
        units: Sequence[str],
        look: Callable[[str], UnitBytes],
        purposes: Callable[[], Mapping[str, int]],
    ) -> None:
        self._units = tuple(units)
        self._look = look
        self._purposes = purposes
        self._moments: list[Moment] = []

    def take(self, move: str, unit: str | None = None) -> None:
        """Look at all units now."""
        seen = [self._look(name) for name in self._units]

        def total(weights: str | None = None, sums: str | None = None) -> int:
            if weights is not None:
                return sum(one.gathered for one in seen if one.weights == weights)
            return sum(one.summed for one in seen if one.sums == sums)

        self._moments.append(
            Moment(
                move=move,
                unit=unit,
                weights="".join(WEIGHTS[one.weights] for one in seen),
                sums="".join(SUMS[one.sums] for one in seen),
                gathering=total(weights="gathering"),
                gathered=total(weights="ready"),
                summing=total(sums="summing"),
                reducing=total(sums="reducing"),
                held=sum(self._purposes().values()),
            )
        )

    def timeline(self) -> Timeline:
        """What was taken so far."""
        return Timeline(units=self._units, purposes=dict(self._purposes()), moments=tuple(self._moments))


class Recording:
    """What ``model.memory()`` gives: the timeline is there when its block has ended."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    def finish(self, timeline: Timeline) -> None:
        """The block has ended."""
        self._timeline = timeline

    @property
    def timeline(self) -> Timeline:
        """What was recorded.

        Raises:
            FsdpError: the block runs still.
        """
        if self._timeline is None:
            raise FsdpError("the timeline is read inside its block; read it after `with model.memory() as memory:`")
        return self._timeline

    def __str__(self) -> str:
        return str(self.timeline)

    def svg(self) -> str:
        """See ``Timeline.svg``."""
        return self.timeline.svg()


def look_at(engine: Engine) -> Callable[[str], UnitBytes]:
    """What a unit of ``engine`` holds."""
    units = {unit.name: unit for unit in engine.units}

    def look(name: str) -> UnitBytes:
        unit = units[name]
        flying = engine.reduction.pipeline.flying(name)
        summed = sum(one.gradients.summing_bytes for one in unit.trained)
        idle = not any(one.gradients.state in OPEN for one in unit.trained)
        return UnitBytes(
            weights=engine.gathering.pipeline.state(name).value.lower(),
            sums="reducing" if flying else "idle" if idle else "summing",
            gathered=unit.gathered_bytes,
            summed=engine.reduction.flying_bytes(name) if flying else summed,
        )

    return look


@contextmanager
def recording(
    engine: Engine, held: Callable[[], Mapping[str, int]], optimizer: torch.optim.Optimizer | None
) -> Iterator[Recording]:
    """Take moments of ``engine`` inside the block; ``held`` tells its bytes by purpose."""

    def purposes() -> dict[str, int]:
        return {**held(), "optimizer": optimizer_bytes(optimizer)}

    recorder = Recorder([unit.name for unit in engine.units], look_at(engine), purposes)
    watched: tuple[Watched, Watched] = (engine.gathering.pipeline, engine.reduction.pipeline)
    memory = Recording()
    before = [one.watch for one in watched]
    recorder.take("begin")
    for one in watched:
        one.watch = recorder.take
    try:
        yield memory
    finally:
        for one, was in zip(watched, before, strict=True):
            one.watch = was
        recorder.take("end")
        memory.finish(recorder.timeline())


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the storages that an optimizer's state lies in, each once."""
    if optimizer is None:
        return 0
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
