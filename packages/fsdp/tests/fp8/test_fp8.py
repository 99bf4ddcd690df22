"""fp8 parameters in one process: bits against the definition, edges of it, memory, and what is refused."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from fp8_oracle import is_fp8, quantized, seen
from fsdp_helpers import Block, batch, emulate, loss_of, make_adamw, make_net, same
from fsdp_stream_helpers import StandInStream

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer
from sixfold.fsdp.buffers.weights import Weights
from sixfold.fsdp.fp8 import quantized as quantized_module
from sixfold.fsdp.fp8.scaled_matmul import Transposes

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
NAN = float("nan")


def wrap(net, strategy="optim_grads_params", buffers=None, **precision):
    precision = {"fp8": is_fp8, "param_dtype": torch.bfloat16, **precision}
    return FullyShardedDataParallel(
        net,
        strategy=strategy,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(**precision),
        buffers=buffers or BufferConfig(),
    )


def seen_by_layers(model, net, name):
    """The values of a weight in the middle of its unit's call."""
    found = []
    owner = net.get_submodule(name.rpartition(".")[0])
    handle = owner.register_forward_hook(lambda module, args, output: found.append(module.weight.detach().clone()))
    model(batch(0, 0, 0))
    handle.remove()
    return found[0]


def main_of(model, name):
    return dict(model.main_parameters())[name]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, None])
