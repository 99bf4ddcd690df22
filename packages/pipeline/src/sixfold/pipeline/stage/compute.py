"""One stage while a program runs: what waits for it and what it holds.

    inbox --> F, B, I, W, RECOMPUTE, STEP of one slot (this file) --> outbox

No rank, no group, no schedule: ``wiring`` says which of these a microbatch needs and where the results go. A slot is a
microbatch's place in every list here. An entry is dropped as soon as it was used, so what is alive is what
``simulate`` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.microbatches.cut_batch import Values, as_tuple, check_travels
from sixfold.pipeline.stage.output_memory import ONE, owns_memory, with_own_memory
from sixfold.pipeline.stage.random_state import RandomState
from sixfold.pipeline.stage.side_effects import SideEffects, StateBefore, part_of
from sixfold.pipeline.stage.stage import GivenTensors, Stage

if TYPE_CHECKING:
    pass

__all__ = ["OutputTaker", "StageRun", "Tensors", "ToNextStage", "WeightGradients", "WholeBackward", "leaves"]

Tensors = tuple[Tensor, ...]
Roots = tuple[GradientEdge, ...]
_uses: Callable[[int], int] = torch._C._storage_Use_Count
_PYTHON_NODE = torch._C._FunctionBase
_gradient_edge: Callable[[tuple[object, ...]], GradientEdge] = partial(tuple.__new__, GradientEdge)
_NO_MORE = (None,) * (len(GradientEdge._fields) - 2)  # what holds a graph that its node does not hold
_STRIDED = torch.strided
_ALONE = 2  # the tensor, and the object that is asked
_engine: Callable[..., object] = torch.autograd.Variable._execution_engine.run_backward


class WeightGradients(Protocol):
    """The weight gradients that I leaves to W."""

    def forward(self, k: int, call: Callable[..., Any], inputs: Values, kwargs: Mapping[str, Any]) -> Any:
        """What ``call`` returns; layers of the stage put their weight gradients under slot ``k``."""

    def backward(self, k: int, roots: Roots, gradients: Tensors) -> object:
        """I of slot ``k``, in which forwards may run again."""

    def backward_weight(self, k: int) -> object:
        """W: make what is there under slot ``k``, and accumulate it."""

    def drop(self) -> object:
        """Forget everything."""


class WholeBackward:
    """No store: I makes the gradients of weights too, and W finds nothing."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def forward(self, k: int, call: Callable[..., Any], inputs: Values, kwargs: Mapping[str, Any]) -> Any:
        """What ``call`` returns."""
        return call(*inputs, **kwargs)

    def backward(self, k: int, roots: Roots, gradients: Tensors) -> None:
        """All of it."""
        run_backward(roots, gradients)

    def backward_weight(self, k: int) -> None:
        """Nothing is left."""

    def drop(self) -> None:
        """Nothing is held."""


class OutputTaker(Protocol):
    """What becomes of a stage's output."""

    def full(self, k: int, outputs: Any) -> None:
        """Hand it on, and keep where its backward begins."""

    def light(self, k: int, outputs: Any) -> None:
        """Hand it on; no backward begins here."""

    def again(self, k: int, outputs: Any) -> None:
        """It was handed on before; keep where its backward begins."""


