"""Arguments that users of torch.distributed.pipelining write: each is one error that names ours.

PipelineRunner, its step, Stage --> naming_ours (this file) --> ScheduleError, or the call as it is

``TorchSchedule`` is the door for code that keeps torch's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from sixfold.pipeline.errors import ScheduleError

__all__ = ["RUNNER", "STAGE", "STEP", "naming_ours", "refuse_others"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

_CHUNKS = "step cuts tensors by rows; give a list of microbatches where that is not the cut"
_GROUP = "give group"
_MOVED = "move the module before; leave it out"
_PROGRAM = "the program says how many: one_f_one_b(ranks, microbatches)"
_SHAPES = "shapes are found in the first step; leave it out"
RUNNER = {
    "args_chunk_spec": _CHUNKS,
    "backward_requires_autograd": "it is seen in the first step; leave it out",
    "chunks": _PROGRAM,
    "defer_pp_recv": "give lookahead, the number of receives that are asked for ahead",
    "device": _MOVED,
    "kwargs_chunk_spec": _CHUNKS,
    "loss": "give loss_fn",
    "microbatches": _PROGRAM,
    "n_microbatches": _PROGRAM,
    "num_microbatches": _PROGRAM,
    "output_merge_spec": "step(..., keep_outputs=True).outputs has each microbatch's",
    "pg": _GROUP,
    "process_group": _GROUP,
    "scale_grads": "give scale='mean' for True, 'sum' for False",
    "schedule": "give program, such as one_f_one_b(ranks, microbatches)",
    "stage": "give stages",
    "timeout": "give timeout_s, in seconds",
}
STAGE = {
    "device": _MOVED,
    "dw_builder": "a program with I and W splits the backward itself; leave it out",
    "get_mesh": "DTensors are not sent; leave it out",
    "group": "give it to PipelineRunner",
    "input_args": _SHAPES,
    "input_grads": _SHAPES,
    "num_stages": "the program says how many; leave it out",
    "output_args": _SHAPES,
    "output_grads": _SHAPES,
    "stage_index": "give index",
    "submodule": "give module",
}
STEP = {
    "losses": "step(...).losses has them",
    "loss_kwargs": "bind them to loss_fn by functools.partial",
    "return_outputs": "give keep_outputs",
    "target": "give targets",
}


def refuse_others(call: str, others: Mapping[str, object]) -> None:
    """Raises ScheduleError: ``step`` or ``evaluate`` was given ``others``. It adds no frame below their warnings."""
    for name in others:
        raise ScheduleError(f"{name} is no argument of PipelineRunner.{call}; {STEP.get(name, 'leave it out')}")


def naming_ours(
    arguments: Mapping[str, str], most: int | None = None
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator: an argument of ``arguments`` is a ScheduleError that says what to write.

    Args:
        most: of arguments without a name, the object itself included.
    """

    def decorate(call: Callable[Given, Result]) -> Callable[Given, Result]:
        where = call.__qualname__.removesuffix(".__init__")

        @wraps(call)
        def checked(*positional: Given.args, **given: Given.kwargs) -> Result:
            if most is not None and len(positional) > most:
                shown = ", ".join(repr(one)[:40] for one in positional[most:])
                raise ScheduleError(f"{where} is given {shown} without a name; it takes module and index so")
            for name in given:
                if name in arguments:
                    raise ScheduleError(f"{name} is no argument of {where}; {arguments[name]}")
            return call(*positional, **given)

        return checked

    return decorate
