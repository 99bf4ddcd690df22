"""The runner's calls (their inputs, evaluations, sharding, profiles, agreement), for all schedules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from matrix_helpers import WIDTH, WORDS, differing, model, plain_loop, same_losses, word_loss, words
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Program, Stage, pipedream_2bw
from sixfold.pipeline.passes import lower
from sixfold.pipeline.schedules import registered

RANKS, M = 3, 4
PROGRAMS = [entry.with_chunks(RANKS, M, entry.chunks or 2) for entry in registered() if entry.flushed]
all_programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def runner_of(program: Program, modules: list[nn.Module], transport: Any = None, **options: Any) -> PipelineRunner:
    """Of a rank's stages, or of all."""
    mine = range(program.stages) if transport is None else program.stages_of(transport.rank)
    stages = [Stage(modules[s], s) for s in mine]
    return PipelineRunner(program, stages, transport, **{"loss_fn": word_loss, "timeout_s": 20} | options)


def assert_same(mine: list[nn.Module], theirs: list[nn.Module]) -> None:
    """Gradients of all stages."""
    assert not {s: names for s, (a, b) in enumerate(zip(mine, theirs, strict=True)) if (names := differing(a, b))}


# ---- Inputs


@all_programs
@pytest.mark.slow
def test_a_tensor_is_cut_along_its_rows_and_a_list_is_taken_as_it_is(program):
    x, y = (torch.cat(part) for part in words(M))
    forms = [(x, y), words(M), ([(part,) for part in words(M)[0]], y)]
    theirs = model(program.stages)
    expected = plain_loop(theirs, *words(M))
    for inputs, targets in forms:
        mine = model(program.stages)
        held = copy.deepcopy((inputs, targets))
        assert same_losses(runner_of(program, mine).step(inputs, targets).losses, expected)
        assert_same(mine, theirs)
        torch.testing.assert_close((inputs, targets), held, rtol=0, atol=0)  # what the caller gave is as it was


