"""F, I and W of one slot as CUDA graphs: the host starts three graphs where it started every kernel.

    F: inputs copied in, a replay, outputs copied out (this file) --> a node of autograd --> I: a replay --> W: a replay

A slot's first steps run as always, which warms up what must not be captured. Then its three graphs are captured, once
for each set of shapes, and from there on replayed. Messages, the loss, additions into ``.grad`` and optimizers stay
outside. What a graph makes lies where the next replay writes, so all that leaves it is copied or added.

[Note: one pool for a slot] Graphs that share memory must be replayed in the order in which they were captured. F, I and
W of a slot are; two slots are not. So each slot has its own, and holds its activations for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules.module import _has_any_global_hook

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Kind
from sixfold.pipeline.program.program import Program, Weights

if TYPE_CHECKING:
    from sixfold.pipeline.split_backward.deferred import MicrobatchEntries
    from sixfold.pipeline.stage.stage import Stage

__all__ = ["CudaGraphCapture", "GraphCapture", "Graphed", "check_graphed", "graph_capture"]

_DEVICE = "cuda"
_of_all_modules: Callable[[], object] = _has_any_global_hook
_WARM_UPS = 3  # calls of a slot that run as ever
_CAPTURES = 3  # one after another of the same work; a capture takes longer than the work


class GraphCapture(Protocol):
    """Captures work of one slot."""

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        """``work``, captured; what is returned runs it again, on the memory that it used. Captures do not run it."""


class CudaGraphCapture:
    """CUDA graphs in a pool of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        """See GraphCapture. Other threads (NCCL's watchdog, ours) may ask their events while it lasts."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            work()
        return graph.replay


def graph_capture(device: torch.device) -> GraphCapture:
    """Of a slot of a stage on ``device``."""
    return CudaGraphCapture(device)


class Graphed:
    """What F of one slot calls in place of the stage's module.

    Args:
        opened: the slot of the stage's store that is open now; None where no gradient of a weight waits.
    """

    def __init__(self, stage: Stage, opened: Callable[[], MicrobatchEntries | None]) -> None:
        self._stage, self._opened = stage, opened
        self._calls = 0
        self._key: _Key | None = None
        self._captures = 0  # in a row
        assert stage.device is not None, "Stage looks for it"
        self._leaf = torch.empty(0, device=stage.device, requires_grad=True)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's outputs."""
        index = self._stage.index
        if kwargs:
            raise ScheduleError(f"stage {index} has cuda_graphs, which take no keyword arguments; step without kwargs")
        for value in inputs:
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise ScheduleError(f"stage {index} has cuda_graphs and an input that is a {kind}; graphs take tensors")
        self._calls += 1
        if self._calls <= _WARM_UPS:
            return self._stage.call(*inputs)
        check_hooks(self._stage)
        key = _key_of(inputs, self._stage)
        if key != self._key:
            self._refuse_moving(key)
            self._capture(inputs)
            self._key = key
        else:
            self._captures = 0
        with torch.no_grad():
            for static, value in zip(self._inputs, inputs, strict=True):
                static.copy_(value)
        self._play_forward()
        outputs = _Replay.apply(self, self._leaf, *inputs, *self._now)  # type: ignore[no-untyped-call]
        return outputs[0] if self._single else outputs

    # ---- capture

    def _refuse_moving(self, key: _Key) -> None:
        """Raise where what was captured is of no use in call after call: a tensor lies elsewhere in each."""
        before = self._key
        if before is None or (before.inputs, before.modes) != (key.inputs, key.modes):
            self._captures = 0
            return
        self._captures += 1
        if self._captures <= _CAPTURES:
            return
        moved = next((name for name, lies in key.lie.items() if before.lie.get(name) != lies), "one of its tensors")
        raise ScheduleError(
            f"stage {self._stage.index} has cuda_graphs, which keep the addresses of tensors, but {moved} has another "
            "address in each call; change it in place (copy_), or make the stage without cuda_graphs"
        )

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        """Record F, I and W; parameters and their gradients are as they were behind it."""
        device = self._stage.device
        assert device is not None, "Stage looks for it"
        record = graph_capture(device).record
        parameters = [p for p in self._stage.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        self._inputs = tuple([v.detach().clone().requires_grad_(v.requires_grad) for v in inputs])
        try:
            self._play_forward = record(self._forward)
            self._arriving = [torch.empty_like(output) for output in self._roots]
            self._play_backward = record(lambda: self._backward(parameters))
            self._play_weights = record(self._weigh)
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _forward(self) -> None:
        outputs = self._stage.call(*self._inputs)
        self._single = isinstance(outputs, Tensor)
        self.outputs: tuple[Tensor, ...] = (outputs,) if self._single else tuple(outputs)
        if not all(isinstance(output, Tensor) for output in self.outputs):
            raise ScheduleError(f"stage {self._stage.index} has cuda_graphs and an output that is no tensor")
        self._roots = [output for output in self.outputs if output.requires_grad]

    def _backward(self, parameters: list[Any]) -> None:
        """I, or a whole B: gradients lie where autograd put them."""
        for one in (*self._inputs, *parameters):
            one.grad = None
        slot = self._opened()
        entries = [] if slot is None else slot.entries
        before = len(entries)
        if self._roots:
            torch.autograd.backward(self._roots, self._arriving)
        self._entries = entries[before:]
        if slot is not None and len({slot.passes.pop(at, None) for at in range(before, len(entries))}) > 1:
            raise ScheduleError(
                f"stage {self._stage.index} has cuda_graphs and runs a backward of its own; make it without cuda_graphs"
            )
        del entries[before:]
        self._of_inputs = [value.grad for value in self._inputs]
        self._now = [p for p in parameters if p.grad is not None]  # those that do not wait for W
        self._of_now = [p.grad for p in self._now]

    def _weigh(self) -> None:
        """W: sums for each parameter, in the order of I."""
        sums: dict[int, Tensor] = {}
        targets: dict[int, Any] = {}
        with torch.no_grad():
            for make, wanted, saved, arrived in self._entries:
                for target, gradient in zip(wanted, make(saved, arrived, wanted), strict=True):
                    if target is not None and gradient is not None:
                        key = id(target)
                        sums[key] = sums[key] + gradient if key in sums else gradient
                        targets[key] = target
        self.later, self._of_later = tuple(targets.values()), list(sums.values())

    # ---- replay

    def backward(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """I: gradients of the inputs, in memory of their own, and of the parameters that do not wait."""
        arrived = [g for g, output in zip(gradients, self.outputs, strict=True) if output.requires_grad]
        for static, gradient in zip(self._arriving, arrived, strict=True):
            static.zero_() if gradient is None else static.copy_(gradient)
        self._play_backward()
        slot = self._opened()
        if self.later and slot is not None:
            slot.entries.append((_weights, self.later, self, self._of_later[0]))
        of_inputs = [None if g is None else g.clone() for g in self._of_inputs]
        return [*of_inputs, *[g.clone() for g in self._of_now if g is not None]]

    def weights(self) -> list[Tensor]:
        """W's."""
        self._play_weights()
        return [gradient.clone() for gradient in self._of_later]


def _weights(graphed: Graphed, arrived: Tensor, wanted: Any) -> list[Tensor]:
    return graphed.weights()


class _Replay(Function):
    """The node of a slot in its microbatch's graph; parameters that do not wait get their gradients through it."""

    @staticmethod
    def forward(ctx: Any, graphed: Graphed, leaf: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphed = graphed
        ctx.set_materialize_grads(False)
        made = tuple([output.detach().clone() for output in graphed.outputs])
        ctx.mark_non_differentiable(*[m for m, o in zip(made, graphed.outputs, strict=True) if not o.requires_grad])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, *ctx.graphed.backward(gradients)


class _Key(NamedTuple):
    """What was captured is good for this alone: shapes, the modes and what is frozen, where tensors lie."""

    inputs: list[object]
    modes: list[bool]
    lie: dict[str, int]


def _key_of(inputs: tuple[Tensor, ...], stage: Stage) -> _Key:
    module = stage.module
    assert module is not None, "Stage looks for it"
    lie = {name: one.data_ptr() for name, one in chain(module.named_parameters(), module.named_buffers())}
    modes = [*(part.training for part in module.modules()), *(p.requires_grad for p in module.parameters())]
    return _Key([(v.shape, v.stride(), v.dtype, v.requires_grad) for v in inputs], modes, lie)


# ---- refusals


def check_hooks(stage: Stage) -> None:
    """Python that a replay would leave out.

    Raises:
        ScheduleError: a module or parameter has a hook.
    """
    module = stage.module
    assert module is not None, "Stage looks for it"
    hooked = ["every module of the process"] if _of_all_modules() else []
    hooked += [
        name or "its module"
        for name, part in module.named_modules()
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    ]
    hooked += [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise ScheduleError(f"stage {stage.index} has cuda_graphs, which run no hooks, and {hooked[0]} has one")


def check_graphed(program: Program, stages: Mapping[int, Stage], options: Mapping[str, Any]) -> None:
    """The program and the runner leave alone what graphs hold.

    Raises:
        ScheduleError: they do not, and which option is against which.
    """
    for index, stage in stages.items():
        if not stage.cuda_graphs:
            continue
        what = f"stage {index} has cuda_graphs, which hold "
        if stage.device is None or stage.device.type != _DEVICE:
            raise ScheduleError(f"{what}work of a CUDA device; its module is on {stage.device}")
        if options["dynamic_shapes"]:
            raise ScheduleError(f"{what}one set of shapes; make the runner with dynamic_shapes=False")
        if options["overlap"] == "streams":
            raise ScheduleError(f"{what}the work of one stream; make the runner with overlap='order'")
        if program.weights is not Weights.FLUSHED:
            raise ScheduleError(f"{what}one version of the weights; the program's are {program.weights}")
        if any(a.kind is Kind.RECOMPUTE and a.stage == index for _, _, e in program.entries() for a in e.each()):
            raise ScheduleError(f"{what}activations for good; the program recomputes them, give one without RECOMPUTE")