class StageRun:
    """Runs one stage, slot by slot.

    Attributes:
        calls: per slot what F runs: the stage's call, or that of another version of its weights.
        inbox: per slot the inputs.
        gradients: per slot the gradients of those outputs that want one.
        outbox, gradient_outbox: what the next and the previous rank are to get.
        end, hand_back: where outputs and the gradients of inputs go; ``wiring`` sets them.
    """

    end: OutputTaker
    hand_back: Callable[[int, Values], None]

    def __init__(self, stage: Stage, slots: int, store: WeightGradients) -> None:
        self.stage = stage
        self.index = stage.index
        self.store = store
        self.slots = slots
        self.effects = SideEffects(stage)  # of forwards that are run again
        self.calls: list[Callable[..., Any]] = [stage.called(self.effects.around)] * slots
        self.clear()

    def clear(self) -> None:
        """Empty every slot."""
        slots = self.slots
        self.kwargs: list[Mapping[str, Any]] = [{}] * slots
        self.inbox: list[Any] = [None] * slots
        self.gradients: list[Any] = [None] * slots
        self.outbox: list[Values | None] = [None] * slots
        self.gradient_outbox: list[Tensors | None] = [None] * slots
        self._inputs: list[Any] = [None] * slots
        self._roots: list[Roots] = [()] * slots
        self._random: list[RandomState | None] = [None] * slots
        self._began: list[RandomState | None] = [None] * slots
        self._before: list[StateBefore | None] = [None] * slots
        self._parts: list[list[Tensor] | None] = [None] * slots
        self.effects.new_step()
        self.store.drop()

    # ---- messages

    def arrive(self, wait: Callable[[], Values], k: int) -> None:
        """The inputs of slot ``k`` are there behind this."""
        self.inbox[k] = wait()

    def arrive_gradients(self, wait: Callable[[], Values], k: int) -> None:
        """The gradients of the outputs of slot ``k`` are there behind this."""
        if self.gradients[k] is None:  # else they were waited for before, for a state
            self.gradients[k] = wait()

    def send(self, sender: Callable[[Values], None], k: int) -> None:
        """SEND_F: its outputs leave."""
        outputs, self.outbox[k] = self.outbox[k], None
        assert outputs is not None, f"stage {self.index}: slot {k} has nothing to send"
        sender(outputs)

    def send_gradients(self, sender: Callable[[Values], None], k: int) -> None:
        """SEND_B: the gradients of its inputs leave."""
        gradients, self.gradient_outbox[k] = self.gradient_outbox[k], None
        assert gradients is not None, f"stage {self.index}: slot {k} has no gradients to send"
        sender(gradients)

    def graph(self, k: int) -> list[Any]:
        """The nodes of autograd's that the backward of slot ``k`` begins at."""
        return [edge.node for edge in self._roots[k]]

    def taken(self, k: int) -> object:
        """What the next F or backward of slot ``k`` takes from outside of the stage."""
        return self.inbox[k], self.gradients[k], self._inputs[k]

    # ---- forwards

    def noting(self, forward: Callable[[int], object]) -> Callable[[int], None]:
        """``forward``, with the random numbers noted that it begins with, so that ``run_again`` can repeat it."""

        def run(k: int) -> None:
            self._began[k] = RandomState(self.stage.device)
            forward(k)

        return run

    def held(self, k: int) -> Held:
        """What slot ``k`` has between its forward and its backward."""
        return Held(self._inputs[k], self.gradients[k], self._began[k], bool(self._roots[k]))

    def run_again(self, k: int, inputs: Values, began: RandomState, graph: bool) -> Any:
        """The forward of slot ``k`` as it was; its backward begins at it if it has a ``graph``, else a RECOMPUTE does.

        Returns:
            its outputs.
        """
        self._inputs[k], self._began[k] = inputs, began
        if not graph:
            self._random[k] = began
        with began.restored():
            outputs = self.calls[k](*inputs, **self.kwargs[k])
            if graph:
                self.end.again(k, outputs)
        return outputs

    def release(self, k: int) -> None:
        """Slot ``k`` is not in flight any more."""
        self.kwargs[k] = {}
        self._began[k] = self._random[k] = None
        self.effects.new_step()

    def predict(self, k: int) -> None:
        """F without a backward."""
        inputs = self.inbox[k]
        self.inbox[k] = None
        self.end.light(k, self.calls[k](*inputs, **self.kwargs[k]))

    def forward(self, k: int) -> None:
        """F whose backward is B."""
        self._inputs[k] = inputs = self.inbox[k]
        self.inbox[k] = None
        self.end.full(k, self.calls[k](*inputs, **self.kwargs[k]))

    def forward_deferring(self, k: int) -> None:
        """F whose backward is I and W."""
        self._inputs[k] = inputs = self.inbox[k]
        self.inbox[k] = None
        self.end.full(k, self.store.forward(k, self.calls[k], inputs, self.kwargs[k]))

    def forward_again_later(self, k: int) -> None:
        """F that RECOMPUTE repeats: only its inputs and the state of the random numbers are held.

        [Note: dropped graph] It runs with gradients switched on and a graph whose saved tensors are dropped, not
        under ``no_grad``: modules take other kernels there, with other bits, and its outputs tell which of them
        want a gradient.
        """
        self._inputs[k] = inputs = self.inbox[k]
        self.inbox[k] = None
        self._random[k] = RandomState(self.stage.device)
        kwargs = self.kwargs[k]
        given = GivenTensors(inputs, kwargs)
        with self.effects.noted(kwargs) as self._before[k], saved_tensors_hooks(_dropped, _missing):
            self.end.light(k, self._with_part(k, self.calls[k](*inputs, **kwargs)))
        given.check(self.index, "RECOMPUTE")

    def recompute(self, k: int) -> None:
        """RECOMPUTE whose backward is B."""
        with self._as_before(k):
            self.end.again(k, self._compared(k, self.calls[k](*self._inputs[k], **self.kwargs[k])))

    def recompute_deferring(self, k: int) -> None:
        """RECOMPUTE whose backward is I and W."""
        with self._as_before(k):
            made = self.store.forward(k, self.calls[k], self._inputs[k], self.kwargs[k])
            self.end.again(k, self._compared(k, made))

    # ---- backwards

    def backward(self, k: int) -> None:
        """B: gradients of the stage's parameters are accumulated, those of its inputs handed on."""
        gradients, roots = self.gradients[k], self._roots[k]
        self.gradients[k] = None
        self._roots[k] = ()
        if roots:
            _engine(roots, gradients, False, False, (), True, True)  # as run_backward
        inputs = self._inputs[k]
        self._inputs[k] = None
        self.hand_back(k, inputs)

    def backward_input(self, k: int) -> None:
        """I: gradients of the inputs are handed on; those of weights that can wait go to the store."""
        gradients, roots = self.gradients[k], self._roots[k]
        self.gradients[k] = None
        self._roots[k] = ()
        if roots:
            self.store.backward(k, roots, gradients)
        inputs = self._inputs[k]
        self._inputs[k] = None
        self.hand_back(k, inputs)

    def step(self) -> None:
        """STEP: the stage's optimizer steps, and the gradients of its parameters are dropped."""
        if (optimizer := self.stage.optimizer) is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    # ---- results

    def keep_roots(self, k: int, outputs: Values) -> None:
        """Backward of slot ``k`` starts at these; only their graph is kept, they are free once they were sent."""
        self._roots[k] = tuple([_edge_of(t) for t in outputs if isinstance(t, Tensor) and t.requires_grad])

    def keep_root(self, k: int, loss: Tensor, gradient: Tensor) -> None:
        """Backward of slot ``k`` starts at this scalar, with this gradient."""
        self._roots[k] = (_edge_of(loss),)
        self.gradients[k] = (gradient,)

    def to_outbox(self, k: int, outputs: Values) -> None:
        """Outputs are kept for a SEND_F."""
        self.outbox[k] = outputs

    def to_inbox(self, k: int, outputs: Values) -> None:
        """These are the inputs, made by a stage of this rank; here they begin a graph of their own."""
        self.inbox[k] = leaves(outputs)

    def to_gradient_outbox(self, k: int, inputs: Values) -> None:
        """Gradients of the inputs are kept for a SEND_B."""
        self.gradient_outbox[k] = gradients_of(inputs)

    def to_gradients_of(self, previous: StageRun) -> Callable[[int, Values], None]:
        """Gradients of the inputs go to a stage of this rank."""

        def hand_back(k: int, inputs: Values) -> None:
            previous.gradients[k] = gradients_of(inputs)

        return hand_back

    def _with_part(self, k: int, outputs: Any) -> Any:
        self._parts[k] = part_of(outputs)
        return outputs

    def _compared(self, k: int, outputs: Any) -> Any:
        """``outputs``, which are those of the first forward."""
        first, self._parts[k] = self._parts[k], None
        if first is not None:  # else a state was loaded since
            self.effects.compare("output", first, part_of(outputs))
        return outputs

    @contextmanager
    def _as_before(self, k: int) -> Iterator[None]:
        random, self._random[k] = self._random[k], None
        before, self._before[k] = self._before[k], None
        assert random is not None, f"stage {self.index}: RECOMPUTE of slot {k} without its F"
        with random.restored(), self.effects.repeated(before or StateBefore()):
            yield


