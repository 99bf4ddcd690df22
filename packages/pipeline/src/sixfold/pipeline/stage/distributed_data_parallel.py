"""A stage that was given as a DistributedDataParallel.

    DistributedDataParallel --> its module and its Replicas (this file) --> Stage

DDP's reducer counts on one forward and one backward per iteration, and sees neither a W nor the backwards of other
microbatches. The runner therefore runs the module inside of it, and the reducer does nothing. The gradients are
averaged here: over DDP's own process group, once, at the program's REDUCE_GRAD.

Divided and then added, as DDP does, in flat buckets of DDP's size. Waits: the all-reduce of a bucket, or of the
count of tokens, and the broadcast of the buffers, each with ``timeout_s`` as its deadline, or that of the group.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sixfold.pipeline.errors import PipelineTimeout, ScheduleError

__all__ = ["Parts", "Replicas", "check_reducers", "replicas"]

_CALLED = ("__call__", "forward", "_run_ddp_forward", "_pre_forward", "_post_forward")  # what calling a DDP runs
_SPARSE = (nn.Embedding, nn.EmbeddingBag)
_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


def replicas(ddp: DistributedDataParallel, index: int) -> Replicas:
    """What drives ``ddp`` as stage ``index``."""
    made = Replicas(ddp, index)
    return ReplicasWithBuffers(ddp, index) if made.buffers else made


class Replicas:
    """The ``data_parallel`` object of a stage that several ranks hold a replica of.

    Args:
        ddp: over the replicas of one stage, one per pipeline. Within its ``no_sync()`` a step reduces nothing.
        index: of the stage.
    Attributes:
        group: DDP's process group.
        timeout_s: deadline of every wait; None: that of the process group.
    Raises:
        ScheduleError: see ``check``.
    """

    def __init__(self, ddp: DistributedDataParallel, index: int) -> None:
        self.timeout_s: float | None = None
        self._index = index
        self._ddp = ddp
        self._module: nn.Module = ddp.module
        self.group: dist.ProcessGroup = ddp.process_group
        self._ignored = set(ddp.parameters_to_ignore)
        self._step_begins = True
        self._inside = Parts(self._module)
        self.check()

    def check(self) -> None:
        """The stage's gradients and outputs are those of the DDP: looked at when the stage is made and in each step.

        Raises:
            ScheduleError: the DDP reduces in a way of its own: communication hooks, mixed precision, sparse gradients,
                optimizers that step in the backward, parameters it reduces apart. Or something lies on the DDP itself,
                and the module inside would run without it: hooks, a forward, a compiled call. Or it has another module.
        """
        what = f"stage {self._index} is a {type(self._ddp).__name__}"
        if self._ddp.module is not self._module:
            raise ScheduleError(
                f"{what} whose module was replaced, and its stage would run the one it was made with; make the stage "
                "and a new runner on all ranks"
            )
        if (why := _on_the_wrapper(self._ddp)) is not None:
            raise ScheduleError(
                f"{what} with {why} of its own, which does not run: a pipeline runs the module inside; put it on that "
                "module"
            )
        if self._inside.changed():
            self._inside.keep()
        if (why := _way_of_its_own(self._ddp, self._inside.modules)) is not None:
            raise ScheduleError(
                f"{what} with {why}, which a pipeline does not run; give the stage the module inside it, and give the "
                "object that reduces its gradients as data_parallel"
            )

    @property
    def buffers(self) -> list[Tensor]:
        """Those that all replicas get from the first, as the module has them now."""
        if not self._ddp.broadcast_buffers:
            return []
        return [buffer for name, buffer in self._module.named_buffers() if name not in self._ignored]

    def _trained(self) -> list[nn.Parameter]:
        """As the module has them now: ``load_state_dict(assign=True)`` and a new head put others in their places."""
        named = self._module.named_parameters()
        return [p for name, p in named if p.requires_grad and name not in self._ignored][::-1]

    def unshard(self) -> None:
        """Replicas are whole."""

    def reshard(self) -> None:
        """Replicas are whole."""

    def before_last_backward(self) -> None:
        """Nothing overlaps with the last backward."""

    def reduce_grad(self) -> None:
        """Average the gradients over all replicas; a parameter that none of them used has none."""
        self._step_begins = True
        ranks = self.group.size()
        if not self._ddp.require_backward_grad_sync or ranks == 1:
            return
        buckets = list(_buckets(self._trained(), int(self._ddp.bucket_bytes_cap)))
        flats = [self._flattened(bucket, 1.0 / ranks) for bucket in buckets]
        works = [dist.all_reduce(flat, group=self.group, async_op=True) for flat in flats]
        for bucket, flat, work in zip(buckets, flats, works, strict=True):
            self._wait(work, "all-reduce its gradients")
            _put_back(bucket, flat)

    def check_synced(self, why: str) -> None:
        """A step whose gradients are used before the next one reduces them.

        Raises:
            ScheduleError: within ``no_sync()`` it does not; ``why`` says what uses them.
        """
        if not self._ddp.require_backward_grad_sync:
            raise ScheduleError(
                f"stage {self._index} is within no_sync(), and {why}; call step outside of no_sync(): gradients of "
                "several steps add up there too"
            )

    def mean(self, number: float) -> float:
        """Over all replicas, which call this together."""
        device = next((p.device for p in self._module.parameters()), torch.device("cpu"))
        total = torch.tensor(number, dtype=torch.float64, device=device)
        self._wait(dist.all_reduce(total, group=self.group, async_op=True), "add up their counts of tokens")
        return total.item() / self.group.size()

    def _flattened(self, bucket: Sequence[nn.Parameter], factor: float) -> Tensor:
        """The gradients of ``bucket`` times ``factor``, and behind them who has one.

        All replicas reduce the same numbers whatever each of them used.
        """
        used = [parameter.grad is not None for parameter in bucket]
        parts = []
        for parameter in bucket:
            if (gradient := parameter.grad) is None:
                gradient = torch.zeros_like(parameter)
            if gradient.layout is not torch.strided:
                raise ScheduleError(
                    f"stage {self._index}: a parameter has a {gradient.layout} gradient; replicas add dense ones"
                )
            parts.append(gradient.reshape(-1))
        parts.append(torch.tensor(used, dtype=parts[0].dtype, device=parts[0].device))
        return torch.cat(parts).mul_(factor)

    def _wait(self, work: Any, what: str) -> None:
        try:
            if self.timeout_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            members = dist.get_process_group_ranks(self.group)
            raise PipelineTimeout(
                f"stage {self._index} waited for its replicas on ranks {members} to {what}: {error}"
            ) from error


class ReplicasWithBuffers(Replicas):
    """Replicas that get their buffers from the first one, at the first forward of a step."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if self._step_begins:
            self._step_begins = False
            self._share()
        return self._module(*args, **kwargs)

    def _share(self) -> None:
        shared = self.buffers
        if not shared or self.group.size() == 1:
            return
        source = dist.get_global_rank(self.group, 0)
        by_type: dict[Any, list[Tensor]] = {}
        for buffer in shared:
            by_type.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        with torch.no_grad():
            for buffers in by_type.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                work = dist.broadcast(flat, source, group=self.group, async_op=True)
                self._wait(work, "share its buffers")
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))


