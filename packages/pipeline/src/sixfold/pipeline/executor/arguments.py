"""What a runner is given: every argument that cannot work is refused when the runner is made.

    program, stages, options --> checks (this file) --> runner

No process group here; ranks are numbers. All ranks must learn what is wrong on one, so nothing is raised before ranks
are connected: ``refusal`` returns its error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from sixfold.pipeline.errors import ScheduleError, number, whole
from sixfold.pipeline.passes import lower, reduce_grad
from sixfold.pipeline.program.action import Kind
from sixfold.pipeline.program.program import Program, Weights, program_given
from sixfold.pipeline.proof.verify import verify
from sixfold.pipeline.stage.distributed_data_parallel import Replicas
from sixfold.pipeline.stage.stage import Stage

__all__ = ["check_loss", "check_program", "check_stages", "check_timeout", "complete", "given_stages", "refusal"]


def given_stages(stages: Stage | Sequence[Stage]) -> list[Stage]:
    """``stages``, or one stage, as a list.

    Raises:
        ScheduleError: something in it is no Stage, such as a module.
    """
    if isinstance(stages, Stage):
        return [stages]
    if isinstance(stages, nn.Module) or not isinstance(stages, Iterable):
        raise ScheduleError(f"stages is a {type(stages).__name__}; it is a list of Stage(module, index)")
    found = list(stages)
    for at, stage in enumerate(found):
        if hasattr(stage, "submod") and hasattr(stage, "stage_index"):
            raise ScheduleError(f"stages[{at}] is a {type(stage).__name__}; make it with Stage.from_torch(stage)")
        if not isinstance(stage, Stage):
            raise ScheduleError(f"stages[{at}] is a {type(stage).__name__}; it is a Stage: Stage(module, index)")
    return found


def refusal(
    program: Program,
    stages: Stage | Sequence[Stage],
    loss_fn: Callable[[Any, Any], Any] | None,
    scale: str,
    *,
    lookahead: int,
    dynamic_shapes: object,
    edges: object,
    overlap: str,
    debug_memory: object,
) -> ScheduleError | None:
    """Why these arguments cannot work; None where they can."""
    try:
        program_given(program)
        check_loss(loss_fn, scale, given_stages(stages))
        whole("lookahead", lookahead, least=0)
        if dynamic_shapes not in (True, False, "announced"):
            raise ScheduleError(f"dynamic_shapes is {dynamic_shapes!r}; it is True, False or 'announced'")
        if not (edges in (None, "groups", "one", "host") or callable(edges)):
            raise ScheduleError(
                f"edges is {edges!r}; it makes the group of an edge, or is 'groups', 'one', 'host' or None"
            )
        if overlap not in ("order", "streams"):
            raise ScheduleError(f"overlap is {overlap!r}; it is 'order' or 'streams'")
        if debug_memory not in (True, False):
            raise ScheduleError(f"debug_memory is {debug_memory!r}; it is True or False")
    except ScheduleError as error:
        return error
    return None


def check_loss(loss_fn: Callable[[Any, Any], Any] | None, scale: str, stages: Sequence[Stage]) -> None:
    """The loss and its scale."""
    if scale not in ("mean", "sum", "token"):
        raise ScheduleError(f"scale is {scale!r}; it is 'mean', 'sum' or 'token'")
    owned = [stage.index for stage in stages if not isinstance(stage.data_parallel, Replicas | None)]
    if tied := [stage.index for stage in stages if stage.tied and stage.index in owned]:
        raise ScheduleError(
            f"stage {tied[0]} has tied parameters and data_parallel, which owns their gradients; give the stage as a "
            "DistributedDataParallel or under fully_shard, or add them in its reduce_grad"
        )
    if scale == "token" and owned:
        raise ScheduleError(
            f"scale='token' divides .grad, which data_parallel owns on stage {owned[0]}; use 'sum', and divide the "
            "gradients in its reduce_grad"
        )
    if scale == "token" and isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise ScheduleError(
            "scale='token' divides the gradients of stages; loss_fn has parameters: make it part of the last stage"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise ScheduleError(f"loss_fn is {loss_fn!r}; it is called with the last stage's output and the target")


def check_timeout(timeout_s: float) -> float:
    """A deadline in seconds."""
    timeout_s = number("timeout_s", timeout_s)
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ScheduleError(f"timeout_s is {timeout_s:g}; it is finite and > 0")
    return timeout_s


def check_stages(program: Program, stages: Sequence[Stage], rank: int | None) -> None:
    """The stages are those that the program places here; ``rank`` is None where all are in this process."""
    wanted = tuple(range(program.stages)) if rank is None else program.stages_of(rank)
    given = tuple(sorted(stage.index for stage in stages))
    if given != wanted:
        where = "this process" if rank is None else f"rank {rank}"
        raise ScheduleError(f"stages {given} were given; the program places {wanted} on {where}", rank=rank or 0)


def check_program(
    program: Program, stages: Mapping[int, Stage], rank: int | None, ranks: int, *, one: bool = False
) -> None:
    """It is right, and the stages can run it.

    Args:
        one: all edges are one communicator.
    Raises:
        ScheduleError: it is for other ranks or stages, is refused by ``verify`` (a SEND never waits), or steps a
            stage without an optimizer, or with another stage's.
    """
    if rank is not None and ranks != len(program.ranks):
        raise ScheduleError(f"the program has {len(program.ranks)} ranks, the group {ranks}; they are equal")
    check_stages(program, tuple(stages.values()), rank)
    verify(program, transport="buffered")  # one that lacks a backward would lose its gradient
    if one:
        if program.weights is not Weights.FLUSHED:
            raise ScheduleError(
                f"weights: {program.weights} let batches overlap without end, but edges='one' needs a proof of the "
                "whole order; make the runner with edges=None or 'groups'"
            )
        verify(complete(program), transport="rendezvous")  # [Note: one communicator]
    for at, position, action in program.entries():
        if action.kind is Kind.STEP and (stage := stages.get(action.stage)) is not None:
            where = {"rank": at, "position": position, "action": action}
            if stage.optimizer is None and any(True for _ in stage.parameters()):
                rule = f"stage {stage.index} has no optimizer; make it with Stage(..., optimizer=)"
                raise ScheduleError(f"rank {at} [{position}] {action}: {rule}", **where)  # type: ignore[arg-type]
            if (other := _stepped_too(stage, stages.values())) is not None:
                rule = (
                    f"the optimizer of stage {stage.index} has parameters of stage {other}, whose gradients may be "
                    "incomplete here; give each stage an optimizer of its own parameters"
                )
                raise ScheduleError(f"rank {at} [{position}] {action}: {rule}", **where)  # type: ignore[arg-type]
            if stage.tied:
                rule = f"stage {stage.index} has tied parameters, whose gradients are summed after the last STEP"
                raise ScheduleError(
                    f"rank {at} [{position}] {action}: {rule}; step the optimizers after runner.step",
                    **where,  # type: ignore[arg-type]
                )


def _stepped_too(stage: Stage, stages: Iterable[Stage]) -> int | None:
    """Another stage that the optimizer of ``stage`` steps, or None."""
    groups: Any = getattr(stage.optimizer, "param_groups", ())
    stepped = {id(p) for group in groups for p in group["params"]} - {id(p) for p in stage.parameters()}
    others = (other for other in stages if other is not stage)
    return next((other.index for other in others if any(id(p) in stepped for p in other.parameters())), None)


def complete(program: Program) -> Program:
    """``program`` with its messages and a REDUCE_GRAD per stage."""
    if not program.lowered:
        return lower(program)
    if any(action.kind is Kind.REDUCE_GRAD for _, _, action in program.entries()):
        return program
    return reduce_grad(program)
