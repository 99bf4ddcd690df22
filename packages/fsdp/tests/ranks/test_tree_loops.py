"""Odd loops with ``grad_sum="tree"``: what a user does between microbatches has the effect that it has in plain torch.

fsdp_tree_worlds.py (plain and sharded) --> loops (this file); each yields where gradients are compared
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import batch, loss_of
from fsdp_tree_helpers import STRATEGIES, differ
from fsdp_tree_worlds import PlainTree, ShardedTree, unlike
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.fsdp import fully_shard_optimizer

MICROBATCHES = 8
Loop = Callable[[Any], Iterator[None]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


def is_sharded(w: Any) -> bool:
    return hasattr(w, "model")


def some(name: str) -> bool:
    return ".up." in name


def a_batch(w: Any, *, last: bool = True) -> None:
    """``last``: also each microbatch says that it may be the last one."""
    rounds = MICROBATCHES // w.ranks
    for at in range(rounds):
        w.run(last=last or at == rounds - 1)


def loss(net: nn.Module, step: int, g: int, rank: int) -> Tensor:
    return loss_of(net(batch(step, g, 0)), batch(step, g, 0))


# ---- zero_grad, and none


@loop
def zeros_in_place(w):
    for last in (True, False, True):
        a_batch(w, last=last)
        yield
        w.step()
        w.zero(set_to_none=False)


@loop
def never_zeroed(w):
    for last in (True, True, False):
        a_batch(w, last=last)
        yield
        w.step()


@loop
def given_up(w):
    w.run(last=False)
    w.run(last=False)
    w.zero()
    w.run(last=False)
    w.run()
    yield
    w.run()
    w.zero()
    a_batch(w)
    yield


@loop
def zeroed_by_the_model(w):
    w.run()
    w.run()
    (w.model if is_sharded(w) else w.net).zero_grad()
    w.new_batch()
    w.run()
    yield


@loop
def all_set_to_none_by_hand(w):
    w.run()
    w.run()
    for main in w.mains().values():
        main.grad = None
    w.run()
    yield
    w.run()
    yield


@loop
def some_set_to_none_by_hand(w):
    w.run()
    w.run()
    for name, main in w.mains().items():
        if some(name):
            main.grad = None
    w.run()
    yield
    w.run()
    yield


@loop
def another_optimizer_zeroes_some_between_hinted_microbatches(w):
    other = torch.optim.SGD([p for name, p in w.net.named_parameters() if some(name)], lr=0.1)
    if is_sharded(w):
        other = fully_shard_optimizer(other, w.model)
    for last in (False, True):
        w.run(last=last)
        w.run(last=last)
        if not is_sharded(w):
            w.show()
        other.zero_grad()
        w.new_batch()
        w.run(last=last)
        w.run()
        yield
        w.zero()


# ---- writes to gradients


def written(w: Any, factor: float, which: Callable[[str], bool] = lambda name: True) -> None:
    for name, main in w.mains().items():
        if which(name) and main.grad is not None:
            main.grad.mul_(factor)


@loop
def scaled_between_backwards(w):
    w.run()
    w.run()
    written(w, 0.3)
    w.run()
    yield
    w.run()
    yield


@loop
def some_scaled_between_backwards(w):
    w.run()
    w.run()
    written(w, 0.3, some)
    w.run()
    yield
    w.run()
    yield


@loop
def scaled_by_the_model_between_backwards(w):
    w.run()
    w.run()
    if is_sharded(w):
        w.model.scale_gradients(0.25)
    else:
        written(w, 0.25)
    w.run()
    yield


@loop
def clipped_by_value_between_backwards(w):
    for _ in range(3):
        w.run()
        nn.utils.clip_grad_value_([main for main in w.mains().values() if main.grad is not None], 1e-3)
        yield


@loop
def summed_over_a_group_of_one_between_backwards(w):
    group = None
    if is_sharded(w) and w.ranks > 1:
        group = [dist.new_group([rank]) for rank in range(w.ranks)][w.rank]
    w.run()
    for main in w.mains().values():
        if main.grad is not None and group is not None:
            dist.all_reduce(main.grad, group=group)
    w.run()
    yield


@loop
def set_before_a_batch(w):
    for main in w.mains().values():
        main.grad = torch.full_like(main, 0.37)
    for _ in range(3):
        w.run()
        yield


@loop
def some_set_before_a_batch(w):
    for name, main in w.mains().items():
        if some(name):
            main.grad = torch.full_like(main, 0.37)
    for _ in range(3):
        w.run()
        yield


@loop
def a_new_tensor_between_backwards(w):
    w.run()
    w.run()
    for main in w.mains().values():
        if main.grad is not None:
            main.grad = main.grad.detach().clone() * 3
    w.run()
    yield
    w.run()
    yield


@loop
def held_over_zero_grad(w):
    w.run()
    w.run()
    held = [main.grad for main in w.mains().values() if main.grad is not None]
    was = [one.detach().clone() for one in held]
    for _ in range(2):
        w.zero()
        w.run()
        w.run()
        yield
        assert not any(differ(one.detach(), before) for one, before in zip(held, was, strict=True)), "theirs"
        w.step()
    del held
    gc.collect()


# ---- parameters without gradients


def choosing(w: Any, uses: Callable[[int, int], bool]) -> Callable[..., Tensor]:
    """``uses(g, block)``: microbatch g uses that block's linears."""
    for net in (w.net,) if is_sharded(w) else (w.net, w.compute):
        for block in net.blocks:
            block.plain, block.uses = block.inner, True
            block.inner = lambda x, block=block: block.plain(x) if block.uses else block.norm(x)

    def chosen(net: nn.Module, step: int, g: int, rank: int) -> Tensor:
        for at, block in enumerate(getattr(net, "module", net).blocks):
            block.uses = uses(g, at)
        return loss(net, step, g, rank)

    return chosen