class ToNextStage:
    """The end of a stage that is not the last: its outputs go to the next one, in memory of their own.

    [Note: memory that changes hands] in ``output_memory.py``.
    """

    def __init__(self, run: StageRun, hand_on: Callable[[int, Values], None]) -> None:
        self._hand_on, self._run = hand_on, run
        self._keep_roots = run.keep_roots
        self._what = f"the output of stage {run.index}"

    def full(self, k: int, outputs: Any) -> None:
        """Hand on, and keep the roots."""
        held = getrefcount(outputs) > ONE
        if (
            type(outputs) is Tensor
            and outputs.layout is _STRIDED
            and (node := outputs.grad_fn) is not None
            and not isinstance(node, _PYTHON_NODE)
        ):
            roots = self._run._roots  # what nearly every stage returns: keep_roots and _edge_of without their loops
            roots[k] = (_gradient_edge((node, outputs.output_nr, *_NO_MORE)),)
            self._hand_on(
                k, with_own_memory(outputs, held=True) if held or not owns_memory(outputs, node) else (outputs,)
            )
            return
        self._keep_roots(k, self._checked(outputs))
        self._hand_on(k, with_own_memory(outputs, held=held))

    def light(self, k: int, outputs: Any) -> None:
        """Hand on."""
        held = getrefcount(outputs) > ONE
        self._checked(outputs)
        self._hand_on(k, with_own_memory(outputs, held=held))

    def again(self, k: int, outputs: Any) -> None:
        """Keep the roots."""
        self._keep_roots(k, as_tuple(outputs, self._what))

    def _checked(self, outputs: Any) -> Values:
        values = as_tuple(outputs, self._what)
        check_travels(values, self._what)
        return values


