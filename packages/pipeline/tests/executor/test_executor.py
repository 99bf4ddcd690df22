"""The executor in one process: the same interpreter, no torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from schedule_helpers import ASYNCHRONOUS, FLUSH
from torch import Tensor, nn

from sixfold.pipeline import (
    PipelineRunner,
    Program,
    ScheduleError,
    Stage,
    dualpipe_v,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from sixfold.pipeline.passes import lower, recompute, split_backward

PROGRAMS = [
    *(make(3, 5) for make in FLUSH.values()),
    *(lower(interleaved(3, 5, 3)), naive(1, 5), split_backward(gpipe(3, 5)), split_backward(dualpipe_v(2, 5))),
    *(recompute(zb_v(3, 5)), recompute(one_f_one_b(3, 5), microbatches=2), lower(recompute(zb_h1(3, 5)))),
]


def stages_of(modules: list[nn.Module]) -> list[Stage]:
    return [Stage(module, index) for index, module in enumerate(modules)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
@pytest.mark.slow
def test_gradients_and_losses_have_the_bits_of_the_plain_loop(program):
    modules, oracle = layers(program.stages), layers(program.stages)
    runner = PipelineRunner(program, stages_of(modules)[::-1], loss_fn=square_loss)
    for seed in (2, 3):
        inputs, targets = batch(11, seed)
        parts = list(inputs.tensor_split(5)), list(targets.tensor_split(5))  # unequal, which a list may be
        losses = runner.step(*parts).losses
        expected = plain_loop(oracle, *parts)
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        assert not any(loss.requires_grad for loss in losses)
    for ours, theirs in zip(modules, oracle, strict=True):
        assert equal_bits(gradients(ours), gradients(theirs))


def test_a_sum_is_not_divided_and_tokens_divide_once():
    inputs, targets = batch(6)
    by_sum, by_token = layers(2), layers(2)
    program = one_f_one_b(2, 3)
    PipelineRunner(program, stages_of(by_sum), loss_fn=lambda o, t: ((o - t) ** 2).sum(), scale="sum").step(
        inputs, targets
    )
    runner = PipelineRunner(
        program, stages_of(by_token), loss_fn=lambda o, t: (((o - t) ** 2).sum(), o.numel()), scale="token"
    )
    runner.step(inputs, targets)
    for ours, theirs in zip(by_token, by_sum, strict=True):
        assert equal_bits(gradients(ours), [g.div(float(6 * 8)) for g in gradients(theirs) if g is not None])


class Two(nn.Module):
    """Takes and returns a pair of a tensor and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(hidden)[index], index


def test_tuples_pass_and_integers_pass_without_gradient():
    torch.manual_seed(0)
    modules = [Two(), Two()]
    x, index = torch.randn(4, 8), torch.tensor([2, 0, 3, 1])
    runner = PipelineRunner(gpipe(2, 2), stages_of(modules), loss_fn=lambda out, _: out[0].square().sum(), scale="sum")
    result = runner.step([(x, index), (x + 1, index)])
    ours = [g.clone() for module in modules for g in gradients(module) if g is not None]
    for module in modules:
        module.zero_grad()
    for part in (x, x + 1):
        modules[1](*modules[0](part, index))[0].square().sum().backward()
    assert equal_bits(ours, [g for module in modules for g in gradients(module)])
    assert len(result.losses) == 2


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_empty_stage_passes_on(empty):
    full, oracle = layers(3), layers(3)
    stages = [Stage(None if index == empty else module, index) for index, module in enumerate(full)]
    inputs, targets = batch(6)
    PipelineRunner(one_f_one_b(3, 3), stages, loss_fn=square_loss).step(inputs, targets)
    plain_loop(
        [m for i, m in enumerate(oracle) if i != empty], list(inputs.tensor_split(3)), list(targets.tensor_split(3))
    )
    for index in range(3):
        assert equal_bits(gradients(full[index]), gradients(oracle[index]))


class Labelled(nn.Module):
    """A last stage that takes its labels as a keyword and returns losses per row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, *, labels: Tensor | None = None) -> Tensor:
        return (self.layer(hidden) - labels).square().sum(-1)


class Ignores(nn.Module):
    """A first stage that is handed the same keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return self.layer(hidden)