def _buckets(parameters: Sequence[nn.Parameter], cap_bytes: int) -> Iterator[list[nn.Parameter]]:
    """In order, those of one type and device together, up to ``cap_bytes`` each (a larger one alone)."""
    open_: dict[Any, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        bucket, size = open_.get(key, ([], 0))
        if bucket and size + parameter.nbytes > cap_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        open_[key] = (bucket, size + parameter.nbytes)
    for bucket, _ in open_.values():
        yield bucket


def _put_back(bucket: Sequence[nn.Parameter], flat: Tensor) -> None:
    *parts, used = torch.split(flat, [*(parameter.numel() for parameter in bucket), len(bucket)])
    # Read from the device only where the answer is not known.
    known = all(parameter.grad is not None for parameter in bucket)
    for parameter, part, anybody in zip(bucket, parts, [1.0] * len(bucket) if known else used.tolist(), strict=True):
        if not anybody:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(part.view(parameter.shape))


class Parts:
    """The modules inside of one, compared without a walk in Python, which takes six times as long.

    Attributes:
        modules: all that were kept.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._top = () if module is None else (module,)
        self.modules: list[nn.Module] = []
        self._inside: list[nn.Module | None] = []  # children of each
        self._kinds: list[type] = []

    def changed(self) -> bool:
        """Whether they are others than were kept, or of other classes, as torch's ``replicate`` makes them."""
        if not self.modules:
            return bool(self._top)
        inside = [part for module in self.modules for part in module._modules.values()]
        return inside != self._inside or [*map(type, self.modules)] != self._kinds

    def keep(self) -> None:
        """Those of now are as they should be."""
        self.modules = [part for module in self._top for part in module.modules()]
        self._inside = [part for module in self.modules for part in module._modules.values()]
        self._kinds = [*map(type, self.modules)]


def check_reducers(module: nn.Module | None, index: int) -> None:
    """Nothing inside the module of stage ``index`` reduces gradients by itself. Raises ScheduleError."""
    composable = getattr(sys.modules.get("torch.distributed._composable.replicate"), "DDP", None)
    for part in module.modules() if module is not None else ():
        made = ", made by replicate()" if composable is not None and isinstance(part, composable) else ""
        if made or isinstance(part, DistributedDataParallel):
            raise ScheduleError(
                f"stage {index} holds a {type(part).__name__}{made}, which reduces in every backward or not at all; "
                "wrap the whole stage in a DistributedDataParallel, or give what reduces its gradients as data_parallel"
            )


def _on_the_wrapper(ddp: DistributedDataParallel) -> str | None:
    """What calling ``ddp`` does and calling its module does not, in words."""
    for held, what in _HOOKS.items():
        if getattr(ddp, held):
            return what
    for name in _CALLED:
        if name in vars(ddp) or getattr(type(ddp), name, None) is not getattr(DistributedDataParallel, name, None):
            return "a forward"
    return "a compile()" if ddp._compiled_call_impl is not None else None


def _way_of_its_own(ddp: DistributedDataParallel, inside: Sequence[nn.Module]) -> str | None:
    """What of ``ddp`` this file does not do, in words."""
    if ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"):  # type: ignore[no-untyped-call]
        return "a communication hook"
    if ddp.mixed_precision is not None:
        return "mixed_precision"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "delay_all_reduce_named_params"
    if getattr(ddp, "buffer_hook", None) is not None:
        return "a buffer hook"
    for part in inside:
        if isinstance(part, _SPARSE) and part.sparse:
            return f"sparse gradients ({_name_of(part, ddp.module.named_modules())})"
        for parameter in part._parameters.values():
            if parameter is not None and "_in_backward_optimizers" in parameter.__dict__:
                name = _name_of(parameter, ddp.module.named_parameters())
                return f"an optimizer that steps in the backward ({name})"
    return None


def _name_of(one: object, named: Iterable[tuple[str, object]]) -> str:
    return next(name for name, other in named if other is one)
