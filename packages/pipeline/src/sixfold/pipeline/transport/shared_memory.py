"""Edges between two processes of one host: shared memory, and a socket as its doorbell.

    SEND: one copy into a block, one packet --> socket --> RECV: a tensor over the block (this file)

A packet says which message it is, what is in it and in which block; the receiver's
tensors lie in the block, which is free again when the last of them has died. The end of the socket tells a dead peer
at once. Memory is anonymous (memfd) and travels as a descriptor, so nothing has a name that could be left behind.

[Note: page] One page is shared besides. The receiver writes how many messages it has asked for: a SEND waits while
more than a window are sent and not asked for. Each block has a byte that says whether it is free. The sender sets it,
the receiver clears it. Neither needs a system call.

[Note: held] Memory of an edge is bounded: what the receiver's stage keeps beyond ``_HELD_BYTES`` it gets as a copy.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import select
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import cache, lru_cache
from struct import Struct
from typing import Any, TypeVar

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.failures.deadlines import PeerLost
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.transport.alarm import LOOK_S, Alarm
from sixfold.pipeline.transport.messages import other_call
from sixfold.pipeline.transport.routes import Route
from sixfold.pipeline.transport.specs import Plain, Specs, pack_specs, specs_of, unpack_specs

__all__ = ["SharedIncoming", "SharedOutgoing", "accept", "can_share", "connect", "listen"]

_Received = TypeVar("_Received")
_WINDOW = 8  # messages sent and not asked for, at least
_HELD_BYTES = 2**30  # of one edge, in tensors of its receiver
_FREE_BYTES = 2**28  # of blocks that lie free; more are given back
_ALIGN = 64
_PAGE_BYTES = 8192
_STATES = 64  # where the bytes of blocks begin in the page
_SPECS_KNOWN = 1024
_POLL_S = 0.0002
_PACKET_BYTES = 2**16
_FAILED = ctypes.c_void_p(-1).value

_MESSAGE = Struct(
    "<BQIBIiIB"
)  # kind, program, stage, forward, microbatch, block (-1: none), specs, whether they may change
_BLOCK = Struct("<BiQ")  # kind, block, bytes
_IS_MESSAGE, _IS_NEW_BLOCK, _IS_DROPPED_BLOCK = 1, 2, 3


class SharedOutgoing:
    """The sending end.

    Args:
        link: connected, of packets.
        rank: of the peer.
    """

    def __init__(self, link: socket.socket, rank: int, timeout_s: float, alarm: Alarm | None = None) -> None:
        self._socket, self._rank, self._timeout_s, self._alarm = link, rank, timeout_s, alarm
        descriptor = os.memfd_create("sixfold-page")
        os.ftruncate(descriptor, _PAGE_BYTES)
        self._page, self._asked = _Memory(descriptor, _PAGE_BYTES).page()
        socket.send_fds(link, [b"page"], [descriptor])
        os.close(descriptor)
        self._peer = _process_of(link)
        self._sent = 0
        self.window = _WINDOW  # messages; see routes.window_of
        self._blocks: dict[int, _Block] = {}
        self._known: dict[Specs, _Layout] = {}

    def send(
        self,
        number: int,
        route: Route,
        may_change: bool,
        values: tuple[Any, ...],
        action: Action,
        specs: Specs | None = None,
    ) -> None:
        """Copy a message, of these ``specs``, into shared memory and ring; blocks only while the peer is far behind."""
        specs, fresh = specs_of(values) if specs is None else specs, b""
        layout = self._known.get(specs)
        if layout is None:
            fresh = pack_specs(specs, action)
            layout = self._learn(specs)
        if self._sent - self._asked[0] >= self.window:
            self._wait_for_peer(action)
        try:
            block = self._free_block(layout.bytes, action) if layout.bytes else None
            if block is not None:
                self._page[_STATES + block.index] = 1
                tensors = [value for value in values if isinstance(value, Tensor)]
                for into, tensor in zip(block.views(layout), tensors, strict=True):
                    if into is not None:
                        into.copy_(tensor.detach())
            index = -1 if block is None else block.index
            head = _MESSAGE.pack(
                _IS_MESSAGE, number, route.stage, route.forward, route.slot, index, layout.id, may_change
            )
            self._socket.send(head + fresh)
        except OSError as error:
            raise PeerLost(action, self._rank) from error
        self._sent += 1

    def close(self) -> None:
        """Nothing more will come; what was sent can still be read."""
        _end(self._socket)

    def _learn(self, specs: Specs) -> _Layout:
        if len(self._known) >= _SPECS_KNOWN:
            self._known.clear()
            for block in self._blocks.values():
                block.forget()
        layout = self._known[specs] = _Layout(specs, len(self._known))
        return layout

    def _wait_for_peer(self, action: Action) -> None:
        now = time.monotonic()
        deadline, look = now + self._timeout_s, now + LOOK_S
        while self._sent - self._asked[0] >= self.window:
            now = time.monotonic()
            ended = False
            if now > look:
                look, ended = now + LOOK_S, _has_ended(self._peer)
            heard = self._alarm is not None and self._alarm.heard()
            if heard or ended or now > deadline or self._peer_has_left():
                raise PeerLost(action, self._rank)
            _stay(self._alarm)
            time.sleep(_POLL_S)

    def _peer_has_left(self) -> bool:
        try:
            return not self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _free_block(self, size: int, action: Action) -> _Block:
        """A free block of at least ``size`` bytes, and not of many times as many."""
        page, free = self._page, 0
        for block in self._blocks.values():
            if not page[_STATES + block.index]:
                if size <= block.size <= 2 * size + mmap.PAGESIZE:
                    self._blocks[block.index] = self._blocks.pop(block.index)  # the one that was used first comes first
                    return block
                free += block.size
        if free > _FREE_BYTES:
            for block in [block for block in self._blocks.values() if not page[_STATES + block.index]]:
                self._socket.send(_BLOCK.pack(_IS_DROPPED_BLOCK, block.index, 0))
                del self._blocks[block.index]
        index = next(index for index in range(len(self._blocks) + 1) if index not in self._blocks)
        if index >= _PAGE_BYTES - _STATES:
            raise ScheduleError(f"{action}: rank {self._rank} keeps {index} messages; edges='groups' has no limit")
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("sixfold-block")
        try:
            os.ftruncate(descriptor, size)
            block = self._blocks[index] = _Block(index, _Memory(descriptor, size))
            self._socket.send(_BLOCK.pack(_IS_NEW_BLOCK, index, size))
            socket.send_fds(self._socket, [b"block"], [descriptor])
        finally:
            os.close(descriptor)
        return block


class SharedIncoming:
    """The receiving end; arguments as of SharedOutgoing, and ``debug_memory``: blocks that nobody holds are filled."""

    def __init__(
        self,
        link: socket.socket,
        rank: int,
        timeout_s: float,
        alarm: Alarm | None = None,
        *,
        debug_memory: bool = False,
    ) -> None:
        self._debug_memory = debug_memory
        self._socket, self._rank, self._timeout_s, self._alarm = link, rank, timeout_s, alarm
        self._look_s = min(timeout_s, LOOK_S)
        _set_deadline(link, self._look_s)
        _, descriptors, _, _ = socket.recv_fds(link, 16, 1)
        if not descriptors:
            raise RuntimeError(f"rank {rank} left while it was connected to")
        self._page, self._asked = _Memory(descriptors[0], _PAGE_BYTES).page()
        os.close(descriptors[0])
        self._posted = 0
        self._blocks: dict[int, _Memory] = {}
        self._layouts: dict[int, _Layout] = {}
        self._early: dict[tuple[int, Route], deque[tuple[Any, ...]]] = {}
        self._packet = bytearray(_PACKET_BYTES)
        self._held = [0]  # bytes; leases take theirs off
        self._process, self._peer = os.getpid(), _process_of(link)
        self.may_change = False  # what the sender said with the last message

    def post(self) -> None:
        """One more message is asked for."""
        self._posted += 1
        self._asked[0] = self._posted

    def wait(self, number: int, route: Route, action: Action) -> tuple[Any, ...]:
        """The values of a message: tensors over its block."""
        early = self._early.get((number, route))
        if early:
            return early.popleft()
        while True:
            program, came, values = self._read(action)
            if program == number and came == route:
                return values
            if came.forward and program != number:
                raise other_call(self._rank)
            self._early.setdefault((program, came), deque()).append(values)

    def close(self) -> None:
        """Nothing more will be taken."""
        _end(self._socket)

    def _read(self, action: Action) -> tuple[int, Route, tuple[Any, ...]]:
        """The next message."""
        packet = self._packet
        while True:
            try:
                size = self._socket.recv_into(packet)
            except BlockingIOError:
                size = self._keep_waiting(action, lambda: self._socket.recv_into(packet))
            except OSError as error:  # the connection has broken
                raise PeerLost(action, self._rank) from error
            if size == 0:
                raise PeerLost(action, self._rank)
            if packet[0] == _IS_MESSAGE:
                break
            _, index, length = _BLOCK.unpack_from(packet)
            if packet[0] == _IS_NEW_BLOCK:
                descriptor = self._descriptor(action)
                self._blocks[index] = _Memory(descriptor, length)
                os.close(descriptor)
            else:
                del self._blocks[index]
        _, number, stage, forward, microbatch, index, specs, self.may_change = _MESSAGE.unpack_from(packet)
        if size > _MESSAGE.size:
            self._layouts[specs] = _Layout(unpack_specs(packet[_MESSAGE.size : size]), specs)
        layout = self._layouts[specs]
        return number, Route(stage, bool(forward), microbatch), self._values(layout, index, bool(forward))

    def _descriptor(self, action: Action) -> int:
        """Of a new block: it is sent behind the packet that says so, and its sender may stand still or end between."""

        def receive() -> list[int]:
            return list(socket.recv_fds(self._socket, 16, 1)[1])

        try:
            descriptors = receive()
        except BlockingIOError:
            descriptors = self._keep_waiting(action, receive)
        except OSError as error:  # the connection has broken
            raise PeerLost(action, self._rank) from error
        if not descriptors:
            raise PeerLost(action, self._rank)
        return descriptors[0]

    def _keep_waiting(self, action: Action, receive: Callable[[], _Received]) -> _Received:
        """What ``receive`` reads, which did not come at once."""
        deadline = time.monotonic() + self._timeout_s - self._look_s
        while (left := deadline - time.monotonic()) > 0 and not (self._alarm is not None and self._alarm.heard()):
            _stay(self._alarm)
            ended = _has_ended(self._peer)  # asked first: all that it sent is there then
            try:
                if _is_readable(self._socket.fileno(), 0 if ended else min(LOOK_S, left)):
                    return receive()
            except OSError as error:
                raise PeerLost(action, self._rank) from error
            if ended:
                break
        raise PeerLost(action, self._rank)

    def _values(self, layout: _Layout, index: int, forward: bool) -> tuple[Any, ...]:
        lease = None
        if index >= 0:
            memory = self._blocks[index]
            lease = _lease_type(memory.size).from_address(memory.address)
            lease.free = self._page, _STATES + index, self._held, memory, self._process, self._debug_memory
            self._held[0] += memory.size
        values: list[Any] = []
        for spec, offset, count in layout.entries:
            if isinstance(spec, Plain):
                values.append(spec.value)
                continue
            shape, dtype, wants_gradient = spec
            if not count:
                tensor = torch.empty(shape, dtype=dtype)
            else:
                tensor = torch.frombuffer(lease, dtype=dtype, count=count, offset=offset).view(shape)
                if self._held[0] > _HELD_BYTES:
                    tensor = tensor.clone()
            values.append(tensor.requires_grad_() if wants_gradient and forward else tensor)
        return tuple(values)


class _Layout:
    """Where the tensors of a message lie in its block."""

    def __init__(self, specs: Specs, identity: int) -> None:
        self.id = identity
        self.bytes = 0
        self.entries: list[tuple[Any, int, int]] = []  # spec, offset, elements
        for spec in specs:
            if isinstance(spec, Plain):
                self.entries.append((spec, 0, 0))
                continue
            count = spec[0].numel()
            self.entries.append((spec, self.bytes, count))
            self.bytes += -(-count * spec[1].itemsize // _ALIGN) * _ALIGN


class _Memory:
    """Shared memory of this process. Python's mmap would keep a descriptor for each block."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        rights, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        self.address = _libc().mmap(None, size, rights, shared, descriptor, 0)
        if self.address == _FAILED:
            raise MemoryError(
                f"no room for a message of {size} bytes in shared memory: {os.strerror(ctypes.get_errno())}"
            )
        self._unmap = _libc().munmap

    def page(self) -> tuple[memoryview, memoryview]:
        """Its bytes and its words, which keep it."""
        array: Any = (ctypes.c_ubyte * self.size).from_address(self.address)
        array.memory = self
        view = memoryview(array).cast("B")
        return view, view.cast("Q")

    def __del__(self) -> None:
        if self.address != _FAILED:
            self._unmap(self.address, self.size)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class _Block:
    """A block as its sender sees it."""

    def __init__(self, index: int, memory: _Memory) -> None:
        self.index, self.size = index, memory.size
        array: Any = (ctypes.c_char * memory.size).from_address(memory.address)
        array.memory = memory  # which its views keep
        self._bytes = array
        self._views: dict[int, list[Tensor | None]] = {}

    def views(self, layout: _Layout) -> list[Tensor | None]:
        """What the tensors of a message are copied into; None for an empty one."""
        views = self._views.get(layout.id)
        if views is None:
            with torch.inference_mode(False):  # a step takes what an evaluation made
                views = self._views[layout.id] = [
                    torch.frombuffer(self._bytes, dtype=spec[1], count=count, offset=offset).view(spec[0])
                    if count
                    else None
                    for spec, offset, count in layout.entries
                    if not isinstance(spec, Plain)
                ]
        return views

    def forget(self) -> None:
        """Numbers of layouts are given anew."""
        self._views.clear()


