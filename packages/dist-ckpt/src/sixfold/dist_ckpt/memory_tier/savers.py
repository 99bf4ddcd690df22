"""Background saves of a tier: one worker for snapshots, and one for the disk.

    state dict --> SnapshotSaver (this file) --> SnapshotJob --> worker --> files of this domain
    a whole generation --> DrainSaver (this file) --> DrainJob --> worker --> an ordinary checkpoint

Both are an ``AsyncSaver`` that hands over another job. Draining has a worker of its own: a slow disk does not keep the
next snapshot waiting.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sixfold.dist_ckpt._worker import serve
from sixfold.dist_ckpt.background import status_and_heartbeats
from sixfold.dist_ckpt.background.arena import Place
from sixfold.dist_ckpt.background.handle import AsyncSave
from sixfold.dist_ckpt.background.lost_ranks import Job
from sixfold.dist_ckpt.background.saver import AsyncSaver
from sixfold.dist_ckpt.background.status_and_heartbeats import Heartbeat
from sixfold.dist_ckpt.background.worker_process import Worker
from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.memory_tier.domain_folder import DomainFolder, DomainStore
from sixfold.dist_ckpt.memory_tier.generations import Generation
from sixfold.dist_ckpt.memory_tier.jobs import DrainJob, SnapshotJob
from sixfold.dist_ckpt.save_load import saving, writer
from sixfold.dist_ckpt.save_load.saving import SaveRequest
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.store import Save, is_checkpoint_file


class SnapshotSaver(AsyncSaver):
    """Saves one generation after the other."""

    content: writer.RankContent | None = None  # of the last one, without tensors
    generation: Generation | None = None

    def begin(self, request: SaveRequest, **of_job: Any) -> AsyncSave:
        """Agree, copy, hand over. Collective; errors as of ``async_save``, on every rank.

        Args:
            of_job: what else a ``SnapshotJob`` is told.
        """
        self._of_job = of_job
        return self._begun(request)

    def fork_worker(self) -> None:
        """See ``MemoryTier.fork_worker``."""
        with self._in_turn():
            tasks = Path("/proc/self/task")  # threads of Python, and those that torch has started
            threads = len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
            if threads > 1 or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                why = f"has {threads} threads" if threads > 1 else "has used a CUDA device"
                raise CheckpointError(f"this process {why}; fork the worker before that, or let a save start one")
            if self._worker is None:
                self._worker = Worker(self._arena.fd, serve)

    def let_go(self) -> AsyncSave | None:
        """Wait until the snapshot in flight has ended, well or not; it."""
        with self._in_turn():
            if (flight := self._flight) is not None:
                flight._is_told = True  # by whoever calls this
            self._let_go()
            return flight

    def _hand_over(self, agreed: saving.Agreed, request: SaveRequest, undo: ExitStack) -> tuple[Job, Heartbeat | None]:
        """Copy the tensors, on every rank or on none. No status is shared: each rank's part ends by itself."""
        exchange, store, save = agreed.exchange, agreed.content.store, agreed.ticket.save
        assert isinstance(store, DomainStore), f"{store} is a domain's"

        def copy() -> tuple[tuple[writer.RankContent, dict[int, Place]], None]:
            store.join(save)
            undo.callback(store.abandon, save)
            copied = self._copy(agreed.content, request)
            self._ready_worker()
            return copied, None

        (self.content, places), _ = exchange.all_reduce(copy, lambda _: None)
        self.generation = store.generation(save)
        job = SnapshotJob(
            rank=0,
            ranks=1,
            content=self.content,
            ticket=saving.Ticket(save),
            check_finite=request.check_finite,
            places=places,
            key=b"",
            timeout_s=request.timeout_s,
            stale_s=status_and_heartbeats.STALE_S,
            own_rank=exchange.rank,
            own_ranks=exchange.ranks,
            **self._of_job,
        )
        return job, None


class DrainSaver(AsyncSaver):
    """Makes ordinary checkpoints of generations."""

    def begin(self, place: Any, content: writer.RankContent, folder: DomainFolder, generation: Generation) -> AsyncSave:
        """Begin to copy a generation to a place. Collective.

        Args:
            content: what this rank saved, without tensors.
        """
        request = SaveRequest({}, place, group=self._group, timeout_s=self._timeout_s)
        self._source = folder, generation
        return self._started(request, partial(self._agreed, request, content))

    def let_go(self) -> None:
        """Wait until the checkpoint on its way has ended, well or not; ``error`` tells."""
        if self._flight is not None:
            self._flight._await_end()

    def is_busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._flight is not None and not self._flight.done()

    def error(self) -> BaseException | None:
        """Why the last one failed, told once; None also while it is on its way."""
        flight = self._flight
        if flight is None or not flight.done() or flight._is_told:
            return None
        flight._is_told = True
        return flight._error

    def error_is_known(self) -> None:
        """Whatever becomes of the checkpoint on its way, ``error`` tells nothing."""
        if self._flight is not None:
            self._flight._is_told = True

    def generation(self) -> Generation | None:
        """What is being copied."""
        return self._source[1] if self.is_busy() else None

    def _agreed(self, request: SaveRequest, content: writer.RankContent) -> saving.Agreed:
        """What ``saving.agree_on`` found when the generation was saved, for another store."""
        exchange, store, later = Exchange(request.group, request.timeout_s), request.store, list[Any]()

        def begun(nbytes: list[int]) -> Save:
            save_id = secrets.token_hex(8)
            begin = partial(store.begin, save_id, sum(nbytes), "replace", is_checkpoint_file)
            if not isinstance(store, ByPointer):
                return begin()
            later.append(begin)
            return Save(save_id=save_id, target=store.name)

        _, save = exchange.all_reduce(lambda: (None, content.nbytes), begun)
        return saving.Agreed(
            exchange, replace(content, store=store, metadata="torch"), saving.Ticket(save), None, (), *later
        )

    def _hand_over(self, agreed: saving.Agreed, request: SaveRequest, undo: ExitStack) -> tuple[Job, Heartbeat | None]:
        job, heartbeat = super()._hand_over(agreed, request, undo)
        own = {part.name: getattr(job, part.name) for part in fields(job)}
        folder, generation = self._source
        return DrainJob(**own, folder=folder, generation=generation), heartbeat

    def _copy(self, content: writer.RankContent, request: SaveRequest) -> tuple[writer.RankContent, dict[int, Place]]:
        return content, {}  # the values lie in the generation
