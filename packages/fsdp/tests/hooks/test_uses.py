"""What people do with a module, done to a wrapped one: bit for bit what plain torch gives.

Each use is a function of a World and runs twice: on a plain module with a plain optimizer (the oracle), and wrapped.
Uses that raise are in test_uses_refused.py.
"""

from __future__ import annotations

import gc
import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from fsdp_helpers import Block, batch, make_adamw, same
from fsdp_world import SETTINGS, WIDTH, Net, World, a_closure
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from sixfold.fsdp import BufferConfig, fully_shard, fully_shard_optimizer


def inner_call(world):
    world.train(2, call=world.net)
    return world.net(batch(7, 0, 0))


def inner_and_outer_calls(world):
    world.train(1, call=world.net)
    world.train(1, first=1)
    with torch.no_grad():
        world.net(batch(3, 0, 0))
    world.train(1, first=2, call=world.net)


def inner_call_that_raises_and_goes_on(world):
    with pytest.raises(IndexError):
        world.net(torch.tensor([[99]]))
    world.train(2, call=world.net)


def calls_that_are_interrupted_inside_a_unit(world):
    def interrupt(*_):
        raise KeyboardInterrupt

    world.train(1)
    for part in (world.net.blocks[1], world.net.blocks[1].down, world.net):
        handle = part.register_forward_pre_hook(interrupt)
        for call in (world.call, world.net):
            with pytest.raises(KeyboardInterrupt):
                call(batch(1, 0, 0))
            with torch.no_grad(), pytest.raises(KeyboardInterrupt):
                call(batch(1, 0, 0))
        handle.remove()
    world.train(2, first=1, call=world.net)
    world.train(1, first=3)


def state_dicts_of_the_module_and_its_parts(world):
    world.train(1)
    whole, part = world.net.state_dict(), world.net.blocks[1].state_dict(prefix="here.")
    assert list(part) == ["here." + name for name, _ in world.net.blocks[1].named_parameters()]
    return torch.cat([value.reshape(-1) for value in (*whole.values(), *part.values())])


def freezing_and_thawing(world):
    world.train(1)
    world.net.blocks[1].requires_grad_(False)
    world.net.head.weight.requires_grad = False
    world.train(2, first=1)
    world.net.requires_grad_(True)
    world.train(1, first=3)


def evaluation_between_steps(world):
    world.train(1)
    world.call.eval()
    with torch.no_grad():
        first = world.call(batch(5, 0, 0))
    with torch.inference_mode():
        second = world.call(batch(6, 0, 0)).clone()
    world.call.train()
    world.train(1, first=1)
    return first + second


def evaluation_and_a_backward_in_other_threads(world):
    def evaluate():
        with torch.no_grad():
            return world.call(batch(5, 0, 0))

    world.train(1)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(evaluate).result()
        loss = world.loss(1)
        pool.submit(loss.backward).result()
    world.optimizer.step()
    return found


def hooks_on_parameters(world):
    parameter = world.net.blocks[0].up.weight
    parameter.register_hook(lambda gradient: gradient * 3)
    seen = []
    world.net.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    world.train(2)
    return torch.tensor(len(seen))


def a_scheduler(world):
    scheduler = torch.optim.lr_scheduler.OneCycleLR(world.optimizer, max_lr=0.1, total_steps=4)
    for step in range(3):
        world.train(1, first=step)
        scheduler.step()
    return torch.tensor(world.optimizer.param_groups[0]["lr"])


def a_grad_scaler(world):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        scaler.scale(world.loss(step)).backward()
        scaler.unscale_(world.optimizer)
        scaler.step(world.optimizer)
        scaler.update()
        world.optimizer.zero_grad()
    return torch.tensor(scaler.get_scale())


def gradients_clipped_by_value(world):
    world.loss(0).backward()
    torch.nn.utils.clip_grad_value_(world.held(), 1e-3)
    world.optimizer.step()


def optimizer_state_saved_and_loaded(world):
    world.train(1)
    file = io.BytesIO()
    torch.save(world.optimizer.state_dict(), file)
    world.train(1, first=1)
    file.seek(0)
    world.optimizer.load_state_dict(torch.load(file, weights_only=True))
    world.train(1, first=2)


