"""Background saves: the trainer stops for a copy of its tensors, a process of its own writes them.

    state dict --> agree --> copy into the arena --> Job --> worker process
                             (this file)                       |
    AsyncSave <-- watching thread <----------- outcome --------+

What is collective (agreeing on the plan, trying the shared folder) happens in the call, on the given group; after it
no rank needs the group. The worker is ``_worker.py``, what trainers and workers tell each other is ``lost_ranks.py``.

[Note: the end of the trainer] An interpreter that ends in order, also by an exception, first waits for its saves in
flight. It waits for each until that ends or has stood still for its timeout_s. So a last ``async_save`` without
``wait`` is a checkpoint. If that save fails, and nobody has waited for it, the exit status is 1. A killed trainer
takes its worker with it within a second. The save is lost, and the target stays. The next save removes what was
written.

[Note: what the store is asked] A request to a store takes as long as a copy. So in the call the first rank asks in a
thread while it copies. It asks to begin the save, if that makes nothing there yet, and it asks for the status. A call
that fails or is interrupted waits ``_LATE_S`` for that thread and removes the status. If the store answers later, the
thread removes it.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from sixfold.dist_ckpt.background import lost_ranks, status_and_heartbeats
from sixfold.dist_ckpt.background.arena import Arena, Place
from sixfold.dist_ckpt.background.handle import AsyncSave
from sixfold.dist_ckpt.background.lazy_copy import LazyCopy, copied_at_once
from sixfold.dist_ckpt.background.lost_ranks import Job
from sixfold.dist_ckpt.background.status_and_heartbeats import Heartbeat, RankState
from sixfold.dist_ckpt.background.worker_process import Worker
from sixfold.dist_ckpt.collectives.exchange import Exchange, Group, errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError, naming, typed
from sixfold.dist_ckpt.progress import Progress
from sixfold.dist_ckpt.save_load import replicated_tensors, saving, writer
from sixfold.dist_ckpt.save_load.saving import SaveRequest
from sixfold.dist_ckpt.state import factory, tree
from sixfold.dist_ckpt.state.records import ShardedTensor, is_main_replica
from sixfold.dist_ckpt.storage.by_pointer import ByPointer, ChildStore
from sixfold.dist_ckpt.storage.local import store_at
from sixfold.dist_ckpt.storage.range_reads import begun as in_thread
from sixfold.dist_ckpt.torch_arguments import ARGUMENTS

__all__ = ["AsyncSave", "AsyncSaver", "async_save", "prepare_async_save"]

_LATE_S = 5.0


class AsyncSaver:
    """A worker process and its arena, for one group of ranks; ``async_save`` keeps one per process.

    Threads that save by one saver take turns: there is one arena.

    Args:
        group: as in ``save``; every rank of it makes a saver and calls it together.
        timeout_s: longest wait, in a call, for a peer; after it, of a save that stands still. Seconds.
    """

    def __init__(self, group: Group = "world", *, timeout_s: float = 600.0) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._arena = Arena()
        self._worker: Worker | None = None
        self._flight: AsyncSave | None = None
        self._lazy: LazyCopy | None = None  # of the save that begins
        self._save_id = ""  # of the last call
        self._untold: BaseException | None = None  # of the save that was let go last
        self._leaving: list[threading.Thread] = []  # of saves that have ended, and wait for others to hear of it
        self._is_closed, self._pid = False, os.getpid()
        self._turn = threading.RLock()
        self._preparing: threading.Thread | None = None
        _open_savers(os.getpid()).add(self)

    def save(
        self, sharded_state_dict: Mapping[Any, Any], checkpoint_dir: str | Path, *arguments: Any, **options: Any
    ) -> AsyncSave:
        """``async_save`` on this saver's group: with its arguments, but ``group`` and ``timeout_s``."""
        group, timeout_s = self._group, self._timeout_s
        await_saves_to(options.get("since"))
        return self._begun(
            SaveRequest(sharded_state_dict, checkpoint_dir, *arguments, group=group, timeout_s=timeout_s, **options)
        )

    def prepare(self, sharded_state_dict: Mapping[Any, Any]) -> None:
        """``prepare_async_save`` of this saver, on its group."""
        self._prepare(sharded_state_dict, Exchange(self._group, self._timeout_s))

    def close(self) -> None:
        """Wait for a save in flight, then end the worker and free the arena. May be called again.

        In a process that was forked it does nothing: saver and worker are the parent's.
        """
        if self._pid != os.getpid():
            return
        with self._in_turn():
            try:
                self._let_go()
                for thread in self._leaving:
                    thread.join()
            finally:
                if self._worker is not None:
                    self._worker.stop()
                self._worker = None
                if not self._is_closed:
                    self._arena.close()
                self._is_closed = True

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begun(self, request: SaveRequest) -> AsyncSave:
        return self._started(
            request, lambda: saving.agree_on(request, begins_later=isinstance(request.store, ByPointer))
        )

    def _started(self, request: SaveRequest, agree: Callable[[], saving.Agreed]) -> AsyncSave:
        start = time.monotonic()
        with self._in_turn(), ExitStack() as undo:
            with errors_to_all(request.group, request.timeout_s):
                if self._is_closed:
                    raise CheckpointError("this AsyncSaver is closed; make a new one")
                _check_is_possible(request)
                self._let_go()
                await_saves_to(request.store)
            agreed = agree()
            undo.callback(agreed.abandon)
            self._save_id = agreed.ticket.save.save_id
            job, heartbeat = self._hand_over(agreed, request, undo)
            worker = self._worker
            assert worker is not None, "_hand_over has one ready"
            flight = AsyncSave(self, worker, job, heartbeat, request.progress, start, self._arena.settle, self._lazy)
            try:
                self._flight = flight
                typed(flight._thread.start)
                undo.pop_all()
            except BaseException:
                if flight._is_given_up():  # else it goes on, and the next call waits for it
                    self._flight = None
                else:
                    undo.pop_all()
                raise
        return flight

    def _prepare(self, state: Mapping[Any, Any], exchange: Exchange) -> None:
        def begin() -> None:
            if self._is_closed:
                raise CheckpointError("this AsyncSaver is closed; make a new one")
            if self._flight is not None:
                return  # which has made all that there is to prepare
            tensors = own_tensors(state, exchange.rank, exchange.ranks)
            self._ready_worker()

            def reserve() -> None:
                with suppress(CheckpointError):  # which a save meets again
                    self._arena.reserve(tensors)

            self._let_go()
            self._preparing = threading.Thread(target=reserve, daemon=True)
            self._preparing.start()

        with self._in_turn():
            exchange.run_on_all(begin)

    def _in_turn(self) -> AbstractContextManager[object]:
        """One call at a time: of two, the second would copy its tensors over those of the first.

        The lock itself: a context manager of our own would hold it as long as an interrupt is kept that comes in it.
        """
        if self._pid != os.getpid():
            raise CheckpointError(
                f"this AsyncSaver is of process {self._pid}, its worker too; a process that was forked makes its own"
            )
        # Asked of the lock itself: a flag of our own stays set when an interrupt comes where it is taken back.
        if self._turn._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise CheckpointError(
                "a signal handler called this AsyncSaver in the middle of another call of it; let the handler set "
                "a flag, and save when that call has returned"
            )
        return self._turn

    def _let_go(self) -> None:
        """Wait until nothing in flight needs arena and worker: no save, no ``prepare``."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        if self._flight is None:
            return
        self._flight._await_end()
        flight, self._flight = self._flight, None  # before the warning, which may be an error (-W error)
        self._arena.freed()
        self._leaving = [thread for thread in (*self._leaving, flight._thread) if thread.is_alive()]
        if flight._error is not None and not flight._is_told:
            self._untold = flight._error
            warnings.warn(f"a background save failed and nobody waited for it: {flight._error}", stacklevel=5)

    def _ready_worker(self) -> Worker:
        if self._worker is None or not self._worker.is_alive():
            old, self._worker = self._worker, None
            if old is not None:
                old.stop()
            self._worker = Worker(self._arena.fd)
        return self._worker

    def _hand_over(self, agreed: saving.Agreed, request: SaveRequest, undo: ExitStack) -> tuple[Job, Heartbeat | None]:
        """Copy the tensors, have a worker and try the shared folder, all on every rank or on none.

        A new worker starts behind the copy: while it imports torch it has a core, which the copy can use.
        """
        exchange, ticket, store = agreed.exchange, agreed.ticket, agreed.content.store
        is_local = store.local_folder is not None
        job = Job(
            rank=exchange.rank,
            ranks=exchange.ranks,
            # A store's own error comes before anybody takes its worker for stopped.
            content=replace(agreed.content, store=store.patient(request.timeout_s / 2)),
            ticket=ticket,
            check_finite=request.check_finite,
            key=secrets.token_bytes(32),
            timeout_s=request.timeout_s,
            stale_s=status_and_heartbeats.STALE_S,
        )

        def heartbeat() -> Heartbeat:
            made = lost_ranks.status_of(job).heartbeat(job.rank)
            undo.callback(made.close)
            return made

        opening, made = Future[saving.Ticket](), ExitStack()

        def opened() -> saving.Ticket:
            begun = ticket if agreed.begin is None else ticket._replace(save=agreed.begin())
            if job.ranks > 1:
                status = lost_ranks.status_of(replace(job, ticket=begun))
                made.callback(status.remove)
                status.make()
            return begun

        def copy() -> tuple[tuple[writer.RankContent, dict[int, Place], Heartbeat | None], saving.Ticket]:
            asks = agreed.begin is not None or (job.rank == 0 and job.ranks > 1)
            if asks:  # beside the copies: see [Note: what the store is asked]
                undo.callback(opening.add_done_callback, lambda _: made.close())
                undo.callback(wait, [opening], _LATE_S)
                in_thread(opened, opening)
            content, places = self._copy(job.content, request)
            begun = opening.result() if asks else ticket
            self._ready_worker()
            return (content, places, heartbeat() if asks and is_local else None), begun

        def meet() -> tuple[Heartbeat, bool]:
            store.join(ticket.save)
            return mine or heartbeat(), job.rank == 0 or lost_ranks.status_of(job).liveness(0).state is RankState.LIVES

        (content, places, mine), (key, begun) = exchange.all_reduce(copy, lambda tickets: (job.key, tickets[0]))
        job = replace(job, content=content, places=places, key=key, ticket=begun)
        if job.ranks == 1:
            return job, None
        if not is_local:
            return job, heartbeat()  # its first beat makes it
        mine, locks_work = exchange.all_reduce(meet, all)
        return replace(job, locks_work=locks_work), mine

    def _copy(self, content: writer.RankContent, request: SaveRequest) -> tuple[writer.RankContent, dict[int, Place]]:
        """The content without tensors, and where their values are now, or will be."""
        tensors = {index: content.records[index].data for index in sorted({write.record for write in content.writes})}
        values = [tensor for tensor in tensors.values() if tensor is not None]
        self._lazy = None
        if request.lazy:
            safe = copied_at_once(request.sharded_state_dict, values)
            named = zip((content.records[index].key for index in tensors), values, safe, strict=True)
            self._lazy = LazyCopy([(name, value) for name, value, own in named if own is value], request.timeout_s)
            places = self._arena.take_later(safe, self._lazy)
        else:
            places = self._arena.take(values)
        records = [_without_data(record) for record in content.records]
        # Common data is in common_bytes; as objects it could name classes that the worker cannot import.
        return replace(content, records=records, common={}, is_owned=True), dict(zip(tensors, places, strict=True))


def _without_data(record: ShardedTensor) -> ShardedTensor:
    """``record.without_data()``, not checked again: thousands of records are copied while the trainer waits."""
    twin = object.__new__(type(record))
    twin.__dict__.update(record.__dict__, data=None)
    return twin


@naming(ARGUMENTS)
def async_save(
    sharded_state_dict: Mapping[Any, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[dict[Any, Any]], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    group: Group = "world",
    if_exists: str = "replace",
    check_finite: bool = False,
    metadata: str = "torch",
    megatron: bool = False,
    since: str | Path | None = None,
    compress: str | None = None,
    lazy: bool = False,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> AsyncSave:
    """``save`` that returns when the values are copied; a worker process writes and commits them.

    Collective over ``group`` like ``save``; afterwards the caller may change its tensors and needs to call nothing.
    It waits for this process's previous background save to end. The shared memory of a rank stays allocated, as
    large as the largest share that it has saved.

    Args: as ``save``. timeout_s limits how long the save may make no progress. However slow it is, it goes on while
        bytes are written. This process calls progress some times a second, from the thread that watches the worker.
        The last call comes after the commit, with the total. An exception in it stops the worker, and
        ``wait`` raises it on all ranks. lazy: it returns before the values are copied. The copy is made beside what
        the caller does next, which changes no large tensor until ``fence`` of the handle has returned; one that is
        changed is an error that names it. Buffers and small tensors are copied in the call. Nothing is committed
        before the fence.
    Returns:
        The handle; errors of writing, large plain tensors that differ between ranks, NaN with ``check_finite`` and
        dead peers are raised by its ``wait``.
    Raises:
        CheckpointError: what ``save`` raises before it writes, on every rank.
    """
    await_saves_to(since)
    return start(SaveRequest(**locals()))


def prepare_async_save(
    sharded_state_dict: Mapping[Any, Any], *, group: Group = "world", timeout_s: float = 600.0
) -> None:
    """Have the worker process and the shared memory ready that ``async_save`` of such a state dict will need.

    Collective over ``group``. It returns at once; a thread gets the memory. The first ``async_save`` then blocks no
    longer than a later one. Call it when the state has its size: an optimizer has its moments after its first step.

    Args: as ``save``.
    Raises:
        ShardingError: what ``save`` says of such a state dict on its own. On every rank.
    """
    _saver_of(os.getpid())._prepare(sharded_state_dict, Exchange(group, timeout_s))


def own_tensors(state: Mapping[Any, Any], rank: int, ranks: int) -> list[torch.Tensor]:
    """What a rank writes of a state dict: no group is asked, and nothing is compared."""
    parts = tree.split(factory.expand(tree.checked(state), rank, ranks)[0])
    records = [record for _, record in parts.records]
    compared, taken = dict(parts.common), {record.key for record in records}  # another dict: nothing is hashed
    whole, *_ = replicated_tensors.take_out(parts.common, compared, taken, rank, ranks, keep_values=False)
    written = [record for record in records if isinstance(record, ShardedTensor) and is_main_replica(record.replica_id)]
    return [record.data for record in (*written, *whole) if record.data is not None]


def start(request: SaveRequest) -> AsyncSave:
    """``async_save`` of a request."""
    return _saver_of(os.getpid())._begun(request)


def _check_is_possible(request: SaveRequest) -> None:
    """CheckpointError for what only ``save`` can do."""
    store, why, own = request.store, None, request.store
    while isinstance(own, ChildStore):
        own = own.parent
    if not threading.main_thread().is_alive():
        why = (
            "is asked for while the interpreter ends, and waits for no background save that begins now: begin it before"
        )
    elif not store.is_shared:
        why = "is memory of one process; background saves are written by another"
    elif type(own).__module__ == "__main__":
        why = f"is a {type(own).__name__} of __main__, which the worker process never runs: import it from a module"
    elif request.engine is None:
        why = (
            f"is saved by {request.sharded} and {request.common}, which save by themselves: background saves go with "
            "('torch_dist', 1), also inside a FullyParallelSaveStrategyWrapper"
        )
    elif not (
        store.local_folder or isinstance(store, ByPointer) or Exchange(request.group, request.timeout_s).ranks == 1
    ):
        why = (
            "does not derive from stores.ByPointer, by which workers of several ranks send each other messages: "
            "pass group=None"
        )
    if why is not None:
        raise CheckpointError(f"{store.name} {why}; or use save")


def await_saves_to(place: Any) -> None:
    """Wait until no background save of this process to a place is in flight; their handles tell how they end.

    Its own thread, which calls ``progress``, does not wait for itself.
    """
    flights = [saver._flight for saver in list(_open_savers(os.getpid())) if saver._flight is not None]
    if flights and place is not None:
        with suppress(CheckpointError):  # of the request, which says what is wrong with it on all ranks
            name = store_at(place).name
            for flight in flights:
                if str(flight.checkpoint_dir) == name and flight._thread is not threading.current_thread():
                    flight._await_end()


def saves_of_this_process() -> set[str]:
    """The ids of its background saves that may go on."""
    return {saver._save_id for saver in list(_open_savers(os.getpid()))}


@cache
def _saver_of(pid: int) -> AsyncSaver:
    """The saver of this process; a forked child must not use its parent's."""
    return AsyncSaver()


@cache
def _open_savers(pid: int) -> WeakSet[AsyncSaver]:
    """The savers of this process, closed when its interpreter ends; see [Note: the end of the trainer]."""
    savers: WeakSet[AsyncSaver] = WeakSet()
    # Of multiprocessing, whose children run no atexit; it takes care of forks, too.
    lost: list[BaseException] = []
    Finalize(None, _close_all, (savers, lost), exitpriority=100)
    Finalize(None, _end_as_failed, (lost,), exitpriority=-100)  # after all others
    return savers


def _close_all(savers: WeakSet[AsyncSaver], lost: list[BaseException]) -> None:
    for saver in list(savers):
        saver._untold = None  # what was let go before has been warned of, and training went on
        try:
            saver.close()
        finally:
            lost += [] if saver._untold is None else [saver._untold]


def _end_as_failed(lost: Sequence[BaseException]) -> None:
    """A run whose last save is lost and who nobody has told does not end as a success: exit status 1."""
    if lost:
        sys.stderr.write(f"sixfold.dist_ckpt: the last background save failed, and nobody waited for it: {lost[0]}\n")
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)
