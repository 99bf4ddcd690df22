"""A deferring nn.Linear is torch's own operator with a hook, or an autograd Function where that would see too little.

The oracle is the module in a plain backward.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from pipeline_helpers import gradients
from split_helpers import equal_bits
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from sixfold.pipeline import ScheduleError, Stage
from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

Call = Callable[[nn.Module, Tensor], Tensor]


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 5), nn.Linear(5, 3, bias=False))


def split(store: WeightGradientStore, module: nn.Module, x: Tensor, call: Call, k: int = 0) -> None:
    """F and I of a microbatch."""
    y = store.forward(k, call, (module, x), {})
    store.backward(k, (get_gradient_edge(y),), (seeded(*y.shape),))


def both(call: Call, x: Tensor, microbatches: int = 3) -> None:
    """The bits of inputs' and parameters' gradients over some microbatches; the first goes through watched layers."""
    ours, plain = model(), model()
    store = WeightGradientStore(Stage(ours, 0))
    for k in range(microbatches):
        mine, theirs = (x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2))
        split(store, ours, mine, call, k)
        store.backward_weight(k)
        y = call(plain, theirs)
        y.backward(seeded(*y.shape))
        assert equal_bits([mine.grad], [theirs.grad])
    assert equal_bits(gradients(ours), gradients(plain))


def as_it_is(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def with_hooked_outputs(module: nn.Module, x: Tensor) -> Tensor:
    """Hooks of outputs that change the gradient come before the layer, whenever they were registered."""
    for part in module:  # type: ignore[attr-defined]
        x = part(x)
        x.register_hook(lambda gradient: gradient * 3)
    return x


@pytest.mark.parametrize("call", [as_it_is, with_hooked_outputs])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (1, 6), (0, 6)], ids=str)
@pytest.mark.parametrize("wants", [True, False])
def test_both_forms_have_the_bits_of_a_plain_backward(call, shape, wants):
    both(call, seeded(*shape).requires_grad_(wants))


def test_torchs_own_operator_runs_where_the_input_or_the_bias_wants_a_gradient():
    layer = nn.Linear(4, 4)
    store = WeightGradientStore(Stage(layer, 0))
    names = []
    for wants in (True, False):
        output = store.forward(0, layer, (seeded(2, 4).requires_grad_(wants),), {})
        names.append(output.grad_fn.name())
    assert names == ["AddmmBackward0", "AddmmBackward0"]


def test_who_looks_after_saved_tensors_sees_the_input():
    layer, x = nn.Linear(4, 4), seeded(2, 4).requires_grad_()
    store = WeightGradientStore(Stage(layer, 0))
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        store.forward(0, layer, (x,), {})
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in seen)


def test_a_parameter_that_lies_elsewhere_in_the_same_step_is_read_there():
    ours = model()
    store = WeightGradientStore(Stage(ours, 0))
    for k in range(2):
        split(store, ours, seeded(4, 6).requires_grad_(), as_it_is, k)
        store.backward_weight(k)
    ours[0].weight.data = ours[0].weight.data * 2
    plain = copy.deepcopy(ours)
    for module in (ours, plain):
        module.zero_grad()
    split(store, ours, seeded(4, 6).requires_grad_(), as_it_is)
    store.backward_weight(0)
    y = plain(seeded(4, 6).requires_grad_())
    y.backward(seeded(*y.shape))
    assert equal_bits(gradients(ours), gradients(plain))


@pytest.mark.parametrize(
    "moved",
    [
        lambda data: data[:4],
        lambda data: data.t() if data.dim() == 2 else data,
        lambda data: data[:, :4] if data.dim() == 2 else data,
        torch.clone,
    ],
    ids=["rows", "transposed", "columns", "elsewhere"],
)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("wants", [True, False])
def test_a_parameter_that_is_given_other_data_within_a_step_is_read_as_it_then_is(moved, checkpointed, wants):
    def call(module: nn.Module, x: Tensor) -> Tensor:
        x = x[..., : module.weight.shape[1]].contiguous()  # type: ignore[union-attr,index]
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)

    torch.manual_seed(0)
    ours = nn.Linear(8, 8)
    plain = copy.deepcopy(ours)
    store = WeightGradientStore(Stage(ours, 0))
    for k in range(3):
        for module in (ours, plain):
            if k == 2:
                module.zero_grad()
                module.weight.data, module.bias.data = moved(module.weight.data), moved(module.bias.data)
        split(store, ours, seeded(3, 8).requires_grad_(wants), call, k)
        store.backward_weight(k)
        y = call(plain, seeded(3, 8).requires_grad_(wants))
        y.backward(seeded(*y.shape))
        del y  # autograd's node of a parameter, which knows its shape, lives as long as a graph
    assert equal_bits(gradients(ours), gradients(plain))


@pytest.mark.parametrize("looks", [False, True])
def test_a_backward_reads_the_weight_that_its_forward_read(looks):
    ours = nn.Linear(8, 8)
    plain = copy.deepcopy(ours)
    found = []
    store = WeightGradientStore(Stage(ours, 0))
    for module in (ours, plain):
        x = seeded(3, 8).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(*[lambda t: t] * 2) if looks else contextlib.nullcontext():
            y = store.forward(0, ours, (x,), {}) if module is ours else plain(x)
        module.weight.data = module.weight.data * 3
        if module is ours:
            store.backward(0, (get_gradient_edge(y),), (seeded(3, 8),))
            store.backward_weight(0)
        else:
            y.backward(seeded(3, 8))
        found.append([x.grad, *gradients(module)])
    assert equal_bits(*found)


def doubled(y: Tensor) -> Tensor:
    y.register_hook(lambda g: g * 2)
    y.register_hook(lambda g: g + 1)
    return y


def removed(y: Tensor) -> Tensor:
    handle = y.register_hook(lambda g: g * 7)
    y.register_hook(lambda g: g + 1)
    handle.remove()
    return y


def in_place(y: Tensor) -> Tensor:
    y.register_hook(lambda g: g * 2)
    y = y.mul_(3)
    y.register_hook(lambda g: g + 1)
    return y


def kept(y: Tensor) -> Tensor:
    y.retain_grad()
    y.register_hook(lambda g: g + y.detach())
    return y


@pytest.mark.parametrize("change", [doubled, removed, in_place, kept], ids=lambda change: change.__name__)
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)], ids=str)
@pytest.mark.parametrize("wants", [True, False])
def test_the_weights_see_what_hooks_of_the_output_make_of_its_gradient(change, shape, wants):
    both(lambda module, x: module[1:](change(module[0](x))), seeded(*shape).requires_grad_(wants))  # type: ignore[index]


@pytest.mark.parametrize("wants", [True, False])
def test_an_output_that_is_detached_in_place_gives_its_layer_no_gradient(wants):
    def call(module: nn.Module, x: Tensor) -> Tensor:
        start = module[0](x).detach_().requires_grad_()  # type: ignore[index]
        return module[1:](module[0](x) + start)  # type: ignore[index]

    both(call, seeded(4, 6).requires_grad_(wants))


def test_layers_are_in_place_in_i_only_where_a_forward_may_run_again():
    found = {}
    for again in (False, True):
        ours = model()
        store = WeightGradientStore(Stage(ours, 0))

        def call(module: nn.Module, x: Tensor, again: bool = again, ours: nn.Module = ours) -> Tensor:
            hidden = module(x)
            hidden.register_hook(lambda _: found.__setitem__(again, "forward" in ours[0].__dict__))
            return torch.utils.checkpoint.checkpoint(nn.Identity(), hidden, use_reentrant=True) if again else hidden

        def checkpointed(module: nn.Module, x: Tensor, inner: Call = call) -> Tensor:
            return torch.utils.checkpoint.checkpoint(inner, module, x, use_reentrant=False)

        for k in range(2):
            split(store, ours, seeded(4, 6).requires_grad_(), checkpointed if again else call, k)
            store.backward_weight(k)
    assert found == {False: False, True: True}


class TwoBackwards(torch.autograd.Function):
    """A graph of its own, kept, and gone through twice."""

    @staticmethod
    def forward(ctx, x, layer):
        with torch.enable_grad():
            ctx.inner = layer(x.detach())
        ctx.zeros = torch.zeros_like(x)
        return ctx.inner.detach()

    @staticmethod
    def backward(ctx, gradient):
        torch.autograd.backward(ctx.inner, gradient * 0.25, retain_graph=True)
        torch.autograd.backward(ctx.inner, gradient * 0.5)
        return ctx.zeros, None


def test_a_bias_gradient_counts_once_where_a_kept_graph_is_gone_through_twice():
    ours, x = model(), seeded(4, 6)
    plain = copy.deepcopy(ours)
    store = WeightGradientStore(Stage(ours, 0))
    split(store, ours, x.clone().requires_grad_(), lambda module, x: TwoBackwards.apply(x, module[0]))  # type: ignore[index]
    store.backward_weight(0)
    y = plain[0](x)
    y.backward(seeded(*y.shape) * 0.75)
    for mine, other in ((ours[0].weight, plain[0].weight), (ours[0].bias, plain[0].bias)):
        torch.testing.assert_close(mine.grad, other.grad)


def test_what_is_frozen_in_one_microbatch_of_a_step_gets_no_gradient_of_it():
    ours = model()
    plain = copy.deepcopy(ours)
    store = WeightGradientStore(Stage(ours, 0))
    frozen = [(), (0,), (0, 2), (2,)]
    for k, parts in enumerate(frozen):
        for module in (ours, plain):
            for part in (0, 2):
                module[part].weight.requires_grad_(part not in parts)
                module[part].bias.requires_grad_(part in parts)
        split(store, ours, seeded(4, 6).requires_grad_(), as_it_is, k)
        store.backward_weight(k)
        y = plain(seeded(4, 6).requires_grad_())
        y.backward(seeded(*y.shape))
    assert equal_bits(gradients(ours), gradients(plain))


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("fails", ["before W", "in W"])
def test_a_step_that_fails_behind_i_keeps_no_activation(fails, wants):
    ours = model()
    store = WeightGradientStore(Stage(ours, 0))
    hidden: list[weakref.ref[Tensor]] = []
    ours[2].register_forward_hook(lambda module, inputs, output: hidden.append(weakref.ref(inputs[0])))
    split(store, ours, seeded(4, 6).requires_grad_(wants), as_it_is)
    if fails == "in W":
        with torch.no_grad():
            hidden[0]().add_(1)  # type: ignore[union-attr]
        with pytest.raises(ScheduleError, match="changed in place"):
            store.backward_weight(0)
    store.drop()
    assert hidden[0]() is None
