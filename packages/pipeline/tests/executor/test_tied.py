"""Tied parameters: one value, one gradient, the sum of all stages' in ascending order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_helpers import Shared, batch, equal_bits, layers, square_loss
from thread_helpers import on_threads, values_or_raise
from torch import nn

from sixfold.pipeline import PipelineRunner, Program, ScheduleError, Stage, gpipe, interleaved, zb_h1
from sixfold.pipeline.passes import optimizer_step


def stages_of(count: int, tied: tuple[int, ...]) -> list[Stage]:
    made = []
    for index, layer in enumerate(layers(count)):
        if index in tied:
            module = Shared(layer, 0.5 + index)
            made.append(Stage(module, index, tied={"factor": module.factor}))
        else:
            made.append(Stage(layer, index))
    return made


def check(program: Program, tied: tuple[int, ...], run: Any) -> None:
    """Two steps; the oracle keeps each copy's own total and adds them."""
    stages, oracle = stages_of(program.stages, tied), stages_of(program.stages, tied)
    copies = [oracle[index].module.factor for index in tied]
    for copy in copies[1:]:
        copy.data.copy_(copies[0].data)
    m = program.microbatches
    totals = None
    for seed in (1, 2):
        x, y = batch(2 * m, seed)
        for a, b in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            for stage in oracle:
                a = stage.module(a)
            (square_loss(a, b) / m).backward()
        total = copies[0].grad
        for copy in copies[1:]:
            total = total + copy.grad
        totals = total.clone() if totals is None else totals + total
        for copy in copies:
            copy.grad = None
    run(program, stages, [batch(2 * m, seed) for seed in (1, 2)])
    for index in tied:
        factor = stages[index].module.factor
        assert torch.equal(factor.data, copies[0].data)
        assert equal_bits([factor.grad], [totals])
    plain = [s for s in range(program.stages) if s not in tied]
    for s in plain:
        theirs = [p.grad for p in oracle[s].module.parameters()]
        assert equal_bits([p.grad for p in stages[s].module.parameters()], theirs)


def one_process(program: Program, stages: list[Stage], batches: list[Any]) -> None:
    runner = PipelineRunner(program, stages, loss_fn=square_loss)
    for x, y in batches:
        runner.step(x, y)


def by_threads(program: Program, stages: list[Stage], batches: list[Any]) -> None:
    def rank(transport: Any) -> None:
        mine = [stages[s] for s in program.stages_of(transport.rank)]
        runner = PipelineRunner(program, mine, transport, square_loss, timeout_s=20)
        for x, y in batches:
            runner.step(x, y)

    values_or_raise(on_threads(len(program.ranks), rank))


CASES = [(gpipe(2, 3), (0, 1)), (zb_h1(3, 4), (0, 2)), (interleaved(2, 4), (0, 1, 3)), (gpipe(4, 2), (1, 2, 3))]


@pytest.mark.parametrize("run", [one_process, by_threads])
@pytest.mark.parametrize(("program", "tied"), CASES, ids=str)
def test_every_copy_gets_the_sum_in_ascending_stage_order(program, tied, run):
    check(program, tied, run)


def test_one_parameter_on_two_stages_of_a_process_is_not_added_twice():
    shared = nn.Parameter(torch.ones(8))
    ours = [Shared(layer, 1.0) for layer in layers(2)]
    stages = []
    for index, module in enumerate(ours):
        module.factor = shared
        stages.append(Stage(module, index, tied={"factor": shared}))
    x, y = batch(4)
    PipelineRunner(gpipe(2, 1), stages, loss_fn=square_loss).step(x, y)
    gradient, shared.grad = shared.grad, None
    square_loss(ours[1](ours[0](x)), y).backward()
    assert torch.equal(gradient, shared.grad)


