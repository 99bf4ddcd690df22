"""``grad_sum="tree"``: weights, gradients and moments of one oracle at 1, 2 and 4 ranks, whatever the options.

fsdp_tree_helpers.py (the oracle) --> this file. Odd loops are in test_tree_loops.py, stages in test_tree_stages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_helpers import batch, loss_of, make_adamw, make_net
from fsdp_tree_helpers import STRATEGIES, WAYS, Run, differ, held_here, plain_run, sharded_run, wrap, wrong
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, fully_shard_optimizer


def covered(expected: Run, found: list[Run]) -> None:
    """Every element lies on some rank."""
    for name, whole in expected.weights.items():
        seen = torch.zeros(whole.numel(), dtype=torch.bool)
        for run in found:
            if name in run.gradients[-1]:
                start, stop, _ = run.gradients[-1][name]
                seen[start:stop] = True
        assert seen.all(), name


def check(expected: Run, found: list[Run], what: object) -> None:
    for rank, run in enumerate(found):
        assert wrong(expected, run) == [], f"{what}, rank {rank}"
    covered(expected, found)


# ---- ranks, strategies, microbatches, hints


def train_all(rank: int, ranks: int, cases: list[tuple[int, str, str]], grad_sum: str = "tree") -> list[Run]:
    return [
        sharded_run(rank, ranks, microbatches, way=way, strategy=strategy, precision={"grad_sum": grad_sum})
        for microbatches, strategy, way in cases
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.slow
def test_any_number_of_ranks_has_the_bits_of_plain_torch(ranks):
    cases = [(g, strategy, way) for g in (8, 12, 16) for strategy in STRATEGIES for way in WAYS]
    found = run_ranks(train_all, ranks, cases, timeout=300.0)
    for at, case in enumerate(cases):
        check(plain(case[0]), [one[at] for one in found], case)


@pytest.mark.parametrize("ranks", [2, 4])
def test_twelve_microbatches_have_the_bits_of_plain_torch(ranks):
    cases = [(12, "optim_grads_params", "last"), (12, "no_shard", "neither")]
    found = run_ranks(train_all, ranks, cases)
    for at, case in enumerate(cases):
        check(plain(12), [one[at] for one in found], case)


KNOWN: dict[int, Run] = {}


def plain(microbatches: int) -> Run:
    if microbatches not in KNOWN:
        KNOWN[microbatches] = plain_run(microbatches)
    return KNOWN[microbatches]


@pytest.mark.parametrize("grad_sum", ["backend", "rank_order"])
def test_other_sums_do_not_have_these_bits(grad_sum):
    cases = [(8, "optim_grads_params", "last")]
    ((found,),) = run_ranks(train_all, 1, cases, grad_sum)
    assert wrong(plain(8), found), "in one process"
    ranks = run_ranks(train_all, 4, cases, grad_sum)
    assert all(wrong(plain(8), one[0]) for one in ranks)
    assert any(differ(found.weights[name], ranks[0][0].weights[name]) for name in found.weights), "1 and 4 ranks"


# ---- another number of ranks from a step on


def go_on(rank: int, ranks: int, first: int, steps: int, before: Any, strategy: str) -> tuple[Any, Run]:
    """``steps`` steps from step ``first`` on, with the state of other ranks before it."""
    net = make_net()
    model = wrap(net, 8, strategy=strategy)
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    run = Run(held=held_here(model))
    if before is not None:
        weights, moments, counts = before
        model.load_full_state_dict(weights)
        model.materialize_state(optimizer)
        for record in model.state_records(optimizer):
            if record.key != "param":
                record.tensor.view(-1).copy_(moments[record.name, record.key][record.start : record.stop])
        for state in optimizer.state.values():
            state["step"].fill_(counts)
        model.refresh()
    for step in range(first, first + steps):
        for g in range(rank, 8, ranks):
            with model.microbatch(last=g == rank + 8 - ranks):
                loss_of(model(batch(step, g, 0)), batch(step, g, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.state = {
        (r.name, r.key): (r.start, r.stop, r.tensor.clone().view(-1))
        for r in model.state_records(optimizer)
        if r.key != "param"
    }
    run.weights = model.full_state_dict()
    return run.weights, run


def whole_moments(runs: list[Run], weights: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    whole: dict[tuple[str, str], Tensor] = {}
    for run in runs:
        for (name, key), (start, stop, part) in run.state.items():
            place = whole.setdefault((name, key), torch.full((weights[name].numel(),), float("nan")))
            place[start:stop] = part
    assert not any(one.isnan().any() for one in whole.values())
    return whole


LAYOUTS = [
    ((4, "optim_grads_params"), (1, "no_shard"), (2, "optim_grads")),
    ((1, "no_shard"), (4, "optim"), (2, "optim_grads_params")),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.slow
def test_runs_that_go_on_at_another_number_of_ranks_have_the_bits_of_one_that_does_not(layout):
    before, first = None, 0
    for ranks, strategy in layout:
        results = run_ranks(go_on, ranks, first, 2, before, strategy)
        first += 2
        weights, runs = results[0][0], [run for _, run in results]
        before = weights, whole_moments(runs, weights), float(first)
    expected = plain_run(8, steps=6)
    assert [name for name in weights if differ(weights[name], expected.weights[name])] == []
    for (name, key), moment in before[1].items():
        assert not differ(moment, expected.state[name, key].view(-1)), f"{key} of {name}"


# ---- options, each beside the same oracle


OPTIONS: dict[str, dict[str, Any]] = {
    "small pieces": {"buffers": {"bucket_bytes": 300}},
    "merged units": {"buffers": {"merge_bytes": 2000}},
    "all gathered": {"buffers": {"gathered_bytes": "all"}},
    "a byte budget": {"buffers": {"gathered_bytes": 7000}},
    "freed memory is NaN": {"buffers": {"fill_freed": True}},
    "one reduce buffer": {"buffers": {"reduce_buffers": 1, "bucket_bytes": 300}},
    "checks of units": {"checks": "unit"},
    "no checks": {"checks": "off"},
    "rows": {"granularity": lambda name, parameter: "row"},
    "whole tensors": {"granularity": lambda name, parameter: "tensor"},
    "no units": {"fsdp_unit_modules": []},
    "linears are units": {"fsdp_unit_modules": [nn.Linear]},
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "unused": {"unused": True},
    "recompute inside": {"recompute": "inside"},
    "recompute around": {"recompute": "around"},
    "recompute reentrant": {"recompute": "reentrant"},
}


def settings(options: dict[str, Any]) -> dict[str, Any]:
    ready = dict(options)
    if "buffers" in ready:
        ready["buffers"] = BufferConfig(**ready["buffers"])
    return ready


def train_options(rank: int, ranks: int, cases: list[tuple[str, str, str]]) -> list[Run]:
    return [
        sharded_run(
            rank, ranks, 8, way=way, strategy=strategy, net=make_net(**MODELS.get(name, {})), steps=2,
            **settings(OPTIONS.get(name, {})),
        )
        for name, strategy, way in cases
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.slow
def test_no_option_of_memory_and_no_kind_of_model_changes_the_bits(ranks):
    cases = [
        (name, strategy, WAYS[(at + by) % 3])
        for at, name in enumerate([*OPTIONS, *MODELS])
        for by, strategy in enumerate(STRATEGIES)
        if "budget" not in name or strategy == "optim_grads_params"
    ]
    found = run_ranks(train_options, ranks, cases, timeout=300.0)
    expected = {name: plain_run(8, steps=2, net=make_net(**MODELS.get(name, {}))) for name in [*OPTIONS, *MODELS]}
    for at, case in enumerate(cases):
        for rank, one in enumerate(found):
            assert wrong(expected[case[0]], one[at]) == [], f"{case}, rank {rank}"


# ---- optimizers


def only_matrices(named: list[tuple[str, Tensor]]) -> list[Tensor]:
    return [p for name, p in named if p.ndim == 2 and "embedding" not in name]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, fused=True),
    "foreach": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, foreach=True),
    "momentum": lambda named: torch.optim.SGD([p for _, p in named], lr=1e-1, momentum=0.9),
    "muon": lambda named: torch.optim.Muon(only_matrices(named), lr=1e-2),
}


def train_optimizers(rank: int, ranks: int) -> list[Run]:
    return [
        sharded_run(rank, ranks, 8, strategy=strategy, make_optimizer=make, steps=3)
        for make in OPTIMIZERS.values()
        for strategy in STRATEGIES
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.slow
def test_optimizers_have_the_bits_of_one_process(ranks):
    found = run_ranks(train_optimizers, ranks)
    at = 0
    for name, make in OPTIMIZERS.items():
        expected = plain_run(8, make_optimizer=make)
        for strategy in STRATEGIES:
            for rank, one in enumerate(found):
                one[at].state = {} if name == "muon" else one[at].state  # over whole matrices, of one rank each
                assert wrong(expected, one[at]) == [], f"{name}, {strategy}, rank {rank}"
            at += 1
