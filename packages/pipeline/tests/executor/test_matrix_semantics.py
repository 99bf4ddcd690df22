"""What a step means (loss, accumulation, split backward, tied weights, tensors), for all schedules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from matrix_helpers import WIDTH, Embed, Head, Mix, differing, model, plain_loop, same_losses, word_loss, words
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn
from torch.nn import functional

from sixfold.pipeline import PipelineRunner, Program, ScheduleError, Stage, defer_weight_grad, one_f_one_b
from sixfold.pipeline.passes import recompute
from sixfold.pipeline.schedules import registered

PROGRAMS = [entry.with_chunks(3, 4, entry.chunks or 2) for entry in registered() if entry.flushed]
SOME = [program for program in PROGRAMS if program.name in ("gpipe", "interleaved", "zb_h2", "zb_v", "dualpipe_v")]
all_programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
some_programs = pytest.mark.parametrize("program", SOME, ids=lambda program: program.name)


def runner_of(program: Program, modules: Sequence[nn.Module | None], **options: Any) -> PipelineRunner:
    """All stages in this process."""
    return PipelineRunner(program, [Stage(m, s) for s, m in enumerate(modules)], **{"loss_fn": word_loss} | options)


def assert_same(mine: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> None:
    """Gradients of all stages."""
    assert not {s: names for s, (a, b) in enumerate(zip(mine, theirs, strict=True)) if (names := differing(a, b))}


def random_grads(modules: Sequence[nn.Module], seed: int) -> None:
    """Gradients that were there before."""
    generator = torch.Generator().manual_seed(seed)
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)


# ---- Loss


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over the words that are not 0."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")


def counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and its words."""
    return summed(logits, targets), (targets != 0).sum()


@all_programs
@pytest.mark.slow
def test_a_sum_is_not_divided_by_the_microbatches(program):
    mine, theirs, batch = model(program.stages), model(program.stages), words(4)
    losses = runner_of(program, mine, loss_fn=summed, scale="sum").step(*batch).losses
    assert same_losses(losses, plain_loop(theirs, *batch, summed, divisor=1))
    assert_same(mine, theirs)


def by_token(transport: Any, program: Program, modules: list[nn.Module], steps: int) -> list[list[Tensor]]:
    """Steps of a rank under ``scale="token"``."""
    stages = [Stage(modules[s], s) for s in program.stages_of(transport.rank)]
    runner = PipelineRunner(program, stages, transport, counted, scale="token", timeout_s=20)
    return [runner.step(*words(4, seed)).losses for seed in range(steps)]


@all_programs
@pytest.mark.slow
def test_gradients_are_divided_once_by_the_tokens_of_the_whole_batch_on_all_ranks(program):
    mine, theirs, batch = model(program.stages), model(program.stages), words(4, seed=0)
    results = values_or_raise(on_threads(3, by_token, program, mine, 1))
    assert same_losses(results[program.placement[-1]][0], plain_loop(theirs, *batch, summed, divisor=1))
    total = float(sum(int((target != 0).sum()) for target in batch[1]))
    for module in theirs:
        for parameter in module.parameters():
            parameter.grad.div_(total)
    assert_same(mine, theirs)


@some_programs
@pytest.mark.slow
def test_tokens_divide_each_steps_gradients_alone_when_steps_are_accumulated(program):
    mine = model(program.stages)
    values_or_raise(on_threads(3, by_token, program, mine, 3))
    sums = model(program.stages)
    for seed in range(3):
        fresh, batch = model(program.stages), words(4, seed)
        plain_loop(fresh, *batch, summed, divisor=1)
        total = float(sum(int((target != 0).sum()) for target in batch[1]))
        for module, into in zip(fresh, sums, strict=True):
            for a, b in zip(module.parameters(), into.parameters(), strict=True):
                b.grad = a.grad / total if b.grad is None else b.grad + a.grad / total
    assert_same(mine, sums)


# ---- Accumulation


