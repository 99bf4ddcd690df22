"""Messages over edges that carry bare tensors: what is in them, and who says so.

    SEND --> Outlet --> tensors on an edge, header or flag on the control channel --> Inlet (this file) --> RECV

[Note: shapes] A receiver posts its buffer before the tensor exists, so it must know the shape. Gradients have the
shapes of the outputs that this rank sent itself. Outputs are agreed upon: the first SEND_F of a batch of each stage is
preceded, on the control channel, by one number: which program and call the sender runs, times two, plus a flag. 0: all
is as in the batch before. 1: each output of this batch of this stage is preceded by its header. The flag is 1
in the first batch of a program, and always with ``dynamic_shapes``. It is also 1 when stage 0's inputs or the first
output changed, or a flag 1 came in. (A header sent only on change could not be expected by the receiver.) Both ends
know where a batch begins by counting messages, so it may begin in the midst of a step. A receive whose shape is not
known yet waits in the edge's queue, and so do those behind it; the ``wait`` for it empties the queue. What is no
tensor (None, int, float, bool) is part of a shape: it travels in headers only, and a change of it is a change of
shape.

[Note: announced shapes] A flag is waited for by the host, once per batch and stage. With ``dynamic_shapes="announced"``
nothing is: shapes stay unless all ranks say before a step that they may change (``renew``), so both ends know which
messages have headers: those whose shape they do not know. The number is sent all the same, and asked for when a batch
begins. It is looked at when the next one begins or the runner checks, long after it came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.transport.routes import Route, route_of
from sixfold.pipeline.transport.shape_agreement import AgreedShapes, Slot
from sixfold.pipeline.transport.specs import Plain, Specs, TensorSpec, pack_specs, specs_of, unpack_specs

__all__ = ["FLAGS", "GroupLane", "TensorControl", "TensorIncoming", "TensorOutgoing", "other_call"]

Values = tuple[Any, ...]
FLAGS = 1  # tag of flags: one for all lanes, so that ranks in different calls notice it


class TensorOutgoing(Protocol):
    """The sending end of an edge for tensors; keeps each until it was sent."""

    def send(self, tensors: Sequence[Tensor], tag: int, action: Action) -> None:
        """Start to send; blocks only while the peer is far behind."""

    def received(self, tag: int) -> None:
        """The peer is known to have the last message of this tag."""


class TensorIncoming(Protocol):
    """The receiving end of an edge for tensors."""

    def post(self, specs: Sequence[TensorSpec], tag: int, action: Action) -> tuple[list[Tensor], list[Any]]:
        """Buffers of these shapes and dtypes, and a work for each; the data is there when that was waited for."""

    def wait(self, work: Any, action: Action) -> None:
        """Wait for a work of ``post``."""

    def forget(self, specs: Sequence[TensorSpec]) -> object:
        """No more messages of these shapes and dtypes come."""


class TensorControl(Protocol):
    """What headers and flags travel on."""

    def send_number(self, number: int, peer: int, tag: int, action: Action) -> None:
        """Start to send."""

    def receive_number(self, peer: int, tag: int, action: Action) -> int:
        """Wait for the next."""

    def ask_number(self, peer: int, tag: int, action: Action) -> Callable[[], int]:
        """Ask for the next; what is returned waits for it."""

    def send(self, data: bytes, peer: int, action: Action | None = None, tag: int = 0) -> None:
        """Start to send."""

    def receive(self, peer: int, action: Action | None = None, tag: int = 0) -> bytes:
        """Wait for the next."""


class GroupLane(AgreedShapes):
    """The messages of one compiled program; see Lane.

    Args:
        outgoing, incoming: edges by peer.
        tag: the first of this lane's, the same on all ranks; there is one for each message of a batch, so that no
            message is taken for one that was lost.
        number: of the program and call, equal on ranks that run the same.
        flush: starts what waits for its batch, where all edges are one communicator: a receive is then asked for where
            it stands, though the host must wait for its shape.
    """

    def __init__(
        self,
        placement: Sequence[int],
        microbatches: int,
        control: TensorControl,
        outgoing: dict[int, TensorOutgoing],
        incoming: dict[int, TensorIncoming],
        *,
        tag: int,
        number: int,
        dynamic_shapes: bool | Literal["announced"],
        flush: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(placement, microbatches, dynamic_shapes)
        self.control, self.number, self.flush = control, number, flush
        self._tag = tag
        self.received: dict[Slot, Specs] = {}
        self._receipts: dict[Route, Receipt] = {}
        self._outlets = {peer: Outlet(self, edge, peer) for peer, edge in outgoing.items()}
        self._inlets = {peer: Inlet(self, edge, peer, microbatches) for peer, edge in incoming.items()}

    def renew(self) -> None:
        """See Lane."""
        super().renew()
        self.received.clear()

    def settle(self) -> None:
        """Look at the numbers of batches that began: all ranks make the same calls.

        Raises:
            ScheduleError: a rank does not.
            PeerLost: a rank began no such batch before the deadline.
        """
        for inlet in self._inlets.values():
            inlet.settle()

    def tag_of(self, route: Route) -> int:
        """Of its tensors and its header."""
        return self._tag + (2 * route.stage + route.forward) * self._microbatches + route.slot

    def sender(self, action: Action) -> Callable[[Values], None]:
        """See Lane."""
        outlet, route = self._outlets[self._placement[action.peer_stage]], route_of(action, self._microbatches)
        return (
            partial(outlet.send_forward, (route.stage, route.slot), self.tag_of(route), action)
            if route.forward
            else partial(outlet.send_backward, self.tag_of(route), action)
        )

    def receiver(self, action: Action) -> Receipt:
        """See Lane; a message that one list asks for may be waited for by the next, so there is one receipt for it."""
        route = route_of(action, self._microbatches)
        if route not in self._receipts:
            peer = self._placement[action.peer_stage]
            receipt = Receipt(self._inlets[peer], route, self.tag_of(route), action)
            if (outlet := self._outlets.get(peer)) is not None:
                # Gradients are made of the output that was sent; an input is made in a slot whose gradients are used.
                receipt.acknowledges = (
                    partial(outlet.edge.received, self.tag_of(route._replace(forward=not route.forward))),
                )
            self._receipts[route] = receipt
        return self._receipts[route]

    def acknowledges(self, received: Action, sent: Action) -> None:
        """Where the message of ``received`` is there, its sender has that of ``sent``."""
        outlet, peer = self._outlets.get(self._placement[sent.peer_stage]), self._placement[received.peer_stage]
        if outlet is not None and peer in self._inlets:
            receipt = self.receiver(received)
            tag = self.tag_of(route_of(sent, self._microbatches))
            receipt.acknowledges = (*receipt.acknowledges, partial(outlet.edge.received, tag))

    def clear(self) -> None:
        """The links are ended instead."""


class Outlet:
    """SEND_F and SEND_B on one directed edge."""

    def __init__(self, lane: GroupLane, edge: TensorOutgoing, peer: int) -> None:
        self._lane, self.edge, self._peer = lane, edge, peer

    def send_forward(self, slot: Slot, tag: int, action: Action, values: Values) -> None:
        """An output."""
        lane = self._lane
        specs = specs_of(values)
        first, told = lane.outputs_of(slot[0]).look(slot, specs, action)
        if first:
            lane.control.send_number(2 * lane.number + told, self._peer, FLAGS, action)
        if told:
            lane.control.send(pack_specs(specs, action), self._peer, action, tag)
        self.edge.send([v for v in values if isinstance(v, Tensor)], tag, action)

    def send_backward(self, tag: int, action: Action, gradients: Values) -> None:
        """The gradients of what was received."""
        self.edge.send(gradients, tag, action)


class Inlet:
    """RECV_F and RECV_B on one directed edge; ``batch`` as in Outputs."""

    def __init__(self, lane: GroupLane, edge: TensorIncoming, peer: int, batch: int) -> None:
        self._lane, self._edge, self._peer, self._batch = lane, edge, peer, batch
        # By stage:
        self._asked: dict[int, int] = {}  # outputs of this batch that are still to be asked for
        self._headers: dict[int, bool] = {}  # of the batch whose flag was read last
        # The number of a batch, asked for and not looked at; whether the first message of that batch has a header.
        self._begun: dict[int, tuple[Callable[[], int], bool]] = {}
        self._queue: deque[tuple[Receipt, bool]] = deque()  # receipts that wait for a shape; whether a flag precedes

    def post(self, receipt: Receipt) -> None:
        """Ask for a message, or queue it until its shape is known; an edge keeps its order."""
        first, stage = False, receipt.route.stage
        if receipt.route.forward:
            if first := not (left := self._asked.get(stage, 0)):
                left = self._batch
            self._asked[stage] = left - 1
        if first and self._lane.announced:
            self._settle(stage)
            number = self._lane.control.ask_number(self._peer, FLAGS, receipt.action)
            self._begun[stage] = number, self._has_header(receipt)
            first = False
        if self._queue or first or self._has_header(receipt):
            self._queue.append((receipt, first))
            if self._lane.flush is not None:
                self._lane.flush()
                self._ask_for_next(receipt)
        else:
            self._ask(receipt)

    def complete(self, receipt: Receipt) -> list[Tensor]:
        """The tensors of ``receipt``, waited for."""
        while receipt.works is None:
            self._ask_for_next(receipt)
        while self._queue and not self._queue[0][1] and not self._has_header(self._queue[0][0]):
            self._ask(self._queue.popleft()[0])
        for work in receipt.works:
            self._edge.wait(work, receipt.action)
        if receipt.works:
            for prove in receipt.acknowledges:
                prove()
        return receipt.buffers

    def _ask_for_next(self, wanted: Receipt) -> None:
        """Ask for the first of the queue, once its flag and header have come."""
        assert self._queue, f"{wanted.action}: waited for and never asked for"
        receipt, first = self._queue.popleft()
        if first:
            self._read_flag(receipt.route.stage, wanted.action)
        if self._has_header(receipt):
            self._settle(receipt.route.stage)  # the host waits anyway, for what comes behind this number
            header = self._lane.control.receive(self._peer, wanted.action, receipt.tag)
            self._lane.received[receipt.slot] = unpack_specs(header)
        self._ask(receipt)

    def settle(self) -> None:
        """Look at the number of the batch that began last of each stage."""
        for stage in tuple(self._begun):
            self._settle(stage)

    def _settle(self, stage: int) -> None:
        begun, here = self._begun.pop(stage, (None, False))
        if begun is not None:
            number, there = divmod(begun(), 2)
            if number != self._lane.number:
                raise other_call(self._peer)
            if bool(there) != here:
                raise ScheduleError(
                    f"rank {self._peer} calls step {'with' if there else 'without'} new_shapes, this rank "
                    f"{'with' if here else 'without'}; all ranks make the same calls"
                )

    def _has_header(self, receipt: Receipt) -> bool:
        if not receipt.route.forward:
            return False
        if self._lane.announced:
            return receipt.slot not in self._lane.received
        return self._headers.get(receipt.route.stage, True)

    def _read_flag(self, stage: int, action: Action) -> None:
        call, flag = divmod(self._lane.control.receive_number(self._peer, FLAGS, action), 2)
        if call != self._lane.number:
            raise other_call(self._peer)
        self._headers[stage] = bool(flag)
        self._lane.open |= bool(flag)

    def _ask(self, receipt: Receipt) -> None:
        lane, forward = self._lane, receipt.route.forward
        specs = (lane.received if forward else lane.sent)[receipt.slot]
        wanted = [spec for spec in specs if isinstance(spec, tuple) and (forward or spec[2])]
        if receipt.wanted != wanted:
            self._edge.forget(receipt.wanted)
            receipt.wanted = wanted
        receipt.buffers, receipt.works = self._edge.post(wanted, receipt.tag, receipt.action)
        receipt.specs = specs


class Receipt:
    """A message that is asked for; its end is bound to one message and used once per batch."""

    __slots__ = ("_inlet", "acknowledges", "action", "buffers", "route", "slot", "specs", "tag", "wanted", "works")

    def __init__(self, inlet: Inlet, route: Route, tag: int, action: Action) -> None:
        self._inlet, self.route, self.tag, self.action = inlet, route, tag, action
        self.slot = (route.stage, route.slot)
        self.buffers: list[Tensor] = []
        self.specs: Specs = ()
        self.wanted: list[TensorSpec] = []  # the last time
        self.works: list[Any] | None = None
        self.acknowledges: tuple[
            Callable[[], None], ...
        ] = ()  # that the peer has what this message is made of, and more

    def post(self) -> None:
        """See transport.Receipt."""
        self._inlet.post(self)

    def wait(self) -> Values:
        """See transport.Receipt."""
        buffers, specs = self._inlet.complete(self), self.specs
        self.buffers, self.specs, self.works = [], (), None
        if not self.route.forward:
            return tuple(buffers)
        tensors = iter(buffers)
        return tuple([spec.value if isinstance(spec, Plain) else _leaf(next(tensors), spec[2]) for spec in specs])


def _leaf(tensor: Tensor, wants_gradient: bool) -> Tensor:
    return tensor.requires_grad_() if wants_gradient else tensor


def other_call(peer: int) -> ScheduleError:
    """A message came that belongs to nothing that runs here."""
    return ScheduleError(
        f"rank {peer} runs another program in this step, or another call (step, evaluate, forward); "
        "all ranks make the same calls"
    )
