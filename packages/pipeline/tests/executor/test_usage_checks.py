"""What is forgotten: eval() before an evaluation, STEPs for the stages' optimizers."""

from __future__ import annotations

import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
from pipeline_helpers import WIDTH, batch, layers, square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Stage, gpipe, one_f_one_b, passes, pipedream, pipedream_2bw


def normed() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 8)]


@pytest.mark.parametrize("call", ["evaluate", "forward"])
def test_nothing_of_an_evaluation_in_training_mode_remains_and_one_warning_says_so(call):
    modules = normed()
    before = deepcopy(modules[0].state_dict())
    runner = PipelineRunner(gpipe(2, 2), [Stage(m, i) for i, m in enumerate(modules)], None, square_loss)
    x, y = batch(8)
    run = partial(runner.evaluate, x, y) if call == "evaluate" else partial(runner.forward, x)
    words = rf"{call} ran with modules in training mode, and 1.running_mean of stage 0"
    with pytest.warns(UserWarning, match=words) as told:
        run()
    assert told[0].filename == __file__, "the line of the call"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    torch.testing.assert_close(modules[0].state_dict(), before, rtol=0, atol=0)
    modules[0].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PipelineRunner(gpipe(2, 2), [Stage(m, i) for i, m in enumerate(modules)], None, square_loss).evaluate(x, y)


def test_a_step_moves_the_statistics_of_a_batch_norm():
    modules = normed()
    PipelineRunner(gpipe(2, 2), [Stage(m, i) for i, m in enumerate(modules)], None, square_loss).step(*batch(8))
    assert modules[0][1].num_batches_tracked == 2