@all_programs
@pytest.mark.slow
def test_gradients_that_are_there_come_first_in_the_sum(program):
    mine, theirs, batch = model(program.stages), model(program.stages), words(4)
    random_grads(mine, 1)
    random_grads(theirs, 1)
    held = [parameter.grad for module in mine for parameter in module.parameters()]
    runner_of(program, mine).step(*batch)
    plain_loop(theirs, *batch)
    assert_same(mine, theirs)
    now = [parameter.grad for module in mine for parameter in module.parameters()]
    assert all(a is b for a, b in zip(held, now, strict=True)), "added in place, as autograd does"


@all_programs
@pytest.mark.slow
def test_steps_accumulate_until_the_caller_drops_the_gradients(program):
    mine, theirs = model(program.stages), model(program.stages)
    runner = runner_of(program, mine)
    for seed, drop in enumerate((False, False, True, False)):
        if drop:
            for module in (*mine, *theirs):
                module.zero_grad()
        runner.step(*words(4, seed))
        plain_loop(theirs, *words(4, seed))
        assert_same(mine, theirs)


# ---- Split backward


class Scaled(nn.Module):
    """``x * weight`` by an operator of its own, which writes down when its weight gradient is made."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__()
        self.weight, self.log, self.name = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), log, name

    def forward(self, x: Tensor) -> Tensor:
        held = x.detach()

        def weight_grad(g: Tensor) -> Tensor:
            self.log.append(self.name)
            return (g * held).flatten(0, -2).sum(0)

        return defer_weight_grad(self.weight, weight_grad, x * self.weight.detach())


class PlainScaled(Scaled):
    """The same to autograd."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Logs(nn.Module):
    """Says when the gradient of its input has been made."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__()
        self.log, self.name = log, name

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda _: self.log.append(self.name))
        return x


@pytest.mark.parametrize("text", ["0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0I0 0F1 0I1 0W0 0W1", "0F0 0F1 0I0 0W0 0B1"])
def test_w_makes_the_weight_gradient_that_i_left(text):
    log: list[str] = []
    first = nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(first, Logs(log, "input"), Scaled(log, "weight"))
    oracle = nn.Sequential(copy.deepcopy(first), nn.Identity(), PlainScaled([], ""))
    batch = list(torch.randn(2, 3, WIDTH)), None
    program = Program.parse("0: " + text)
    PipelineRunner(program, [Stage(module, 0)], loss_fn=lambda o, _: o.square().mean()).step(*batch)
    plain_loop([oracle], batch[0], [None, None], lambda o, _: o.square().mean())
    assert not differing(module, oracle)
    done = {"I": ["input"], "W": ["weight"], "B": ["weight", "input"]}
    order = [word for action in text.split() for word in done.get(action[1], [])]
    if "0B" in text:  # within a B either may come first
        assert (log[:2], sorted(log[2:])) == (order[:2], sorted(order[2:]))
    else:
        assert log == order


class Twice(nn.Linear):
    """A Linear by inheritance only, whose gradient is another."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * 2, self.bias)


