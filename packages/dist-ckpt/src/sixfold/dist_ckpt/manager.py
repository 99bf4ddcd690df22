"""The checkpoints of a run: saved every so many steps, kept by rule, found again by step, as the newest or the best.

    step, state, metrics --> CheckpointManager (this file) --> save or async_save --> root/step-%08d
                                                           --> retention: which steps stay
root --> latest, best, steps --> restore --> load

Metrics are saved with their checkpoint, as its ``content_metadata``: a folder that is copied or moved has them.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

from sixfold.dist_ckpt import retention, serialization
from sixfold.dist_ckpt.background.saver import AsyncSave, async_save
from sixfold.dist_ckpt.collectives.exchange import Exchange, Group
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.save_load.saving import SaveRequest
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.local import located

__all__ = ["CheckpointManager", "Restored"]

Found = TypeVar("Found")

_LOG = logging.getLogger(__name__)
_OWN = {
    "sharded_state_dict",
    "checkpoint_dir",
    "content_metadata",
    "group",
    "timeout_s",
}  # what the manager gives itself
_OPTIONS = {part.name for part in fields(SaveRequest) if part.init} - _OWN


class Restored(NamedTuple):
    """What ``restore`` has loaded: the step, what ``load`` returned (tensors are the caller's own), and the metrics."""

    step: int
    state: Any
    metrics: dict[str, float]


class CheckpointManager:
    """Saves a run every ``every`` steps, keeps checkpoints by rule, and restores the newest, the best or any step.

        manager = CheckpointManager("run", every=100, keep_last=3, keep_every=1000, best="loss")
        restored = manager.restore(state)  # None: the run begins
        for step in range(restored.step + 1 if restored else 1, 10_001):
            ...
            manager.save(step, state, {"loss": loss})  # saves at multiples of 100
        manager.close()

    All ranks of ``group`` make a manager and call ``save``, ``restore``, ``discard_after`` and ``close`` together.
    ``steps``, ``latest``, ``best`` and ``to_remove`` are for one rank alone: they look at the folder as it is now.

    Args:
        root: folder or URL of the run. Checkpoints are ``root/step-%08d``; nothing else in it is touched.
        every: ``save`` saves at multiples of it; None: at each call.
        keep_last: so many of the highest steps stay, one at least; None: all do, and the other rules have no meaning.
        keep_every: multiples of it stay as well.
        best: name of a metric; the checkpoint that is best by it stays as well.
        mode: whether the least or the largest value of it is best.
        background: ``save`` returns after a copy, and another process writes. An error of that save is raised by the
            next call of ``save``, ``wait`` or ``close``.
        group: as in ``dist_ckpt.save``.
        timeout_s: longest wait for one peer, seconds; of a save in the background, as in ``async_save``.
        options: further arguments of ``dist_ckpt.save``, such as ``check_finite=True``.
    Raises:
        CheckpointError: a number that is none, ``keep_last`` below 1, a rule without ``keep_last``, an unknown option.
    """

    def __init__(
        self,
        root: str | Path | ByPointer,
        *,
        every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        background: bool = True,
        group: Group = "world",
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and not retention.is_integer(value, 1):
                raise CheckpointError(f"{name} is {value!r}; it is an integer >= 1, or None")
        if keep_last is None and keep_every is not None:
            raise CheckpointError(f"keep_every is {keep_every} and keep_last None, which keeps all; give keep_last")
        if mode not in ("min", "max"):
            raise CheckpointError(f"mode is {mode!r}; it is 'min' or 'max'")
        if unknown := sorted(options.keys() - _OPTIONS):
            raise CheckpointError(
                f"{unknown[0]} is no option of a manager; those of save are {', '.join(sorted(_OPTIONS))}"
            )
        place = root if isinstance(root, ByPointer) else located(root, "root")
        self.root = place.absolute() if isinstance(place, Path) else place  # the process may go to another folder
        self._every, self._keep_last, self._keep_every = every, keep_last, keep_every
        self._best, self._sign = best, 1.0 if mode == "min" else -1.0
        self._background, self._group, self._timeout_s, self._options = background, group, timeout_s, options
        self._flight: AsyncSave | None = None
        self._metrics: dict[int, dict[str, float]] = {}  # of checkpoints, as the first rank read them for a removal

    # ---- all ranks together

    def save(
        self, step: int, state: Mapping[Any, Any], metrics: Mapping[str, Any] | None = None, *, force: bool = False
    ) -> bool:
        """Save ``state`` as ``step`` if it is a multiple of ``every``, or by ``force``; whether it did.

        First it waits for the save before it, and removes what no rule keeps; the log says what, before it goes.

        Args:
            metrics: numbers by name, the same on all ranks. A value that is not finite is never the best.
        Raises:
            CheckpointError: ``root`` has a checkpoint of a later step: a restart would go on from there. What
                ``dist_ckpt.save`` raises, also of the save before this one. All on all ranks.
        """
        place: Any = retention.step_path(self.root, step)
        if not force and self._every is not None and step % self._every:
            return False
        self.wait()
        mine, _ = Exchange(self._group, self._timeout_s).all_reduce(partial(_saved, step, metrics or {}), self._check)
        arguments = {**self._options, "content_metadata": mine, "group": self._group, "timeout_s": self._timeout_s}
        self._metrics.pop(step, None)
        if self._background:
            self._flight = async_save(state, place, **arguments)
        else:
            serialization.save(state, place, **arguments)
            self._on_first_rank(self._remove)
        return True

    def restore(self, state: Any, step: int | Literal["best"] | None = None, **options: Any) -> Restored | None:
        """Load the newest checkpoint into ``state``, or the best, or that of ``step``; None if the run has none yet.

        Args:
            options: further arguments of ``dist_ckpt.load``, such as ``strict`` or ``dtype_policy``.
        Raises:
            CheckpointError: there is no whole checkpoint of ``step``; or what ``dist_ckpt.load`` raises.
        """
        self.wait()
        found = self._on_first_rank(lambda: self._wanted(step))
        if found is None:
            return None
        place = retention.step_path(self.root, found)
        loaded = serialization.load(state, place, group=self._group, timeout_s=self._timeout_s, **options)
        metrics = self._on_first_rank(lambda: _metrics_at(place))
        return Restored(found, loaded, metrics)

    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints after ``step``: a run that goes back calls it before it trains on.

        Returns:
            The steps that are removed, the highest first.
        Raises:
            CheckpointError: there is no whole checkpoint of ``step``; nothing is removed then.
        """
        self.wait()

        def discard() -> list[int]:
            later = [other for other, _ in retention.checkpoints(self.root, after=step)]
            if later:
                _LOG.info("%s: going back to step %d, removing %s", self.root, step, _named(later))
            retention.discard_after(self.root, step)
            return later[::-1]

        return self._on_first_rank(discard)

    def wait(self) -> None:
        """Return when the save in the background is committed, and what no rule keeps is removed.

        Raises:
            CheckpointError: what became of that save; the checkpoints before it stay.
        """
        if self._flight is not None:
            flight, self._flight = self._flight, None
            flight.wait()
            self._on_first_rank(self._remove)

    close = wait  # may be called again; the manager can go on

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:  # else other ranks may not come; the interpreter's end waits for a save that goes on
            self.close()

    # ---- one rank alone

    def steps(self) -> list[int]:
        """Steps of whole checkpoints, ascending."""
        return [step for step, _ in retention.checkpoints(self.root)]

    def latest(self) -> int | None:
        """The highest step of a whole checkpoint; None if there is none."""
        steps = self.steps()
        if not steps:
            retention.latest(self.root)  # it refuses checkpoints under other names: a run would begin anew
        return steps[-1] if steps else None

    def best(self) -> int | None:
        """The step whose metric is best, the later of equal ones; None if no checkpoint has that metric as a number."""
        if self._best is None:
            raise CheckpointError("this manager has no best; make it with best='loss', the name of a metric")
        self._metrics.clear()  # a run that another process trains may have gone back, and saved a step again
        return self._best_of(self.steps())

    def to_remove(self) -> list[int]:
        """Steps of checkpoints that the next removal takes, if nothing is saved until then."""
        return [] if self._keep_last is None else self._not_kept(self.steps(), self._keep_last)

    def _not_kept(self, steps: Sequence[int], keep_last: int) -> list[int]:
        best = None if self._best is None else self._best_of(steps)
        return retention.not_kept(steps, keep_last, self._keep_every, () if best is None else (best,))

    def _best_of(self, steps: Sequence[int]) -> int | None:
        assert self._best is not None, "asked only with a metric"
        values = {step: self._sign * self._metrics_of(step).get(self._best, math.nan) for step in steps}
        finite = [step for step in steps if math.isfinite(values[step])]
        return min(finite, key=lambda step: (values[step], -step), default=None)

    def _metrics_of(self, step: int) -> dict[str, float]:
        if step not in self._metrics:
            self._metrics[step] = _metrics_at(retention.step_path(self.root, step))
        return self._metrics[step]

    def _wanted(self, step: int | Literal["best"] | None) -> int | None:
        if step is None:
            return self.latest()
        if step != "best" and not retention.is_integer(step, 0):
            raise CheckpointError(f"step is {step!r}; it is an integer >= 0, 'best', or None for the newest")
        steps = self.steps()
        found = self.best() if step == "best" else operator.index(step)
        if found not in steps:
            which = f"with a finite {self._best!r}" if found is None else f"of step {step!r}"
            raise CheckpointError(f"{self.root} has no whole checkpoint {which}; it has {_named(steps)}")
        return found

    def _check(self, saved: Sequence[dict[str, Any]]) -> None:
        for rank, other in enumerate(saved):
            for name, value in saved[0].items():
                if repr(other[name]) != repr(value):
                    raise MismatchError(
                        f"{name}: {value} on rank 0 and {other[name]} on rank {rank}; give all ranks the same step, "
                        "and the same metrics, such as the mean that all_reduce makes"
                    )
        step = saved[0]["step"]
        if later := [other for other, _ in retention.checkpoints(self.root, after=step)]:
            raise CheckpointError(
                f"{self.root} has {_named(later)}, later than step {step}: a restart would go on from step {later[-1]}"
                ". A run that went back calls discard_after(N) first, with the step N that it restored"
            )

    def _remove(self) -> None:
        if self._keep_last is None:
            return
        gone = self._not_kept(steps := self.steps(), self._keep_last)
        if gone:
            _LOG.info("%s: removing %s", self.root, _named(gone))
        stay = set(steps).difference(gone)
        retention.prune(self.root, keep_last=self._keep_last, keep_every=self._keep_every, keep=stay)
        for step in gone:
            self._metrics.pop(step, None)

    def _on_first_rank(self, work: Callable[[], Found]) -> Found:
        """What ``work`` returns or raises on the first rank, on all."""
        return Exchange(self._group, self._timeout_s).all_reduce(lambda: (None, None), lambda _: work())[1]


def _saved(step: int, metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint says of itself, to keep and to compare; numpy's numbers and tensors of one element count."""
    numbers = {}
    for name, value in metrics.items():
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise CheckpointError(
                f"metrics[{name!r}] is {value!r}; metrics are numbers by name, such as {{'loss': 2.31}}"
            ) from None
    content = {"step": step, "metrics": dict(sorted(numbers.items()))}
    return content, content


def _metrics_at(place: Any) -> dict[str, float]:
    content = serialization.load_content_metadata(place)
    found = content.get("metrics") if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


def _named(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    shown = ", ".join(map(str, steps[:8])) + (f", ... ({len(steps)})" if len(steps) > 8 else "")
    return f"step {shown}" if len(steps) == 1 else f"steps {shown}"
