"""The classes of torch.distributed.pipelining's users, on this executor.

    schedule's name or CSV, PipelineStage objects --> TorchSchedule (this file) --> PipelineRunner

[Note: torch's division] torch sums the gradients of a step undivided and divides ``.grad`` by the number of
microbatches at its end. So does this class: gradients then have torch's bits for any number of microbatches. Gradients
from before the step are set aside meanwhile, which torch divides once more at every step. A stage with
``data_parallel`` has its gradients elsewhere; there each loss is divided before its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.executor.connect import group_of, refuse, transport_of
from sixfold.pipeline.executor.runner import PipelineRunner
from sixfold.pipeline.microbatches.cut_batch import cut, joined
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules import by_name
from sixfold.pipeline.stage.stage import Stage

__all__ = ["TorchSchedule", "program_of"]


def program_of(schedule: str | Path, ranks: int, microbatches: int, chunks: int = 1) -> Program:
    """The program of a schedule's name, ours, torch's or torchtitan's, or of a CSV file of theirs.

    Args:
        schedule: such as "1F1B", "Interleaved1F1B", "zb_v"; or a path that ends in ``.csv``, "compute_only" or
            "compute_comms".
        chunks: stages per rank.
    Raises:
        ScheduleError: no such schedule, one that cannot have so many chunks, or a file for other ranks,
            microbatches or stages.
    """
    if not _is_file(schedule):
        return by_name(str(schedule)).with_chunks(ranks, microbatches, chunks)
    return _in_file(Path(schedule), ranks, microbatches, ranks * chunks)


def _program(schedule: str | Path, ranks: int, microbatches: int, stages: int) -> Program:
    """Of so many stages."""
    if _is_file(schedule):
        return _in_file(Path(schedule), ranks, microbatches, stages)
    if stages % ranks:
        raise ScheduleError(f"num_stages is {stages}, which {ranks} ranks do not divide; a CSV may place them so")
    return program_of(schedule, ranks, microbatches, stages // ranks)


def _is_file(schedule: str | Path) -> bool:
    return str(schedule).endswith(".csv")


def _in_file(path: Path, ranks: int, microbatches: int, stages: int) -> Program:
    program = Program.from_csv(path.read_text())
    there = {"ranks": len(program.ranks), "microbatches": program.microbatches, "stages": program.stages}
    for what, count in {"ranks": ranks, "microbatches": microbatches, "stages": stages}.items():
        if there[what] != count:
            raise ScheduleError(f"{path} has {there[what]} {what}; here there are {count}")
    return program


class TorchSchedule:
    """``Schedule1F1B``, ``ScheduleZBVZeroBubble``, ... with torch's arguments and calls, run by ``PipelineRunner``.

    All ranks of the group make theirs together, and make the same calls.

    Args:
        schedule: as ``program_of`` takes it.
        stages: this rank's ``torch.distributed.pipelining.PipelineStage`` objects, or one of them. ``Stage`` objects
            need ``group`` and ``num_stages`` too.
        n_microbatches: of a step.
        loss_fn: of output and target; None runs forwards alone.
        scale_grads: divide gradients by ``n_microbatches`` ([Note: torch's division]).
        group: None takes the stages' own.
        num_stages: None takes the stages' own.
        options: of ``PipelineRunner``, such as ``timeout_s`` and ``store``.
    Attributes:
        program, runner: what runs, and what runs it.
    Raises:
        ScheduleError: stages have no group, or different groups or numbers of stages; the ranks do not divide the
            number of stages and no CSV places them; a stage has a ``dw_builder``; or as ``program_of`` and
            ``PipelineRunner``.
    """

    def __init__(
        self,
        schedule: str | Path,
        stages: Any,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        *,
        scale_grads: bool = True,
        group: dist.ProcessGroup | None = None,
        num_stages: int | None = None,
        **options: Any,
    ) -> None:
        given = list(stages) if isinstance(stages, Sequence) else [stages]
        found = group_of(_one_of("group", given, group))
        if not isinstance(found, dist.ProcessGroup):
            raise ScheduleError(f"group is a {type(found).__name__}; torch's calls take a process group or a mesh")
        group = found
        count = whole("num_stages", _one_of("num_stages", given, num_stages), least=1)
        ranks = group.size()
        self._loss_fn = loss_fn
        self._loss_kwargs: dict[str, Any] = {}
        try:
            self._microbatches = whole("n_microbatches", n_microbatches, least=1)
            self._stages = [stage if isinstance(stage, Stage) else Stage.from_torch(stage) for stage in given]
            self.program = _program(schedule, ranks, self._microbatches, count)
        except (ScheduleError, OSError) as error:  # the others make theirs, and are told
            refuse(error, transport_of(group, None), options.get("store"), options.get("timeout_s", 600.0))
        own = all(stage.data_parallel is None for stage in self._stages)
        self._equal, self._divide = scale_grads, scale_grads and own
        self._last = self.program.placement[-1] == group.rank()
        self.runner = PipelineRunner(
            self.program,
            self._stages,
            group,
            None if loss_fn is None else self._loss,
            scale="mean" if scale_grads and not own else "sum",
            **options,
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One batch, forward and backward; as torch's ``step``.

        Args:
            args: the model's inputs, where stage 0 is. Tensors are cut along dim 0,
                flex_attention's masks by their rows; other values go to each microbatch.
            target: where the last stage is; cut likewise.
            losses: filled, where the last stage is, with the losses of the microbatches, detached.
            return_outputs: join the last stage's outputs; False saves their memory.
            loss_kwargs: further arguments of ``loss_fn``.
            kwargs: of every local stage's module; cut likewise, never sent.
        Returns:
            the outputs of the whole batch where the last stage is, else None.
        Raises:
            ScheduleError: rows that ``n_microbatches`` does not divide, where gradients are divided by it; or as
                ``PipelineRunner.step``.
        """
        if self._loss_fn is None:
            return self.eval(*args, target=target, losses=losses, **kwargs)
        batch = self._cut(args, target, kwargs)
        self._loss_kwargs = dict(loss_kwargs or {})
        keep = return_outputs and self._last
        with _divided(self._stages, self._microbatches if self._divide else 1):
            result = self.runner.step(*batch[:2], kwargs=batch[2], keep_outputs=keep)
        _fill(losses, result.losses, self._last)
        return joined(result.outputs) if keep else None

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forwards alone; arguments and result as ``step``'s."""
        inputs, targets, each = self._cut(args, target, kwargs)
        self._loss_kwargs = dict(loss_kwargs or {})
        if self._loss_fn is None:
            result = self.runner.forward(inputs, kwargs=each)
        else:
            result = self.runner.evaluate(inputs, targets, kwargs=each, keep_outputs=self._last)
        _fill(losses, result.losses, self._last)
        return joined(result.outputs) if self._last else None

    def _loss(self, output: Any, target: Any) -> Any:
        assert self._loss_fn is not None, "the runner has a loss_fn only if there is one"
        return self._loss_fn(output, target, **self._loss_kwargs)

    def _cut(self, args: tuple[Any, ...], target: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, list[dict[str, Any]]]:
        m = self._microbatches
        try:
            inputs = cut(args, m, "args", equal=self._equal) if args else None
            return inputs, cut(target, m, "target", equal=self._equal), cut(kwargs, m, "kwargs", equal=self._equal)
        except ScheduleError as error:  # the other ranks are in the call already, and wait for this one
            self.runner.fail(error)


def _one_of(name: str, stages: Iterable[Any], given: Any) -> Any:
    """What is given, or what all the stages say."""
    said = [getattr(stage, name, None) for stage in stages]
    if given is not None:
        return given
    if not said or any(one is None or one != said[0] for one in said):
        raise ScheduleError(f"{name} of the stages is {said}; give them one, or {name}=")
    return said[0]


@contextmanager
def _divided(stages: Iterable[Stage], by: int) -> Iterator[None]:
    """Gradients that come within are divided by ``by``, and added to those from before."""
    parameters = _parameters(stages) if by > 1 else []
    before = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(by)
    except BaseException:
        for parameter in parameters:
            parameter.grad = None
        raise
    finally:
        for parameter, gradient in before:
            new, parameter.grad = parameter.grad, gradient
            if new is not None:
                gradient.add_(new)


def _parameters(stages: Iterable[Stage]) -> list[nn.Parameter]:
    """Each parameter of the stages once."""
    modules = (stage.module for stage in stages if stage.module is not None)
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


def _fill(losses: list[Tensor] | None, made: Sequence[Tensor], last: bool) -> None:
    if losses is not None and last:
        losses[:] = made