def odd_model(stages: int) -> list[nn.Module]:
    """Subclasses, frozen halves, no bias, an embedding with a padding word, a parameter that nothing uses."""
    with torch.random.fork_rng():
        torch.manual_seed(9)
        first, last = Embed(), Head()
        first.words = nn.Embedding(11, WIDTH, padding_idx=3, scale_grad_by_freq=True)
        middle = [nn.Sequential(Twice(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(stages - 2)]
        for s, module in enumerate(middle):
            module[s % 2].weight.requires_grad_(s % 3 != 0)
            module.register_parameter("unused", nn.Parameter(torch.ones(2)))
        last.norm.requires_grad_(False)
    return [first, *middle, last]


@all_programs
@pytest.mark.slow
def test_subclasses_frozen_halves_and_unused_parameters_have_the_bits_of_the_plain_loop(program):
    mine, theirs = odd_model(program.stages), odd_model(program.stages)
    for _ in range(2):
        runner_of(program, mine).step(*words(4))
        plain_loop(theirs, *words(4))
    assert_same(mine, theirs)


@some_programs
@pytest.mark.parametrize("how", ["checkpoint", "recompute"])
@pytest.mark.slow
def test_checkpoints_and_recomputes_have_the_bits_of_the_plain_loop(program, how):
    mine, theirs = model(program.stages), model(program.stages)
    stages = [Stage(module, s, checkpoint=how == "checkpoint") for s, module in enumerate(mine)]
    program = recompute(program) if how == "recompute" else program
    losses = PipelineRunner(program, stages, loss_fn=word_loss).step(*words(4)).losses
    assert same_losses(losses, plain_loop(theirs, *words(4)))
    assert_same(mine, theirs)


# ---- Tied weights


class Tied(nn.Module):
    """A stage with its copy of a weight that several stages have."""

    def __init__(self, inner: nn.Module, shift: float) -> None:
        super().__init__()
        self.inner, self.shared = inner, nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.shared.weight.add_(shift)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(self.inner(x)))


def tied_model(stages: int) -> list[nn.Module]:
    """All but the head have a copy, each of another value."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return [*(Tied(Mix() if s else Embed(), s / 10) for s in range(stages - 1)), Head()]


def tied_rank(transport: Any, program: Program, modules: list[nn.Module], steps: int) -> None:
    """One rank of it."""
    stages = [
        Stage(modules[s], s, tied={"shared": modules[s].shared.weight} if isinstance(modules[s], Tied) else None)
        for s in program.stages_of(transport.rank)
    ]
    runner = PipelineRunner(program, stages, transport, word_loss, timeout_s=20)
    for seed in range(steps):
        runner.step(*words(4, seed))


@all_programs
@pytest.mark.slow
def test_tied_weights_begin_equal_and_get_the_sum_in_ascending_stage_order(program):
    mine, theirs = tied_model(program.stages), tied_model(program.stages)
    values_or_raise(on_threads(3, tied_rank, program, mine, 1))
    copies = [module.shared.weight for module in theirs[:-1]]
    for copy_ in copies[1:]:
        copy_.data.copy_(copies[0].data)
    plain_loop(theirs, *words(4, 0))
    total = copies[0].grad.clone()
    for copy_ in copies[1:]:
        total.add_(copy_.grad)
    for copy_ in copies:
        copy_.grad = total.clone()
    for module in mine[:-1]:
        assert torch.equal(module.shared.weight, copies[0])
    assert_same(mine, theirs)


@some_programs
def test_tied_gradients_of_steps_before_are_counted_once(program):
    mine = tied_model(program.stages)
    values_or_raise(on_threads(3, tied_rank, program, mine, 2))
    total = 0
    for seed in range(2):
        theirs = tied_model(program.stages)
        for module in theirs[1:-1]:
            module.shared.weight.data.copy_(theirs[0].shared.weight.data)
        plain_loop(theirs, *words(4, seed))
        total = total + sum(module.shared.weight.grad for module in theirs[:-1])
    for module in mine[:-1]:
        torch.testing.assert_close(module.shared.weight.grad, total)
        assert torch.equal(module.shared.weight.grad, mine[0].shared.weight.grad)


# ---- Tensors


class Many(nn.Module):
    """Passes everything that may travel, each changed a little."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor, scale: Tensor, empty: Tensor, n: int, none: None) -> Any:
        y = torch.where(mask.unsqueeze(-1), self.layer(x), x)[ids] * scale
        assert none is None
        assert not (mask.requires_grad or ids.requires_grad)
        return y, ~mask, ids.flip(0), scale * 0.5, empty, n + 1, none


def many_inputs(m: int) -> list[tuple[Any, ...]]:
    """Of m microbatches."""
    generator = torch.Generator().manual_seed(8)
    return [
        (
            torch.randn(3, WIDTH, generator=generator),
            torch.rand(3, generator=generator) < 0.5,
            torch.randperm(3, generator=generator),
            torch.tensor(1.5 + k),
            torch.zeros(0, 2),
            k,
            None,
        )
        for k in range(m)
    ]


def many_loss(output: tuple[Any, ...], _: None) -> Tensor:
    """Of the tensor and the number that went through all stages."""
    return output[0].square().mean() * output[5]


def pass_many(transport: Any, program: Program, modules: list[nn.Module]) -> list[Tensor]:
    """One rank of it."""
    stages = [Stage(modules[s], s) for s in program.stages_of(transport.rank)]
    return PipelineRunner(program, stages, transport, many_loss, timeout_s=20).step(many_inputs(4)).losses


@all_programs
@pytest.mark.slow
def test_tuples_of_any_types_travel_and_what_is_not_floating_has_no_gradient(program):
    torch.manual_seed(0)
    mine = [Many() for _ in range(program.stages)]
    theirs = copy.deepcopy(mine)
    results = values_or_raise(on_threads(3, pass_many, program, mine))
    expected = plain_loop(theirs, many_inputs(4), [None] * 4, many_loss)
    assert same_losses(results[program.placement[-1]], expected)
    assert_same(mine, theirs)


@some_programs
def test_microbatches_of_different_sizes_and_steps_of_other_shapes(program):
    mine, theirs = model(program.stages), model(program.stages)
    runner = runner_of(program, mine)
    for rows in ((1, 2, 3, 1), (4, 4, 4, 4), (2, 1, 1, 5)):
        inputs, targets = ([words(1, seed, n)[part][0] for seed, n in enumerate(rows)] for part in (0, 1))
        runner.step(inputs, targets)
        plain_loop(theirs, inputs, targets)
    assert_same(mine, theirs)


@pytest.mark.sampled
@all_programs
@pytest.mark.parametrize("full", ["first", "last", "none but two"])
def test_empty_stages_pass_on_whatever_comes(program, full):
    """A chain of linear layers with gaps: tuples of one, integers beside them, at both ends too."""
    torch.manual_seed(6)
    n = program.stages
    there = {"first": [0], "last": [n - 1], "none but two": [n // 2, max(0, n // 2 - 2)]}[full]
    mine: list[nn.Module | None] = [Mix() if s in there else None for s in range(n)]
    theirs = [copy.deepcopy(mine[s]) for s in sorted(there)]
    inputs = list(torch.randn(4, 2, WIDTH))

    def rank(transport: Any) -> list[Tensor]:
        stages = [Stage(mine[s], s) for s in program.stages_of(transport.rank)]
        runner = PipelineRunner(program, stages, transport, lambda o, _: o.square().mean(), timeout_s=20)
        return runner.step(inputs).losses

    results = values_or_raise(on_threads(3, rank))
    expected = plain_loop(theirs, inputs, [None] * 4, lambda o, _: o.square().mean())
    assert same_losses(results[program.placement[-1]], expected)
    assert_same([mine[s] for s in sorted(there)], theirs)


def test_loss_fn_gets_what_the_last_stage_returned():
    """A tuple of one tensor is no tensor: ``output[0]`` would be its first row."""
    for last, first in ((lambda h: (h,), lambda output: output[0]), (lambda h: h, lambda output: output)):

        class Last(nn.Module):
            def forward(self, hidden: Tensor, last: Any = last) -> Any:
                return last(hidden)

        mine = [nn.Linear(WIDTH, WIDTH), Last()]
        runner = PipelineRunner(
            one_f_one_b(2, 2),
            [Stage(module, s) for s, module in enumerate(mine)],
            None,
            lambda output, target, first=first: nn.functional.mse_loss(first(output), target),
        )
        x = torch.ones(2, WIDTH)
        losses = runner.step(x, x).losses
        assert losses[0] == nn.functional.mse_loss(mine[0](x[:1]), x[:1])
        assert type(runner.forward(x).outputs[0]) is type(last(x))


def test_an_input_that_recompute_would_find_changed_is_refused():
    class Doubles(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    runner = PipelineRunner(
        recompute(one_f_one_b(1, 2)), [Stage(Doubles(WIDTH, WIDTH), 0)], None, nn.functional.mse_loss
    )
    with pytest.raises(ScheduleError, match="stage 0 changes its input in place"):
        runner.step(torch.ones(2, WIDTH), torch.ones(2, WIDTH))
