"""What SEND and RECV do: messages of one program over the edges of one rank.

    outbox --> Outlet --> edge --> Inlet (this file) --> inbox

[Note: shapes] A receiver posts its buffer before the tensor exists, so it must
know the shape. Gradients have the shapes of the outputs that this rank made
itself. Outputs are agreed upon: the first SEND_F of a step on each edge is
preceded, on the control channel, by one number: which program and call the sender
runs, times two, plus a flag. 0: all is as in the step before. 1: each message of
this step on this edge is preceded by its header. The flag is 1 in the first step
of a program, when stage 0's inputs or the first output changed, when a flag 1
came in, and always with ``dynamic_shapes``. (A header sent only on change could
not be expected by the receiver.) A receive whose shape is not known yet waits in
the edge's queue, and so do those behind it; the action that uses its tensor
empties the queue.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.action import Action
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.stage_run import StageRun, Tensors, TensorSpec
from sixfold.pipeline.transport import Control, Incoming, Outgoing

__all__ = ["Agreement", "Inlet", "Outlet"]

_TAG = 1  # of flags and headers on the control channel
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class Agreement:
    """Whether the shapes of this step are those of the step before; see [Note: shapes].

    Attributes:
        call: number of the program and call, equal on ranks that run the same.
        open: whether messages have headers in this step.
    """

    def __init__(self, dynamic: bool, call: int) -> None:
        self._dynamic = dynamic
        self.call = call
        self._settled = False
        self._signature: object = None
        self.open = True

    def begin(self, signature: object) -> None:
        """A new step; ``signature`` describes stage 0's inputs where they are known."""
        self.open = self._dynamic or not self._settled or signature != self._signature
        self._signature = signature

    def settle(self) -> None:
        """The step went through: its shapes hold until further notice."""
        self._settled = True


class Outlet:
    """SEND_F and SEND_B on one directed edge."""

    def __init__(self, edge: Outgoing, control: Control, peer: int, agreement: Agreement) -> None:
        self._edge, self._control, self._peer, self._agreement = edge, control, peer, agreement
        self.begin()

    def begin(self) -> None:
        """A new step: the flag has not been sent."""
        self._headers: bool | None = None

    def send_forward(self, run: StageRun, k: int, action: Action) -> None:
        """SEND_F: what stage ``run`` made of microbatch ``k``."""
        outputs = run.outbox[k]
        run.outbox[k] = None
        assert outputs is not None, f"{action}: the outbox is empty"
        specs = tuple((t.shape, t.dtype, t.requires_grad) for t in outputs)
        if self._headers is None:
            self._announce(specs == run.output_specs[k], action)
        if self._headers:
            run.output_specs[k] = specs
            for numbers in _header(specs):
                self._control.send(numbers, self._peer, _TAG, action)
        elif specs != run.output_specs[k]:
            raise ScheduleError(
                f"stage {run.index} made {_words(specs)} of microbatch {k}, in the step before "
                f"{_words(run.output_specs[k] or ())}; make the runner with dynamic_shapes=True"
            )
        self._edge.send(outputs, action)

    def send_backward(self, run: StageRun, k: int, action: Action) -> None:
        """SEND_B: the gradients of the inputs of microbatch ``k``."""
        gradients = run.gradient_outbox[k]
        run.gradient_outbox[k] = None
        assert gradients is not None, f"{action}: the outbox is empty"
        self._edge.send(gradients, action)

    def _announce(self, same: bool, action: Action) -> None:
        self._agreement.open |= not same
        self._headers = self._agreement.open
        self._control.send(torch.tensor([2 * self._agreement.call + self._headers]), self._peer, _TAG, action)


