"""``grad_sum="tree"`` under programs that call stage handles: whole and split backwards, in any order.

A tiny runner of action strings (this file) --> main gradients, beside the tree over plain microbatches
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from fsdp_matrix_helpers import Cell, Net, make_net
from fsdp_tree_helpers import STRATEGIES, Named, differ, gradients_of, tree_of
from torch import Tensor, nn

from sixfold.fsdp import FsdpError, FullyShardedDataParallel, MixedPrecision

pytestmark = pytest.mark.usefixtures("as_sharded")

MICROBATCHES = 6
FUSED = [f"{s}F{k}" for k in range(6) for s in (0, 1)]
SPLIT = [*FUSED, *(f"{s}I{k}" for k in range(6) for s in (1, 0))]
MIXED = ("I0", "I1", "B2", "W1", "I3", "B4", "W0", "B5", "W3")
PROGRAMS = {
    "gpipe": [*FUSED, *(f"{s}B{k}" for k in range(6) for s in (1, 0))],
    "one by one": [f"{action}{k}" for k in range(6) for action in ("0F", "1F", "1B", "0B")],
    "backwards out of order": [*FUSED, *(f"{s}B{k}" for k in (3, 0, 5, 1, 4, 2) for s in (1, 0))],
    "weights at the end": [*SPLIT, *(f"{s}W{k}" for s in (1, 0) for k in range(6))],
    "weights in another order": [*SPLIT, *(f"{s}W{k}" for s in (1, 0) for k in (5, 2, 0, 1, 4, 3))],
    "whole and split": [*FUSED, *(f"{s}{a}{k}" for k in range(6) for s in (1, 0) for a in ("B" if k % 2 else "IW"))],
    "whole ones between I and W": [*FUSED, *(f"{s}{action}" for s in (1, 0) for action in MIXED)],
}
STAGES_APART = Cell(way="split 2", kind="plain")


def inputs(step: int, k: int) -> Tensor:
    return torch.randint(0, 17, (2, 3), generator=torch.Generator().manual_seed(100 * step + k))


def whole(net: Net) -> None:
    """Its backwards defer nothing."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.aside = None


def plain(steps: int) -> list[Named]:
    net = make_net(STAGES_APART)
    whole(net)
    return [
        tree_of(gradients_of(net, lambda step=step, k=k: net(inputs(step, k))) for k in range(MICROBATCHES))
        for step in range(steps)
    ]


def drive(net: Net, handles: Sequence[Any], program: Sequence[str], step: int, *, told: bool = True) -> None:
    """``told``: handles learn of which microbatch a backward is."""
    given: dict[tuple[int, int], Tensor] = {}
    made: dict[tuple[int, int], Tensor] = {}
    weights: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = {}
    for action in program:
        s, kind, k = int(action[0]), action[1], int(action[2:])
        if kind == "F":
            x = inputs(step, k) if s == 0 else made[0, k].detach().requires_grad_()
            given[s, k] = x
            made[s, k] = handles[s].call(x) if s == 0 else handles[s].call(x, inputs(step, k))
            continue
        if kind in "BI":
            if told:
                handles[s].before_backward(k)
            made[s, k].backward(None if s == 1 else given[1, k].grad)
            weights[s, k] = list(net.aside)
            net.aside.clear()
        if kind in "BW":
            for parameter, gradient in weights.pop((s, k)):
                handles[s].accumulate(parameter, gradient)
            handles[s].after_backward(k)


def wrapped(strategy: str, **options: Any) -> tuple[Net, FullyShardedDataParallel]:
    net = make_net(STAGES_APART)
    units = [type(net.first.blocks[0]), nn.Embedding, net.last.norm, net.last.head]
    options.setdefault("mixed_precision", MixedPrecision(grad_sum="tree"))
    return net, FullyShardedDataParallel(net, strategy=strategy, fsdp_unit_modules=units, grad_divisor=1.0, **options)


def finish(model: FullyShardedDataParallel, handles: Sequence[Any]) -> Named:
    for handle in reversed(handles):
        handle.reduce_grad()
    model.finish_grad_sync()
    return {name: main.grad.clone() for name, main in model.main_parameters() if main.grad is not None}


def beside(expected: Named, found: Named) -> list[str]:
    assert expected.keys() == found.keys()
    return [name for name in found if differ(expected[name].view(-1), found[name].view(-1))]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow
def test_a_program_has_the_sum_of_the_tree_whatever_its_order(name, strategy):
    split = any("W" in action for action in PROGRAMS[name])
    net, model = wrapped(strategy)
    if not split:
        whole(net)
    handles = [model.stage_handle(net.stages[s], fused=not split) for s in ("0", "1")]
    for step, expected in enumerate(plain(3)):
        drive(net, handles, PROGRAMS[name], step)
        assert beside(expected, finish(model, handles)) == [], step
        model.zero_grad()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
