"""What a rank does to be a fault for the others, and what the others say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from pipeline_helpers import batch, square_loss
from torch import Tensor, nn

from ranktest import store
from sixfold.pipeline import PipelineRunner, PipelineTimeout, Program, Stage

Report = tuple[str, str, float]  # name of the error's type, its text, seconds


def stop() -> None:
    """Stop this process until another kills it."""
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
    begin = time.monotonic()
    try:
        call()
    except expected as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", time.monotonic() - begin


def timeout_of(call: Callable[[], object]) -> Report:
    """``report`` of a call beside a rank that stops, which is ended then."""
    found = report(call, PipelineTimeout)
    end_the_stopped()
    return found


def runner_of(program: Program, rank: int, module: nn.Module, timeout_s: float, **options: Any) -> PipelineRunner:
    """A runner with one stage on each rank."""
    options = {"store": store(), "loss_fn": square_loss, **options}
    return PipelineRunner(program, [Stage(module, rank)], dist.group.WORLD, timeout_s=timeout_s, **options)


def step_of(program: Program, rank: int, module: nn.Module, timeout_s: float, **options: Any) -> Report:
    """The report of one step."""
    runner = runner_of(program, rank, module, timeout_s, **options)
    return report(lambda: runner.step(*batch(2 * program.microbatches)), BaseException)
