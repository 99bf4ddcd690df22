"""The process of a member: rank of one generation after the other, alive in between.

    processes.py --> a pipe --> listening thread --> Generation --> target --> Done, Failed --> processes.py
                                (this file)     `--> Over --> connections cut --> all dropped --> Ready

[Note: how a survivor comes back] Its main thread may wait in a collective for a rank that is gone, or for one that
waits for another. So the listening thread shuts the sockets that this generation made, and goes on doing so until the
main thread has left the run by the error that follows. The store has been closed by the leader: whoever meets there
fails at once. Groups, engine, files and threads of the generation then go; the process, its device and what it has
imported stay.

gloo does not wake every send of a connection that is shut. A main thread that has computed nothing for ``STUCK_S``
since then waits for what cannot come: the process ends, and another takes its place. If it waits for another thread of
its own, as for one that writes a snapshot, it has ``OWN_S``. One that asks again and again whether something has come
computes a little, and has ``DROP_S`` beyond the time of its longest steps.

[Note: a failed rank waits] It keeps its connections until it is told what comes: peers would otherwise report those.
"""

from __future__ import annotations

import gc
import math
import os
import queue
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sixfold.gpt.elastic.generation import STUCK, Done, Failed, Generation, Leave, Over, Ready
from sixfold.gpt.elastic.heartbeat import GenerationOverError, Heartbeat
from sixfold.gpt.elastic.lifeline import Lifeline
from sixfold.gpt.errors import FinalError, ReplicasDifferError
from sixfold.gpt.launch.spawn import failure_of, name_in_warnings, prepare_process

CUT_POLL_S = 0.1
STUCK_S = 1.0
OWN_S = 5.0
DROP_S = 10.0
Prepare = Callable[..., None]  # prepare(*args), in a process that may be a rank later
Target = Callable[..., int]  # target(generation, heartbeat, *args): the run's exit status


def member_main(
    channel: Connection,
    lifeline: Connection,
    member: int,
    slots: Path,
    target: Target,
    args: tuple[Any, ...],
    prepare: Prepare | None,
    local: bool,
) -> None:
    """Body of a member's process: it ends when the supervisor closes the pipe."""
    prepare_process(member, local=local)
    if prepare is not None:
        prepare(*args)  # there is no other thread yet
    gc.freeze()  # what was imported is in no cycle with a generation, and is not looked through when one is dropped
    _Member(channel, Lifeline(lifeline), Heartbeat(slots, member)).serve(target, args)