def _give_back(lease: Any) -> None:
    page, at, held, _, process, debug_memory = lease.free
    held[0] -= len(lease)
    if os.getpid() == process:  # a fork, such as a worker that loads data, has the tensor and not the block
        if debug_memory:
            ctypes.memset(lease, 255, len(lease))  # [Note: free memory is NaN] in receive_buffers.py
        page[at] = 0


@lru_cache(maxsize=256)
def _lease_type(size: int) -> Any:
    """What tensors over a block of ``size`` bytes hold on to: its end frees the block."""
    return type("Lease", (ctypes.c_char * size,), {"__del__": _give_back})


def _stay(alarm: Alarm | None) -> None:
    """Raises ScheduleError where another rank is in another call. [Note: a new program beside a known one]"""
    if alarm is not None and (stray := alarm.calls.stray()) is not None:
        raise other_call(stray)


def can_share() -> bool:
    """Whether this system has what edges are made of, and allows it: Linux does, a sandbox may not."""
    if not all(hasattr(socket, name) for name in ("send_fds", "SO_PEERCRED", "SO_PASSCRED", "SCM_CREDENTIALS")):
        return False
    try:
        os.close(os.memfd_create("sixfold-probe"))
        listen()[0].close()
    except (AttributeError, OSError):
        return False
    return True


