"""What people do with a module and cannot be right with a wrapped one: one FsdpError, at the line that does it.

``yield`` stands before the line that raises. Uses that are right are in test_uses.py.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from fsdp_helpers import Block, batch, same
from fsdp_world import SETTINGS, WIDTH, Net, World
from torch import nn

from sixfold.fsdp import FsdpError, FullyShardedDataParallel, fully_shard
from sixfold.fsdp.hooks import global_hooks as everywhere

pytestmark = pytest.mark.usefixtures("as_sharded")


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


def swaps_tensors(world):
    torch.utils.swap_tensors(world.net.head.weight, nn.Parameter(torch.zeros(17, WIDTH)))
    yield
    world.optimizer.step()


def calls_from_two_threads(outer, inner):
    def use(world):
        def special(net, x):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(inner(world), batch(0, 0, 0)).result()

        world.net.special = special
        yield
        outer(world)(batch(0, 0, 0))

    use.__name__ = calls_from_two_threads.__name__
    return use


def writes_in_its_own_call(world):
    def clamp(net, x):
        with torch.no_grad():
            net.head.weight.clamp_(-0.01, 0.01)
        return net.head(x)

    world.net.special = clamp
    world.loss(0).backward()
    yield
    world.optimizer.step()


def in_its_own_call(action):
    """What a module does to its own weight in its forward; told at the step."""

    def use(world):
        def special(net, x):
            action(net.head.weight)
            return net.head(x)

        world.net.special = special
        world.loss(0).backward()
        yield
        world.optimizer.step()

    use.__name__ = f"{action.__name__}_in_its_own_call"
    return use


def assigns_its_data(weight):
    weight.data = torch.ones_like(weight)


def freezes(weight):
    weight.requires_grad_(False)


def takes_a_plain_alias(net):
    net.head.weight.as_subclass(torch.Tensor).sum()


def calls_the_forward_of_a_unit(world):
    block = world.net.blocks[0]
    world.net.special = lambda net, x: net.head(block.forward(x))
    yield
    world.call(batch(0, 0, 0))


def generates_with_another_models_hand_tied_weight(world):
    other = nn.Linear(WIDTH, 17, bias=False)
    other.weight = world.net.embedding.weight
    yield
    other(torch.zeros(1, WIDTH))


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


def two_calls_in_one_autocast(world):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            world.call(batch(0, 0, 0))
        loss = world.loss(0)
    yield
    loss.backward()


REFUSED = [
    (hand_tied_head, r"embedding.weight: linear\(\) reads .* the parameter registered in both"),
    (hand_tied_head_without_grad, "embedding.weight: .* reads its values outside a call"),
    (doing(reads_a_weight), r"embedding.weight: sum\(\) reads .*full_state_dict"),
    (doing(reads_under_no_grad), "blocks.0.up.weight: .*norm"),
    (doing(takes_data), "head.weight: its .data is taken"),
    (doing(assigns_data), "head.weight: its .data is assigned.*before wrapping"),
    (doing(writes_in_place), "head.weight: mul_"),
    (doing(writes_an_element), "head.weight: __setitem__"),
    (doing(initialises), "head.weight: normal_"),
    (doing(applies_an_initialiser), "weight: "),
    (doing(writes_out), "head.weight: add"),
    (doing(resets), "blocks.0.up.weight: "),
    (doing(half), r"embedding.weight: half\(\).*convert before wrapping"),
    (doing(to_dtype), r"blocks.1.norm.weight: to\(\).*convert before wrapping"),
    (doing(to_device), r"embedding.weight: to\(\).*convert before wrapping"),
    (two_calls_in_one_autocast, "not through its outputs.*cache_enabled=False"),
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
    (swaps_tensors, "head.weight is no longer the Parameter"),
    (calls_from_two_threads(lambda world: world.call, lambda world: world.net), "two threads call the model at once"),
    (calls_from_two_threads(lambda world: world.net, lambda world: world.call), "two threads call the model at once"),
    (writes_in_its_own_call, "head.weight: it was written to in place"),
    (in_its_own_call(assigns_its_data), "head.weight: its .data was assigned in a call of its unit"),
    (in_its_own_call(freezes), "head.weight: requires_grad was set to False in a call.*between calls"),
    (doing(takes_a_plain_alias), r"head.weight: as_subclass\(\) reads"),
    (calls_the_forward_of_a_unit, r"blocks.0.norm.weight: layer_norm\(\) reads .*outside a call of its unit"),
    (generates_with_another_models_hand_tied_weight, r"embedding.weight: linear\(\) reads"),
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
@pytest.mark.slow
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


@pytest.mark.slow
def test_a_module_whose_wrapper_is_gone_says_so_instead_of_computing_with_what_is_left():
    torch.manual_seed(0)
    net = Net()
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    model(batch(0, 0, 0))
    del model
    gc.collect()
    with pytest.raises(FsdpError, match="its FullyShardedDataParallel object was deleted before"):
        net(batch(0, 0, 0))


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
    turned = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(
        FsdpError, match=r"weight is torch.complex64; parameters are floating, others are module buffers"
    ):
        fully_shard(turned)


@pytest.mark.slow
def test_what_fully_shard_keeps_goes_with_the_module():
    process_wide = torch.nn.modules.module._global_parameter_registration_hooks
    World(SETTINGS["zero-3"])
    gc.collect()  # what other tests left counts neither before nor after
    hooks, watched = len(process_wide), len(everywhere._watchers())
    world = World(SETTINGS["zero-3"])
    world.train(1)
    net, engine = weakref.ref(world.net), weakref.ref(world.call._engine)
    assert len(process_wide) == hooks and len(everywhere._watchers()) == watched + 1
    del world
    gc.collect()
    assert net() is None and engine() is None and len(everywhere._watchers()) == watched


@pytest.mark.slow
def test_a_model_that_is_collected_while_another_is_made_disturbs_nothing():
    def collect(*_):
        gc.collect()

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net, fsdp_unit_modules=[nn.Linear])
    circle = [net]
    circle.append(circle)  # so that nothing but the collector finds it
    seen = weakref.ref(net)
    register = nn.modules.module.register_module_module_registration_hook
    # torch walks its table of hooks while the first of these runs; the other makes it look at the table once more.
    handles = [register(collect), register(lambda *_: None)]
    try:
        gc.collect()
        gc.disable()
        del net, circle
        nn.Sequential().add_module("another", nn.Identity())
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()
    assert seen() is None


def test_two_calls_in_one_autocast_block_are_right_without_its_cache():
    worlds = World(None), World(SETTINGS["zero-3"])
    for world in worlds:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            with torch.no_grad():
                world.call(batch(0, 0, 0))
            loss = world.loss(0)
        loss.backward()
        world.optimizer.step()
    assert same(*(world.weights() for world in worlds)) == []
