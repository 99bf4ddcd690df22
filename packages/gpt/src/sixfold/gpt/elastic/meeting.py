"""Where the ranks of a generation meet: a store of its own for each, which nobody can use when it is over.

    leader.py --> open, close --> Files: on one node, a file            (this file)
                             `-> Servers: on several, a process that serves a TCPStore

[Note: a closed store] When the generation is over, its file becomes a link to itself: every later use of it fails at
once, also in a rank that waits for a key, and in one that wakes up late. The process that serves a store is killed, and
its port with it.
"""

from __future__ import annotations

import multiprocessing
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from sixfold.gpt.elastic.processes import signal_to
from sixfold.gpt.errors import TrainError
from sixfold.gpt.launch.spawn import prepare_process

SERVE_S = 60.0  # to begin: the server that it is forked from may have to start anew


class Meetings(Protocol):
    """Stores by generation."""

    def open(self, generation: int) -> str: ...

    def close(self, generation: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Files:
    """A FileStore for each generation, in a folder of this machine."""

    folder: Path

    def open(self, generation: int) -> str:
        """The URL of a new one; torch makes the file."""
        return f"file://{self._path(generation)}"

    def close(self, generation: int) -> None:
        """See [Note: a closed store]. May be done again."""
        store = self._path(generation)
        if not store.is_symlink():
            link = store.with_name(f".{store.name}")
            link.symlink_to(store.name)
            link.replace(store)

    def _path(self, generation: int) -> Path:
        return self.folder / f"generation-{generation}"


@dataclass(slots=True)
class Servers:
    """A TCPStore for each generation, served by a process of this machine, which others know as ``host``."""

    host: str
    _serving: dict[int, BaseProcess] = field(default_factory=dict)

    def open(self, generation: int) -> str:
        """The URL of a new one.

        Raises:
            TrainError: no port to be had.
        """
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(there,), name=f"sixfold store {generation}")
        process.start()
        there.close()
        self._serving[generation] = process
        try:
            port = here.recv() if here.poll(SERVE_S) else "no word of it"
        except EOFError:
            port = "its process has ended"
        here.close()
        if not isinstance(port, int):
            raise TrainError(f"no store could be served where the ranks of generation {generation} meet: {port}")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{port}"

    def close(self, generation: int) -> None:
        """See [Note: a closed store]. May be done again."""
        process = self._serving.pop(generation, None)
        if process is not None:
            signal_to(process, signal.SIGKILL)

    def close_all(self) -> None:
        """No store is left."""
        for generation in list(self._serving):
            self.close(generation)


def _serve(channel: Connection) -> None:
    """Body of the process: it ends with the server that it was forked from, as all do, or by a signal."""
    prepare_process(-1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to all of a process group; ranks still save
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        channel.send(store.port)
    except (OSError, RuntimeError) as error:
        channel.send(str(error))
        return
    while True:
        signal.pause()
