"""Main parameters in the hands of others: gradients that are set to None, values that are written or replaced.

The oracle is the plain module, to which the same is done with its own parameters.
"""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import batch, same
from fsdp_world import SETTINGS, World
from torch import nn

from sixfold.fsdp import FsdpError


def mains(world: World) -> list[nn.Parameter]:
    """What the optimizer holds: the module's parameters, or the main ones."""
    return world.held()


def set_to_none(world: World) -> None:
    """torch's tuning guide: in place of ``zero_grad()``."""
    for parameter in world.net.parameters():
        parameter.grad = None


def guide(world: World) -> None:
    for step in range(3):
        world.loss(step).backward()
        world.optimizer.step()
        set_to_none(world)


def given_up(world: World) -> None:
    """A step that is not taken leaves nothing; under ``no_sync`` too, where all is local yet."""
    world.loss(0).backward()
    set_to_none(world)
    if world.wrapped:
        with world.call.no_sync():
            world.loss(1).backward()
    else:
        world.loss(1).backward()
    set_to_none(world)
    world.loss(2).backward()
    world.optimizer.step()


def some(world: World) -> None:
    """The head's gradient alone is dropped: it has that of the second micro-batch."""
    world.loss(0).backward()
    world.net.head.weight.grad = None
    world.loss(1).backward()
    world.optimizer.step()
    set_to_none(world)


def sharpness_aware(world: World) -> None:
    """The widely used recipe: an ascent step in place, then ``p.data`` is the old value again."""
    for step in range(3):
        world.loss(step).backward()
        old = {}
        with torch.no_grad():
            for p in mains(world):
                old[p] = p.data.clone()
                p.add_(p.grad.sign(), alpha=0.05)
        world.optimizer.zero_grad()
        world.loss(step).backward()
        for p in mains(world):
            p.data = old[p]
        world.optimizer.step()
        world.optimizer.zero_grad()


def averaged_for_evaluation(world: World) -> list[torch.Tensor]:
    """An average of weights takes their place for an evaluation, between two backwards too, and goes again."""
    average = [p.detach().clone() for p in mains(world)]
    found = []
    for step in range(3):
        world.loss(step).backward()
        world.optimizer.step()
        world.optimizer.zero_grad()
        with torch.no_grad():
            for one, p in zip(average, mains(world), strict=True):
                one.lerp_(p, 0.1)
        world.loss(step + 7).backward()
        world.optimizer.zero_grad()
        backup = [p.detach().clone() for p in mains(world)]
        with torch.no_grad():
            for one, p in zip(average, mains(world), strict=True):
                p.copy_(one)
            found.append(world.call(batch(9, 0, 0)).clone())
            for one, p in zip(backup, mains(world), strict=True):
                p.data.copy_(one)
                p.mul_(1.0)
            found.append(world.call(batch(9, 0, 0)).clone())
    return found


def data_swapped_for_evaluation(world: World) -> list[torch.Tensor]:
    found = []
    for step in range(2):
        world.train(1, step)
        backup = [p.data for p in mains(world)]
        for p in mains(world):
            p.data = p.data * 0.5
        with torch.no_grad():
            found.append(world.call(batch(9, 0, 0)).clone())
        for one, p in zip(backup, mains(world), strict=True):
            p.data = one
        with torch.no_grad():
            found.append(world.call(batch(9, 0, 0)).clone())
    return found


def another_optimizer_steps(world: World) -> None:
    """One over the same parameters that was not given to ``fully_shard_optimizer``."""
    other = torch.optim.AdamW(mains(world), lr=1e-2)
    for step in range(3):
        world.loss(step).backward()
        other.step()
        other.zero_grad()


def schedule_free(world: World) -> list[torch.Tensor]:
    """``eval()`` and ``train()`` of such an optimizer move weights in place between an average and the iterate."""
    found = []
    z = [p.detach().clone() for p in mains(world)]
    for step in range(3):
        world.train(1, step)
        with torch.no_grad():
            for p, one in zip(mains(world), z, strict=True):
                p.lerp_(one, 1 - 1 / 0.9)
            found.append(world.call(batch(9, 0, 0)).clone())
            for p, one in zip(mains(world), z, strict=True):
                p.lerp_(one, 0.1)
    return found


def written_through_views(world: World) -> list[torch.Tensor]:
    """Views share the version; ``.data`` of a view does not, and needs ``refresh()``."""
    found = []
    writes = [
        lambda p: p.view(-1).mul_(0.9),
        lambda p: p.data.view(-1).mul_(0.9),
        lambda p: [row.mul_(0.9) for row in p],
        lambda p: p.view(-1).data.mul_(0.9),
    ]
    for write in writes:
        with torch.no_grad():
            found.append(world.call(batch(9, 0, 0)).clone())
            for p in mains(world):
                write(p)
            if world.wrapped and write is writes[-1]:
                world.call.refresh()
            found.append(world.call(batch(9, 0, 0)).clone())
    return found


USES = [
    guide,
    given_up,
    some,
    sharpness_aware,
    averaged_for_evaluation,
    data_swapped_for_evaluation,
    another_optimizer_steps,
    schedule_free,
]


@pytest.mark.sampled
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_what_is_done_to_main_parameters_does_what_it_does_to_a_plain_module(use, setting):
    plain, ours = World(None), World(SETTINGS[setting])
    expected, found = use(plain), use(ours)
    assert same(plain.weights(), ours.weights()) == []
    for one, other in zip(expected or [], found or [], strict=True):
        assert torch.equal(one, other)


def test_a_main_parameter_that_gets_another_shape_is_refused():
    world = World(SETTINGS["zero-3"])
    world.train(1)
    name, main = next(iter(world.call.main_parameters()))
    main.data = torch.zeros(3)
    with pytest.raises(FsdpError, match=f"{name}: .data of its main parameter was set to a tensor of shape"):
        world.call(batch(0, 0, 0))


def test_state_is_saved_of_what_data_was_set_to():
    world = World(SETTINGS["zero-3"])
    world.train(1)
    for _, main in world.call.main_parameters():
        main.data = torch.full_like(main, 2.0)
    assert all((value == 2.0).all() for value in world.call.full_state_dict().values())
    assert all((record.tensor == 2.0).all() for record in world.call.state_records())


@pytest.mark.usefixtures("as_sharded")
def test_writes_through_views_are_seen_and_those_through_data_of_a_view_after_refresh():
    plain, ours = World(None), World(SETTINGS["zero-3"])
    for one, other in zip(written_through_views(plain), written_through_views(ours), strict=True):
        assert torch.equal(one, other)
    assert same(plain.weights(), ours.weights()) == []
