"""What a caller forgot or cannot see: eval() before an evaluation, STEPs for optimizers, a W with nothing to do.

stages --> runner: evaluate leaves buffers as they are, a warning where optimizers never step (this file)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.stage.distributed_data_parallel import Parts, Replicas, check_reducers
from sixfold.pipeline.stage.side_effects import dense_parts, is_plain, same_values
from sixfold.pipeline.stage.stage import Stage, check_made

__all__ = ["BufferGuard", "ModuleCheck", "OptimizerCheck", "warn_of_empty_w"]

_LEAST = 0.5  # of a stage's trainable numbers that W makes the gradients of, below which a split does little


def warn_of_empty_w(shares: Mapping[int, float]) -> None:
    """Warn where W makes few of a stage's gradients: the bubble is then not that of W's full time."""
    few = {index: share for index, share in shares.items() if share < _LEAST}
    if few:
        told = ", ".join(f"{share:.0%} of stage {index}" for index, share in sorted(few.items()))
        warnings.warn(
            f"W makes the gradients of {told}; the others are made in I, and the split saves less than simulate says. "
            "simulate(program, costs.deferring(runner.deferred)) counts it; nn.Linear, nn.Embedding and "
            "defer_weight_grad wait for W",
            stacklevel=4,
        )


class BufferGuard:
    """Buffers of modules in training mode, which an evaluation puts back: a batch norm's statistics move.

    A module may say beside a buffer for what it was made, as the longest row that a table has. So where a buffer is put
    back, plain attributes are too. Modules in eval() are not looked at.
    """

    def __init__(self) -> None:
        self._told = False

    @contextmanager
    def around(self, stages: Iterable[Stage], call: str, loss_fn: object = None) -> Iterator[None]:
        """Around an ``evaluate`` or ``forward``."""
        held: list[tuple[str, str, dict[str, Tensor | None], str, Tensor, Tensor]] = []
        attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        tops = [(f"stage {stage.index}", stage.module) for stage in stages]
        for what, top in (*tops, ("loss_fn", loss_fn if isinstance(loss_fn, nn.Module) else None)):
            for path, module in top.named_modules() if top is not None else ():
                if module.training:
                    attributes.append((module.__dict__, dict(module.__dict__)))
                for name, buffer in module._buffers.items() if module.training else ():
                    if buffer is not None:
                        check_made(module, what)
                        where = f"{path}.{name}" if path else name
                        held.append((what, where, module._buffers, name, buffer, buffer.detach().clone()))
        try:
            yield
        finally:
            moved = ""
            for what, where, buffers, name, buffer, was in held:
                # A batch norm's kernel moves its statistics without a new version: only the values tell.
                if buffers.get(name) is not buffer or not same_values(buffer, was):
                    moved = moved or f"{where} of {what}"
                    buffers[name] = buffer if _written_back(buffer, was) else was
            for place, was_there in attributes if moved else ():
                _put_back(place, was_there)
        if moved and not self._told:
            self._told = True
            warnings.warn(
                f"{call} ran with modules in training mode, and {moved} moved; buffers and plain attributes were put "
                "back, and not what lists and dicts hold. Call eval() on the stages' modules and loss_fn before it, "
                "and train() behind it",
                stacklevel=4,
            )


def _written_back(buffer: Tensor, was: Tensor) -> bool:
    """Whether ``buffer``, whose parts may have other sizes by now, has its values again."""
    # Of its data, without a new version: a microbatch in flight may have saved it.
    parts, before = dense_parts(buffer.data), dense_parts(was)
    if [part.shape for part in parts] != [part.shape for part in before]:
        return False
    for part, values in zip(parts, before, strict=True):
        part.copy_(values)
    return True


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    """Numbers, texts and tuples of them, of a module."""
    for name, value in list(attributes.items()):
        was = before.get(name)
        if value is not was and is_plain(value) and is_plain(was):
            if name in before:
                attributes[name] = was
            else:
                del attributes[name]


class ModuleCheck:
    """The stages are what the runner was made with: its calls are bound to them."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._made = [(stage, stage.module, _options(stage), Parts(stage.module)) for stage in stages]
        self._cut = [
            (stage, parts, part, origin)
            for stage, module, _, parts in self._made
            for part in (() if module is None else module.modules())
            if hasattr(origin := vars(part).get("_origin"), "elsewhere")
        ]

    def look(self) -> None:
        """Raises ScheduleError: one is another, or has what a stage is refused with, such as a hook of its DDP."""
        for stage, module, options, parts in self._made:
            if stage.module is not module:
                raise ScheduleError(
                    f"the module of stage {stage.index} was replaced, and this runner would run the one it was made "
                    "with; make a new runner on all ranks, or replace layers inside of the module"
                )
            for name, value in options.items():
                if getattr(stage, name) is not value:
                    raise ScheduleError(
                        f"{name} of stage {stage.index} was set after its runner was made, which would run the stage "
                        "as it was; make the stage with it, and a new runner on all ranks"
                    )
            if parts.changed():
                check_reducers(module, stage.index)
                parts.keep()
            if isinstance(stage.data_parallel, Replicas):
                stage.data_parallel.check()
        for stage, parts, part, origin in self._cut:
            _check_ties(stage, parts.modules, part, origin)


def _check_ties(stage: Stage, held: Iterable[nn.Module], part: nn.Module, origin: Any) -> None:
    """What other stages of the model hold too is tied. ``origin`` is the model that ``part`` was cut from.

    Args:
        held: all modules of the stage.
    """
    others = {id(parameter) for parameter in origin.elsewhere(part)}
    if others.isdisjoint(id(parameter) for inside in held for parameter in inside._parameters.values()):
        return
    others -= {id(parameter) for parameter in stage.tied.values()}
    for path, parameter in part.named_parameters():
        if id(parameter) in others and (parameter.is_floating_point() or parameter.is_complex()):
            raise ScheduleError(
                f"stage {stage.index}: {path} is a parameter of another stage too and not in stage.tied, so that "
                "ranks would train it apart; tie weights before the cut, or cut the model again, and make a new "
                "optimizer and runner (a Stage made of a stage's module takes tied=stage.tied)"
            )
    if (path := origin.grown(part)) is not None:
        raise ScheduleError(
            f"stage {stage.index}: {path} was tied to other stages before the cut, and to further ones after it, so "
            "that its gradients would be summed in two groups; tie weights before the cut, or cut the model again, "
            "and make a new optimizer and runner"
        )


def _options(stage: Stage) -> dict[str, object]:
    """What a runner's calls are bound to besides the module."""
    return {name: getattr(stage, name) for name in ("checkpoint", "data_parallel", "cuda_graphs")}


class OptimizerCheck:
    """Warns once where a stage's optimizer has not stepped between two steps of a program without STEPs."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._watched = {
            stage.index: stage.optimizer for stage in stages if isinstance(stage.optimizer, torch.optim.Optimizer)
        }
        self._before: dict[int, int] = {}

    def look(self, *, steps: bool) -> None:
        """A step begins, of a program that ``steps`` optimizers or does not."""
        if steps or not self._watched:
            return
        now = {}
        for index, optimizer in self._watched.items():
            trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
            if (first := next(trained, None)) is not None:
                now[index] = first._version
        still = [index for index, version in now.items() if self._before.get(index) == version]
        if self._before:
            self._watched = {}
        self._before = now
        if still:
            warnings.warn(
                f"stage {still[0]} has an optimizer, the program has no STEP, and the optimizer has not stepped "
                "between two steps; run passes.optimizer_step(program), or call optimizer.step() behind step()",
                stacklevel=4,
            )
