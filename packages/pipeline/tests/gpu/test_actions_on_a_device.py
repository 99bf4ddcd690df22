"""What each action does on a CUDA device: split backwards, recomputes with the device's random numbers, autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nested_helpers import MODULES, check
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Stage, dualpipe_v, gpipe, zb_h1, zb_v
from sixfold.pipeline.passes import optimizer_step, recompute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device(stages: int) -> list[nn.Module]:
    return [module.to("cuda") for module in layers(stages)]


@pytest.mark.parametrize("program", [zb_h1(2, 4), zb_v(2, 4), dualpipe_v(2, 4), recompute(zb_v(2, 4))], ids=str)
def test_split_backwards_have_the_bits_of_the_plain_loop(program):
    modules, oracle = on_device(program.stages), on_device(program.stages)
    x, y = (tensor.to("cuda") for tensor in batch(16))
    PipelineRunner(program, [Stage(m, i) for i, m in enumerate(modules)], loss_fn=square_loss).step(x, y)
    plain_loop(oracle, list(x.tensor_split(4)), list(y.tensor_split(4)))
    assert all(equal_bits(gradients(a), gradients(b)) for a, b in zip(modules, oracle, strict=True))


@pytest.mark.parametrize("program", [zb_h1(2, 4), zb_v(2, 4)], ids=lambda program: program.name)
@pytest.mark.parametrize("kind", ["implicit", "implicit last", "all", "twice", "attack", "reentrant", "non-reentrant"])
def test_passes_inside_of_others_have_the_bits_of_the_plain_loop_on_the_devices_thread(kind, program):
    check(MODULES[kind], program, device="cuda")


class Drops(nn.Module):
    """Tells what its dropout left, at each forward of a microbatch."""

    def __init__(self, layer: nn.Module, tell: Callable[[int, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.tell = layer, tell

    def forward(self, x: Tensor, *, k: int) -> Tensor:
        y = nn.functional.dropout(self.layer(x), 0.5)
        self.tell(k, y.detach().clone())
        return y


def test_a_recomputed_forward_draws_the_devices_numbers_of_the_first_one():
    seen: list[dict[int, list[Tensor]]] = [{}, {}]  # no part of the modules: RECOMPUTE puts those back
    modules = [
        Drops(module, lambda k, y, mine=mine: mine.setdefault(k, []).append(y))
        for module, mine in zip(on_device(2), seen, strict=True)
    ]
    x, y = (tensor.to("cuda") for tensor in batch(8))
    program = recompute(gpipe(2, 4))
    runner = PipelineRunner(program, [Stage(m, i) for i, m in enumerate(modules)], loss_fn=square_loss)
    runner.step(x, y, kwargs=[{"k": k} for k in range(4)])
    for mine in seen:
        assert [len(each) for each in mine.values()] == [2] * 4
        assert all(torch.equal(*each) for each in mine.values())
        assert not torch.equal(mine[0][0] == 0, mine[1][0] == 0)


def test_autocast_of_the_device_holds_for_forwards_and_not_for_backwards():
    program = zb_v(2, 4)
    modules, oracle = on_device(4), on_device(4)
    x, y = (tensor.to("cuda") for tensor in batch(16))
    with torch.autocast("cuda", torch.bfloat16):
        PipelineRunner(program, [Stage(m, i) for i, m in enumerate(modules)], loss_fn=square_loss).step(x, y)
    for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        with torch.autocast("cuda", torch.bfloat16):
            for module in oracle:
                a = module(a)
            loss = square_loss(a, b)
        (loss / 4).backward()
    assert all(equal_bits(gradients(a), gradients(b)) for a, b in zip(modules, oracle, strict=True))


def test_a_step_of_the_stages_optimizers_needs_no_word_from_the_host():
    program = optimizer_step(zb_h1(2, 4))
    modules = on_device(2)
    stages = [Stage(m, i, optimizer=torch.optim.AdamW(m.parameters(), fused=True)) for i, m in enumerate(modules)]
    runner = PipelineRunner(program, stages, loss_fn=square_loss)
    x, y = (tensor.to("cuda") for tensor in batch(16))
    runner.step(x, y)  # what is made once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = runner.step(x, y).losses
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).isfinite().all()
