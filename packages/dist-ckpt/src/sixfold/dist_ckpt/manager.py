"""The checkpoints of a run: saved every so many steps, kept by rule, found again by step, as the newest or the best.

    step, state, metrics --> CheckpointManager (this file) --> save --> root/step-%08d; retention.py: which steps stay
    root --> CheckpointManager (this file) --> load

Metrics are saved with their checkpoint, as its ``content_metadata``: a folder that is copied or moved has them.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

from sixfold.dist_ckpt import retention, serialization
from sixfold.dist_ckpt.background.saver import AsyncSave, async_save, prepare_async_save
from sixfold.dist_ckpt.collectives.exchange import Exchange, Group, errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.metrics import content_of, taken_out
from sixfold.dist_ckpt.save_load.saving import SaveRequest
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.local import located, resolved, store_at
from sixfold.dist_ckpt.storage.step_names import NAMING, Naming, StepNames

__all__ = ["CheckpointManager", "Restored"]
Found = TypeVar("Found")

_OWN = {"sharded_state_dict", "checkpoint_dir", "content_metadata", "since", "group", "timeout_s"}  # given here
_OPTIONS = sorted({part.name for part in fields(SaveRequest) if part.init} - _OWN)


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
            manager.save(step, state, {"loss": loss})  # saves at multiples of 100
        manager.close()

    All ranks of ``group`` make a manager and call ``save``, ``restore``, ``discard_after`` and ``close`` together.
    ``steps``, ``latest``, ``best`` and ``to_remove`` are for one rank alone: they look at the folder as it is now.

    Args:
        root: folder or URL of the run. Checkpoints are ``root/step-%08d``; nothing else in it is touched.
        name: of the folder of a step: ``"checkpoint-{step}"``, ``"iter_{step:07d}"``, or a function of the step.
        every: ``save`` saves at multiples of it; None: at each call.
        keep_last: so many of the highest steps stay, at least one; None: all do, and the other rules have no meaning.
        keep_every: multiples of it stay as well.
        best, mode: name of a metric; the checkpoint of its least value ("min"), or largest ("max"), stays as well.
        background: ``save`` returns after a copy, and another process writes. An error of that save is raised by the
            next call of ``save``, ``wait`` or ``close``.
        incremental: what has not changed since the newest checkpoint is linked and not written: ``since`` of ``save``.
        full_every: then a save that passes a multiple of it links nothing: a bad block on the disk hurts all steps
            that share its file.
        group, timeout_s: as in ``dist_ckpt.save``; of a save in the background, as in ``async_save``.
        options: further arguments of ``dist_ckpt.save``, such as ``check_finite=True``. In the background ``lazy`` is
            one too: see ``fence_before``.
    Raises:
        CheckpointError: an argument that means nothing, or a name from which no step can be read.
    """

    def __init__(
        self,
        root: str | Path | ByPointer,
        *,
        name: Naming = NAMING,
        every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        background: bool = True,
        incremental: bool = False,
        full_every: int | None = None,
        group: Group = "world",
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        rules = {"every": every, "keep_last": keep_last, "keep_every": keep_every, "full_every": full_every}
        for rule, value in rules.items():
            if value is not None and not retention.is_integer(value, 1):
                raise CheckpointError(f"{rule} is {value!r}; it is an integer >= 1, or None")
        if full_every is not None and not incremental:
            raise CheckpointError(f"full_every is {full_every} and incremental False: each save is full; leave it out")
        if keep_last is None and keep_every is not None:
            raise CheckpointError(f"keep_every is {keep_every} and keep_last None, which keeps all; give keep_last")
        if not (best is None or isinstance(best, str)) or mode not in ("min", "max"):
            raise CheckpointError(f"best is {best!r}, mode {mode!r}; the name of a metric, or None, and 'min' or 'max'")
        if unknown := sorted(options.keys() - _OPTIONS):
            raise CheckpointError(f"{unknown[0]} is no option of a manager; those of save are {', '.join(_OPTIONS)}")
        if not background and options.pop("lazy", False):  # ``dist_ckpt.save`` has no such argument
            raise CheckpointError("lazy is True and background False: nothing is copied; leave one of them out")
        place = root if isinstance(root, ByPointer) else located(root, "root")
        if incremental and not isinstance(place, Path):
            raise CheckpointError(f"incremental is set, but {root!r} is no local folder: only there files are linked")
        self.root = resolved(Path()) / place if isinstance(place, Path) else place  # the process may leave its folder
        self._name, self._every, self._keep_last, self._keep_every = name, every, keep_last, keep_every
        self._best, self._sign, self._is_prepared = best, 1.0 if mode == "min" else -1.0, not background
        self._background, self._incremental, self._full_every = background, incremental, full_every
        self._group, self._timeout_s, self._passed = group, timeout_s, "0"  # calls of save that saved nothing
        self._options = {**options, "group": group, "timeout_s": timeout_s}
        self._flight: AsyncSave | None = None
        self._safe_globals: Sequence[Any] = ()  # of the last restore: what metrics lie beside may need them
        self._metrics: dict[int, dict[str, float]] = {}  # of checkpoints, as the first rank read them for a removal
        StepNames(name)

    # ---- all ranks together

    def save(
        self, step: int, state: Mapping[Any, Any], metrics: Mapping[str, Any] | None = None, *, force: bool = False
    ) -> bool:
        """Save ``state`` as ``step`` if it is a multiple of ``every``, or by ``force``; whether it did.

        First it waits for the save before it, and removes what no rule keeps; the log says what, before it goes.

        Args:
            metrics: numbers by name, the same on all ranks. A value that is not finite is never the best.
        Raises:
            CheckpointError: ``root`` has a later step; or as ``dist_ckpt.save``, also of the save before. On all ranks.
        """
        with errors_to_all(self._group, self._timeout_s):
            place: Any = self._place(step)
        if not force and self._every is not None and step % self._every:
            self._passed = f"{int(self._passed.partition(' ')[0]) + 1} to step {step}"  # all ranks' next call compares
            if not self._is_prepared:  # the state has its size now: after a step an optimizer has its moments
                self._is_prepared = True
                self._together("no save", {"step": step}, lambda: None)
                prepare_async_save(state, group=self._group, timeout_s=self._timeout_s)
            return False
        self.wait()
        with errors_to_all(self._group, self._timeout_s):
            content = content_of(step, {} if metrics is None else metrics)
        if content["metrics"] and self._best not in (None, *content["metrics"]):
            warnings.warn(f"metrics without {self._best!r}: such a checkpoint is never the best", stacklevel=2)
        since = self._together("save", content, lambda: self._checked_newest(step))
        arguments = {**self._options, "content_metadata": content, "since": since}
        self._metrics.pop(step, None)
        if self._background:
            self._flight = async_save(state, place, **arguments)
        else:
            serialization.save(state, place, **arguments)
            self._together("save", {}, self._remove)
        return True

    def restore(self, state: Any, step: int | Literal["best"] | None = None, **options: Any) -> Restored | None:
        """Load the newest checkpoint into ``state``, or the best, or that of ``step``; None if the run has none yet.

        Args:
            options: further arguments of ``dist_ckpt.load``, such as ``strict`` or ``dtype_policy``.
        Raises:
            CheckpointError: there is no whole checkpoint of ``step``; or what ``dist_ckpt.load`` raises.
        """
        self.wait()
        self._safe_globals = options.get("safe_globals", ())
        if (found := self._together("restore", {"step": step}, lambda: self._wanted(step))) is None:
            return None
        loaded = serialization.load(state, self._place(found), group=self._group, timeout_s=self._timeout_s, **options)
        return Restored(found, loaded, taken_out(loaded[0] if isinstance(loaded, tuple) else loaded))

    def discard_after(self, step: int) -> list[int]:
        """Remove the checkpoints after ``step``: a run that goes back calls it before it trains on.

        Returns:
            The steps that are removed, the highest first.
        Raises:
            CheckpointError: there is no whole checkpoint of ``step``; nothing is removed then.
        """
        self.wait()

        def discard() -> list[int]:
            later = self.steps(after=step)
            retention.discard_after(self.root, step, name=self._name)
            return later[::-1]

        return self._together("discard_after", {"step": step}, discard)

    def wait(self) -> None:
        """Return when the save in the background is committed, and what no rule keeps is removed.

        Raises:
            CheckpointError: what became of that save; the checkpoints before it stay.
        """
        if self._flight is not None:
            flight, self._flight = self._flight, None
            with errors_to_all(self._group, self._timeout_s):
                flight.wait()
            self._together("wait", {}, self._remove)

    def fence_before(self, optimizer: Any) -> None:
        """With ``lazy=True``: each ``optimizer.step()`` from now on waits for the copy. See ``AsyncSave.fence``."""
        optimizer.register_step_pre_hook(lambda *_: None if self._flight is None else self._flight.fence())

    def close(self) -> None:
        """As ``wait``, and all ranks agree that they are here; it may be called again, and the manager can go on."""
        self.wait()
        self._together("close", {}, lambda: None)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:  # else other ranks may not come; the interpreter's end waits for a save that goes on
            self.close()

    # ---- one rank alone

    def steps(self, *, after: int = -1) -> list[int]:
        """Steps of whole checkpoints that are later than ``after``, ascending."""
        return [step for step, _ in retention.checkpoints(self.root, after=after, name=self._name)]

    def latest(self) -> int | None:
        """The highest step of a whole checkpoint; None if there is none."""
        found = retention.latest(self.root, name=self._name)  # which tells of checkpoints of other names
        return None if found is None else max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step whose metric is best, the later of equal ones; None if no checkpoint has that metric as a number."""
        if self._best is None:
            raise CheckpointError("this manager has no best; make it with best='loss', the name of a metric")
        self._metrics.clear()  # a run that another process trains may have gone back, and saved a step again
        best, unread = self._compared()
        for error in unread.values():
            raise error
        return best

    def to_remove(self) -> list[int]:
        """Steps of checkpoints that the next removal takes, if nothing is saved until then."""
        return [] if self._keep_last is None else retention.prunable(self.root, **self._rules())

    def _place(self, step: int) -> Any:
        return retention.step_path(self.root, step, name=self._name)

    def _remove(self) -> None:
        if self._keep_last is not None:
            retention.prune(self.root, **self._rules())

    def _rules(self) -> dict[str, Any]:
        """The arguments of a prune. A checkpoint whose metrics cannot be read may be the best, and stays."""
        best, unread = (None, {}) if self._best is None else self._compared()
        for step, error in unread.items():
            warnings.warn(f"step {step} stays, since its metrics cannot be read: {error}", stacklevel=2)
        keep = [*unread, *(() if best is None else (best,))]
        return {"keep_last": self._keep_last, "keep_every": self._keep_every, "keep": keep, "name": self._name}

    def _compared(self) -> tuple[int | None, dict[int, CheckpointError]]:
        """The step that is best, and why those could not be compared whose metrics cannot be read."""
        values, unread = dict[int, float](), dict[int, CheckpointError]()
        for step in self.steps():
            try:
                if step not in self._metrics:
                    common = serialization.load_common_state_dict(self._place(step), safe_globals=self._safe_globals)
                    self._metrics[step] = taken_out(common)
                values[step] = self._sign * self._metrics[step].get(str(self._best), math.nan)
            except CheckpointError as error:
                unread[step] = error
        finite = [step for step, value in values.items() if math.isfinite(value)]
        return min(finite, key=lambda step: (values[step], -step), default=None), unread

    def _wanted(self, step: int | Literal["best"] | None) -> int | None:
        if step is None:
            return self.latest()
        if step != "best" and not retention.is_integer(step, 0):
            raise CheckpointError(f"step is {step!r}; it is an integer >= 0, 'best', or None for the newest")
        steps = self.steps()
        found = self.best() if step == "best" else operator.index(step)
        if found not in steps:
            which = f"with a finite {self._best!r}" if found is None else f"of step {step!r}"
            raise CheckpointError(f"{self.root} has no whole checkpoint {which}; it has {retention.named(steps)}")
        return found

    def _checked_newest(self, step: int) -> Any:
        if later := self.steps(after=step):
            raise CheckpointError(
                f"{self.root} has {retention.named(later)}, later than step {step}: a restart would go on from step "
                f"{later[-1]}. A run that went back calls discard_after(N) first, with the step N that it restored"
            )
        newest = max(self.steps(), default=None) if self._incremental else None
        if newest is None or (self._full_every and step // self._full_every > newest // self._full_every):
            return None
        return self._place(newest)

    def _together(self, call: str, given: dict[str, Any], work: Callable[[], Found]) -> Found:
        """What ``work`` returns or raises on the first rank, on all, if all make the same call of the same manager."""
        mine = {"call": call, "every": self._every, "background": self._background, **given}
        mine, self._passed = {**mine, "calls of save that saved nothing": self._passed}, "0"
        return Exchange(self._group, self._timeout_s).on_first(lambda: {"root": store_at(self.root).name, **mine}, work)
