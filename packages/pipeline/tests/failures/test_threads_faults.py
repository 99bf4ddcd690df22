"""What goes wrong on one rank ends the step on all of them in time, with one line each that says where (threads)."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from matrix_helpers import WIDTH, model, word_loss, words
from thread_helpers import on_threads
from torch import Tensor, nn
from transport_helpers import Altered

from sixfold.pipeline import (
    PipelineRunner,
    PipelineTimeout,
    Program,
    ScheduleError,
    Stage,
    defer_weight_grad,
    dualpipe_v,
    interleaved,
    one_f_one_b,
    zb_h2,
    zb_v,
)
from sixfold.pipeline.passes import optimizer_step
from sixfold.pipeline.transport import threads

RANKS, M = 3, 6
LONG_S = 20.0  # what is told is told long before
SHORT_S = 0.5  # what is silent is given up after this
PROGRAMS = [one_f_one_b(RANKS, M), interleaved(RANKS, M, 2), zb_h2(RANKS, M), zb_v(RANKS, M), dualpipe_v(RANKS, M)]
all_programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
WAITS = re.compile(r"rank (\d) waits at (the start of the step|\[\d+/\d+\] \d+(SEND|RECV)_[FB]\d+) for rank (\d)")


class Gate:
    """Calls ``act`` at the ``turn``-th time, counted from 1."""

    def __init__(self, turn: int, act: Callable[[], Any]) -> None:
        self.turn, self.act = turn, act

    def __call__(self, *_: Any) -> None:
        self.turn -= 1
        if self.turn == 0:
            self.act()


class Faulty(nn.Module):
    """``module`` that does something in one of its forwards, or of its backwards."""

    def __init__(self, module: nn.Module, forward: Gate | None = None, backward: Gate | None = None) -> None:
        super().__init__()
        self.module, self.in_forward, self.in_backward = module, forward, backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.in_forward is not None:
            self.in_forward()
        output = self.module(*args, **kwargs)
        if self.in_backward is not None:
            output.register_hook(self.in_backward)
        return output


@dataclass
class Ended:
    """How a rank's step ended: its error, when, after how long; and the errors of what was tried after it."""

    error: BaseException | None
    at_s: float
    took_s: float
    after: list[BaseException | None]


