"""What lies in a GPU's memory and which lines of code asked for it, on request.

    a step of log.memory_steps --> recorded (this file) --> RUN/memory/step-N-rank-R.pickle, for pytorch.org/memory_viz

The snapshot is torch's own, of its allocator for CUDA. The host's allocator keeps no such record, so a run on CPUs is
refused: `sixfold plan` says what memory is for without a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sixfold.gpt.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from sixfold.gpt.config.train_config import LogConfig

EVENTS = 1_000_000  # allocations and frees that are kept, the newest; some 100 bytes each


def check_memory_steps(log: LogConfig, device: torch.device, ranks: int) -> None:
    """Refuse what has no snapshot.

    Raises:
        ConfigError: the device is no GPU, or there is no such rank.
    """
    if log.memory_steps and device.type != "cuda":
        raise ConfigError(
            f"log.memory_steps is {list(log.memory_steps)} and the device {device.type!r}, whose allocator keeps no "
            "record; log.memory_steps = [] works, and `sixfold plan` says what memory is for"
        )
    beyond = [rank for rank in log.memory_ranks if rank >= ranks]
    if log.memory_steps and beyond:
        raise ConfigError(
            f"log.memory_ranks has {beyond[0]}, and the run has {ranks} ranks; they are numbered from 0: "
            f"log.memory_ranks = [{ranks - 1}] works, and [] is all"
        )


@contextmanager
def recorded(run_dir: str | Path, log: LogConfig, step: int, rank: int) -> Iterator[None]:
    """Run the body; if ``log`` names this step and rank, write what it allocates, also if it fails.

    What was there before has its sizes, and no lines of code. A snapshot that cannot be written ends no run.
    """
    if step not in log.memory_steps or (log.memory_ranks and rank not in log.memory_ranks):
        yield
        return
    from torch.cuda import memory

    path = Path(run_dir) / "memory" / f"step-{step:08d}-rank-{rank}.pickle"
    memory._record_memory_history(max_entries=EVENTS)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        except OSError as error:
            print(f"sixfold: the memory snapshot of step {step} is not kept: {error}", file=sys.stderr, flush=True)
        memory._record_memory_history(enabled=None)