class _Member:
    def __init__(self, channel: Connection, lifeline: Lifeline, heartbeat: Heartbeat) -> None:
        self._channel, self._lifeline, self._heartbeat = channel, lifeline, heartbeat
        self._generations: queue.SimpleQueue[Generation | Leave] = queue.SimpleQueue()
        self._over = 0.0  # the newest generation that has ended
        self._leaves = False
        self._changed = threading.Condition()
        self._sockets: set[int] | None = None  # inodes of those that were there before the generation

    def serve(self, target: Target, args: tuple[Any, ...]) -> None:
        """Be what the supervisor says, until it ends this process."""
        threading.Thread(target=self._listen, name="sixfold-supervisor", daemon=True).start()
        while isinstance(generation := self._generations.get(), Generation):
            self._serve_one(generation, target, args)

    def _serve_one(self, generation: Generation, target: Target, args: tuple[Any, ...]) -> None:
        name_in_warnings(generation.rank)
        self._lifeline.tie_children()
        with self._changed:
            self._sockets = set(_connections().values())
            self._heartbeat.generation()
            self._heartbeat.is_over = self._over >= generation.number
        report: Done | Failed
        try:
            if self._heartbeat.is_over:  # before it began: its leader may be gone, and nobody answers there
                raise GenerationOverError("this generation has ended")
            report = Done(generation=generation.number, status=target(generation, self._heartbeat, *args))
        except BaseException as error:  # SystemExit too: the supervisor must hear of it
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # begin at the target
            failure = failure_of(error, generation.rank, generation.size)
            report = Failed(
                generation=generation.number,
                failure=failure,
                blames_peer=blames_a_peer(error),
                accused=error.accused if isinstance(error, ReplicasDifferError) else {},
            )
            _forget_frames(error)
        self._heartbeat.rests()
        with self._changed:
            if self._over < generation.number:
                self._channel.send(report)
            self._changed.wait_for(lambda: self._over >= generation.number)
            self._sockets = None  # the listening thread cuts no more
            if self._leaves:
                return
        _drop()
        self._channel.send(Ready(generation=generation.number))

    def _listen(self) -> None:
        """Take the supervisor's words; without a supervisor there is no member."""
        while True:
            try:
                word = self._channel.recv()
            except (EOFError, OSError):
                os._exit(1)
            if isinstance(word, Generation):
                self._generations.put(word)
            elif isinstance(word, Over):
                self._end_generation(word.generation)
            else:
                self._leaves = True
                self._generations.put(word)
                with self._changed:
                    self._over = math.inf
                    self._changed.notify_all()

    def _end_generation(self, number: int) -> None:
        with self._changed:
            self._over, self._heartbeat.is_over = number, True
            self._changed.notify_all()
        worked, since = 0, time.monotonic()
        began = since
        while True:
            with self._changed:
                if self._sockets is None:
                    return
                for file, inode in _connections().items():
                    if inode not in self._sockets:
                        _shut(file)
            time.sleep(CUT_POLL_S)
            if worked != (worked := _main_thread_ticks()):
                since = time.monotonic()
            elif time.monotonic() - since > (OWN_S if _waits_for_own_thread() else STUCK_S):
                os._exit(STUCK)
            if time.monotonic() - began > DROP_S + 2 * self._heartbeat.longest_s:
                os._exit(STUCK)


def _main_thread_ticks() -> int:
    """Processor time of the main thread, in the kernel's ticks."""
    fields = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # utime and stime of proc(5), counted from the state on


def _waits_for_own_thread() -> bool:
    """Whether the main thread waits in a lock of Python, and not in a call of torch."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    return frame is not None and frame.f_code.co_filename == threading.__file__


def _connections() -> dict[int, int]:
    """Inodes of this process's sockets, by file number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed meanwhile
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _shut(file: int) -> None:
    """Both ends of a network connection see its end; what listens, or is of this machine alone, stays."""
    try:
        with socket.socket(fileno=os.dup(file)) as connection:
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # gloo aborts where that fails
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed meanwhile, or not connected
        pass


def _drop() -> None:
    """Nothing is left of a generation whose run has been left: groups, and what cycles of objects hold."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # what the run held: engine, threads that end with it, files


def _forget_frames(error: BaseException) -> None:
    """Frames of a traceback hold the whole run; errors are kept, as sixfold.fsdp's first one by its heartbeat."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]


def blames_a_peer(error: BaseException) -> bool:
    """Whether an error, or what it came from, says that another rank is gone or late."""
    from sixfold.dist_ckpt import LostPeerError
    from sixfold.gpt.parallel.agreement import is_of_peer
    from sixfold.gpt.parallel.lost_ranks import is_lost_rank
    from sixfold.pipeline.errors import PipelineTimeout, ScheduleError

    if isinstance(error, ReplicasDifferError):  # raised on all ranks alike
        return not isinstance(error, FinalError)
    seen: BaseException | None = error
    while seen is not None:
        if is_of_peer(seen) or isinstance(seen, LostPeerError | PipelineTimeout):
            return True
        if isinstance(seen, ScheduleError) and seen.of_peer:
            return True
        if isinstance(seen, RuntimeError) and is_lost_rank(seen):
            return True
        if getattr(seen, "ranks", ()):  # sixfold.fsdp names the ranks at fault
            return True
        seen = seen.__cause__ or seen.__context__
    return False