class Scales(nn.Module):
    """Multiplies by a keyword; the last stage makes the loss from its labels."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(WIDTH, WIDTH), seen

    def forward(self, x: Tensor, *, scale: float, k: int, labels: Tensor) -> Tensor:
        self.seen.append(k)
        return torch.tanh(self.layer(x)) * scale + labels


@all_programs
@pytest.mark.slow
def test_keywords_reach_all_stages_of_their_microbatch_and_are_not_sent(program):
    generator = torch.Generator().manual_seed(1)
    inputs = list(torch.randn(M, 2, WIDTH, generator=generator))
    kwargs = [{"scale": 0.5 + k, "k": k, "labels": inputs[k] / 3} for k in range(M)]
    seen: list[list[int]] = [[] for _ in range(program.stages)]
    torch.manual_seed(2)
    mine = [Scales(seen[s]) for s in range(program.stages)]
    theirs = copy.deepcopy(mine)

    def rank(transport: Any) -> list[Tensor]:
        own = [dict(each) for each in kwargs]
        runner = runner_of(program, mine, transport, loss_fn=lambda o, t: o.square().mean() if t is None else None)
        return runner.step(inputs if transport.rank == program.placement[0] else None, kwargs=own).losses

    results = values_or_raise(on_threads(RANKS, rank))
    assert seen == [list(range(M))] * program.stages
    losses = []
    for x, keywords in zip(inputs, kwargs, strict=True):
        for module in theirs:
            x = module(x, **keywords)
        loss = x.square().mean()
        (loss / M).backward()
        losses.append(loss.detach())
    assert same_losses(results[program.placement[-1]], losses)
    assert_same(mine, theirs)


# ---- Evaluations, outputs


@all_programs
@pytest.mark.slow
def test_evaluations_and_forwards_between_steps_leave_no_trace(program):
    mine, theirs = model(program.stages), model(program.stages)
    targets = words(M, 9)[1]

    def rank(transport: Any) -> list[Any]:
        runner = runner_of(program, mine, transport)
        found: list[Any] = []
        for seed in range(2):
            found.append(runner.evaluate(words(M, 9)[0], targets, keep_outputs=True))
            found.append(runner.forward(words(M, 9, rows=5)[0]))
            found.append(runner.step(*words(M, seed), keep_outputs=True))
        found.append(runner.evaluate(*words(M, 9)))
        return found

    results = values_or_raise(on_threads(RANKS, rank))
    with torch.no_grad():
        evaluated = evaluate(theirs, words(M, 9))
    for seed in range(2):
        expected = plain_loop(theirs, *words(M, seed))
        for r, result in enumerate(results):
            last = r == program.placement[-1]
            first, forward, step = result[3 * seed : 3 * seed + 3]
            assert same_losses(first.losses, evaluated if last else [])
            assert same_losses(step.losses, expected if last else [])
            assert [len(each.outputs) for each in (first, forward, step)] == ([M] * 3 if last else [0] * 3)
            assert [tuple(each.shape) for each in forward.outputs] == ([(5, 3, WORDS)] * M if last else [])
            assert forward.losses == []
            for output, loss, target in zip(step.outputs, step.losses, words(M, seed)[1], strict=False):
                assert not output.requires_grad
                assert torch.equal(word_loss(output, target), loss)
    assert same_losses(results[program.placement[-1]][-1].losses, evaluated)
    assert_same(mine, theirs)
    assert all(parameter.requires_grad for module in mine for parameter in module.parameters())


def evaluate(modules: list[nn.Module], batch: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
    """Losses of the plain model."""
    losses = []
    for value, target in zip(*batch, strict=True):
        for module in modules:
            value = module(*value) if isinstance(value, tuple) else module(value)
        losses.append(word_loss(value, target))
    return losses


def test_an_evaluation_while_microbatches_are_in_flight_leaves_them_as_they_are():
    program = pipedream_2bw(RANKS, M, steps=2)

    def rank(transport: Any, modules: list[nn.Module], evaluations: int) -> list[Tensor]:
        stages = [
            Stage(modules[s], s, optimizer=torch.optim.SGD(modules[s].parameters(), lr=0.1))
            for s in program.stages_of(transport.rank)
        ]
        runner = PipelineRunner(program, stages, transport, word_loss, timeout_s=20)
        losses = []
        for seed in range(4):
            losses += runner.step(*words(M, seed)).losses
            for _ in range(evaluations):
                runner.evaluate(*words(M, 9))
        runner.drain()
        return losses

    disturbed, quiet = model(RANKS), model(RANKS)
    one = values_or_raise(on_threads(RANKS, rank, disturbed, 1))
    other = values_or_raise(on_threads(RANKS, rank, quiet, 0))
    assert same_losses(one[-1], other[-1])
    for a, b in zip(disturbed, quiet, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# ---- What shards a stage


class Handle:
    """Writes down its calls; ``accumulate`` keeps what it is handed instead of ``.grad``."""

    def __init__(self, module: nn.Module, log: list[str]) -> None:
        self.module, self.log = module, log
        self.handed: dict[nn.Parameter, Tensor] = {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append("call")
        return self.module(*args, **kwargs)

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.log.append("accumulate")
        held = self.handed.get(parameter)
        self.handed[parameter] = gradient.clone() if held is None else held + gradient

    def after_backward(self, microbatch: int) -> None:
        self.log.append(f"after{microbatch}")

    def __getattr__(self, name: str) -> Any:
        if name not in ("unshard", "reshard", "before_last_backward", "reduce_grad"):
            raise AttributeError(name)
        return lambda: self.log.append(name)


def expected_calls(program: Program, stage: int) -> list[str]:
    """From the program's own list: what the handle of a stage of two Linears with biases is to see."""
    row = program.ranks[program.placement[stage]]
    mine = [part for entry in row for part in (entry.parts or (entry,)) if part.stage == stage]
    ends = [action for action in mine if action.kind.value in ("B", "W")]
    calls: list[str] = []
    for action in mine:
        if action.kind.value == "F":
            calls.append("call")
        if action in ends:
            if action is ends[-1]:
                calls.append("before_last_backward")
            if action.kind.value == "W":
                calls += ["accumulate"] * 4
            calls.append(f"after{action.microbatch}")
    return [*calls, "reduce_grad"]


