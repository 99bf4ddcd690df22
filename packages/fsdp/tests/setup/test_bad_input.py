"""Every wrong option is refused with its value and what is allowed."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, make_net
from torch import nn

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "zero3"}, "strategy is 'zero3'; it is one of no_shard, optim, optim_grads, optim_grads_params"),
        ({"initial": "hope"}, "initial is 'hope'; it is one of check, broadcast, trust"),
        ({"checks": "all"}, "checks is 'all'; it is one of off, order, unit"),
        ({"grad_reduce": "first"}, "grad_reduce is 'first'; it is one of auto, last, microbatch"),
        ({"fsdp_unit_modules": ["Nothing"]}, "'Nothing' matches no module"),
        ({"grad_divisor": 0.0}, "grad_divisor is 0.0"),
        ({"grad_divisor": float("inf")}, "grad_divisor is inf"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"first_step_timeout_s": -1.0}, "first_step_timeout_s is -1.0"),
        ({"busy_timeout_s": 0.0}, "busy_timeout_s is 0.0"),
        ({"fsdp_unit_modules": "Block"}, "fsdp_unit_modules is 'Block'; it is a list"),
        ({"granularity": lambda name, parameter: None}, "granularity is None"),
        (
            {"mesh_for": lambda name: object()},
            "mesh_for gives embedding.weight object; it gives a 1-D DeviceMesh, or None",
        ),
    ],
)
def test_a_wrong_option_of_the_model_is_refused(options, says):
    with pytest.raises(FsdpError, match=says):
        FullyShardedDataParallel(make_net(), **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MixedPrecision(grad_sum="ring"), "grad_sum is 'ring'; it is one of backend, rank_order, tree"),
        (lambda: MixedPrecision(param_dtype=torch.int8), "param_dtype is torch.int8"),
        (lambda: MixedPrecision(fp8=lambda name: True, main_dtype=torch.float64), "main_dtype .*float64 .* fp8"),
        (lambda: MixedPrecision(fp8=["up.weight"]), r"fp8 is \['up.weight'\].*function of a parameter's name"),
        (lambda: MixedPrecision(fp8_matmul="scaled"), "fp8_matmul .* fp8 is None"),
        (lambda: MixedPrecision(fp8_matmul="fast"), "fp8_matmul .* emulate, scaled, scaled_rows"),
        (lambda: MixedPrecision(grad_dtype=torch.float64), "grad_dtype is torch.float64"),
        (lambda: BufferConfig(gathered_bytes=0), "gathered_bytes is 0"),
        (lambda: BufferConfig(gathered_bytes="treble"), "'treble'; it is one of double, all"),
        (lambda: BufferConfig(gathered_bytes=-5), "gathered_bytes is -5"),
        (lambda: BufferConfig(gathered_bytes=True), "gathered_bytes is True; it is one of double, all"),
        (lambda: BufferConfig(user_buffers="perhaps"), "user_buffers is 'perhaps'; it is one of off, auto, require"),
        (lambda: BufferConfig(bucket_bytes=0), "bucket_bytes is 0"),
        (lambda: BufferConfig(reduce_buffers=0), "reduce_buffers is 0"),
        (lambda: BufferConfig(align_bytes=100), "align_bytes is 100"),
        (lambda: BufferConfig(prefetch_bytes=-1), "prefetch_bytes is -1"),
    ],
)
def test_a_wrong_or_later_option_of_a_config_is_refused(make, says):
    with pytest.raises(FsdpError, match=says):
        make()


def test_moving_or_loading_a_wrapped_model_is_refused():
    model = FullyShardedDataParallel(make_net(), fsdp_unit_modules=[Block])
    with pytest.raises(FsdpError, match="before wrapping"):
        model.to(torch.bfloat16)
    with pytest.raises(FsdpError, match="state_records"):
        model.load_state_dict({})
    with pytest.raises(FsdpError, match="not inside"):
        model.entry(nn.Linear(2, 2))
    with pytest.raises(FsdpError, match="a plan is for a byte budget"):
        model.use_plan([])
    with pytest.raises(FsdpError, match="FullyShardedDataParallel already"):
        FullyShardedDataParallel(nn.Sequential(model))
    with pytest.raises(FsdpError, match=r"AdamW holds .* itself; use fully_shard_optimizer"):
        model.materialize_state(torch.optim.AdamW(model.module.parameters()))


def test_integer_parameters_and_meta_modules_without_an_initialiser_are_refused():
    class Odd(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, **options), requires_grad=False)

    with pytest.raises(FsdpError, match=r"w is torch.int32"):
        FullyShardedDataParallel(Odd(dtype=torch.int32))
    with pytest.raises(FsdpError, match="reset_parameters"):
        FullyShardedDataParallel(Odd(device="meta"))


@pytest.mark.usefixtures("as_sharded")
def test_an_output_that_hides_its_tensors_is_an_error_not_a_wrong_gradient():
    """From the second step on; in the first every saved tensor is looked at (test_leaving_tensors.py)."""

    class Table(nn.Embedding):
        hides = False

        def forward(self, x):
            found = super().forward(x)
            return (lambda: found) if self.hides else found

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Table(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, x):
            found = self.parts[0](x)
            return self.parts[2](self.parts[1](found() if callable(found) else found))

    net = Net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[*net.parts])
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters()), model)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    Table.hides = True
    with pytest.raises(FsdpError, match="and not through its outputs") as caught:
        model(torch.tensor([1])).sum().backward()
    assert caught.value.unit == "parts.0"