def test_what_cannot_be_tied_is_refused():
    two = stages_of(2, (0, 1))
    two[1].module.factor = nn.Parameter(torch.ones(8, dtype=torch.float64))
    two[1] = Stage(two[1].module, 1, tied={"factor": two[1].module.factor})
    with pytest.raises(ScheduleError, match=r"tied\['factor'\] is torch.float32 \[8\] on stage 0 and torch.float64"):
        PipelineRunner(gpipe(2, 2), two, loss_fn=square_loss)
    stages = [
        Stage(s.module, s.index, tied=s.tied, optimizer=torch.optim.SGD(s.module.parameters()))
        for s in stages_of(2, (0, 1))
    ]
    with pytest.raises(ScheduleError, match="stage 0 has tied parameters, whose gradients are summed after"):
        PipelineRunner(optimizer_step(gpipe(2, 2)), stages, loss_fn=square_loss)
    module = two[0].module
    stage = Stage(module, 0, tied={"factor": module.factor}, data_parallel=object())  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="stage 0 has tied parameters and data_parallel, which owns"):
        PipelineRunner(gpipe(2, 2), [stage, two[1]], loss_fn=square_loss)
    single = Stage(module, 0, tied={"factr": module.factor})
    for other in (Stage(nn.Linear(8, 8), 1), stages_of(2, (0, 1))[1]):
        with pytest.raises(ScheduleError, match=r"tied\['fact.*r'\] is on stage . alone, and nothing is tied to it"):
            PipelineRunner(gpipe(2, 2), [single, other], loss_fn=square_loss)
    PipelineRunner(gpipe(1, 2), single, loss_fn=square_loss).step(*batch(4))  # a cut into one stage names it too


def test_a_step_that_fails_leaves_the_gradients_of_tied_parameters_as_they_were():
    stages = stages_of(2, (0, 1))
    runner = PipelineRunner(gpipe(2, 2), stages, loss_fn=square_loss)
    runner.step(*batch(4))
    before = [stage.module.factor.grad.clone() for stage in stages]
    with pytest.raises(ScheduleError):
        runner.step(batch(4)[0], [torch.ones(3)] * 2)
    assert equal_bits([stage.module.factor.grad for stage in stages], before)


def loads_again(transport: Any, modules: list[nn.Module], which: tuple[int, ...], tie: bool, assign: bool) -> Any:
    """A step, new weights for some of the copies, and another step, on the stages of a rank or on all."""
    here = range(2) if transport is None else [transport.rank]
    stages = [Stage(modules[i], i, tied={"factor": modules[i].factor}) for i in here]
    runner = PipelineRunner(gpipe(2, 2), stages, transport, square_loss, timeout_s=20)
    runner.step(*batch(4))
    for i in here:
        state = {name: value * 2 for name, value in modules[i].state_dict().items()}
        if i in which:
            modules[i].load_state_dict(state, assign=assign)
        for parameter in modules[i].parameters():
            parameter.grad = None
    if tie:
        runner.tie()
    runner.step(*batch(4))
    return [modules[i].factor for i in here]


def two_shared(*, one: bool = False) -> list[nn.Module]:
    modules = [Shared(layer, 0.5) for layer in layers(2)]
    if one:
        modules[1].factor = modules[0].factor
    return modules


def run_again(where: str, modules: list[nn.Module], *args: Any) -> list[Any]:
    if where == "one process":
        return loads_again(None, modules, *args)
    return [found for (found,) in values_or_raise(on_threads(2, loads_again, modules, *args))]


@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
@pytest.mark.parametrize("where", ["one process", "one object", "threads"])
def test_copies_stay_tied_when_both_are_loaded(where, assign):
    where, one = ("one process", True) if where == "one object" else (where, False)
    modules, oracle = two_shared(one=one), two_shared(one=True)
    found = run_again(where, modules, (0, 1), False, assign)
    for module in oracle:
        doubled = {name: value * 2 for name, value in two_shared()[oracle.index(module)].state_dict().items()}
        module.load_state_dict(doubled)
    factor = oracle[0].factor
    if one and not assign:  # each of two loads doubles the one object
        factor.data.mul_(2)
    x, y = batch(4)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (square_loss(oracle[1](oracle[0](a)), b) / 2).backward()
    for copy in found:
        torch.testing.assert_close(copy.data, factor.data)
        torch.testing.assert_close(copy.grad, factor.grad)


@pytest.mark.parametrize("assign", [True, False], ids=["assign", "copy"])
@pytest.mark.parametrize("where", ["one process", "threads"])
def test_a_copy_that_was_loaded_alone_is_refused_until_it_is_tied_again(where, assign):
    with pytest.raises(ScheduleError, match=r"tied\['factor'\]: the copies on stages 0 and 1 have other values"):
        run_again(where, two_shared(), (0,), False, assign)
    first, second = run_again(where, two_shared(), (0,), True, assign)
    assert torch.equal(first.data, torch.full((8,), 1.0))
    assert torch.equal(second.data, first.data)