@pytest.mark.parametrize("schedule", [pipedream, pipedream_2bw])
@pytest.mark.filterwarnings("ignore:.*with modules in training mode:UserWarning")
def test_an_evaluation_in_training_mode_changes_nothing_of_microbatches_in_flight(schedule):
    def losses(evaluates: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        modules, (x, y) = normed(), batch(8, 1)
        stages = [Stage(m, i, optimizer=torch.optim.SGD(m.parameters(), 0.1)) for i, m in enumerate(modules)]
        runner, found = PipelineRunner(schedule(2, 4), stages, None, square_loss), []
        for _ in range(3):
            found += runner.step(x, y).losses
            if evaluates:
                runner.evaluate(x, y)
        return found + [value.clone() for m in modules for value in m.state_dict().values()]

    with_it, without = losses(True), losses(False)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def with_optimizers() -> tuple[list[nn.Module], list[Stage]]:
    modules = layers(2)
    made = [Stage(m, i, optimizer=torch.optim.AdamW(m.parameters())) for i, m in enumerate(modules)]
    return modules, made


def test_an_optimizer_that_nobody_steps_is_told_of_once_and_the_remedies_step_it():
    _, stages = with_optimizers()
    runner = PipelineRunner(gpipe(2, 2), stages, None, square_loss)
    runner.step(*batch(4))
    with pytest.warns(
        UserWarning, match="stage 0 has an optimizer, the program has no STEP, and the optimizer has not"
    ) as told:
        runner.step(*batch(4))
    assert told[0].filename == __file__, "the line of the call"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.step(*batch(4))
        for how in ("STEP", "outside"):
            modules, stages = with_optimizers()
            before = [p.clone() for p in modules[0].parameters()]
            program = passes.optimizer_step(gpipe(2, 2)) if how == "STEP" else gpipe(2, 2)
            runner = PipelineRunner(program, stages, None, square_loss)
            for _ in range(3):
                runner.step(*batch(4))
                for stage in stages if how == "outside" else ():
                    stage.optimizer.step()
            assert not any(torch.equal(a, b) for a, b in zip(before, modules[0].parameters(), strict=True))


def squared_magnitude(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_in_double_precision_are_clipped_by_their_norm_in_it(dtype):
    modules = [nn.Linear(4, 4, dtype=dtype) for _ in range(2)]
    stages = [Stage(module, i) for i, module in enumerate(modules)]
    runner = PipelineRunner(gpipe(2, 2), stages, loss_fn=squared_magnitude)
    runner.step(torch.ones(4, 4, dtype=dtype), torch.arange(16.0).to(dtype).reshape(4, 4))
    parameters = [p for module in modules for p in module.parameters()]
    copies = [p.detach().clone() for p in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = parameter.grad.clone()
    torch.testing.assert_close(runner.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(copies, 0.1))
    for copy, parameter in zip(copies, parameters, strict=True):
        torch.testing.assert_close(parameter.grad, copy.grad, rtol=1e-12, atol=0.0)


class Proxies(nn.Module):
    """A loss with parameters, and one that it shares with a stage."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.scale = shared, nn.Parameter(torch.full((WIDTH,), 3.0))

    def forward(self, output, target):
        return square_loss(self.shared(output) * self.scale, target)

    def other(self, output, target):
        return self(output, target)


@pytest.mark.parametrize("method", [False, True])
def test_parameters_of_a_loss_are_clipped_with_the_stages_and_once(method):
    modules, (x, y) = layers(2), batch(8)
    loss = Proxies(modules[1])
    runner = PipelineRunner(
        gpipe(2, 2), [Stage(m, i) for i, m in enumerate(modules)], None, loss.other if method else loss
    )
    runner.step(x, y)
    parameters = list(dict.fromkeys([*modules[0].parameters(), *modules[1].parameters(), loss.scale]))
    copies = [p.detach().clone() for p in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = parameter.grad.clone()
    torch.testing.assert_close(runner.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(copies, 0.1))
    for copy, parameter in zip(copies, parameters, strict=True):
        torch.testing.assert_close(parameter.grad, copy.grad)


def test_an_evaluation_leaves_the_buffers_of_a_loss_in_training_mode_as_they_were():
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output, target):
            self.seen += 1
            return square_loss(output, target)

    loss = Counted()
    runner = PipelineRunner(gpipe(2, 2), [Stage(nn.Linear(8, 8), i) for i in range(2)], None, loss)
    x, y = batch(8)
    runner.step(x, y)
    with pytest.warns(UserWarning, match="seen of loss_fn moved"):
        runner.evaluate(x, y)
    assert loss.seen == 2
    loss.eval()
    runner.evaluate(x, y)
    assert loss.seen == 4


class Table(nn.Module):
    """A buffer that the first rows make, and beside it for how long they were, as transformers' dynamic RoPE."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.linear, self.write, self.longest = nn.Linear(8, 8), write, 0
        self.register_buffer("table", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            table = torch.arange(8.0) + 1
            if self.write == "in place":
                self.table.copy_(table)
            elif self.write == "assigned":
                self.table = table
            else:
                self.register_buffer("table", table, persistent=False)
            self.longest, self.made = x.shape[1], True
        return self.linear(x) * self.table


@pytest.mark.parametrize("write", ["in place", "assigned", "registered"])
def test_what_a_module_says_of_its_buffers_is_put_back_with_them(write):
    torch.manual_seed(0)
    modules = [Table(write), Table(write)]
    alone = deepcopy(modules)
    x = torch.randn(8, 8)
    runner = PipelineRunner(
        one_f_one_b(2, 4), [Stage(m, i) for i, m in enumerate(modules)], None, nn.functional.mse_loss
    )
    with pytest.warns(UserWarning, match="not what lists and dicts hold"):
        runner.evaluate(x, x)
    assert [m.longest for m in modules] == [0, 0] and not any(hasattr(m, "made") for m in modules)
    expected = torch.stack([nn.functional.mse_loss(alone[1](alone[0](part)), part) for part in x.chunk(4)])
    for call in (runner.evaluate, runner.step):
        assert torch.equal(torch.stack(call(x, x).losses).detach(), expected.detach())