def test_keywords_reach_every_stage_and_the_last_one_may_make_the_losses():
    torch.manual_seed(0)
    modules = [Ignores(), Labelled()]
    inputs, labels = batch(6)
    cut = list(labels.tensor_split(3))
    runner = PipelineRunner(one_f_one_b(2, 3), stages_of(modules), loss_fn=lambda losses, _: losses.sum(), scale="sum")
    result = runner.step(list(inputs.tensor_split(3)), kwargs=[{"labels": part} for part in cut])
    expected = [
        modules[1](modules[0](x), labels=y).sum().detach() for x, y in zip(inputs.tensor_split(3), cut, strict=True)
    ]
    assert torch.equal(torch.stack(result.losses), torch.stack(expected))


def test_evaluation_and_forward_between_steps_leave_no_trace():
    program = one_f_one_b(2, 3)
    disturbed, quiet = layers(2), layers(2)
    one = PipelineRunner(program, stages_of(disturbed), loss_fn=square_loss)
    other = PipelineRunner(program, stages_of(quiet), loss_fn=square_loss)
    evaluated = one.evaluate(*batch(6, 9)).losses  # before the first step, and smaller than it
    for seed in (2, 3):
        one.step(*batch(9, seed))
        assert torch.equal(torch.stack(one.evaluate(*batch(6, 9)).losses), torch.stack(evaluated))
        assert len(one.forward(batch(9)[0]).outputs) == 3
        other.step(*batch(9, seed))
    assert not any(loss.requires_grad for loss in evaluated)
    for ours, theirs in zip(disturbed, quiet, strict=True):
        assert equal_bits(gradients(ours), gradients(theirs))


def test_a_step_may_run_another_program_and_equal_ones_are_compiled_once():
    modules, oracle = layers(2), layers(2)
    runner = PipelineRunner(one_f_one_b(2, 3), stages_of(modules), loss_fn=square_loss)
    for m in (3, 4, 3, 4):
        inputs, targets = batch(12, m)
        runner.step(inputs, targets, program=gpipe(2, m) if m == 4 else lower(one_f_one_b(2, m)))
        plain_loop(oracle, list(inputs.tensor_split(m)), list(targets.tensor_split(m)))
    for ours, theirs in zip(modules, oracle, strict=True):
        assert equal_bits(gradients(ours), gradients(theirs))
    assert len(runner._programs) == 2


class ActionTimer:
    """A data_parallel object that only writes down how it is driven."""

    def __init__(self, module: nn.Module, log: list[str], name: str) -> None:
        self.module, self.log, self.name = module, log, name

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"{self.name}call")
        return self.module(*args, **kwargs)

    def unshard(self) -> None:
        self.log.append(f"{self.name}unshard")

    def reshard(self) -> None:
        self.log.append(f"{self.name}reshard")

    def after_backward(self, microbatch: int) -> None:
        self.log.append(f"{self.name}after{microbatch}")

    def before_last_backward(self) -> None:
        self.log.append(f"{self.name}last")

    def reduce_grad(self) -> None:
        self.log.append(f"{self.name}reduce")


def test_the_program_drives_what_shards_a_stage():
    log: list[str] = []
    modules = layers(2)
    stages = [Stage(module, i, data_parallel=ActionTimer(module, log, f"{i}.")) for i, module in enumerate(modules)]
    runner = PipelineRunner(gpipe(2, 2), stages, loss_fn=square_loss)
    runner.step(*batch(4))
    assert [entry for entry in log if entry.startswith("0.")] == [
        f"0.{entry}" for entry in ("call", "call", "after0", "last", "after1", "reduce")
    ]
    assert [entry[2:] for entry in log if entry.startswith("1.")] == [
        "call",
        "call",
        "after0",
        "last",
        "after1",
        "reduce",
    ]
    log.clear()
    runner.evaluate(*batch(4))
    assert sorted(log) == ["0.call", "0.call", "1.call", "1.call"]
    log.clear()
    slots = Program.parse("0: 0UNSHARD 0F0 0RESHARD 1F0 1B0 1REDUCE_GRAD 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD")
    PipelineRunner(slots, stages, loss_fn=square_loss).step(*batch(2))
    assert log == [
        *("0.unshard", "0.call", "0.reshard", "1.call", "1.last", "1.after0", "1.reduce"),
        *("0.unshard", "0.last", "0.after0", "0.reshard", "0.reduce"),
    ]