def outcome(call: Callable[[], Any]) -> BaseException | None:
    """What it raised."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def run(
    program: Program,
    modules: list[nn.Module],
    *,
    loss_fn: Any = word_loss,
    batch: Callable[[int], tuple[Any, Any]] = lambda _: words(M),
    timeout_s: float = LONG_S,
    transports: Any = None,
    stage: Callable[..., Stage] = Stage,
    others_ended: threading.Event | None = None,
) -> list[Ended]:
    """A quick step of all ranks, and then one more call of each kind on what is left of the runners."""
    start = threading.Barrier(len(program.ranks))
    ended: list[int] = []

    def rank(transport: Any) -> Ended:
        stages = [stage(modules[s], s) for s in program.stages_of(transport.rank)]
        runner = PipelineRunner(program, stages, transport, loss_fn, timeout_s=timeout_s)
        start.wait(20)
        begin = time.monotonic()
        error = outcome(lambda: runner.step(*batch(transport.rank)))
        end = time.monotonic()
        ended.append(transport.rank)
        if others_ended is not None and len(ended) == len(program.ranks) - 1:
            others_ended.set()
        again = (lambda: runner.step(*words(M)), lambda: runner.evaluate(*words(M)), runner.check)
        return Ended(error, end, end - begin, [outcome(call) for call in again])

    results = on_threads(len(program.ranks), rank, transports=transports)
    for result in results:
        assert type(result) is Ended, result
    return results


def boom() -> None:
    """What a stage does wrong."""
    raise ArithmeticError("no such word")


def assert_told(results: list[Ended], culprit: int, words_: str, cause: type[BaseException], action: str) -> None:
    """All ranks say the same of ``culprit``, at once; it has the original; no runner can be used after it."""
    for rank, result in enumerate(results):
        error, text = result.error, str(result.error)
        assert type(error) is ScheduleError, (rank, error)
        assert re.match(rf"rank {culprit} failed at \[\d+/\d+\] {action}: {words_}", text), (rank, text)
        assert "\n" not in text, f"rank {rank}: one line"
        assert result.took_s < LONG_S / 2, rank
        assert error.rank == culprit
        assert all(isinstance(after, ScheduleError) for after in result.after), (rank, result.after)
    assert type(results[culprit].error.__cause__) is cause


@all_programs
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("turn", [1, M])
@pytest.mark.slow
def test_a_stage_that_raises_in_its_forward(program, where, turn):
    modules = model(program.stages)
    s = 0 if where == "first" else program.stages - 1
    modules[s] = Faulty(modules[s], forward=Gate(turn, boom))
    results = run(program, modules)
    assert_told(
        results, program.placement[s], "ArithmeticError: no such word", ArithmeticError, rf"(\(.*)?{s}F{turn - 1}.*"
    )


@all_programs
def test_a_stage_that_raises_in_its_backward(program):
    modules = model(program.stages)
    modules[1] = Faulty(modules[1], backward=Gate(2, boom)) if program.stages == 3 else modules[1]
    s = 1
    if program.stages > 3:  # the first module that gives one tensor, whatever else it is
        s = program.stages - 1
        modules[s] = Faulty(modules[s], backward=Gate(2, boom))
    results = run(program, modules)
    assert_told(results, program.placement[s], "ArithmeticError: no such word", ArithmeticError, rf"(\(.*)?{s}[BI]1.*")


@all_programs
def test_a_loss_that_raises(program):
    gate = Gate(3, boom)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        gate()
        return word_loss(logits, targets)

    results = run(program, model(program.stages), loss_fn=loss_fn)
    last = program.stages - 1
    assert_told(results, program.placement[-1], "ArithmeticError", ArithmeticError, rf"(\(.*)?{last}F2.*")


def test_a_weight_gradient_that_raises_in_w():
    program = zb_h2(RANKS, M)
    modules = model(RANKS)

    class Deferred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return defer_weight_grad(self.weight, lambda _: boom(), x * self.weight.detach())

    modules[1] = Deferred()
    assert_told(run(program, modules), 1, "ArithmeticError: no such word", ArithmeticError, "1[WB]0")


def test_an_optimizer_that_raises_at_its_step():
    program = optimizer_step(one_f_one_b(RANKS, M))

    class Sgd(torch.optim.SGD):
        def step(self, *_: Any) -> None:  # type: ignore[override]
            boom()

    def stage(module: nn.Module, s: int) -> Stage:
        make = Sgd if s == 2 else torch.optim.SGD
        return Stage(module, s, optimizer=make(module.parameters(), lr=0.1))

    # Rank 2 ends first: the others wait for its gradients no more, and are told at their own end or in the next step.
    results = run(program, model(RANKS), stage=stage)
    text = str(results[2].error)
    assert re.match(r"rank 2 failed at \[\d+/\d+\] 2STEP0: ArithmeticError", text), text
    for result in results:
        assert all(isinstance(after, ScheduleError) for after in result.after), result.after
        assert any("2STEP0" in str(each) for each in (result.error, *result.after)), (result.error, result.after)


@pytest.mark.parametrize(
    "method", ["call", "accumulate", "before_backward", "after_backward", "before_last_backward", "reduce_grad"]
)
def test_what_shards_a_stage_raises(method):
    class Handle:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def __getattr__(self, name: str) -> Any:
            return (lambda *_: boom()) if name == method else (lambda *_: None)

        def call(self, *args: Any) -> Any:
            return boom() if method == "call" else self.module(*args)

    def stage(module: nn.Module, s: int) -> Stage:
        return Stage(module, s, data_parallel=Handle(module) if s == 1 else None)

    results = run(zb_h2(RANKS, M), [model(RANKS)[0], nn.Linear(WIDTH, WIDTH), model(RANKS)[2]], stage=stage)
    error = results[1].error
    assert isinstance(error, ScheduleError)
    assert re.match(r"rank 1 failed at \[\d+/\d+\] 1\w+: ArithmeticError: no such word", str(error)), str(error)
    assert type(error.__cause__) is ArithmeticError
    for result in results:
        assert result.took_s < LONG_S / 2
        assert any("rank 1 failed at" in str(each) for each in (result.error, *result.after))


def test_a_time_out_of_what_shards_a_stage_is_a_time_out_on_all_ranks():
    class Handle:
        def __getattr__(self, name: str) -> Any:
            if name in ("call", "accumulate", "before_backward", "after_backward"):
                raise AttributeError(name)
            return late if name == "reduce_grad" else (lambda: None)

    def late() -> None:
        raise PipelineTimeout("stage 1 waited for its replicas")

    results = run(
        zb_h2(RANKS, M),
        model(RANKS),
        stage=lambda module, s: Stage(module, s, data_parallel=Handle() if s == 1 else None),
    )
    for result in results:
        told = next(each for each in (result.error, *result.after) if each is not None)
        assert type(told) is PipelineTimeout, told
        assert re.match(r"rank 1 failed at \[\d+/\d+\] 1REDUCE_GRAD: stage 1 waited for its replicas", str(told))


@all_programs
def test_a_shape_that_the_next_stage_cannot_take_is_that_stages_error(program):
    modules = model(program.stages)
    modules[1] = nn.Linear(WIDTH, WIDTH + 1)
    if program.stages > 3:
        modules[2] = nn.Linear(WIDTH, WIDTH)
    results = run(program, modules)
    assert_told(results, program.placement[2], "RuntimeError: ", RuntimeError, r"(\(.*)?2F0.*")


def test_a_stage_that_returns_what_cannot_travel():
    class Words(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"hidden": x}

    modules = model(RANKS)
    modules[1] = Words()
    for result in run(one_f_one_b(RANKS, M), modules):
        assert re.match(r"rank 1 failed at \[\d+/\d+\] 1F0: the output of stage 1 is a dict", str(result.error))


@pytest.mark.parametrize(
    ("rank", "batch", "words_"),
    [
        (0, (words(M)[0][:-1], None), f"inputs has {M - 1} microbatches; the program has {M}"),
        (0, (None, None), "inputs is None on the rank of stage 0"),
        (0, ({"ids": 1}, None), "inputs is a dict"),
        (0, (torch.zeros(M - 1, 3), None), f"inputs has {M - 1} rows"),
        (2, (None, words(M)[1] * 2), f"targets has {2 * M} microbatches; the program has {M}"),
    ],
)
def test_lists_that_are_not_the_programs_are_told_to_all_and_the_next_step_is_fine_or_refused(rank, batch, words_):
    results = run(one_f_one_b(RANKS, M), model(RANKS), batch=lambda r: batch if r == rank else words(M))
    for result in results:
        assert isinstance(result.error, ScheduleError)
        assert words_ in str(result.error), result.error
        assert result.took_s < LONG_S / 2
    # Either no runner can be used any more, or all of them can.
    assert len({type(result.after[0]) for result in results}) == 1, [result.after for result in results]


def make_and_step(transport: Any, program: Program, stages: list[Stage]) -> None:
    """A rank that is given its ``stages``."""
    PipelineRunner(program, [stages[transport.rank]], transport, word_loss, timeout_s=LONG_S).step(*words(M))


def test_stages_that_are_not_the_programs_are_told_to_all():
    modules = model(RANKS)
    stages = [Stage(modules[0], 0), Stage(modules[2], 2), Stage(modules[2], 2)]
    begin = time.monotonic()
    results = on_threads(RANKS, make_and_step, one_f_one_b(RANKS, M), stages)
    assert time.monotonic() - begin < LONG_S / 2
    for result in results:
        assert type(result) is ScheduleError
        assert "stages (2,) were given; the program places (1,) on rank 1" in str(result)


def test_a_step_of_a_program_without_optimizer_names_the_stage_on_all_ranks():
    sgd = [None if s == 1 else torch.optim.SGD(module.parameters()) for s, module in enumerate(model(RANKS))]
    stages = [Stage(module, s, optimizer=sgd[s]) for s, module in enumerate(model(RANKS))]
    begin = time.monotonic()
    results = on_threads(RANKS, make_and_step, optimizer_step(one_f_one_b(RANKS, M)), stages)
    assert time.monotonic() - begin < LONG_S / 2
    for result in results:
        assert type(result) is ScheduleError
        assert "1STEP0: stage 1 has no optimizer" in str(result)


# ---- Silent peers and lost messages


def assert_timed_out(results: list[Ended], silent: set[int], since_s: float) -> None:
    """All but ``silent`` ended at the deadline, each with where it stands and for whom it waits."""
    for rank, result in enumerate(results):
        if rank in silent:
            continue
        text = str(result.error)
        assert type(result.error) is PipelineTimeout, (rank, result.error)
        assert SHORT_S / 2 < result.at_s - since_s < SHORT_S + 1, rank
        found = WAITS.match(text)
        assert found, text
        assert found.group(1) == str(rank), text
        assert "\n" not in text
        assert all(isinstance(after, ScheduleError) for after in result.after), (rank, result.after)


@all_programs
@pytest.mark.parametrize("number", [0, 7])
def test_a_lost_message_is_a_timeout_on_every_rank_that_still_runs(program, number):
    count = iter(range(10_000))
    lost: list[str] = []
    when: list[float] = []

    def on_send(action: Any) -> bool:
        if next(count) != number:
            return True
        lost.append(str(action))
        when.append(time.monotonic())
        return False

    transports = [Altered(each, on_send) if each.rank == 1 else each for each in threads(RANKS)]
    results = run(program, model(program.stages), transports=transports, timeout_s=SHORT_S)
    assert len(lost) == 1
    # A rank that had all of its own messages may have ended its step; then its next call says it.
    ended = {rank for rank, result in enumerate(results) if result.error is None}
    assert all(isinstance(results[rank].after[0], ScheduleError) for rank in ended)
    assert_timed_out(results, ended, when[0])
    stage, kind = re.fullmatch(r"(\d+)SEND_(F\d+|B\d+)", lost[0]).groups()
    taker = int(stage) + (1 if kind[0] == "F" else -1)
    missed = f"{taker}RECV_{kind} for rank 1"
    assert missed in str(results[program.placement[taker]].error), (lost, [result.error for result in results])


@all_programs
def test_a_rank_that_stops_is_a_timeout_on_the_others_that_names_it(program):
    others_ended = threading.Event()
    when: list[float] = []

    def stop() -> None:
        when.append(time.monotonic())
        others_ended.wait(LONG_S)

    modules = model(program.stages)
    last = program.stages - 1
    modules[last] = Faulty(modules[last], forward=Gate(2, stop))
    results = run(program, modules, timeout_s=SHORT_S, others_ended=others_ended)
    culprit = program.placement[last]
    assert_timed_out(results, {culprit}, when[0])
    for rank, result in enumerate(results):
        if rank != culprit:
            assert re.search(rf"rank {culprit} (silent|at \[)", str(result.error)), result.error
    assert isinstance(results[culprit].error, ScheduleError), "it woke, and what it made is not to be used"


# ---- Ctrl-C


@all_programs
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_goes_on_as_it_is_and_ends_the_step_of_the_others(program, interrupt):
    def act() -> None:
        raise interrupt

    modules = model(program.stages)
    last = program.stages - 1
    modules[last] = Faulty(modules[last], forward=Gate(2, act))
    results = run(program, modules)
    culprit = program.placement[last]
    for rank, result in enumerate(results):
        assert result.took_s < LONG_S / 2
        assert all(isinstance(after, ScheduleError) for after in result.after), (rank, result.after)
        if rank == culprit:
            assert type(result.error) is interrupt
        else:
            assert type(result.error) is ScheduleError
            assert re.match(rf"rank {culprit} failed at \[\d+/\d+\] .*{interrupt.__name__}", str(result.error))


# ---- Other calls than step


@pytest.mark.parametrize("call", ["evaluate", "forward"])
@all_programs
def test_a_stage_that_raises_in_an_evaluation_is_told_to_all(program, call):
    modules = model(program.stages)
    last = program.stages - 1
    modules[last] = Faulty(modules[last], forward=Gate(2, boom))

    def rank(transport: Any) -> tuple[list[BaseException | None], float]:
        stages = [Stage(modules[s], s) for s in program.stages_of(transport.rank)]
        runner = PipelineRunner(program, stages, transport, word_loss, timeout_s=LONG_S)
        begin = time.monotonic()
        first = outcome(lambda: runner.evaluate(*words(M)) if call == "evaluate" else runner.forward(words(M)[0]))
        return [first, outcome(lambda: runner.step(*words(M)))], time.monotonic() - begin

    results = on_threads(RANKS, rank)
    told = rf"rank {program.placement[last]} failed at .*{last}F1.*no such word"
    for r, ((error, after), took_s) in enumerate(results):
        # A rank that only sends may have ended before; then its next call says it.
        assert error is None or re.match(told, str(error)), (r, error)
        assert isinstance(after, ScheduleError), r
        assert re.search(told, str(error or after)), (r, after)
        assert took_s < LONG_S / 2
    assert isinstance(results[program.placement[last]][0][0], ScheduleError)
