"""A stage: a piece of the model with its place in the pipeline.

nn.Module, index --> Stage (this file) --> PipelineRunner
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint as checkpointed_call

from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.microbatches.cut_batch import tensors_in
from sixfold.pipeline.stage.distributed_data_parallel import check_reducers, replicas
from sixfold.pipeline.torch_arguments import STAGE, naming_ours

__all__ = ["DataParallel", "GivenTensors", "Stage", "check_made"]


class TwoRuns(Protocol):
    """A forward that a checkpoint runs twice."""

    early_stop: bool  # the second run ends with the last tensor that the backward needs, not with the forward

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around the first run, and around each later one."""

    def made(self, outputs: Any) -> Any:
        """What a run made, before it is handed on."""


Around = Callable[[Mapping[str, Any]], TwoRuns]


class GivenTensors:
    """The tensors that a forward is given, as it finds them: a second run would be given what it makes of them."""

    __slots__ = ("_found",)

    def __init__(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = [("its input", value) for value in inputs if isinstance(value, Tensor)]
        given += tensors_in(kwargs, "kwargs") if kwargs else ()
        self._found = [(name, value, value._version) for name, value in given if not value.is_inference()]

    def check(self, stage: int, again: str) -> None:
        """Raises ScheduleError: one was changed in place."""
        for name, value, version in self._found:
            if value._version != version:
                raise ScheduleError(
                    f"stage {stage} changes {name} in place, and {again} would start from what became of it; let it "
                    "change a copy"
                )


class DataParallel(Protocol):
    """What shards or replicates a stage; the program drives it.

    Four more methods are optional. F runs ``call(*args, **kwargs)`` instead of the module.
    ``accumulate(parameter, gradient)`` gets each weight gradient that a W made. ``before_backward(microbatch)``
    is called before each B and I, ``after_backward(microbatch)`` when a microbatch is done on the stage.
    """

    def unshard(self) -> object:
        """Gather the stage's parameters; called at UNSHARD."""

    def reshard(self) -> object:
        """Free them again; called at RESHARD."""

    def before_last_backward(self) -> object:
        """Called once per step, before the stage's last B or W."""

    def reduce_grad(self) -> object:
        """Start the reduction of the stage's gradients; called once, at REDUCE_GRAD."""


class Stage:
    """One stage of the model.

    Args:
        module: takes and returns a tensor, or a tuple of tensors, None, ints, floats and bools. None passes its input
            on. Of a DistributedDataParallel the module inside runs; DDP's process group averages its gradients once, at
            REDUCE_GRAD.
        index: its place in the pipeline, from 0 on.
        optimizer: steps at the STEPs of a program that has them; its parameters are the stage's. Gradients of others
            are left alone.
        tied: parameters of which several stages hold a copy, by one name on all of them. A runner gives each copy the
            value of the lowest stage. After a step each has the sum of their gradients.
        checkpoint: keep only the stage's inputs, and run its forward again in the backward
            (``torch.utils.checkpoint``, non-reentrant). What the forward changes in buffers, attributes and generators,
            it changes once; a parameter that the second run changes again is refused.
        data_parallel: see ``DataParallel``.
        cuda_graphs: from the fourth step on F, I and W (or B) are replays of CUDA graphs, for one set of shapes. The
            module takes only tensors and has no hooks and no branch on values. Each microbatch keeps its activations.
    Raises:
        ScheduleError: the module is no nn.Module, or an argument has another type. Or a DistributedDataParallel stands
            deeper inside, or reduces in another way (communication hooks, mixed precision, sparse gradients), or has
            hooks or a forward of its own.
    """

    @naming_ours(STAGE, most=3)
    def __init__(
        self,
        module: nn.Module | None,
        index: int,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        tied: Mapping[str, Tensor] | None = None,
        checkpoint: bool = False,
        data_parallel: DataParallel | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        index = whole("index", index, least=0)
        if module is not None and not isinstance(module, nn.Module):
            raise ScheduleError(f"stage {index} is a {type(module).__name__}; it is an nn.Module, or None to pass on")
        if isinstance(module, DistributedDataParallel):
            if data_parallel is not None:
                raise ScheduleError(
                    f"stage {index} is a {type(module).__name__} and has data_parallel; give one of them"
                )
            data_parallel = replicas(module, index)
            module = module.module
        check_reducers(module, index)
        if optimizer is not None and not callable(getattr(optimizer, "step", None)):
            raise ScheduleError(f"stage {index}: optimizer is a {type(optimizer).__name__}; it is a torch.optim one")
        if checkpoint not in (True, False):
            raise ScheduleError(f"stage {index}: checkpoint is {checkpoint!r}; it is True or False")
        if cuda_graphs and (module is None or checkpoint or data_parallel is not None or tied):
            raise ScheduleError(
                f"stage {index} has cuda_graphs, which hold a module's whole work; give them without checkpoint, "
                "data_parallel and tied"
            )
        self.module = module
        self.cuda_graphs = bool(cuda_graphs)
        self.index = index
        self.optimizer = optimizer
        self._tied = _tied(index, tied, module)
        self.checkpoint = bool(checkpoint)
        self.data_parallel = data_parallel

    @classmethod
    def from_torch(cls, stage: Any, **options: Any) -> Stage:
        """The stage of a ``torch.distributed.pipelining.PipelineStage``; the module is shared, not copied.

        Args:
            options: of ``Stage``.
        Raises:
            ScheduleError: it is none, or has a ``dw_builder``.
        """
        module, index = getattr(stage, "submod", None), getattr(stage, "stage_index", None)
        if module is None or index is None:
            raise ScheduleError(f"a {type(stage).__name__} is no PipelineStage: it has no submod and stage_index")
        if getattr(stage, "dw_builder", None) is not None:
            raise ScheduleError(
                f"stage {index} has a dw_builder, which runs weight gradients its own way; make the stage without it: "
                "a program with I and W needs none here"
            )
        return cls(module, index, **options)

    @property
    def call(self) -> Callable[..., Any]:
        """What F runs: ``data_parallel.call``, else the module, else the identity; checkpointed if asked for."""
        return self.called(_NothingAround)

    def called(self, around: Around) -> Callable[..., Any]:
        """``call``; where it is checkpointed, ``around(kwargs)`` has what its forward runs in, and runs again in."""
        if (call := getattr(self.data_parallel, "call", None)) is not None:
            return self.checkpointed(call, around)
        return _pass_on if self.module is None else self.checkpointed(self.module, around)

    def checkpointed(self, call: Callable[..., Any], around: Around) -> Callable[..., Any]:
        """``call`` as this stage runs it: itself, or with its activations made again in the backward."""
        if not self.checkpoint:
            return call

        def again_in_backward(*arguments: Any, **kwargs: Any) -> Any:
            runs = around(kwargs)
            given = GivenTensors((), kwargs)  # torch looks after the arguments itself

            def run(*inputs: Any) -> Any:
                return runs.made(call(*inputs, **kwargs))

            made = checkpointed_call(
                run, *arguments, use_reentrant=False, context_fn=runs.contexts, early_stop=runs.early_stop
            )
            if torch.is_grad_enabled():
                given.check(self.index, "the second run of its checkpoint")
            return made

        return again_in_backward

    @property
    def tied(self) -> dict[str, nn.Parameter]:
        """The tied parameters that the module has now: ``load_state_dict(assign=True)`` puts others in their places."""
        return {name: self._parameter(name, path) for name, path in self._tied.items()}

    def _parameter(self, name: str, path: str) -> nn.Parameter:
        assert self.module is not None, "a stage without a module has no tied parameters"
        try:
            return self.module.get_parameter(path)
        except AttributeError:
            raise ScheduleError(
                f"stage {self.index}: tied[{name!r}] was {path}, which its module has no more; make the stage anew"
            ) from None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module's."""
        return iter(()) if self.module is None else self.module.parameters()

    @property
    def device(self) -> torch.device | None:
        """Device of the stage's first parameter or buffer, None if it has none, or none yet: a meta device's."""
        if self.module is None:
            return None
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return None if first is None or first.device.type == "meta" else first.device


def check_made(module: nn.Module, what: str) -> None:
    """Every parameter and buffer has its shape.

    Raises:
        ScheduleError: a lazy layer has not run yet.
    """
    for name, value in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(value):
            raise ScheduleError(
                f"{what}: {name} gets its shape in its first forward (a lazy layer); run the model once on a batch "
                "before it is used here"
            )


def _tied(index: int, tied: Mapping[str, Tensor] | None, module: nn.Module | None) -> dict[str, str]:
    """Where in the module each tied parameter is."""
    if tied is None:
        return {}
    if not isinstance(tied, Mapping):
        raise ScheduleError(f"stage {index}: tied is a {type(tied).__name__}; it maps names to the stage's parameters")
    if module is not None and tied:
        check_made(module, f"stage {index}")
    own = {} if module is None else {id(p): path for path, p in module.named_parameters()}
    found: dict[str, str] = {}
    for name, parameter in tied.items():
        if not isinstance(name, str) or id(parameter) not in own:
            raise ScheduleError(f"stage {index}: tied[{name!r}] is no parameter of its module, under a name in text")
        found[name] = own[id(parameter)]
    return found


class _NothingAround:
    early_stop = True

    def __init__(self, _: Mapping[str, Any]) -> None:
        pass

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), nullcontext()

    def made(self, outputs: Any) -> Any:
        return outputs


def _pass_on(*arguments: Tensor, **_: Any) -> Tensor | tuple[Tensor, ...]:
    """The empty stage."""
    return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], Tensor) else arguments
