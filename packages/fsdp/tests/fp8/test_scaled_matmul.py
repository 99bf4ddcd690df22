"""``fp8_matmul="scaled"``: ``torch._scaled_mm`` on a CPU against the product of what it is given; transposed copies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fp8_oracle import is_fp8, narrowed, quantized
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from fsdp_memory_helpers import storages
from torch import nn

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer
from sixfold.fsdp.fp8 import quantized as quantized_module
from sixfold.fsdp.fp8.scaled_matmul import Transposes, _cpu_takes_rows


def wrap(net, matmul="scaled", units=(Block,), fp8=is_fp8, strategy="optim_grads_params", buffers=None, **precision):
    return FullyShardedDataParallel(
        net,
        strategy=strategy,
        fsdp_unit_modules=list(units),
        mixed_precision=MixedPrecision(fp8=fp8, fp8_matmul=matmul, **precision),
        buffers=buffers or BufferConfig(),
    )


MATMULS = ["scaled", "scaled_rows"] if _cpu_takes_rows() else ["scaled"]  # torch 2.11's CPU takes no rows


class Whole(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.linear = nn.Linear(13, 19, bias=bias)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("matmul", MATMULS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 13), (2, 3, 13), (13,)])
def test_forward_and_backward_multiply_bytes(matmul, bias, shape):
    torch.manual_seed(0)
    net = Whole(bias)
    weight = net.linear.weight.detach().clone()
    added = net.linear.bias.detach().clone() if bias else torch.zeros(19)
    model = wrap(net, matmul, units=(nn.Linear,), fp8=lambda name: name == "linear.weight")
    x = torch.randn(shape, requires_grad=True)
    gradient = torch.randn(*shape[:-1], 19)
    output = model(x)
    output.backward(gradient)
    rows = matmul == "scaled_rows"
    q, scale = quantized(weight)
    stood_for = q.double() * scale.double()
    x_MK, g_MN = x.detach().view(-1, 13), gradient.view(-1, 19)
    wanted = narrowed(x_MK, torch.float8_e4m3fn, rows) @ stood_for.t() + added.double()
    torch.testing.assert_close(output.detach().double(), wanted.view(output.shape), rtol=1e-5, atol=1e-5)
    wanted = narrowed(g_MN, torch.float8_e4m3fn if rows else torch.float8_e5m2, rows) @ stood_for
    torch.testing.assert_close(x.grad.double(), wanted.view(x.shape), rtol=1e-5, atol=1e-5)
    gradients = {name: main.grad for name, main in model.main_parameters()}
    assert torch.equal(gradients["linear.weight"].view(19, 13), g_MN.t() @ x_MK)
    if bias:
        torch.testing.assert_close(gradients["linear.bias"], g_MN.sum(0))


@pytest.mark.parametrize("matmul", MATMULS)
def test_bf16_activations_are_rounded_once(matmul):
    torch.manual_seed(0)
    net = Whole(False)
    q, scale = quantized(net.linear.weight)
    model = wrap(net, matmul, units=(nn.Linear,), fp8=lambda name: True, param_dtype=torch.bfloat16)
    x = torch.randn(37, 13).bfloat16().requires_grad_()
    gradient = torch.randn(37, 19).bfloat16()
    output = model(x)
    output.backward(gradient)
    rows = matmul == "scaled_rows"
    stood_for = q.double() * scale.double()
    wanted = narrowed(x.detach(), torch.float8_e4m3fn, rows) @ stood_for.t()
    torch.testing.assert_close(output.detach().double(), wanted, rtol=2**-8, atol=1e-6)
    wanted = narrowed(gradient, torch.float8_e4m3fn if rows else torch.float8_e5m2, rows) @ stood_for
    torch.testing.assert_close(x.grad.double(), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("matmul", MATMULS)
def test_operands_lie_as_the_kernel_of_cuda_takes_them(matmul, monkeypatch):
    plain, calls = torch._scaled_mm, []

    def checked(a, b, *, scale_a, scale_b, out_dtype):
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        assert a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0
        assert scale_a.dtype == scale_b.dtype == torch.float32 and scale_a.is_contiguous() and scale_b.is_contiguous()
        assert torch.float8_e4m3fn in (a.dtype, b.dtype)
        if matmul == "scaled_rows":
            assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1]) and a.dtype == b.dtype
        else:
            assert scale_a.numel() == scale_b.numel() == 1
        calls.append((a.shape, b.shape))
        return plain(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    net = nn.Sequential(nn.Linear(16, 32))
    model = wrap(net, matmul, units=(nn.Linear,), fp8=lambda name: name == "0.weight")
    x = torch.randn(16, 5, requires_grad=True)
    model(x.t()).backward(torch.randn(32, 5).t())  # both transposed
    assert calls == [((5, 16), (16, 32)), ((5, 32), (32, 16))]


def test_no_rows_and_rows_of_zeros_are_fine():
    model = wrap(Whole(True), units=(nn.Linear,), fp8=lambda name: name == "linear.weight")
    assert model(torch.zeros(0, 13)).shape == (0, 19)
    assert model(torch.zeros(4, 13)).isfinite().all()
    rows = wrap(Whole(True), MATMULS[-1], units=(nn.Linear,), fp8=lambda name: name == "linear.weight")
    x = torch.zeros(4, 13)
    x[2] = 1.0
    assert rows(x).isfinite().all()


def run(net, model, steps=2):
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(steps):
        for k in range(2):
            loss_of(model(batch(step, k, 0)), batch(step, k, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


@pytest.mark.slow
def test_training_stays_close_to_the_emulation_and_learns():
    torch.manual_seed(0)
    losses = {}
    for matmul in ("emulate", *MATMULS):
        net = make_net(width=16)
        model = wrap(net, matmul, param_dtype=torch.bfloat16)
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        losses[matmul] = []
        for _ in range(12):
            loss = loss_of(model(batch(0, 0, 0)), batch(0, 0, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[matmul].append(float(loss.detach()))
    for matmul in MATMULS:
        assert losses[matmul][-1] < 0.5 * losses[matmul][0]
        assert losses[matmul][0] == pytest.approx(losses["emulate"][0], rel=0.02)
        assert losses[matmul][-1] == pytest.approx(losses["emulate"][-1], rel=0.15)


@pytest.mark.parametrize("recompute", ["inside", "around", "reentrant"])
def test_recompute_gives_the_same_bits(recompute):
    plain, other = make_net(), make_net(recompute=recompute)
    assert same(run(plain, wrap(plain)), run(other, wrap(other))) == []


@pytest.mark.parametrize("gathered_bytes", ["double", "all"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_transposed_copies_live_in_backward_alone(gathered_bytes, strategy):
    net = make_net()
    model = wrap(net, strategy=strategy, buffers=BufferConfig(gathered_bytes=gathered_bytes))
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    alive = []

    def look(*_):
        alive.append(model.report()["fp8"]["transposes_alive"])

    for block in net.blocks:
        block.register_forward_hook(look)
        block.up.register_full_backward_hook(look)
    for step in range(2):
        for k in range(2):
            loss_of(model(batch(step, k, 0)), batch(step, k, 0)).backward()
            forward, backward = alive[:3], alive[3:]
            alive.clear()
            assert forward == [()] * 3
            assert backward == [("blocks.2",), ("blocks.1",), ("blocks.0",)]
        optimizer.step()
        assert model.report()["fp8"]["transposes_alive"] == ()
        optimizer.zero_grad()
    report = model.report()
    assert report["fp8"]["transposes_made"] == 2 * 2 * 3
    # Units take turns in memory of the largest one: two matrices of 27 x 13, each on a border of 128 bytes.
    assert report["bytes"]["fp8_transposed"] == 2 * 384
    for unit, hidden in ((f"blocks.{i}", 19 + 4 * i) for i in range(3)):
        assert report["units"][unit]["gathered_bytes"] == report["units"][unit]["wire_bytes"]
        assert report["units"][unit]["wire_bytes"] <= 2 * 13 * hidden + 4 * (2 * 13 + hidden) + 6 * 128


def test_units_of_one_depth_take_turns_and_those_around_them_keep_theirs():
    tensors = {name: quantized_module.QuantizedTensor(name, (2, 3)) for name in ("root", "a", "b")}
    for at, tensor in enumerate(tensors.values()):
        tensor.q = torch.arange(6, dtype=torch.uint8).view(2, 3) + 10 * at
    units = {"root": (-1, [tensors["root"]]), "a": (0, [tensors["a"]]), "b": (0, [tensors["b"]]), "c": (0, [])}
    copies = Transposes(units, torch.device("cpu"))
    assert copies.nbytes == 2 * 128
    for unit in ("root", "a", "c", "a", "b"):
        copies.use(unit, in_backward=True)
    assert copies.alive == ("root", "b") and copies.made == 3 and copies.dropped == 1
    assert tensors["a"].transposed is None
    assert torch.equal(tensors["root"].transposed, tensors["root"].q.t())
    assert torch.equal(tensors["b"].transposed, tensors["b"].q.t())
    copies.drop("a")
    copies.drop("c")
    assert copies.alive == ("root", "b")
    copies.use("c", in_backward=False)
    assert copies.alive == () and copies.dropped == 3


@pytest.mark.parametrize("matmul", ["emulate", "scaled"])
@pytest.mark.parametrize("gathered_bytes", ["double", "all"])
@pytest.mark.slow
def test_the_report_counts_every_byte(matmul, gathered_bytes):
    net = make_net(width=16)
    model = wrap(net, matmul, buffers=BufferConfig(gathered_bytes=gathered_bytes), param_dtype=torch.bfloat16)
    reported = sum(model.report()["bytes"].values())
    del net
    before = storages()
    del model
    after = storages()
    assert sum(nbytes for place, nbytes in before.items() if place not in after) == reported


def test_a_copy_that_was_dropped_too_early_costs_no_bit(monkeypatch):
    first = make_net()
    expected = run(first, wrap(first))
    second = make_net()
    model = wrap(second)
    monkeypatch.setattr("sixfold.fsdp.fp8.scaled_matmul.Transposes.make", lambda self, unit: None)
    assert same(expected, run(second, model)) == []
    assert model.report()["fp8"]["transposes_made"] == 0


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.up = nn.Linear(13, 19)
        self.read = read

    def forward(self, x):
        return self.read(self.up.weight, x)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda w, x: x @ w.t(), "t"),
        (lambda w, x: torch.einsum("bi,oi->bo", x, w), "einsum"),
        (lambda w, x: F.embedding(torch.tensor([1]), w), "embedding"),
        (lambda w, x: x.mm(w.T), "T"),
        (lambda w, x: w.data.sum(), "data"),
        (lambda w, x: w.sum(), "sum"),
        (lambda w, x: F.linear(w, x), "F.linear"),
        (lambda w, x: w[0], "__getitem__"),
        (lambda w, x: torch.nn.init.zeros_(w), "zero_"),
    ],
)
def test_only_linear_reads_bytes(read, name):
    model = wrap(Reads(read), units=(), fp8=lambda name: name == "up.weight")
    with pytest.raises(FsdpError, match=name):
        model(torch.randn(5, 13))


def test_linear_by_hand_is_linear_and_shapes_are_free_to_read():
    def read(w, x):
        assert w.shape == (19, 13) and w.dtype == torch.float32 and w.requires_grad and w.grad is None
        return F.linear(x, w) + x.new_zeros(w.size(0))

    net = Reads(read)
    model = wrap(net, units=(), fp8=lambda name: name == "up.weight")
    model(torch.randn(5, 13)).sum().backward()
    assert dict(model.main_parameters())["up.weight"].grad is not None


def test_between_calls_bytes_are_no_values_but_state_dicts_hold_main_weights():
    net = make_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model = wrap(net, buffers=BufferConfig(gathered_bytes="all"))
    model(batch(0, 0, 0))
    with pytest.raises(FsdpError, match=r"blocks\.0\.up\.weight"):
        net.blocks[0].up.weight.sum()
    assert same(before, model.full_state_dict()) == []
    assert same(before, dict(net.state_dict())) == []
    assert same(before, dict(model.state_dict())) == []


def test_a_frozen_weight_keeps_no_activation_for_its_gradient():
    net = Whole(False)
    net.linear.weight.requires_grad_(False)
    model = wrap(net, units=(nn.Linear,), fp8=lambda name: True)
    x = torch.randn(5, 13, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("saved a tensor"), lambda t: t):
        output = model(x)
    output.sum().backward()
    assert x.grad is not None


def test_autocast_casts_the_activation():
    model = wrap(Whole(True), units=(nn.Linear,), fp8=lambda name: name == "linear.weight")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(5, 13)).dtype == torch.bfloat16


def test_a_parameter_of_another_class_is_refused():
    class Own(nn.Parameter):
        pass

    net = Whole(False)
    net.linear.weight = Own(net.linear.weight.detach())
    with pytest.raises(FsdpError, match=r"linear\.weight is a Own.*emulate"):
        wrap(net, units=(), fp8=lambda name: True)


def test_compiled_layers_read_what_bytes_stand_for_or_are_refused():
    def trained(compiled, matmul):
        net = make_net(layers=1)
        if compiled:
            net.blocks[0].forward = torch.compile(net.blocks[0].forward, backend="eager", fullgraph=True)
        return run(net, wrap(net, matmul), steps=1)

    assert same(trained(False, "emulate"), trained(True, "emulate")) == []
    with pytest.raises(Exception, match=r"blocks\.0\.up\.weight is an fp8 parameter.*torch\.compile.*emulate"):
        trained(True, "scaled")


def test_a_cpu_that_takes_no_scale_for_each_row_is_told_at_the_wrap(monkeypatch):
    def whole_alone(*operands, scale_a, **others):
        raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.")

    monkeypatch.setattr(torch, "_scaled_mm", whole_alone)
    _cpu_takes_rows.cache_clear()
    try:
        with pytest.raises(FsdpError, match=r"linear\.weight is on a CPU.* one scale a tensor: .*'emulate'"):
            wrap(Whole(True), "scaled_rows", units=(nn.Linear,), fp8=lambda name: name == "linear.weight")
    finally:
        _cpu_takes_rows.cache_clear()
