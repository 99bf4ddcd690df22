"""``scale="token"``: whatever the backward of a step reaches is divided by the step's tokens, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Stage, gpipe, one_f_one_b, passes, zb_h1

M = 4


class Scales(nn.Module):
    """A layer times a factor that is given, or is no registered parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden = [nn.Parameter(torch.ones(4))]

    def forward(self, x: Tensor, *, by: Any = 1.0) -> Tensor:
        return torch.tanh(self.layer(x)) * by * self.hidden[0]


def made(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Scales(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))]


def rows(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def counted(weight: Tensor | None = None) -> Any:
    """A sum over the rows whose target is not 0, and how many those are."""

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = output if weight is None else output * weight
        each = nn.functional.cross_entropy(logits, target, reduction="none")
        return (each * (target > 0)).sum(), (target > 0).sum()

    return loss


def plain(modules: list[nn.Module], parts: list[Tensor], targets: Tensor, loss: Any, kwargs: Any = None) -> None:
    """Gradients of the mean over the whole batch, added to those that are there."""
    total = torch.tensor(0.0)
    for k, (part, target) in enumerate(zip(parts, targets.chunk(M), strict=True)):
        for module in modules:
            part = module(part, **(kwargs[k] if kwargs and isinstance(module, Scales) else {}))
        total = total + loss(part, target)[0]
    (total / (targets > 0).sum()).backward()


def close(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def leaves_of(modules: list[nn.Module]) -> list[Tensor]:
    return [*modules[0].hidden, *(p for module in modules for p in module.parameters())]


PROGRAMS = [gpipe(2, M), one_f_one_b(2, M), zb_h1(2, M), passes.recompute(gpipe(2, M))]
ids = [program.name or "recompute" for program in PROGRAMS]


def runner_of(program: Any, modules: list[nn.Module], loss: Any) -> PipelineRunner:
    stages = [Stage(module, index) for index, module in enumerate(modules)]
    return PipelineRunner(program, stages, None, loss, scale="token")


@pytest.mark.parametrize("program", PROGRAMS, ids=ids)
@pytest.mark.parametrize("change", ["assign", "head", "hidden"])
@pytest.mark.slow
def test_parameters_that_were_replaced_behind_the_first_step_are_divided(program, change):
    modules, theirs = made(), made()
    loss = counted()
    runner = runner_of(program, modules, loss)
    runner.step(*rows())
    for net in (modules, theirs):
        if change == "assign":
            for module, other in zip(net, made(7), strict=True):
                module.load_state_dict(other.state_dict(), assign=True)
        elif change == "head":
            net[1][1] = made(7)[1][1]
        else:
            net[0].hidden[0] = nn.Parameter(torch.full((4,), 0.5))
        for leaf in leaves_of(net):
            leaf.grad = None
    for seed in (2, 3):
        x, y = rows(seed)
        runner.step(x, y)
        plain(theirs, list(x.chunk(M)), y, loss)
    close(leaves_of(modules), leaves_of(theirs))


@pytest.mark.parametrize("program", PROGRAMS, ids=ids)
@pytest.mark.parametrize("cut", [True, False], ids=["one tensor", "list"])
def test_inputs_keywords_and_what_only_the_loss_knows_are_divided(program, cut):
    nets, leaves = (made(), made()), []
    for net, run in zip(nets, ("ours", "plain"), strict=True):
        factor, by = (torch.full((n,), 1.5, requires_grad=True) for n in (3, 4))
        kwargs = [{"by": by}] * M
        runner = runner_of(program, net, lambda output, target, factor=factor: counted(factor)(output, target))
        own = [factor, by]
        for seed in (1, 2):
            x, y = rows(seed)
            given = [x.requires_grad_()] if cut else [part.clone().requires_grad_() for part in x.chunk(M)]
            own += given
            if run == "ours":
                runner.step(given[0] if cut else given, y, kwargs=kwargs_for(net, kwargs))
            else:
                plain(net, list(x.chunk(M)) if cut else given, y, counted(factor), kwargs)
        leaves.append([*own, *leaves_of(net)])
    close(*leaves)


def kwargs_for(net: list[nn.Module], kwargs: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The last stage is given them too, and does nothing with them."""
    net[1].forward = lambda x, by=None: net[1][1](net[1][0](x))
    return kwargs


@pytest.mark.parametrize("program", PROGRAMS, ids=ids)
def test_what_only_later_microbatches_reach_is_divided(program):
    """An expert in a plain list, to which the first rows were not sent."""

    class Sends(Scales):
        def forward(self, x: Tensor, *, late: bool) -> Tensor:
            return super().forward(x, by=self.hidden[1] if late else 1.0)

    nets, loss = [], counted()
    for run in ("ours", "plain"):
        net = made()
        net[0].__class__, net[0].hidden = Sends, [nn.Parameter(torch.full((4,), value)) for value in (0.5, 2.0)]
        nets.append(net)
        kwargs = [{"late": k >= 2} for k in range(M)]
        runner = runner_of(program, net, loss)
        for seed in (1, 2):
            x, y = rows(seed)
            if run == "ours":
                net[1].forward = lambda x, net=net, **_: net[1][1](net[1][0](x))
                runner.step(x, y, kwargs=kwargs)
            else:
                plain(net, list(x.chunk(M)), y, loss, kwargs)
    close(*map(leaves_of, nets))


@pytest.mark.parametrize("several", [False, True])
def test_what_is_in_front_of_the_pipeline_gets_its_gradient_and_is_divided(several):
    """An embedding whose graph ends in the inputs; the loss reads its weight too."""
    nets, front, loss = (made(), made()), [], counted()
    for net, run in zip(nets, ("ours", "plain"), strict=True):
        torch.manual_seed(3)
        table = nn.Embedding(8, 4)
        front.append(table.weight)

        def both(output, target, table=table):
            return loss(output + table.weight[0, 0], target)

        factor, layer = net[0].hidden[0], net[0].layer
        net[0].forward = lambda x, by=1.0, factor=factor, layer=layer: torch.tanh(layer(x)) * by * factor
        for seed in (1, 2):
            _, y = rows(seed)
            ids, by = torch.arange(8) % 5, torch.linspace(1.0, 2.0, 8)[:, None]
            if run == "ours":
                hidden = table(ids)
                runner_of(zb_h1(2, M), net, both).step((hidden, by) if several else hidden, y)
            else:
                parts = [table(part) for part in ids.chunk(M)]
                kwargs = [{"by": part if several else 1.0} for part in by.chunk(M)]
                plain(net, parts, y, both, kwargs)
    close(front, front[::-1])
    assert front[0].grad.abs().max() > 0, "the embedding is trained"
    close(*map(leaves_of, nets))
