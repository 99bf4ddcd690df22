"""Whether torch's elementwise steps have the same bits for a whole tensor and for its pieces, by implementation."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

NUMEL, STEPS = 10_007, 4
ELEMENTWISE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("NAdam", {"weight_decay": 0.1}),
    ("RAdam", {}),
    ("Adamax", {}),
    ("Adadelta", {}),
    ("ASGD", {}),
    ("Rprop", {}),
]
FUSED = [(name, options) for name, options in ELEMENTWISE if name in ("SGD", "Adam", "AdamW", "Adagrad")]


def stepped(name: str, options: dict[str, Any], edges: list[int]) -> list[Tensor]:
    """Weights and state after some steps on the pieces between ``edges``, put together."""
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(NUMEL, generator=draw)
    pieces = [nn.Parameter(weights[a:b].clone()) for a, b in pairwise(edges)]
    optimizer = getattr(torch.optim, name)(pieces, lr=1e-2, **options)
    for _ in range(STEPS):
        gradient = torch.randn(NUMEL, generator=draw) * 10.0 ** torch.randint(-6, 2, (NUMEL,), generator=draw)
        for piece, a, b in zip(pieces, edges, edges[1:], strict=False):
            piece.grad = gradient[a:b]
        optimizer.step()
    kinds = [key for key, value in optimizer.state[pieces[0]].items() if torch.is_tensor(value) and value.dim()]
    return [torch.cat([piece.detach() for piece in pieces])] + [
        torch.cat([optimizer.state[piece][key] for piece in pieces]) for key in kinds
    ]


def cuts(unit: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [0, *sorted({unit * draw.randrange(1, NUMEL // unit) for _ in range(12)}), NUMEL]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("name", "options"), ELEMENTWISE)
def test_steps_by_foreach_and_by_a_loop_have_the_same_bits_for_any_cut(name, options, foreach):
    options = options | {"foreach": foreach}
    whole = stepped(name, options, [0, NUMEL])
    assert all(same(stepped(name, options, cuts(1, seed)), whole) for seed in range(3))


@pytest.mark.parametrize(("name", "options"), FUSED)
def test_fused_steps_have_the_same_bits_for_cuts_at_multiples_of_a_vector(name, options):
    """[Note: fused steps and cuts]"""
    whole = stepped(name, options | {"fused": True}, [0, NUMEL])
    assert all(same(stepped(name, options | {"fused": True}, cuts(16, seed)), whole) for seed in range(3))


def test_threads_of_a_fused_step_do_not_change_its_bits():
    options = {"weight_decay": 0.1, "fused": True}
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(stepped("AdamW", options, [0, NUMEL]))
    finally:
        torch.set_num_threads(before)
    assert same(found[0], found[1]) and same(found[0], found[2])