def two_losses_one_backward(world):
    for step in range(2):
        (world.loss(step) + 2 * world.loss(step + 5)).backward()
        world.optimizer.step()
        world.optimizer.zero_grad()


def losses_with_a_backward_each(world):
    for step in range(2):
        losses = [world.loss(step), world.loss(step + 5)]
        for loss in losses:
            loss.backward()
        world.optimizer.step()
        world.optimizer.zero_grad()


def losses_with_a_backward_each_and_no_sync(world):
    for step in range(2):
        losses = [world.loss(step), world.loss(step + 5)]
        with world.call.no_sync() if world.wrapped else nullcontext():
            for loss in losses:
                loss.backward()
        world.optimizer.step()
        world.optimizer.zero_grad()


def one_forward_of_many_is_dropped(world):
    for step in range(2):
        losses = [world.loss(step), world.loss(step + 3), world.loss(step + 5)]
        (losses[0] + losses[2]).backward()
        world.optimizer.step()
        world.optimizer.zero_grad()


def gradient_of_an_input(world):
    """It leaves no gradient, so that weight decay moves nothing."""
    x = torch.ones(2, WIDTH, requires_grad=True)
    (found,) = torch.autograd.grad(world.call(x).sum(), x)
    world.optimizer.step()
    assert all(p.grad is None for p in world.held())
    return found


def gradient_into_an_input_only(world):
    x = torch.ones(2, WIDTH, requires_grad=True)
    world.call(x).sum().backward(inputs=[x])
    assert all(p.grad is None for p in world.held())
    world.optimizer.step()
    return x.grad


def gradient_of_a_parameter(world):
    """autograd.grad gives the gradient of this rank's loss, and accumulates nothing."""
    (found,) = torch.autograd.grad(world.loss(0), world.net.blocks[0].up.weight)
    world.optimizer.step()
    return found


def recompute_around_all(world):
    world.train(2, call=lambda tokens: checkpoint(world.call, tokens, use_reentrant=False))


def reentrant_recompute_around_all(world):
    def call(x):
        return checkpoint(world.call, x, use_reentrant=True)

    for step in range(2):
        x = torch.full((2, WIDTH), 0.5 + step, requires_grad=True)
        call(x).square().sum().backward()
        world.optimizer.step()
        world.optimizer.zero_grad()


def tensors_in_place_of_parameters(world):
    given = {name: torch.full_like(p, 0.01) for name, p in world.net.named_parameters()}
    found = torch.func.functional_call(world.net, given, (batch(0, 0, 0),))
    world.train(1)
    return found


def metadata(world):
    world.train(1)
    p = world.net.embedding.weight
    told = (p.shape, p.dtype, p.device, p.numel(), p.dim(), len(p), p.requires_grad, p.is_leaf, p.stride(), p.ndim)
    assert isinstance(p, nn.Parameter) and isinstance(repr(p), str) and f"{p}"
    assert told == (torch.Size((17, WIDTH)), torch.float32, torch.device("cpu"), 221, 2, 17, True, True, (WIDTH, 1), 2)
    assert p.grad is None
    p.grad = None
    return torch.zeros_like(p)


def a_module_without_parameters_is_added(world):
    world.train(1)
    world.net.extra = nn.Dropout(0.0)
    world.net.blocks[0].note = "a plain attribute"
    world.train(1, first=1)


RIGHT = [
    inner_call,
    inner_and_outer_calls,
    inner_call_that_raises_and_goes_on,
    calls_that_are_interrupted_inside_a_unit,
    state_dicts_of_the_module_and_its_parts,
    freezing_and_thawing,
    evaluation_between_steps,
    evaluation_and_a_backward_in_other_threads,
    hooks_on_parameters,
    a_scheduler,
    a_grad_scaler,
    gradients_clipped_by_value,
    optimizer_state_saved_and_loaded,
    two_losses_one_backward,
    losses_with_a_backward_each,
    losses_with_a_backward_each_and_no_sync,
    one_forward_of_many_is_dropped,
    gradient_of_an_input,
    gradient_into_an_input_only,
    gradient_of_a_parameter,
    recompute_around_all,
    reentrant_recompute_around_all,
    tensors_in_place_of_parameters,
    a_closure,
    metadata,
    a_module_without_parameters_is_added,
]