def test_an_unused_input_gets_a_zero_gradient_so_that_its_maker_does_not_wait():
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, _: Tensor) -> Tensor:
            return self.weight * 2

    first = nn.Linear(8, 8)
    runner = PipelineRunner(gpipe(2, 1), stages_of([first, Constant()]), loss_fn=lambda o, _: o)
    runner.step(batch(2)[0])
    assert torch.equal(first.weight.grad, torch.zeros(8, 8))


def test_outputs_are_released_when_no_backward_needs_them():
    alive: list[Any] = []

    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.shift  # an addition keeps none of its tensors
            import weakref

            alive.append(weakref.ref(y))
            return y

    runner = PipelineRunner(gpipe(2, 4), stages_of([Big(), Big()]), loss_fn=lambda o, _: o.sum())
    runner.step(batch(8)[0])
    assert [ref() is not None for ref in alive] == [False] * 8


def test_a_stage_that_raises_is_named_with_its_action_and_chained():
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("no")

    runner = PipelineRunner(gpipe(2, 2), stages_of([nn.Linear(8, 8), Fails()]), loss_fn=square_loss)
    with pytest.raises(ScheduleError, match=r"rank 1 failed at \[\d/\d+\] 1F0: ZeroDivisionError: no") as caught:
        runner.step(*batch(4))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.rank, str(caught.value.action)) == (1, "1F0")


def make(program: Program | None = None, modules: list[nn.Module] | None = None, **options: Any) -> PipelineRunner:
    return PipelineRunner(program or gpipe(2, 2), stages_of(modules or layers(2)), loss_fn=square_loss, **options)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: make().step(), "inputs is None on the rank of stage 0"),
        (lambda: make().step(batch(1)[0]), "inputs has 1 rows"),
        (lambda: make().step([batch(1)[0]]), "inputs has 1 microbatches; the program has 2"),
        (lambda: make().step("words"), "inputs is a str"),
        (lambda: make().step(["a", "b"]), r"inputs\[0\] is a str"),
        (lambda: make().step(batch(2)[0], [1, 2, 3]), "targets has 3 microbatches"),
        (lambda: make().step(*batch(2), kwargs=[{}]), "kwargs has 1 entries"),
        (
            lambda: make().step(*batch(2), program=gpipe(3, 2)),
            r"stages \(0, 1\) were given; the program places \(0, 1, 2\)",
        ),
        (lambda: make(gpipe(3, 2)), r"stages \(0, 1\) were given"),
        (lambda: make(scale="max"), "scale is 'max'"),
        (lambda: make(timeout_s=0), "timeout_s is 0"),
        (
            lambda: make(Program.parse("0: 0F0 0B0 0STEP0\n1: 1F0 1B0 1STEP0")),
            r"rank 0 \[2\] 0STEP0: stage 0 has no optimizer; make it with Stage",
        ),
        (lambda: Stage(nn.Linear(1, 1), 0, checkpoint="yes"), "stage 0: checkpoint is 'yes'"),
        (lambda: Stage(nn.Linear(1, 1), 0, optimizer=3), "stage 0: optimizer is a int"),
        (lambda: Stage(nn.Linear(1, 1), 0, tied={"w": nn.Parameter(torch.ones(1))}), r"tied\['w'\] is no parameter of"),
        (lambda: Stage(nn.Linear(1, 1), 0, tied=3), "tied is a int; it maps names"),
        (lambda: PipelineRunner(gpipe(2, 2), stages_of(layers(2))).step(*batch(2)), "step needs the runner's loss_fn"),
    ],
)
def test_what_cannot_work_is_refused_by_name(act, words):
    with pytest.raises(ScheduleError, match=words):
        act()


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_programs_that_keep_older_weights_need_optimizers(name):
    with pytest.raises(
        ScheduleError, match=r"STEP0: stage 0 has no optimizer; make it with Stage\(\.\.\., optimizer=\)"
    ):
        make(ASYNCHRONOUS[name](2, 4), layers(2))


def test_a_stage_must_return_tensors():
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    with pytest.raises(ScheduleError, match="the output of stage 0 is a dict; stages exchange"):
        make(modules=[Named(), nn.Linear(8, 8)]).step(*batch(2))


def test_token_scale_and_sharding_exclude_each_other():
    module = nn.Linear(8, 8)
    stage = Stage(module, 0, data_parallel=ActionTimer(module, [], ""))
    with pytest.raises(ScheduleError, match=r"scale='token' divides \.grad, which data_parallel owns"):
        PipelineRunner(gpipe(1, 1), [stage], loss_fn=square_loss, scale="token")