def test_random_orders_of_whole_and_split_backwards_have_the_sum_of_the_tree(seed):
    random = Random(seed)
    net, model = wrapped(random.choice(STRATEGIES))
    handles = [model.stage_handle(net.stages[s], fused=False) for s in ("0", "1")]
    for step, expected in enumerate(plain(2)):
        program, waiting = list(FUSED), []
        for s in (1, 0):
            for k in random.sample(range(MICROBATCHES), MICROBATCHES):
                if random.random() < 0.4:
                    program.append(f"{s}B{k}")
                else:
                    program.append(f"{s}I{k}")
                    waiting.append(f"{s}W{k}")
                random.shuffle(waiting)
                while waiting and random.random() < 0.4:
                    program.append(waiting.pop())
        drive(net, handles, program + waiting, step)
        assert beside(expected, finish(model, handles)) == [], program + waiting
        model.zero_grad()


def test_a_step_that_is_given_up_in_the_middle_leaves_nothing():
    net, model = wrapped("optim_grads_params")
    handles = [model.stage_handle(net.stages[s], fused=False) for s in ("0", "1")]
    drive(net, handles, PROGRAMS["weights in another order"][:-3], 5)
    model.zero_grad()
    drive(net, handles, PROGRAMS["weights in another order"], 0)
    assert beside(plain(1)[0], finish(model, handles)) == []


def test_no_zero_grad_adds_the_tree_of_the_next_step():
    net, model = wrapped("optim_grads")
    handles = [model.stage_handle(net.stages[s], fused=False) for s in ("0", "1")]
    first, second = plain(2)
    for step in range(2):
        drive(net, handles, PROGRAMS["weights at the end"], step)
        found = finish(model, handles)
    assert beside({name: first[name] + second[name] for name in first}, found) == []


def test_whole_backwards_out_of_order_that_nobody_told_of_are_refused():
    net, model = wrapped("optim_grads_params")
    whole(net)
    handles = [model.stage_handle(net.stages[s], fused=True) for s in ("0", "1")]
    with pytest.raises(FsdpError, match=r"call before_backward\(microbatch\)"):
        drive(net, handles, PROGRAMS["backwards out of order"], 0, told=False)


def test_split_backwards_that_nobody_told_of_are_refused():
    net, model = wrapped("optim_grads_params")
    handles = [model.stage_handle(net.stages[s], fused=False) for s in ("0", "1")]
    with pytest.raises(FsdpError, match="nobody told of which micro-batch"):
        drive(net, handles, PROGRAMS["weights at the end"], 0, told=False)


def test_a_microbatch_that_is_told_of_twice_is_refused():
    net, model = wrapped("optim_grads_params")
    whole(net)
    handles = [model.stage_handle(net.stages[s], fused=True) for s in ("0", "1")]
    with pytest.raises(FsdpError, match=r"microbatch 0 is reduced twice in a batch"):
        drive(net, handles, ["0F0", "1F0", "1B0", "0B0", "0F0", "1F0", "1B0", "0B0"], 0)


def test_a_parameter_of_two_stages_is_refused_when_a_handle_is_made():
    net = make_net(STAGES_APART)
    net.last.head.weight = net.first.embedding.weight
    units = [type(net.first.blocks[0]), net.last.norm]
    model = FullyShardedDataParallel(net, fsdp_unit_modules=units, mixed_precision=MixedPrecision(grad_sum="tree"))
    with pytest.raises(FsdpError, match="is of no single stage"):
        for stage in ("0", "1"):
            model.stage_handle(net.stages[stage], fused=True)


@pytest.mark.parametrize("split", [False, True])
def test_root_parameters_of_one_stage_of_two_are_in_its_tree(split):
    net = make_net(STAGES_APART)
    if not split:
        whole(net)
    model = FullyShardedDataParallel(
        net, fsdp_unit_modules=[type(net.first.blocks[0]), nn.Embedding], grad_divisor=1.0,
        mixed_precision=MixedPrecision(grad_sum="tree"),
    )  # fmt: skip
    handles = [model.stage_handle(net.stages[s], fused=not split) for s in ("0", "1")]
    for step, expected in enumerate(plain(2)):
        drive(net, handles, PROGRAMS["weights in another order" if split else "backwards out of order"], step)
        assert beside(expected, finish(model, handles)) == [], step
        model.zero_grad()


def test_a_single_stage_has_the_root_units_parameters():
    cell = Cell(way="split 1")
    net = make_net(cell)
    model = FullyShardedDataParallel(
        net, fsdp_unit_modules=[type(net.first.blocks[0])], grad_divisor=1.0,
        mixed_precision=MixedPrecision(grad_sum="tree"),
    )  # fmt: skip
    handle = model.stage_handle(net.stages["0"], fused=False)
    other = make_net(cell)
    whole(other)
    leaves = [gradients_of(other, lambda k=k: other(inputs(0, k))) for k in range(MICROBATCHES)]
    made = [handle.call(inputs(0, k), inputs(0, k)) for k in range(MICROBATCHES)]
    weights = {}
    for k in (2, 0, 1, 5, 4, 3):
        handle.before_backward(k)
        made[k].backward()
        weights[k] = list(net.aside)
        net.aside.clear()
    for k in (0, 5, 1, 2, 3, 4):
        for parameter, gradient in weights[k]:
            handle.accumulate(parameter, gradient)
        handle.after_backward(k)
    assert beside(tree_of(leaves), finish(model, [handle])) == []