@pytest.mark.slow
def test_training_equals_the_definition(strategy, param_dtype):
    net = make_net()
    model = wrap(net, strategy, param_dtype=param_dtype)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(3):
        for k in range(2):
            loss_of(model(batch(step, k, 0)), batch(step, k, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = emulate(
        ranks=1, steps=3, accumulate=2, net_options={}, per_microbatch=True, param_dtype=param_dtype, seen=seen
    )
    assert same(expected, model.full_state_dict()) == []


@pytest.mark.parametrize("gathered_bytes", ["double", "all"])
def test_layers_see_the_new_weights_after_a_step_and_after_loading(gathered_bytes):
    net = make_net()
    model = wrap(net, buffers=BufferConfig(gathered_bytes=gathered_bytes))
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    name = "blocks.1.up.weight"

    def expected():
        q, scale = quantized(main_of(model, name).view(23, 13))
        return (q.float() * scale).bfloat16()

    first = seen_by_layers(model, net, name)
    assert torch.equal(first, expected())
    loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    optimizer.step()
    second = seen_by_layers(model, net, name)
    assert torch.equal(second, expected()) and not torch.equal(second, first)
    for record in model.state_records():
        record.tensor.mul_(-3.0)
    model.refresh()
    assert torch.equal(seen_by_layers(model, net, name), expected())


def test_one_large_element_sets_the_scale_and_a_tensor_of_zeros_has_scale_one():
    net = make_net()
    with torch.no_grad():
        net.blocks[0].up.weight.zero_()
        net.blocks[0].down.weight.zero_()[3, 4] = -7e4
        net.blocks[2].up.weight.fill_(1e-44)  # amax / 448 is 0 in fp32
    model = wrap(net, param_dtype=None)
    assert torch.equal(seen_by_layers(model, net, "blocks.0.up.weight"), torch.zeros(19, 13))
    down = seen_by_layers(model, net, "blocks.0.down.weight")
    assert down[3, 4] == -7e4 and down.count_nonzero() == 1
    assert torch.equal(seen_by_layers(model, net, "blocks.2.up.weight"), torch.zeros(27, 13))


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_a_main_weight_that_is_not_finite_is_not_hidden_by_its_scale(value):
    net = make_net()
    model = wrap(net)
    main_of(model, "blocks.0.up.weight").data.view(-1)[5] = value
    model.refresh()
    assert seen_by_layers(model, net, "blocks.0.up.weight").isnan().all()
    assert not seen_by_layers(model, net, "blocks.1.up.weight").isnan().any()
    assert model(batch(0, 0, 0)).isnan().any()


def test_frozen_fp8_parameters_are_seen_quantised_and_get_no_gradient():
    net = make_net(frozen=True)
    model = wrap(net)
    optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
    before = main_of(model, "blocks.1.up.weight").detach().clone()
    for step in range(2):
        loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(main_of(model, "blocks.1.up.weight"), before)
    assert main_of(model, "blocks.1.up.weight").grad is None
    q, scale = quantized(before.view(23, 13))
    assert torch.equal(seen_by_layers(model, net, "blocks.1.up.weight"), (q.float() * scale).bfloat16())
    expected = emulate(
        ranks=1,
        steps=2,
        accumulate=1,
        net_options={"frozen": True},
        per_microbatch=True,
        param_dtype=torch.bfloat16,
        seen=seen,
    )
    assert same(expected, model.full_state_dict()) == []


def test_a_tensor_larger_than_the_scratch_is_quantised_in_pieces(monkeypatch):
    monkeypatch.setattr("sixfold.fsdp.fp8.quantized._CHUNK", 100)
    net = make_net()
    model = wrap(net)
    for name in ("blocks.1.up.weight", "blocks.2.down.weight"):
        main = main_of(model, name)
        q, scale = quantized(main)
        assert torch.equal(seen_by_layers(model, net, name).view(-1), (q.float() * scale).bfloat16())
    assert model.report()["bytes"]["fp8_scratch"] == 100 * 5 + 256 * 4 + 6 * 28


def test_a_byte_for_each_fp8_weight_travels_and_norms_lie_beside_them_as_they_are():
    width, hidden = 64, 256
    net = torch.nn.Sequential(*(Block(width, hidden=hidden) for _ in range(2)))
    model = FullyShardedDataParallel(
        net,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(fp8=lambda name: is_fp8("blocks." + name), param_dtype=torch.bfloat16),
    )
    exact = 2 * width * hidden + 2 * (2 * width + hidden)  # matrices; bf16 norm and bias
    report = model.report()
    for name in ("0", "1"):
        unit = report["units"][name]
        assert exact <= unit["wire_bytes"] <= exact + 5 * 128
        assert unit["gathered_bytes"] - unit["wire_bytes"] == pytest.approx(2 * 2 * width * hidden, abs=2 * 128)
    assert report["fp8"]["tensors"] == 4


def allocations(fp8):
    """Sizes >= 16 KB that the third step allocates."""
    net = make_net(width=128)
    model = wrap(net, fp8=fp8)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
    for number in range(3):
        with torch.profiler.profile(profile_memory=True) as profile:
            loss_of(model(batch(number, 0, 0)), batch(number, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sorted(
        e.cpu_memory_usage for e in profile.events() if e.name == "[memory]" and e.cpu_memory_usage >= 1 << 14
    )


@pytest.mark.slow
def test_fp8_allocates_nothing_more_per_step():
    assert allocations(is_fp8) == allocations(None)


class Predicate:
    def __call__(self, name):
        return name.endswith("norm.weight")


@pytest.mark.parametrize("matmul", ["scaled", "scaled_rows"])
def test_a_vector_is_no_matrix(matmul):
    with pytest.raises(FsdpError, match=r"blocks.0.norm.weight has the shape \(13,\).*emulate"):
        wrap(make_net(), fp8=Predicate(), fp8_matmul=matmul)


def test_a_vector_may_be_emulated():
    net = make_net()
    model = wrap(net, fp8=Predicate())
    assert torch.equal(seen_by_layers(model, net, "blocks.0.norm.weight"), torch.ones(13, dtype=torch.bfloat16))


class RecordedStream(StandInStream):
    """The gather stream, which writes down what happens inside it."""

    def __init__(self, log):
        self.log = log
        self.entered = False

    @property
    @contextmanager
    def inside(self):
        self.entered = True
        yield
        self.entered = False

    def mark(self):
        assert self.entered
        self.log.append("mark")
        return len(self.log)

    def join(self, event):
        assert not self.entered
        self.log.append(f"join {event}")


def test_bytes_are_made_and_read_on_the_gather_stream_and_transposed_after_compute_has_joined(monkeypatch):
    net = make_net(layers=1)
    model = wrap(net, fp8_matmul="scaled")
    log = []
    stream = model._engine.gathering._stream = RecordedStream(log)

    def record(owner, name, text, on_stream):
        plain = getattr(owner, name)

        def recorded(*args, **kwargs):
            assert stream.entered is on_stream, text
            log.append(text)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, recorded)

    record(quantized_module._ScaleGroup, "refresh", "scales", True)
    record(quantized_module, "quantize", "bytes", True)
    record(Weights, "spread_copies", "arrive", True)
    record(Transposes, "make", "transpose", False)
    record(torch, "_scaled_mm", "multiply", False)
    model(batch(0, 0, 0)).sum().backward()
    assert log == [
        "mark", "join 1",  # the root unit, which travels as layers read it
        "scales", "bytes", "bytes", "arrive", "mark", "join 7",  # up and down
        "multiply", "multiply",  # forward
        "transpose", "transpose", "multiply", "multiply",  # backward: the root has none, the block two
    ]  # fmt: skip


class MaximumWithoutNan:
    """Two ranks on a back end whose maximum of floats takes the number where one is NaN, as CUDA's ``fmax`` does."""

    def __init__(self, other):
        self.other = torch.tensor(other)

    def maximum(self, full):
        other = self.other if full.is_floating_point() else self.other.view(full.dtype)
        full.copy_(torch.fmax(full, other))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_of_one_rank_wins_on_every_back_end(sign):
    tensors = [quantized_module.QuantizedTensor(name, (3,)) for name in "abc"]
    mains = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.0, math.copysign(NAN, sign), 3.0]), torch.zeros(3)]
    for tensor, main in zip(tensors, mains, strict=True):
        tensor.main = main
    scales = quantized_module.Fp8Scales([(MaximumWithoutNan([448.0, 896.0, NAN]), True, tensors)], torch.device("cpu"))
    scales.refresh(tensors, lambda work: None)
    assert tensors[0].scale == 1.0 and tensors[1].scale.isnan() and tensors[2].scale.isnan()


