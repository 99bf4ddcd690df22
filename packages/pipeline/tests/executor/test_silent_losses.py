"""What a runner could lose without a word: each is right, or a ScheduleError when it is used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Program, ScheduleError, Stage, gpipe, one_f_one_b, program_of
from sixfold.pipeline.passes import lower


def runner_of(modules: list[Any], program: Program | None = None, loss_fn: Any = square_loss, **options: Any):
    stages = [Stage(module, index) for index, module in enumerate(modules)]
    return PipelineRunner(program or one_f_one_b(len(modules), 3), stages, loss_fn=loss_fn, **options)


def refused(words: str, act: Any) -> None:
    with pytest.raises(ScheduleError, match=words):
        act()


# ---- the loss


def test_a_loss_of_several_numbers_is_refused_and_not_summed():
    per_row = lambda output, target: (output - target).square().mean(-1)  # noqa: E731
    refused(r"loss_fn returned a tensor of shape \(2,\); it returns one number", lambda: step(per_row))
    refused(r"loss_fn returned a tensor of shape \(2,\)", lambda: step(per_row, mode="evaluate"))
    one = layers(2)
    runner_of(one, loss_fn=lambda o, t: square_loss(o, t).reshape(1)).step(*batch(6))  # as autograd's backward takes it
    two = layers(2)
    runner_of(two).step(*batch(6))
    assert equal_bits(gradients(one[0]), gradients(two[0]))


def step(loss_fn: Any, mode: str = "step", **options: Any) -> Any:
    return getattr(runner_of(layers(2), loss_fn=loss_fn, **options), mode)(*batch(6))


def test_a_loss_that_trains_nothing_or_is_no_tensor_is_refused():
    refused("loss_fn returned a loss without a gradient", lambda: step(lambda o, t: square_loss(o, t).detach()))
    assert len(step(lambda o, t: square_loss(o, t).detach(), mode="evaluate").losses) == 3
    refused("loss_fn returned a float; it returns one number", lambda: step(lambda o, t: square_loss(o, t).item()))
    refused("loss_fn returned a tuple; it returns one number", lambda: step(lambda o, t: (square_loss(o, t), "extra")))
    refused("loss_fn returned a complex number", lambda: step(lambda o, t: square_loss(o, t) * (1 + 1j)))
    refused("loss_fn returned a NoneType", lambda: step(lambda o, t: None))
    refused(r"with scale='token' loss_fn returns \(sum, count\)", lambda: step(square_loss, scale="token"))
    infinite = lambda o, t: (square_loss(o, t), float("inf"))  # noqa: E731
    refused("the counts of loss_fn sum to inf", lambda: step(infinite, scale="token"))


def test_a_loss_that_compares_by_value_and_has_no_hash_is_taken():
    @dataclass
    class Weighted:
        weight: float

        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            return self.weight * square_loss(output, target)

    one, two = layers(2), layers(2)
    runner = runner_of(one, loss_fn=Weighted(2.0))
    runner.step(*batch(6))
    assert len(runner.evaluate(*batch(6)).losses) == 3 and not runner.forward(batch(6)[0]).losses
    runner_of(two, loss_fn=lambda o, t: 2.0 * square_loss(o, t)).step(*batch(6))
    assert equal_bits(gradients(one[0]), gradients(two[0]))


def test_gradients_that_are_there_are_not_divided_again_by_tokens():
    token = lambda o, t: (((o - t) ** 2).sum(), o.numel())  # noqa: E731
    modules, apart = layers(2), [layers(2), layers(2)]
    runner = runner_of(modules, loss_fn=token, scale="token")
    for turn, other in enumerate(apart):
        runner.step(*batch(6, turn))
        runner_of(other, loss_fn=token, scale="token").step(*batch(6, turn))
    for index in (0, 1):
        both = zip(*(gradients(other[index]) for other in apart), strict=True)
        assert equal_bits(gradients(modules[index]), [a + b for a, b in both])
    kept = [g.clone() for g in gradients(modules[0])]
    refused("without a word|boom", lambda: runner.step(batch(6)[0], kwargs=[{"boom": 1}] * 3))
    assert equal_bits(gradients(modules[0]), kept)  # a step that failed leaves what was there
    modules[0].zero_grad(set_to_none=False)
    modules[1].zero_grad(set_to_none=True)
    runner.step(*batch(6, 0))
    assert equal_bits(gradients(modules[0]), gradients(apart[0][0]))


def test_parameters_that_only_the_loss_knows_are_not_divided_by_tokens():
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Any:
            return (self.scale * output - target).square().sum(), output.numel()

    refused(
        "scale='token' divides the gradients of stages; loss_fn has parameters", lambda: step(Head(), scale="token")
    )


# ---- microbatches


def test_a_batch_that_does_not_divide_is_not_a_mean_of_its_rows():
    x, y = batch(7)
    refused(r"inputs has 7 rows for 3 microbatches.*scale='mean'", lambda: runner_of(layers(2)).step(x, y))
    refused(r"targets has 7 rows for 3 microbatches", lambda: runner_of(layers(2)).step(batch(6)[0], y))
    assert len(runner_of(layers(2)).evaluate(x, y).losses) == 3
    runner_of(layers(2)).step(list(x.tensor_split(3)), list(y.tensor_split(3)))  # each counts as one of three
    total = lambda o, t: ((o - t) ** 2).sum()  # noqa: E731
    for options in (
        {"loss_fn": total, "scale": "sum"},
        {"loss_fn": lambda o, t: (total(o, t), len(o)), "scale": "token"},
    ):
        modules, oracle = layers(2), layers(2)
        runner_of(modules, **options).step(x, y)
        (total(oracle[1](oracle[0](x)), y) / (7 if options["scale"] == "token" else 1)).backward()
        for ours, theirs in zip(modules, oracle, strict=True):
            torch.testing.assert_close(gradients(ours), gradients(theirs))


def test_a_dividing_batch_gives_the_gradient_of_its_mean():
    x, y = batch(9)
    modules, oracle = layers(2), layers(2)
    runner_of(modules).step(x, y)
    square_loss(oracle[1](oracle[0](x)), y).backward()
    for ours, theirs in zip(modules, oracle, strict=True):
        torch.testing.assert_close(gradients(ours), gradients(theirs))


def test_a_tensor_for_all_microbatches_is_not_cut_because_it_is_in_a_tuple_or_a_dict():
    x, y = batch(6)
    shared = torch.ones(3, 8)  # as many rows as microbatches: each would get one, and broadcast it
    for tables in ((shared, shared), {"cos": shared}, [shared]):
        with pytest.raises(ScheduleError, match=r"kwargs\['tables'\]\[\S+\] has 3 rows, the batch 6;"):
            runner_of(layers(2)).step(x, y, kwargs={"tables": tables})
    with pytest.raises(ScheduleError, match=r"kwargs\['table'\] has 3 rows, the batch 6;"):  # of a rank without a batch
        runner_of(layers(2)).step(list(x.chunk(3)), list(y.chunk(3)), kwargs={"mask": x, "table": shared})
    with pytest.raises(ScheduleError, match=r"inputs\[1\] has 3 rows, the batch 6; all of inputs is cut"):
        runner_of(layers(2)).step((x, shared), y)
    with pytest.raises(
        ScheduleError, match=r"targets\['weight'\] has 3 rows, the batch 6; .* a list of 3 microbatches"
    ):
        runner_of(layers(2)).step(x, {"y": y, "weight": shared})


def test_keywords_are_one_mapping_per_microbatch_or_one_whose_tensors_have_the_rows_of_the_batch():
    make = lambda: runner_of(layers(2))  # noqa: E731
    x, y = batch(6)
    mask = torch.ones(7)  # PyTorch's schedules cut it with tensor_split
    refused(r"kwargs\['mask'\] has 7 rows, the batch 6;", lambda: make().step(x, y, kwargs={"mask": mask}))
    refused(
        r"kwargs\['mask'\] has 7 rows, the batch 6;",
        lambda: make().step(list(x.chunk(3)), list(y.chunk(3)), kwargs={"mask": mask}),
    )
    refused(r"kwargs\[1\] is a Tensor; it is a dict", lambda: make().step(x, y, kwargs=[{}, mask, {}]))
    refused("kwargs has 1 entries", lambda: make().step(x, y, kwargs=[{}]))
    refused("kwargs is a Tensor", lambda: make().step(x, y, kwargs=torch.ones(3)))


@pytest.mark.parametrize("inputs", [{"x": 1}, 3, [1, 2, 3], ("a", 1)], ids=repr)
def test_inputs_of_another_form_are_refused_by_name(inputs):
    refused(r"inputs(\[0\])? (is|holds) a \w+;", lambda: runner_of(layers(2)).step(inputs, batch(6)[1]))


def test_targets_may_be_none_and_reach_the_loss_as_none():
    seen = []
    runner_of(layers(2), loss_fn=lambda o, t: seen.append(t) or o.sum()).step(batch(6)[0])
    runner_of(layers(2), loss_fn=lambda o, t: seen.append(t) or o.sum()).step(batch(6)[0], [None, 1, "two"])
    assert seen == [None, None, None, None, 1, "two"]


def test_an_input_that_wants_a_gradient_gets_it():
    x, y = batch(6)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    runner_of(layers(2), gpipe(2, 3)).step(ours, y)
    oracle = layers(2)
    square_loss(oracle[1](oracle[0](theirs)), y).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


# ---- stages


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_frozen_stages_get_no_gradients_and_pass_on_those_of_others(frozen):
    modules, oracle = layers(3), layers(3)
    for index in frozen:
        modules[index].requires_grad_(False)
        oracle[index].requires_grad_(False)
    x, y = batch(6)
    runner_of(modules).step(x, y)
    for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        (square_loss(oracle[2](oracle[1](oracle[0](a))), b) / 3).backward()
    for ours, theirs in zip(modules, oracle, strict=True):
        assert equal_bits(gradients(ours), gradients(theirs))
    for index in frozen:
        assert gradients(modules[index]) == [None, None]


def test_an_embedding_of_integers_and_outputs_of_any_stride_have_the_bits_of_the_plain_loop():
    class Turned(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return (
                self.module(x).T.contiguous().T[:, ::2].repeat(1, 2)[:, : x.shape[-1] if x.is_floating_point() else 8]
            )

    def modules() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Turned(nn.Embedding(10, 8)), Turned(nn.Linear(8, 8)), nn.Linear(8, 8)]

    ours, theirs = modules(), modules()
    x, y = torch.arange(6) % 4, batch(6)[1]
    runner_of(ours).step(x, y)
    for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        (square_loss(theirs[2](theirs[1](theirs[0](a))), b) / 3).backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert equal_bits(gradients(mine), gradients(other))


def test_modules_and_the_name_of_a_schedule_are_told_what_makes_stages_and_a_program_of_them():
    modules = layers(2)
    refused(
        r"stages\[0\] is a \w+; it is a Stage: Stage\(module, index\)",
        lambda: PipelineRunner(one_f_one_b(2, 2), modules, loss_fn=square_loss),
    )
    stages = [Stage(module, index) for index, module in enumerate(modules)]
    refused(
        r"program is '1F1B'; it is a Program: program_of\('1F1B', ranks, microbatches\) makes one of a name",
        lambda: PipelineRunner("1F1B", stages, loss_fn=square_loss),
    )
    PipelineRunner(program_of("1F1B", 2, 2), stages, loss_fn=square_loss).step(*batch(4))  # what both say
    alike = layers(2)
    runner_of(alike, one_f_one_b(2, 2)).step(*batch(4))
    for mine, other in zip(modules, alike, strict=True):
        assert equal_bits(gradients(mine), gradients(other))


def test_what_is_no_module_and_two_stages_of_one_place_are_refused():
    refused("stage 0 is a function; it is an nn.Module, or None", lambda: Stage(lambda x: x, 0))
    refused("index is '0'; it is a whole number >= 0", lambda: Stage(None, "0"))
    refused("index is -1; it is >= 0", lambda: Stage(None, -1))
    first = layers(1)[0]
    stages = [Stage(first, 0), Stage(first, 0)]
    refused(r"stages \(0, 0\) were given", lambda: PipelineRunner(gpipe(2, 2), stages, loss_fn=square_loss))


# ---- programs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0: 0F0 0F1 0B0\n1: 1F0 1F1 1B0 1B1", "0B1 is missing"),
        ("0: 0F0 0F1 0B0 0B1 0B1\n1: 1F0 1F1 1B0 1B1", "it is already at"),
        ("0: 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0REDUCE_GRAD\n1: 1F0 1F1 1B0 1B1", "once per step"),
        (str(lower(gpipe(2, 2))).replace("0B1 ", ""), "0B1 is missing"),
        (str(lower(gpipe(2, 2))).replace("0REDUCE_GRAD", "").replace("0B1", "0REDUCE_GRAD 0B1"), "a backward of the"),
    ],
)
def test_a_program_that_would_lose_or_double_a_gradient_is_refused(text, words):
    program = Program.parse(text, microbatches=2)
    refused(re.escape(words), lambda: runner_of(layers(2), program))
    refused(re.escape(words), lambda: runner_of(layers(2), gpipe(2, 2)).step(*batch(4), program=program))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lookahead": -1}, "lookahead is -1; it is >= 0"),
        ({"lookahead": 1.5}, "lookahead is 1.5; it is a whole number >= 0"),
        ({"timeout_s": float("inf")}, "timeout_s is inf; it is finite and > 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan; it is finite and > 0"),
        ({"timeout_s": "60"}, "timeout_s is '60'; it is a number"),
        ({"loss_fn": 3}, "loss_fn is 3; it is called"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    refused(re.escape(words), lambda: runner_of(layers(2), **options))