class Held(NamedTuple):
    """What a slot has between its forward and its backward."""

    inputs: Values | None
    gradients: Tensors | None
    began: RandomState | None
    graph: bool


def run_backward(roots: Roots, gradients: Tensors) -> None:
    """What ``torch.autograd.backward`` calls, hooks and all; its own checks in Python take 25 us of each call."""
    _engine(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _edge_of(tensor: Tensor) -> GradientEdge:
    """``get_gradient_edge`` without its checks, a third of its time, where autograd's own node holds the graph."""
    node = tensor.grad_fn
    if node is None or isinstance(node, _PYTHON_NODE):
        return get_gradient_edge(tensor)
    return _gradient_edge((node, tensor.output_nr, *_NO_MORE))


def leaves(values: Values) -> Values:
    """``values`` without their history, still asking for gradients where they did."""
    return tuple(t.detach().requires_grad_() if isinstance(t, Tensor) and t.requires_grad else t for t in values)


def gradients_of(inputs: Values) -> Tensors:
    """Of those inputs that want one, taken from them: an input may live on, for its weight gradient."""
    if len(inputs) == 1 and type(leaf := inputs[0]) is Tensor and (gradient := leaf.grad) is not None:
        leaf.grad = None
        return (_alone(gradient),)
    found = []
    for leaf in inputs:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            # An input that the stage did not use has none, but the stage that made it waits for one.
            found.append(torch.zeros_like(leaf) if leaf.grad is None else _alone(leaf.grad))
            leaf.grad = None
    return tuple(found)


def _alone(gradient: Tensor) -> Tensor:
    """``gradient`` in memory of its own.

    Autograd lets two leaves take views of one tensor as their gradients: an input's may be a parameter's too, to which
    the next microbatch is added while this one is still on its way.
    """
    strided = type(gradient) is Tensor and gradient.layout is torch.strided
    if strided and _uses(gradient.untyped_storage()._cdata) > _ALONE:
        return gradient.clone()
    return gradient


def _dropped(_: Tensor) -> None:
    """Save nothing."""


def _missing(_: None) -> Tensor:
    raise ScheduleError(
        "the forward of a microbatch that is recomputed runs a backward of its own, for which nothing was kept; run a "
        "program without RECOMPUTE, and make the stage with Stage(checkpoint=True)"
    )
