"""What a rank does to be a fault for the others, and what the others say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pipeline_helpers import batch, square_loss
from torch import Tensor, nn

from ranktest import store
from sixfold.pipeline import PipelineRunner, PipelineTimeout, Program, Stage

Report = tuple[str, str, float]  # name of the error's type, its text, seconds (see ``starved``)


def starved() -> float:
    """Seconds for which this process's threads were ready and had no core: a busy machine's, and not the deadline's."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended meanwhile
            total += int(path.read_text().split()[1])
    return total * 1e-9


def stop() -> None:
    """Stop this process until another kills it."""
    store().set("stopped_at", str(time.monotonic()))
    store().set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def end_the_stopped() -> None:
    """Kill the process that stopped, once it is known that nobody needs it any more."""
    if store().check(["stopped"]):
        os.kill(int(store().get("stopped")), signal.SIGKILL)


def stop_at(owner: Any, name: str) -> None:
    """Stop this process when it first calls the method ``name`` of the class ``owner``."""

    def stopping(*args: Any, **kwargs: Any) -> None:
        stop()

    setattr(owner, name, stopping)


class Acts(nn.Module):
    """Does ``act`` in its ``turn``-th forward, counted from 1."""

    def __init__(self, turn: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.turn, self.act, self.layer = turn, act, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.turn -= 1
        if self.turn == 0:
            self.act()
        return self.layer(x)


def report(call: Callable[[], object], expected: type[BaseException] = Exception) -> Report:
    """What ``call`` raised, and after how long."""
    begin, before = time.monotonic(), starved()
    try:
        call()
    except expected as error:
        return type(error).__name__, str(error), time.monotonic() - begin - (starved() - before)
    return "none", "", time.monotonic() - begin - (starved() - before)


def timeout_of(call: Callable[[], object]) -> Report:
    """``report`` of a call beside a rank that stops, which is ended then; seconds from its stop on."""
    begin = time.monotonic()
    kind, text, took = report(call, PipelineTimeout)
    if store().check(["stopped_at"]):
        took -= max(float(store().get("stopped_at")) - begin, 0.0)
    end_the_stopped()
    return kind, text, took


def runner_of(program: Program, rank: int, module: nn.Module, timeout_s: float, **options: Any) -> PipelineRunner:
    """A runner with one stage on each rank."""
    options = {"store": store(), "loss_fn": square_loss, **options}
    return PipelineRunner(program, [Stage(module, rank)], dist.group.WORLD, timeout_s=timeout_s, **options)


def step_of(program: Program, rank: int, module: nn.Module, timeout_s: float, **options: Any) -> Report:
    """The report of one step."""
    dist.barrier()  # all are up: on a busy machine one may be late by more than the deadline
    runner = runner_of(program, rank, module, timeout_s, **options)
    return report(lambda: runner.step(*batch(2 * program.microbatches)), BaseException)
