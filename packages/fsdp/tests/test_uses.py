"""What people do with a module, done to a wrapped one: bit for bit what plain torch gives, or one FsdpError.

Each use is a function of a World and runs twice: on a plain module with a plain optimizer (the oracle), and wrapped.
``RIGHT`` uses give the same values and the same weights; ``REFUSED`` uses raise at the line that is marked.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from fsdp_helpers import Block, batch, loss_of, make_adamw, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, fully_shard, fully_shard_optimizer

WIDTH = 13


class Net(nn.Module):
    """Embedding and blocks are units, norm and head are the root's. ``special`` runs in the middle of forward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, hidden=19 + 4 * i) for i in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.special = None

    def forward(self, tokens):
        x = self.embedding(tokens) if not tokens.is_floating_point() else tokens
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.special(self, x) if self.special is not None else self.head(x)


class World:
    """``call`` is the net itself, or the wrapper; ``net`` is the inner module in both."""

    def __init__(self, options, make_optimizer=make_adamw):
        torch.manual_seed(0)
        self.net = Net()
        self.call = self.net
        if options is not None:
            self.call = fully_shard(self.net, **options)
        self.optimizer = make_optimizer(list(self.net.parameters()))
        self.wrapped = options is not None
        if self.wrapped:
            fully_shard_optimizer(self.optimizer, self.call)

    def loss(self, step, call=None):
        return loss_of((self.call if call is None else call)(batch(step, 0, 0)), batch(step, 0, 0))

    def train(self, steps=1, first=0, call=None):
        for step in range(first, first + steps):
            self.loss(step, call).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def held(self):
        """Parameters that the optimizer holds."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def weights(self):
        return self.call.full_state_dict() if self.wrapped else self.net.state_dict()


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


def a_closure(world):
    def closure():
        world.optimizer.zero_grad()
        loss = world.loss(0)
        loss.backward()
        return loss

    return torch.stack([world.optimizer.step(closure).detach() for _ in range(3)])


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
    state_dicts_of_the_module_and_its_parts,
    freezing_and_thawing,
    evaluation_between_steps,
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
SETTINGS = {
    "no units": {},
    "zero-3": {"fsdp_unit_modules": [Block, nn.Embedding]},
    "zero-1": {"fsdp_unit_modules": [Block, nn.Embedding], "strategy": "optim"},
    "zero-0": {"fsdp_unit_modules": [Block, nn.Embedding], "strategy": "no_shard"},
}


def compare(use, options, make_optimizer=make_adamw):
    plain, world = World(None, make_optimizer), World(options, make_optimizer)
    expected, found = use(plain), use(world)
    if expected is not None:
        assert torch.equal(expected, found)
    assert same(dict(plain.weights()), dict(world.weights())) == []


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("use", RIGHT, ids=lambda use: use.__name__)
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


def test_a_compiled_model_trains_as_the_plain_one():
    plain, world = World(None), World(SETTINGS["zero-3"])
    plain.train(2)
    world.train(2, call=torch.compile(world.call, backend="eager"))
    assert same(plain.weights(), world.weights()) == []


# ---- refused


def hand_tied_head(world):
    world.net.special = lambda net, x: F.linear(x, net.embedding.weight)
    yield
    world.call(batch(0, 0, 0))


def hand_tied_head_without_grad(world):
    world.net.special = lambda net, x: x @ net.embedding.weight.T
    yield
    with torch.no_grad():
        world.call(batch(0, 0, 0))


def doing(action):
    """A use that is refused at its only line, after a step."""

    def use(world):
        world.train(1)
        yield
        action(world.net)

    use.__name__ = action.__name__
    return use


def after_backward(action):
    def use(world):
        world.loss(0).backward()
        yield
        action(world.net)

    use.__name__ = action.__name__
    return use


def reads_a_weight(net):
    net.embedding.weight.sum()


def reads_under_no_grad(net):
    with torch.no_grad():
        net.blocks[0].up.weight.norm()


def takes_data(net):
    net.head.weight.data.norm()


def assigns_data(net):
    net.head.weight.data = torch.zeros(17, WIDTH)


def writes_in_place(net):
    with torch.no_grad():
        net.head.weight.mul_(0.5)


def writes_an_element(net):
    with torch.no_grad():
        net.head.weight[0] = 1.0


def initialises(net):
    nn.init.normal_(net.head.weight)


def applies_an_initialiser(net):
    net.apply(lambda module: [nn.init.zeros_(p) for p in module.parameters(recurse=False)])


def writes_out(net):
    torch.add(torch.ones(17, WIDTH), 1.0, out=net.head.weight)


def resets(net):
    net.blocks[0].up.reset_parameters()


def half(net):
    net.half()


def to_dtype(net):
    net.blocks[1].to(torch.bfloat16)


def to_device(net):
    net.to("meta")


def deep_copy(net):
    copy.deepcopy(net)


def shallow_pickle(net):
    pickle.dumps(net)


def torch_save(net):
    torch.save(net.blocks[0], io.BytesIO())


def average(net):
    torch.optim.swa_utils.AveragedModel(net)


def to_vector(net):
    torch.nn.utils.parameters_to_vector(net.parameters())


def from_vector(net):
    torch.nn.utils.vector_to_parameters(torch.zeros(10_000), net.parameters())


def replaces_a_parameter(net):
    net.blocks[0].up.weight = nn.Parameter(torch.zeros(19, WIDTH))


def ties_afterwards(net):
    net.head.weight = net.embedding.weight


def adds_a_module(net):
    net.blocks.append(Block(WIDTH))


def adds_a_parameter(net):
    net.blocks[0].register_parameter("scale", nn.Parameter(torch.ones(1)))


def loads(net):
    net.load_state_dict({name: torch.zeros_like(p) for name, p in net.named_parameters()})


def loads_a_part(net):
    net.blocks[0].load_state_dict({name: torch.zeros_like(p) for name, p in net.blocks[0].named_parameters()})


def wraps_again(net):
    fully_shard(net.blocks[0])


def wraps_all_again(net):
    fully_shard(nn.Sequential(net), fsdp_unit_modules=[Block])


def calls_a_unit(net):
    net.blocks[0](torch.zeros(1, WIDTH))


def plain_optimizer_steps(net):
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def clips_with_torch(net):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def zeroes_inside(net):
    net.zero_grad()


def assigns_a_gradient(net):
    net.head.weight.grad = torch.zeros(17, WIDTH)


def deletes_a_parameter(world):
    del world.net.blocks[0].up.bias
    world.net.blocks[0].up.bias = None
    world.loss(0).backward()
    yield
    world.optimizer.step()


def swaps_a_parameter_beneath_the_module(world):
    world.net.head._parameters["weight"] = nn.Parameter(torch.zeros(17, WIDTH))
    world.loss(0).backward()
    yield
    world.optimizer.step()


def writes_in_its_own_call(world):
    def clamp(net, x):
        with torch.no_grad():
            net.head.weight.clamp_(-0.01, 0.01)
        return net.head(x)

    world.net.special = clamp
    world.loss(0).backward()
    yield
    world.optimizer.step()


def a_graph_from_before_the_step(world):
    loss = world.loss(0)
    loss.backward(retain_graph=True)
    world.optimizer.step()
    yield
    loss.backward()


def second_order_in_two_slots(world):
    x = torch.ones(2, WIDTH, requires_grad=True)
    y = world.call(x).square().sum()
    yield
    torch.autograd.grad(y, x, create_graph=True)


def a_plain_optimizer_state(world):
    other = World(None)
    other.train(1)
    yield
    world.optimizer.load_state_dict(other.optimizer.state_dict())


def a_foreign_group(world):
    world.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    world.loss(0).backward()
    yield
    world.optimizer.step()


def copies_the_wrapper(world):
    yield
    copy.deepcopy(world.call)


def pickles_the_wrapper(world):
    yield
    pickle.dumps(world.call)


def averages_the_wrapper(world):
    yield
    torch.optim.swa_utils.AveragedModel(world.call)


def asks_dcp_for_optimizer_state(world):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    world.train(1)
    yield
    get_optimizer_state_dict(world.call, world.optimizer)


def asks_dcp_before_the_first_step(world):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    yield
    get_optimizer_state_dict(world.call, world.optimizer)


def sets_model_state_by_dcp(world):
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    yield
    set_model_state_dict(world.call, World(None).net.state_dict())


REFUSED = [
    (hand_tied_head, r"embedding.weight: linear\(\) reads .* the parameter registered in both"),
    (hand_tied_head_without_grad, "embedding.weight: .* reads its values outside a call"),
    (doing(reads_a_weight), r"embedding.weight: sum\(\) reads .*full_state_dict"),
    (doing(reads_under_no_grad), "blocks.0.up.weight: .*norm"),
    (doing(takes_data), "head.weight: .data is taken"),
    (doing(assigns_data), "head.weight: .data is assigned.*before wrapping"),
    (doing(writes_in_place), "head.weight: mul_"),
    (doing(writes_an_element), "head.weight: __setitem__"),
    (doing(initialises), "head.weight: normal_"),
    (doing(applies_an_initialiser), "weight: "),
    (doing(writes_out), "head.weight: add"),
    (doing(resets), "blocks.0.up.weight: "),
    (doing(half), "embedding.weight: "),
    (doing(to_dtype), "blocks.1.norm.weight: to"),
    (doing(to_device), "embedding.weight: to"),
    (doing(deep_copy), "full_state_dict"),
    (doing(shallow_pickle), "full_state_dict"),
    (doing(torch_save), "full_state_dict"),
    (doing(average), "full_state_dict"),
    (doing(to_vector), "embedding.weight: view"),
    (doing(from_vector), "embedding.weight: "),
    (doing(replaces_a_parameter), r"Linear.weight is set to another Parameter of shape \(19, 13\)"),
    (doing(ties_afterwards), "Linear.weight is set to another Parameter"),
    (doing(adds_a_module), "brings the parameter norm.weight"),
    (doing(adds_a_parameter), "Block.scale is set"),
    (doing(loads), "load_state_dict.* of Net .*state_records"),
    (doing(loads_a_part), "load_state_dict.* of Block"),
    (doing(wraps_again), "norm.weight was wrapped before.*fsdp_unit_modules"),
    (doing(wraps_all_again), "0.embedding.weight was wrapped before"),
    (doing(calls_a_unit), "a unit's module was called directly"),
    (doing(plain_optimizer_steps), "SGD holds embedding.weight itself"),
    (after_backward(clips_with_torch), r"embedding.weight: .grad is read.*model.clip_grad_norm_\(\)"),
    (after_backward(zeroes_inside), "embedding.weight: .grad is read.*optimizer.zero_grad"),
    (after_backward(assigns_a_gradient), "head.weight: .grad is assigned"),
    (deletes_a_parameter, "blocks.0.up.bias is no longer the Parameter"),
    (swaps_a_parameter_beneath_the_module, "head.weight is no longer the Parameter"),
    (writes_in_its_own_call, "head.weight: it was written to in place"),
    (a_graph_from_before_the_step, "graph from before an optimizer step"),
    (second_order_in_two_slots, 'create_graph=True.*gathered_bytes="all"'),
    (a_plain_optimizer_state, "of an optimizer that was not sharded"),
    (a_foreign_group, r"parameter of shape \(3,\) is not of this model"),
    (copies_the_wrapper, "not copied or pickled"),
    (pickles_the_wrapper, "not copied or pickled"),
    (averages_the_wrapper, r"main_parameters\(\), element by element"),
    (asks_dcp_for_optimizer_state, r"state_records\(optimizer\)"),
    (asks_dcp_before_the_first_step, r"state_records\(optimizer\)"),
    (sets_model_state_by_dcp, "state_records"),
]


@pytest.mark.parametrize(("use", "says"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_a_use_that_cannot_be_right_is_refused_at_its_line(use, says):
    world = World({"fsdp_unit_modules": [Block, nn.Embedding]})
    doing_it = use(world)
    next(doing_it)
    with pytest.raises(FsdpError, match=says):
        next(doing_it)


def test_a_refused_use_leaves_a_model_that_trains_as_if_it_had_not_been_tried():
    plain, world = World(None), World(SETTINGS["zero-3"])
    plain.train(2)
    world.train(1)
    for use in (reads_a_weight, takes_data, writes_in_place, initialises, half, deep_copy, loads, adds_a_module):
        with pytest.raises(FsdpError):
            use(world.net)
    world.train(1, first=1)
    assert same(plain.weights(), world.weights()) == []


def test_a_parameter_frozen_before_wrapping_stays_frozen_and_says_so():
    torch.manual_seed(0)
    net = Net()
    net.blocks[1].requires_grad_(False)
    fully_shard(net, fsdp_unit_modules=[Block])
    net.blocks[1].requires_grad_(False)
    for thaw in (lambda: net.requires_grad_(True), lambda: setattr(net.blocks[1].up.weight, "requires_grad", True)):
        with pytest.raises(FsdpError, match=r"blocks.1.* was False when it was wrapped.*freeze it afterwards"):
            thaw()


def test_a_module_whose_wrapper_is_gone_says_so_instead_of_computing_with_what_is_left():
    torch.manual_seed(0)
    net = Net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    model(batch(0, 0, 0))
    del model
    gc.collect()
    with pytest.raises(FsdpError, match="after its FullyShardedDataParallel object was deleted"):
        net(batch(0, 0, 0))


def test_fully_shard_needs_nobody_to_keep_what_it_returns():
    torch.manual_seed(0)
    plain, net = World(None), Net()
    net.load_state_dict(plain.net.state_dict())
    fully_shard(net, fsdp_unit_modules=[Block])
    gc.collect()
    assert torch.equal(net(batch(0, 0, 0)), plain.net(batch(0, 0, 0)))


def test_members_of_torchs_classes_are_told_where_they_are_here():
    model = World(SETTINGS["zero-3"]).call
    for name in ("set_requires_gradient_sync", "unshard", "reshard", "summon_full_params", "set_is_last_backward"):
        assert not hasattr(model, name)
        with pytest.raises(FsdpError, match=rf"has no {name}, which torch's has; \w+"):
            getattr(model, name)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = model.nothing_like_it


def test_a_parameter_that_is_no_plain_tensor_or_too_wide_is_refused_at_the_wrap():
    wide = nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(FsdpError, match=r"weight is torch.float64 .*main_dtype=torch.float64"):
        fully_shard(wide)
    with pytest.raises(FsdpError, match=r"weight has no shape yet.*one forward"):
        fully_shard(nn.LazyLinear(2))


def test_what_fully_shard_keeps_goes_with_the_module():
    gc.collect()  # models of earlier tests
    process_wide = torch.nn.modules.module._global_parameter_registration_hooks
    before = len(process_wide)
    world = World(SETTINGS["zero-3"])
    world.train(1)
    net, engine = weakref.ref(world.net), weakref.ref(world.call._engine)
    assert len(process_wide) == before + 1
    del world
    gc.collect()
    assert net() is None and engine() is None and len(process_wide) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: nn.Sequential(nn.LSTM(4, 4), TakeFirst()),
        lambda: nn.BatchNorm1d(3),
    ],
    ids=["weight_norm", "orthogonal", "encoder layer", "lstm", "batch norm"],
)
def test_modules_that_look_at_their_own_weights_in_special_ways_are_right(make):
    torch.manual_seed(0)
    plain = nn.Sequential(make(), nn.Linear(4, 4))
    net = copy.deepcopy(plain)
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


class TakeFirst(nn.Module):
    def forward(self, pair):
        return pair[0]