def test_a_scale_shrinks_with_its_tensor_also_where_nothing_of_it_lies_here():
    tensor = quantized_module.QuantizedTensor("a", (3,))
    elsewhere = MaximumWithoutNan([896.0])
    scales = quantized_module.Fp8Scales([(elsewhere, True, [tensor])], torch.device("cpu"))
    scales.refresh([tensor], lambda work: None)
    assert tensor.scale == 2.0
    elsewhere.other = torch.tensor([448.0])
    scales.main_changed([tensor])
    scales.refresh([tensor], lambda work: None)
    assert tensor.scale == 1.0


def test_tensors_without_elements_and_scalars_are_fine():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.none = torch.nn.Parameter(torch.zeros(0, 5))
            self.one = torch.nn.Parameter(torch.tensor(-3.3))

        def forward(self, x):
            return x * self.one + self.none.sum()

    for chosen in (("none",), ("none", "one")):
        net = Odd()
        model = FullyShardedDataParallel(
            net, mixed_precision=MixedPrecision(fp8=lambda name, chosen=chosen: name in chosen)
        )
        output = model(torch.ones(2))
        assert torch.equal(output, torch.full((2,), -3.3)), "the largest element of a tensor is 448 times its scale"
        output.sum().backward()
        assert dict(model.main_parameters())["one"].grad.item() == 2.0


@pytest.mark.parametrize("budget", [30_000, 60_000])
def test_a_byte_budget_changes_no_bit(budget):
    results = []
    for gathered_bytes in ("double", budget):
        net = make_net()
        model = wrap(net, buffers=BufferConfig(gathered_bytes=gathered_bytes))
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
        for step in range(3):
            loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.full_state_dict())
    assert same(*results) == []


def test_every_scale_lies_where_cublaslt_takes_it():
    """At multiples of 16 bytes; of another it says CUBLAS_STATUS_NOT_SUPPORTED."""
    tensors = [quantized_module.QuantizedTensor(str(at), (16, 16)) for at in range(5)]
    scales = quantized_module.Fp8Scales([(None, True, tensors[:3]), (None, False, tensors[3:])], torch.device("cpu"))
    assert scales.tensors == 5
    assert [one.scale.data_ptr() % 16 for one in tensors] == [0] * 5