def compare(use, options, make_optimizer=make_adamw):
    plain, world = World(None, make_optimizer), World(options, make_optimizer)
    expected, found = use(plain), use(world)
    if expected is not None:
        assert torch.equal(expected, found)
    assert same(dict(plain.weights()), dict(world.weights())) == []


@pytest.mark.sampled
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("use", RIGHT, ids=lambda use: use.__name__)
@pytest.mark.slow
def test_a_use_gives_what_plain_torch_gives(use, setting):
    compare(use, SETTINGS[setting])


def lbfgs(parameters):
    return torch.optim.LBFGS(list(parameters), max_iter=4, history_size=3)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_lbfgs_sees_the_weights_that_it_has_just_set(strategy):
    compare(a_closure, {"fsdp_unit_modules": [Block], "strategy": strategy}, lbfgs)


def a_gradient_penalty(world):
    for step in range(2):
        x = torch.full((2, WIDTH), 0.1 * (step + 1), requires_grad=True)
        (slope,) = torch.autograd.grad(world.call(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        world.optimizer.step()
        world.optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_second_order_gradient_is_right_where_all_weights_stay(strategy):
    units = [Block, nn.Embedding]
    buffers = BufferConfig(gathered_bytes="all")
    compare(a_gradient_penalty, {"fsdp_unit_modules": units, "strategy": strategy, "buffers": buffers})


def a_penalty_on_weights(world):
    """Read where they are: after the forward, kept in memory of their own."""
    for step in range(2):
        loss = world.loss(step)
        loss = loss + 0.1 * sum(p.square().sum() for p in world.net.parameters())
        loss.backward()
        world.optimizer.step()
        world.optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_weights_that_are_kept_may_be_read_between_forward_and_step(strategy):
    compare(a_penalty_on_weights, {"fsdp_unit_modules": [Block], "strategy": strategy})


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_plain_one():
    plain, world = World(None), World(SETTINGS["zero-3"])
    plain.train(2)
    world.train(2, call=torch.compile(world.call, backend="eager"))
    assert same(plain.weights(), world.weights()) == []


def test_fully_shard_needs_nobody_to_keep_what_it_returns():
    torch.manual_seed(0)
    plain, net = World(None), Net()
    net.load_state_dict(plain.net.state_dict())
    fully_shard(net, fsdp_unit_modules=[Block])
    gc.collect()
    assert torch.equal(net(batch(0, 0, 0)), plain.net(batch(0, 0, 0)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
        lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: nn.Sequential(nn.LSTM(4, 4), TakeFirst()),
        lambda: nn.BatchNorm1d(3),
    ],
    ids=[
        "weight_norm",
        "orthogonal",
        "a hook's spectral norm",
        "a hook's pruning",
        "encoder layer",
        "lstm",
        "batch norm",
    ],
)
def test_modules_that_look_at_their_own_weights_in_special_ways_are_right(make):
    plain, net = (seeded(lambda: nn.Sequential(make(), nn.Linear(4, 4))) for _ in range(2))
    model = fully_shard(net, fsdp_unit_modules=[net[0], net[1]])
    optimizers = make_adamw(plain.parameters()), fully_shard_optimizer(make_adamw(net.parameters()), model)
    x = torch.randn(2, 3, 4)
    for _ in range(2):
        for one, optimizer in zip((plain, net), optimizers, strict=True):
            one(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(dict(plain.state_dict()), dict(model.full_state_dict())) == []
    plain.eval()
    net.eval()
    with torch.inference_mode():
        assert torch.equal(plain(x), net(x))


def seeded(make):
    torch.manual_seed(0)
    return make()


class TakeFirst(nn.Module):
    def forward(self, pair):
        return pair[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.usefixtures("as_sharded")
def test_a_transformer_encoder_evaluates_as_the_guide_says(nested, strategy):
    outputs = []
    x, padded = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for wrapped in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        call = net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested)
        if wrapped:
            call = fully_shard(net, process_group=None, fsdp_unit_modules=[type(layer)], strategy=strategy)
        net.eval()
        with torch.no_grad():
            outputs.append(call(x, src_key_padding_mask=padded))
    plain, ours = outputs
    torch.testing.assert_close(ours[~padded], plain[~padded])
    if nested:
        assert not plain[padded].any() and ours[padded].all()
    else:
        torch.testing.assert_close(ours, plain)