@pytest.mark.sampled
@all_programs
@pytest.mark.parametrize("lowered", [False, True], ids=["as made", "lowered"])
@pytest.mark.slow
def test_what_shards_a_stage_is_called_in_the_order_of_the_program(program, lowered):
    torch.manual_seed(3)
    mine = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(program.stages)]
    theirs = copy.deepcopy(mine)
    handles = [Handle(module, []) for module in mine]
    stages = [Stage(module, s, data_parallel=handles[s]) for s, module in enumerate(mine)]
    inputs = list(torch.randn(M, 2, WIDTH))
    runner = PipelineRunner(lower(program) if lowered else program, stages, loss_fn=lambda o, _: o.square().mean())
    runner.evaluate(inputs)
    assert [handle.log for handle in handles] == [["call"] * M] * program.stages
    for _ in range(2):
        for handle in handles:
            handle.log.clear()
        runner.step(inputs)
        assert [handle.log for handle in handles] == [expected_calls(program, s) for s in range(program.stages)]
        plain_loop(theirs, inputs, [None] * M, lambda o, _: o.square().mean())
    for handle, module in zip(handles, theirs, strict=True):  # some by B into .grad, some by W to the handle
        for parameter, other in zip(handle.module.parameters(), module.parameters(), strict=True):
            parts = [part for part in (parameter.grad, handle.handed.get(parameter)) if part is not None]
            torch.testing.assert_close(sum(parts), other.grad)


# ---- Programs per step, profiles, agreement


@pytest.mark.slow
def test_one_runner_runs_all_programs_of_its_stages_each_step_another():
    by_placement: dict[tuple[int, ...], list[Program]] = {}
    for program in PROGRAMS:
        by_placement.setdefault(program.placement, []).append(program)
    for placement, programs in by_placement.items():
        mine, theirs = model(len(placement)), model(len(placement))
        runner = runner_of(programs[0], mine)
        for seed, program in enumerate([*programs, *map(lower, programs), Program.parse(str(programs[0]))]):
            losses = runner.step(*words(M, seed), program=program).losses
            assert same_losses(losses, plain_loop(theirs, *words(M, seed))), program.name
            assert_same(mine, theirs)


@all_programs
@pytest.mark.slow
def test_a_profile_has_each_action_once_in_its_ranks_order_and_none_before_its_inputs(program):
    result = runner_of(program, model(program.stages), profile=True).step(*words(M))
    work = [(rank, str(action), begin, end) for rank, action, begin, end in result.events if str(action)[1] in "FBIW"]
    for rank, row in enumerate(program.ranks):
        parts = [str(part) for entry in row for part in (entry.parts or (entry,))]
        assert [text for r, text, *_ in work if r == rank] == parts
    ends = {text: end for _, text, _, end in work}
    for _, text, begin, end in work:
        assert begin <= end
        stage, kind, k = int(text[0]), text[1], text[2:]
        before = [f"{stage - 1}F{k}"] if kind == "F" else [f"{stage + 1}{other}{k}" for other in "BI"]
        assert all(ends[each] <= begin for each in before if each in ends and kind != "W"), text
    assert result.timeline is not None
    assert result.timeline.makespan > 0


def test_all_ranks_run_the_program_that_one_of_them_chose():
    chosen = next(program for program in PROGRAMS if program.name == "zb_h1")
    first = next(program for program in PROGRAMS if program.name == "gpipe")
    mine, theirs = model(RANKS), model(RANKS)

    def rank(transport: Any) -> Program:
        runner = runner_of(first, mine, transport)
        agreed = runner.agree(chosen if transport.rank == 1 else None, source=1)
        runner.step(*words(M), program=agreed)
        runner.check()
        return agreed

    assert values_or_raise(on_threads(RANKS, rank)) == [chosen] * RANKS
    plain_loop(theirs, *words(M))
    assert_same(mine, theirs)