def listen() -> tuple[socket.socket, str]:
    """A socket that waits for the sender, and its name for ``connect``; it has no file."""
    name = f"sixfold-{uuid.uuid4().hex}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(1)
    return listener, name


def connect(name: str) -> socket.socket | None:
    """A connection to who listens under ``name``; None if it is on another host or another user's."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(f"\0{name}")
    except OSError:
        link.close()
        return None
    return link if _same_user(link) else None


def accept(listener: socket.socket) -> socket.socket | None:
    """The connection that was made; None if it is another user's."""
    with listener:
        link, _ = listener.accept()
    return link if _same_user(link) else None


def _same_user(link: socket.socket) -> bool:
    _, user, _ = _credentials(link)
    if user == os.getuid():
        return True
    link.close()
    return False


def _credentials(link: socket.socket) -> tuple[int, ...]:
    """Process, user and group of the other end; process 0 if it cannot be seen from here."""
    return Struct("3i").unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))


def _process_of(link: socket.socket) -> int:
    return _credentials(link)[0]


def _is_readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read within ``seconds``, or an end. Not by ``select``, which knows 1,024 files."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(math.ceil(seconds * 1000)))


def _has_ended(process: int) -> bool:
    """Whether ``process`` is known to be dead. Its socket does not tell while a fork of it, such as a worker that loads
    data, lives on."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return False
    try:
        return _is_readable(descriptor, 0)
    finally:
        os.close(descriptor)


def _set_deadline(link: socket.socket, seconds: float) -> None:
    """Of each receive, in the kernel: Python's own costs a system call more."""
    whole = int(seconds)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, Struct("ll").pack(whole, int((seconds - whole) * 1e6)))


def _end(link: socket.socket) -> None:
    try:
        link.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it had ended
    link.close()