@loop
def unused_in_some_microbatches(w):
    chosen = choosing(w, lambda g, at: (g + at) % 3 != 0)
    for step in range(2):
        for _ in range(MICROBATCHES // w.ranks):
            w.run(loss=chosen, last=step == 0)
            if step == 0:
                yield
        w.show()
        yield
        w.step()
        w.zero()


@loop
def unused_on_some_ranks(w):
    chosen = choosing(w, lambda g, at: at != 1 or g % w.ranks == w.ranks - 1)
    for _ in range(3):
        w.run(loss=chosen)
        yield


@loop
def unused_by_all(w):
    chosen = choosing(w, lambda g, at: at != 1)
    for _ in range(2):
        w.run(loss=chosen)
        w.run(loss=chosen)
        w.show()
        yield
        w.step()
        w.zero()
    w.run()
    yield


@loop
def used_from_the_third_microbatch_on(w):
    chosen = choosing(w, lambda g, at: at != 1 or g >= 2 * w.ranks)
    for _ in range(4):
        w.run(loss=chosen, last=False)
    w.show()
    yield


@loop
def gradients_of_minus_zero(w):
    def none(net: nn.Module, step: int, g: int, rank: int) -> Tensor:
        return loss(net, step, g, rank) * -0.0

    w.run(loss=none)
    w.run(loss=none)
    yield
    w.run()
    yield
    w.step()
    w.zero(set_to_none=False)
    w.run(loss=none)
    yield


@loop
def frozen_between_steps(w):
    for wanted in (True, False, True):
        w.net.blocks[1].up.requires_grad_(wanted)
        w.run()
        w.run()
        yield
        w.step()
        w.zero()


@loop
def frozen_between_microbatches(w):
    w.run()
    w.net.blocks[1].up.requires_grad_(False)
    w.run()
    w.run()
    yield


@loop
def gradients_of_some_inputs(w):
    w.run()
    w.run(only=some)
    w.run()
    yield
    w.zero()
    w.run(only=some)
    w.run()
    yield


# ---- calls


def joint_loss(net: nn.Module, step: int, g: int, rank: int) -> Tensor:
    return loss(net, step, g, rank) + loss_of(net(batch(step, g, 1)), batch(step, g, 0))


@loop
def several_calls_in_one_backward(w):
    for _ in range(2):
        w.run(loss=joint_loss)
        w.run()
        w.run(loss=joint_loss)
        yield
        w.step()
        w.zero()


@loop
def calls_in_flight_and_then_several_in_one_backward(w):
    if is_sharded(w):
        numbers = [w.rank, w.ranks + w.rank]
        for one in [loss(w.model, 0, g, w.rank) for g in numbers]:
            one.backward()
        w.round += 2
    else:
        w.run()
        w.run()
    yield
    w.run(loss=joint_loss)
    w.run(loss=joint_loss)
    yield


@loop
def an_evaluation_between_microbatches(w):
    w.run()
    with torch.no_grad():
        loss(w.model if is_sharded(w) else w.net, 9, 9, 0)
    w.run()
    yield


@loop
def finished_in_the_middle(w):
    w.run(last=False)
    w.run(last=False)
    w.show()
    yield
    w.run(last=False)
    w.show()
    yield


@loop
def a_forward_that_raises(w):
    net = w.net if is_sharded(w) else w.compute
    w.run()
    handle = net.blocks[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        w.run()
    handle.remove()
    w.run()
    yield


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def raising(w: Any, block: int) -> None:
    """A backward that ends at ``block``; the microbatch's number is used up."""
    handle = w.net.blocks[block].register_forward_hook(lambda module, args, out: Raises.apply(out))
    with pytest.raises(ZeroDivisionError):
        w.run()
    handle.remove()
    w.round += 1


@loop
def a_backward_that_raises_and_a_step_given_up(w):
    for block in (0, 1, 2):
        w.run()
        if is_sharded(w):
            raising(w, block)
        w.zero()
        w.run()
        w.run()
        yield


# ---- beside each other


def train(rank: int, ranks: int, names: list[str], strategies: list[str]) -> list[Any]:
    found = []
    for name in names:
        for strategy in strategies:
            world = ShardedTree(rank, ranks, MICROBATCHES, strategy=strategy)
            found.append(([world.gradients() for _ in LOOPS[name](world)], world.whole()))
    return found


def check(ranks: int, names: list[str], strategies: list[str]) -> None:
    results = run_ranks(train, ranks, names, strategies, timeout=300.0)
    at = 0
    for name in names:
        world = PlainTree(ranks, MICROBATCHES)
        expected = [world.gradients() for _ in LOOPS[name](world)]
        for strategy in strategies:
            for rank, result in enumerate(results):
                gradients, weights = result[at]
                for yielded, (plain, found) in enumerate(zip(expected, gradients, strict=True)):
                    assert unlike(plain, found) == [], f"{name}, {strategy}, rank {rank}, yield {yielded}"
                bad = [one for one, value in weights.items() if differ(value, world.whole()[one])]
                assert bad == [], f"{name}, {strategy}, rank {rank}"
            at += 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_an_odd_loop_has_the_gradients_of_plain_torch(strategy, ranks):
    check(ranks, list(LOOPS), [strategy])


def test_loops_that_zero_in_place_or_write_to_gradients_have_those_of_plain_torch():
    check(2, ["zeros_in_place", "set_before_a_batch", "unused_on_some_ranks"], ["optim_grads_params"])


def test_another_number_of_ranks_has_the_same_bits_where_gradients_are_never_zeroed():
    for name in ("never_zeroed", "zeros_in_place"):
        worlds = [PlainTree(ranks, MICROBATCHES) for ranks in (1, 2, 4)]
        for world in worlds:
            for _ in LOOPS[name](world):
                pass
        first, *others = [world.whole() for world in worlds]
        assert not any(differ(first[one], other[one]) for other in others for one in first), "the oracle itself"


def raise_and_go_on(rank: int, ranks: int, block: int, strategy: str) -> dict[str, Any]:
    world = ShardedTree(rank, ranks, MICROBATCHES, strategy=strategy)
    world.run()
    raising(world, block)
    world.run()
    return world.gradients()


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.slow
def test_gradients_of_a_backward_that_raised_stay_as_in_plain_torch(strategy):
    for block in range(3):
        net = PlainTree(1, MICROBATCHES).net
        for g in range(6):
            if g in (2, 3):
                handle = net.blocks[block].register_forward_hook(lambda module, args, out: Raises.apply(out))
                with pytest.raises(ZeroDivisionError):
                    loss(net, 0, g, 0).backward()
                handle.remove()
            else:
                loss(net, 0, g, 0).backward()
        for found in run_ranks(raise_and_go_on, 2, block, strategy):
            for name, (start, stop, part) in found.items():
                plain = dict(net.named_parameters())[name].grad.view(-1)[start:stop] / MICROBATCHES
                torch.testing.assert_close(part, plain, rtol=1e-5, atol=1e-7)


# ---- closures


def closures(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    found = []
    for hinted in (False, True):
        world = ShardedTree(
            rank, ranks, MICROBATCHES, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4), strategy="no_shard"
        )

        def closure(world: Any = world, hinted: bool = hinted) -> Tensor:
            world.zero()
            a_batch(world, last=not hinted)
            return torch.tensor(1.0)

        for _ in range(2):
            world.optimizer.step(closure)
        found.append(world.whole())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow
def test_closures_of_lbfgs_see_the_sum_of_the_tree(ranks):
    world = PlainTree(1, MICROBATCHES, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))

    def closure() -> Tensor:
        world.zero()
        a_batch(world)
        return torch.tensor(1.0)

    for _ in range(2):
        world.optimizer.step(closure)
    for found in run_ranks(closures, ranks):
        for weights in found:
            assert [name for name, value in weights.items() if differ(value, world.whole()[name])] == []
