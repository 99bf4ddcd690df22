"""fp8 parameters on one CUDA device: the bytes of the definition, and ``torch._scaled_mm`` near their product."""

from __future__ import annotations

import pytest
import torch
from fp8_oracle import is_fp8, narrowed, quantized
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net
from torch import nn

from sixfold.fsdp import FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
has_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="torch._scaled_mm needs compute capability 8.9",
)


def wrap(net, matmul="emulate", fp8=is_fp8, units=(Block,), param_dtype=torch.bfloat16):
    return FullyShardedDataParallel(
        net,
        fsdp_unit_modules=list(units),
        mixed_precision=MixedPrecision(param_dtype=param_dtype, fp8=fp8, fp8_matmul=matmul),
        initial="trust",
    )


def test_layers_see_the_weights_that_the_definition_gives_on_a_cpu():
    net = make_net()
    mains = {name: value.detach().clone() for name, value in net.named_parameters()}
    model = wrap(net.cuda())
    seen = {}
    for i, block in enumerate(net.blocks):
        for name in ("up", "down"):
            key = f"blocks.{i}.{name}.weight"
            getattr(block, name).register_forward_hook(
                lambda module, args, output, key=key: seen.update({key: module.weight.detach().clone().cpu()})
            )
    model(batch(0, 0, 0).cuda())
    assert len(seen) == 2 * len(net.blocks)
    for key, found in seen.items():
        q, scale = quantized(mains[key])
        assert torch.equal(found, (q.float() * scale).bfloat16()), key


def test_a_step_reads_nothing_on_the_host():
    net = make_net(width=16).cuda()
    model = wrap(net)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), fused=True), model)
    for step in range(3):
        tokens = batch(step, 0, 0).cuda()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            loss_of(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@has_fp8
@pytest.mark.parametrize("matmul", ["scaled", "scaled_rows"])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_scaled_products_are_near_those_of_what_bytes_stand_for(matmul, rows):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128, bias=True)).cuda()
    weight, bias = net[0].weight.detach().clone(), net[0].bias.detach().clone()
    model = wrap(net, matmul, fp8=lambda name: name == "0.weight", units=())
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
    output = model(x)
    output.backward(gradient)
    q, scale = quantized(weight.cpu())
    stood_for = q.double() * scale.double()
    by_row = matmul == "scaled_rows"
    # bfloat16 results (2**-8), and sums of 64 to 128 products in the kernel's own order and width.
    wanted = narrowed(x.detach().cpu(), torch.float8_e4m3fn, by_row) @ stood_for.t() + bias.cpu().double()
    assert (output.detach().cpu().double() - wanted).abs().max() < 0.01 * wanted.abs().max()
    of_gradient = torch.float8_e4m3fn if by_row else torch.float8_e5m2
    wanted = narrowed(gradient.cpu(), of_gradient, by_row) @ stood_for
    assert (x.grad.cpu().double() - wanted).abs().max() < 0.01 * wanted.abs().max()
    main = dict(model.main_parameters())["0.weight"]
    torch.testing.assert_close(main.grad.view(128, 64), (gradient.t() @ x.detach()).float(), rtol=1e-2, atol=1e-2)


@has_fp8
@pytest.mark.parametrize("matmul", ["scaled", "scaled_rows"])
def test_scaled_training_learns_as_the_emulation_does(matmul):
    last = {}
    for one in ("emulate", matmul):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Embedding(17, 64), Block(64, hidden=128), Block(64, hidden=128), nn.Linear(64, 17)
        ).cuda()
        model = wrap(net, one, fp8=lambda name: name.endswith(("up.weight", "down.weight")))
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        tokens = batch(0, 0, 0).cuda()
        for _ in range(12):
            loss = loss_of(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        last[one] = float(loss.detach())
        if one != "emulate":
            assert model.report()["fp8"]["transposes_made"] == 24
    assert last[matmul] == pytest.approx(last["emulate"], abs=0.05)


@has_fp8
def test_sizes_that_the_kernel_does_not_take_are_refused_at_the_wrap():
    with pytest.raises(FsdpError, match=r"0\.weight has the shape \(19, 16\).*multiples of 16.*emulate"):
        wrap(nn.Sequential(nn.Linear(16, 19)).cuda(), "scaled", fp8=lambda name: name == "0.weight", units=())