def evaluates(ranks: Any, modules: list[nn.Module], verb: str, tied: bool) -> None:
    """One copy is loaded behind the runner; perhaps tied again."""
    here = (0, 1) if ranks is None else (ranks.rank,)
    stages = [Stage(modules[i], i, tied={"factor": modules[i].factor}) for i in here]
    runner = PipelineRunner(gpipe(2, 2), stages, ranks, square_loss, timeout_s=20)
    x, y = batch(4)
    given = (x, y) if verb == "evaluate" else (x,)
    getattr(runner, verb)(*given)
    if 0 in here:
        modules[0].factor.data.mul_(2)
    if tied:
        runner.tie()
    getattr(runner, verb)(*given)
    if tied:
        runner.step(x, y)  # another message on the same way
        getattr(runner, verb)(*given)


@pytest.mark.parametrize("verb", ["evaluate", "forward"])
@pytest.mark.parametrize("where", ["one process", "threads"])
def test_an_evaluation_of_copies_that_differ_is_refused_until_they_are_tied_again(where, verb):
    def run(tied: bool) -> None:
        modules = two_shared()
        if where == "one process":
            evaluates(None, modules, verb, tied)
        else:
            values_or_raise(on_threads(2, evaluates, modules, verb, tied))

    with pytest.raises(ScheduleError, match=r"tied\['factor'\]: the copies on stages 0 and 1 have other values"):
        run(tied=False)
    run(tied=True)


@pytest.mark.parametrize("verb", ["step", "tie"])
def test_copies_that_differ_end_the_runner_of_every_rank_and_a_new_one_ties_them(verb):
    modules = two_shared()
    x, y = batch(4)

    def rank(transport: Any) -> None:
        stage = Stage(modules[transport.rank], transport.rank, tied={"factor": modules[transport.rank].factor})

        def made() -> PipelineRunner:
            return PipelineRunner(gpipe(2, 2), [stage], transport, square_loss, timeout_s=20)

        runner = made()
        if transport.rank == 0:
            modules[0].factor.data.mul_(2)
        if transport.rank == 0:
            runner.evaluate(x, y)  # sends what the other looks at
        else:
            with pytest.raises(ScheduleError, match=r"have other values.*make a new runner on all ranks"):
                runner.evaluate(x, y)
        with pytest.raises(ScheduleError, match=r"have other values, .*make a new runner on all ranks"):
            runner.tie() if verb == "tie" else getattr(runner, verb)(x, y)
        runner = made()
        runner.evaluate(x, y)
        runner.step(x, y)

    values_or_raise(on_threads(2, rank))
    assert torch.equal(modules[1].factor.data, torch.full((8,), 1.0))


def test_a_tied_parameter_that_is_gone_or_of_another_shape_is_named():
    modules = two_shared()
    stages = [Stage(module, i, tied={"factor": module.factor}) for i, module in enumerate(modules)]
    runner = PipelineRunner(gpipe(2, 2), stages, None, square_loss)
    modules[1].factor = nn.Parameter(torch.ones(1))
    with pytest.raises(ScheduleError, match=r"tied\['factor'\] of stage 1 was .*\[8\] and is .*\[1\]; tied .*cut the"):
        runner.step(*batch(4))
    del modules[1].factor
    with pytest.raises(ScheduleError, match=r"stage 1: tied\['factor'\] was factor, which its module has no more"):
        runner.step(*batch(4))


