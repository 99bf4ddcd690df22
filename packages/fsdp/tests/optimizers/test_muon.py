"""Muon over pieces: who owns a matrix, what travels, and (in one process) the bits of torch's Muon."""

from __future__ import annotations

import itertools

import pytest
import torch
from fsdp_helpers import Block, same
from fsdp_world import World
from torch import nn

from sixfold.fsdp import FsdpError, fully_shard, fully_shard_optimizer
from sixfold.fsdp.layout import TensorSpec, plan_layout
from sixfold.fsdp.optimizers.muon import plan_groups, spread_owners

# A Llama-3-8B block: q, k, v, o, gate, up, down; and its norms.
BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
LAYERS = 32


def flops(shape):
    """Of X (X^T X) products, by counting the loops of a triple sum: m <= n."""
    m, n = sorted(shape)
    return m * m * n + m * m * m + m * m * n


@pytest.mark.parametrize("ranks", [8, 16, 32, 64, 128, 256, 512])
def test_owners_of_a_llama_have_even_work_unless_one_matrix_is_more(ranks):
    shapes = BLOCK * LAYERS
    owners = spread_owners(shapes, ranks)
    loads = [0] * ranks
    for shape, owner in zip(shapes, owners, strict=True):
        loads[owner] += flops(shape)
    assert max(loads) <= max(1.1 * sum(loads) / ranks, max(map(flops, shapes)))


@pytest.mark.parametrize("ranks", [8, 16, 64, 512])
def test_element_layout_gathers_at_most_a_twentieth_more_than_the_model(ranks):
    specs = [TensorSpec(f"w{i}", shape, torch.bfloat16) for i, shape in enumerate([*BLOCK, (4096,), (4096,)])]
    layout = plan_layout(specs, ranks)
    assert layout.world_size * layout.shard_bytes <= 1.05 * sum(spec.nbytes for spec in specs)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_element_travels_once_to_its_matrix_and_back_to_its_place(ranks):
    """All ranks' plans are played on lists: element e of matrix m is the pair (m, e)."""
    shapes = [(3, 5), (40, 7), (5, 3), (40, 7), (3, 5), (64, 64), (40, 7), (0, 5)]
    layout = plan_layout([TensorSpec(str(i), shape) for i, shape in enumerate(shapes)], ranks)
    parts = [layout.parts(str(i)) for i in range(len(shapes))]
    owners = spread_owners(shapes, ranks)
    plans = [plan_groups(shapes, parts, owners, rank, ranks) for rank in range(ranks)]
    for groups in zip(*plans, strict=True):
        assert len({group.shape for group in groups}) == 1
        sent = [
            [(piece.at, e) for piece in group.mine for e in elements_of(layout, rank, piece.at)]
            for rank, group in enumerate(groups)
        ]
        received = [[] for _ in range(ranks)]
        for source, group in enumerate(groups):
            assert sum(group.sent) == len(sent[source])
            for target, part in enumerate(cut(sent[source], group.sent)):
                assert len(part) == groups[target].received[source]
                received[target] += part
        seen = []
        for rank, group in enumerate(groups):
            for pieces in group.owned:
                whole = [one for p in pieces for one in received[rank][p.offset : p.offset + p.numel]]
                at = pieces[0].at
                assert owners[at] == rank and whole == [(at, e) for e in range(shapes[at][0] * shapes[at][1])]
                seen.append(at)
        assert sorted(seen) == [i for i, s in enumerate(shapes) if s == groups[0].shape and s[0] * s[1]]


def elements_of(layout, rank, at):
    part = next(part for part in layout.slices(rank) if part.name == str(at))
    return range(part.start, part.stop)


def cut(flat, counts):
    ends = list(itertools.accumulate(counts))
    return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]


def test_a_plan_can_be_read():
    parts = [[(0, 0, 4), (1, 4, 6)], [(1, 0, 6)]]
    assert [str(group) for group in plan_groups([(2, 3), (2, 3)], parts, [0, 1], 1, 2)] == [
        "2x3 owns 1 sends [2, 6] receives [0, 6]"
    ]


def matrices(parameters):
    return [one for one in parameters if one.ndim == 2]


MAKERS = {
    "default": lambda p: torch.optim.Muon(matrices(p), lr=1e-2),
    "plain momentum": lambda p: torch.optim.Muon(matrices(p), lr=1e-2, nesterov=False, weight_decay=0.0),
    "adamw's rate": lambda p: torch.optim.Muon(matrices(p), lr=1e-2, adjust_lr_fn="match_rms_adamw", ns_steps=3),
    "tensor rate": lambda p: torch.optim.Muon(matrices(p), lr=torch.tensor(1e-2)),
    "groups": lambda p: torch.optim.Muon(
        [{"params": matrices(p)[:3], "lr": 0.05}, {"params": matrices(p)[3:], "weight_decay": 0.5, "momentum": 0.5}]
    ),
}
GRAINS = {
    "element": lambda name, p: "element",
    "row": lambda name, p: "row",
    "block": lambda name, p: 3,
    "mixed": lambda name, p: "tensor" if "up" in name else "element",
}


@pytest.mark.parametrize(
    ("name", "grain"),
    [
        *((name, "element") for name in MAKERS),
        *(("groups", grain) for grain in ("row", "block", "mixed")),
    ],
)
@pytest.mark.slow
def test_pieces_give_torchs_bits(name, grain):
    options = {"fsdp_unit_modules": [Block], "granularity": GRAINS[grain]}
    plain, world = World(None, MAKERS[name]), World(options, MAKERS[name])
    plain.train(3)
    world.train(3)
    assert same(plain.weights(), world.weights()) == []


def test_a_closure_is_called_before_the_pieces_step():
    plain, world = World(None, MAKERS["default"]), World({"fsdp_unit_modules": [Block]}, MAKERS["default"])
    for one in (plain, world):

        def closure(one=one):
            one.optimizer.zero_grad()
            loss = one.loss(0)
            loss.backward()
            return loss

        one.optimizer.step(closure)
    assert same(plain.weights(), world.weights()) == []


def test_a_matrix_without_a_gradient_is_left_as_it_is():
    plain, world = World(None, MAKERS["default"]), World({"fsdp_unit_modules": [Block]}, MAKERS["default"])
    for one in (plain, world):
        one.train(1)
        one.net.head.weight.requires_grad_(False)
        one.train(2, first=1)
    assert same(plain.weights(), world.weights()) == []


def test_a_scheduler_made_before_sharding_still_counts_steps():
    torch.manual_seed(0)
    net = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Muon(list(net.parameters()), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model = fully_shard(net)
    fully_shard_optimizer(optimizer, model)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_main_parameters_in_pieces_are_refused_because_other_ranks_would_not_know():
    world = World({"fsdp_unit_modules": [Block], "granularity": GRAINS["row"]})
    mains = [main for _, main in world.call.main_parameters() if main.ndim == 2]
    with pytest.raises(FsdpError, match=r"embedding.weight lies in pieces.*module's own parameters"):
        fully_shard_optimizer(torch.optim.Muon(mains), world.call)


def test_another_muon_is_refused_over_pieces_because_its_arithmetic_is_not_known():
    class Muon(torch.optim.Muon):
        def step(self, closure=None):
            raise AssertionError("never called")

    with pytest.raises(FsdpError, match=r"Muon updates embedding.weight .*as a whole tensor"):
        World({"fsdp_unit_modules": [Block]}, lambda p: Muon(matrices(p)))