class Inlet:
    """RECV_F and RECV_B on one directed edge.

    Args:
        announced: whether forward messages come this way, and so a flag in every step.
    """

    def __init__(self, edge: Incoming, control: Control, peer: int, agreement: Agreement, announced: bool) -> None:
        self._edge, self._control, self._peer, self._agreement = edge, control, peer, agreement
        self._announced = announced
        self.first: Action | None = None  # that a flag precedes, for reports
        self._queue: deque[Receipt] = deque()

    def begin(self) -> None:
        """A new step: ask for its flag."""
        self._headers: bool | None = None
        self._queue.clear()
        if self._announced:
            self._flag, self._flag_work = self._control.post(1, self._peer, _TAG, self.first)

    def post_forward(self, run: StageRun, k: int, action: Action) -> None:
        """RECV_F: the inputs of microbatch ``k``."""
        run.inbox[k] = receipt = Receipt(self, run, k, action, True)
        if self._headers is False:
            self._post(receipt)
        else:
            self._queue.append(receipt)

    def post_backward(self, run: StageRun, k: int, action: Action) -> None:
        """RECV_B: the gradients of the outputs of microbatch ``k``, whose shapes this rank knows."""
        run.gradients[k] = receipt = Receipt(self, run, k, action, False)
        if self._queue:
            self._queue.append(receipt)  # an edge keeps its order
        else:
            self._post(receipt)

    def complete(self, receipt: Receipt) -> Tensors:
        """The tensors of ``receipt``, waited for."""
        if receipt.works is None:
            self._post_queued(receipt)
        assert receipt.works is not None, f"{receipt.action}: it was not in the queue of its edge"
        for work in receipt.works:
            self._edge.wait(work, receipt.action)
        return receipt.buffers

    def _post_queued(self, wanted: Receipt) -> None:
        """Post what waits in the queue: all of it, or with headers up to ``wanted``, whose header must have come."""
        if self._headers is None:
            self._control.wait(self._flag_work, wanted.action)
            call, flag = divmod(int(self._flag.item()), 2)
            if call != self._agreement.call:
                raise ScheduleError(
                    f"rank {self._peer} runs another program in this step, or another call (step, evaluate, forward); "
                    "all ranks make the same calls"
                )
            self._headers = bool(flag)
            self._agreement.open |= self._headers
        while self._queue:
            receipt = self._queue.popleft()
            if self._headers and receipt.forward:
                receipt.run.input_specs[receipt.k] = self._read_header(receipt.action)
            self._post(receipt)
            if self._headers and receipt is wanted:
                return

    def _post(self, receipt: Receipt) -> None:
        run, k = receipt.run, receipt.k
        specs = run.input_specs[k] if receipt.forward else run.output_specs[k]
        assert specs is not None, f"{receipt.action}: posted without a shape"
        wanted = [spec for spec in specs if receipt.forward or spec[2]]
        receipt.buffers, receipt.works = self._edge.post(wanted, receipt.action)
        if receipt.forward:
            receipt.wants_gradient = [buffer for buffer, spec in zip(receipt.buffers, wanted, strict=True) if spec[2]]

    def _read_header(self, action: Action) -> tuple[TensorSpec, ...]:
        size, work = self._control.post(1, self._peer, _TAG, action)
        self._control.wait(work, action)
        numbers, work = self._control.post(int(size.item()), self._peer, _TAG, action)
        self._control.wait(work, action)
        return _specs(numbers.tolist())


class Receipt:
    """A message that was asked for; the action that uses its tensors waits."""

    __slots__ = ("action", "buffers", "forward", "inlet", "k", "run", "wants_gradient", "works")

    def __init__(self, inlet: Inlet, run: StageRun, k: int, action: Action, forward: bool) -> None:
        self.inlet, self.run, self.k, self.action, self.forward = inlet, run, k, action, forward
        self.buffers: Tensors = ()
        self.wants_gradient: list[Tensor] = []
        self.works: list[Any] | None = None

    def wait(self) -> Tensors:
        """The tensors: gradients, or inputs as leaves."""
        buffers = self.inlet.complete(self)
        for leaf in self.wants_gradient:
            leaf.requires_grad_()
        return buffers


def _header(specs: tuple[TensorSpec, ...]) -> tuple[Tensor, Tensor]:
    """Length and numbers: per tensor dtype code, whether it wants a gradient, dimensions, sizes."""
    numbers: list[int] = []
    for shape, dtype, wants_gradient in specs:
        if dtype not in _DTYPES:
            raise ScheduleError(f"{dtype} does not travel between stages; known are {', '.join(map(str, _DTYPES))}")
        numbers += (_DTYPES.index(dtype), int(wants_gradient), len(shape), *shape)
    return torch.tensor([len(numbers)]), torch.tensor(numbers, dtype=torch.int64)


def _specs(numbers: list[int]) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    at = 0
    while at < len(numbers):
        dtype, wants_gradient, dimensions = numbers[at : at + 3]
        at += 3 + dimensions
        specs.append((torch.Size(numbers[at - dimensions : at]), _DTYPES[dtype], bool(wants_gradient)))
    return tuple(specs)


def _words(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{dtype} {tuple(shape)}" for shape, dtype, _ in specs) or "nothing"