@pytest.mark.parametrize("where", ["one process", "threads"])
@pytest.mark.parametrize("sort", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_gradient_hook_of_a_tied_copy_is_refused_until_the_gradients_are_changed_behind_the_step(sort, where):
    """Such as a mask over the rows of an embedding that are not trained: the other copy's part came past it."""
    mask = torch.tensor([0.0, 1.0]).repeat(4)

    def masked(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(mask)

    hook = mask.mul if sort == "register_hook" else masked
    x, y = batch(4)

    def run(ranks: Any, modules: list[nn.Module], hooked: bool) -> None:
        here = (0, 1) if ranks is None else (ranks.rank,)
        stages = [Stage(modules[i], i, tied={"factor": modules[i].factor}) for i in here]
        runner = PipelineRunner(gpipe(2, 2), stages, ranks, square_loss, timeout_s=20)
        handle = getattr(modules[0].factor, sort)(hook) if hooked and 0 in here else None
        try:
            runner.step(x, y)
        finally:
            if handle is not None:
                handle.remove()
        for stage in stages:
            stage.module.factor.grad.mul_(mask)

    def attempt(modules: list[nn.Module], hooked: bool) -> None:
        if where == "one process":
            run(None, modules, hooked)
        else:
            values_or_raise(on_threads(2, run, modules, hooked))

    with pytest.raises(ScheduleError, match=r"tied\['factor'\] of stage 0 has a gradient hook, .*behind step\(\)"):
        attempt(two_shared(), hooked=True)
    modules, oracle = two_shared(), two_shared(one=True)
    attempt(modules, hooked=False)
    oracle[0].factor.register_hook(mask.mul)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (square_loss(oracle[1](oracle[0](a)), b) / 2).backward()
    for module in modules:
        torch.testing.assert_close(module.factor.grad, oracle[0].factor.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [0, 1, 397, 799])
@pytest.mark.parametrize("verb", ["step", "forward"])
def test_one_row_of_a_copy_that_was_changed_alone_is_refused_until_it_is_tied_again(verb, row, dtype):
    """Such as the padding's, set to zero behind each step: its other copy went on with a row of its own."""
    modules = two_shared()
    for module in modules:
        module.factor = nn.Parameter(torch.linspace(-1, 1, 6400).view(800, 8).to(dtype))
        module.forward = lambda x, module=module: module.layer(x) * module.factor[:2].float()
    stages = [Stage(module, i, tied={"factor": module.factor}) for i, module in enumerate(modules)]
    runner = PipelineRunner(gpipe(2, 2), stages, None, square_loss)
    x, y = batch(4)

    def run():
        return runner.step(x, y) if verb == "step" else runner.forward(x)

    run()
    modules[0].factor.data[row] += 1.0
    with pytest.raises(ScheduleError, match=r"tied\['factor'\]: the copies on stages 0 and 1 have other values"):
        run()
    for module in modules:
        module.zero_grad()
    runner.tie()
    run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_copies_that_differ_by_the_rounding_of_their_optimizers_are_taken_as_one(dtype):
    from sixfold.pipeline.executor.tied_weights import _far, _norms

    draw = torch.Generator().manual_seed(0)
    value = torch.randn(800, 8, generator=draw).mul(10).to(dtype)
    other = (value * (1 + torch.finfo(dtype).eps * torch.randn(800, 8, generator=draw).sign())).to(dtype)
    assert not _far(_norms(other), _norms(value), value)
    assert not _far(_norms(value.t().contiguous().t()), _norms(value), value)
    other[3] += 10
    assert _far(_norms(other), _norms(value), value)


@pytest.mark.parametrize("where", ["one process", "threads"])
@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)])
def test_copies_are_frozen_and_trained_together_or_the_next_step_names_them_on_all_ranks(frozen, where):
    x, y = batch(4)

    def run(ranks: Any, modules: list[nn.Module]) -> None:
        here = (0, 1) if ranks is None else (ranks.rank,)
        stages = [Stage(modules[i], i, tied={"factor": modules[i].factor}) for i in here]
        runner = PipelineRunner(gpipe(2, 2), stages, ranks, square_loss, timeout_s=20)
        runner.step(x, y)
        for i in here:
            modules[i].zero_grad()
            modules[i].factor.requires_grad_(i not in frozen)
        if len(frozen) == 2:
            runner.step(x, y)
            assert all(stage.module.factor.grad is None for stage in stages)
            for stage in stages:
                stage.tied["factor"].requires_grad_()
            runner.step(x, y)
            assert all(stage.module.factor.grad is not None for stage in stages)
            return
        runner.evaluate(x, y)  # whose values do not depend on it
        with pytest.raises(ScheduleError, match=r"tied\['factor'\]: the copies on stages 0 and 1 are not both trained"):
            runner.step(x, y)

    if where == "one process":
        run(None, two_shared())
    else:
        values_or_raise(on_threads(2, run, two_shared()))
