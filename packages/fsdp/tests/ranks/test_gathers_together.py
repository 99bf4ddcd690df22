"""Small units whose gathers are one message: fewer messages, the same bits, and what was refused is refused."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import emulate, make_adamw, make_net, same, train_steps
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

NETS: list[dict[str, Any]] = [
    {"layers": 4, "tied": True, "frozen": True, "unused": True},
    {"layers": 4, "recompute": "reentrant"},
    {"layers": 2, "recompute": "inside"},
]
DTYPES = (None, torch.bfloat16)
KNOWN_S = 20.0  # far below the deadline


def train_all(rank: int, ranks: int) -> list[dict[str, Tensor]]:
    found = []
    for dtype in DTYPES:
        for options in NETS:
            net = make_net(**options)
            model = FullyShardedDataParallel(
                net,
                process_group=dist.group.WORLD,
                fsdp_unit_modules=[nn.Linear, nn.LayerNorm],
                mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
            )
            assert model.report()["bytes"]["gather_arena"] > 0
            optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
            train_steps(model, optimizer, rank, steps=3, accumulate=2)
            found.append(model.full_state_dict())
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.sampled)])
def test_gathers_in_one_message_have_the_bits_of_the_emulation(ranks: int) -> None:
    results = run_ranks(train_all, ranks)
    cases = [(dtype, options) for dtype in DTYPES for options in NETS]
    for at, (dtype, options) in enumerate(cases):
        expected = emulate(
            ranks=ranks, steps=3, accumulate=2, net_options=options, per_microbatch=True, param_dtype=dtype
        )
        for one in results:
            assert same(expected, one[at]) == [], (dtype, options)


class Layer(nn.Module):
    """Two layers with weights; it may be left out, or look at what another one holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.line = nn.Linear(4, 4)
        self.looks_at: list[nn.Linear] = []
        self.left_out = False

    def forward(self, x: Tensor) -> Tensor:
        if self.left_out:
            return x
        for other in self.looks_at:
            x = x + other.weight.sum()
        return x + self.line(self.norm(x))


def wrapped(**buffers: Any) -> tuple[Any, Any, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(*(Layer() for _ in range(5)))
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        fsdp_unit_modules=[nn.Linear, nn.LayerNorm],
        buffers=BufferConfig(**buffers),
    )
    assert len(model.units) == 6, model.units
    return model, fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=0.1), model), net


def step_of(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def count_gathers(rank: int, ranks: int) -> list[list[int]]:
    """Messages of a training step, of two calls after it, and of one after main weights were written to."""
    found = []
    for gathered_bytes in (None, "double"):
        model, optimizer, _ = wrapped(gathered_bytes=gathered_bytes)

        def call(model: Any = model) -> None:
            with torch.no_grad():
                model(torch.ones(2, 4))

        def write(model: Any = model) -> None:
            with torch.no_grad():
                for _, main in model.main_parameters():
                    main.mul_(2)
            call(model)

        step_of(model, optimizer)
        seen = [model.report()["gathers"]]
        for act in (lambda model=model, optimizer=optimizer: step_of(model, optimizer), call, call, write):
            act()
            seen.append(model.report()["gathers"])
        found.append([after - before for before, after in pairwise(seen)])
    return found


def test_small_units_are_gathered_in_one_message_until_main_weights_change() -> None:
    for together, apart in run_ranks(count_gathers, 2):
        assert (together, apart) == ([2, 2, 0, 2], [9, 6, 5, 6]), "the root unit is a message of its own"


def refused(rank: int, ranks: int) -> list[str]:
    """A block reads a weight of a unit that is not its own, on all ranks."""
    found = []
    for buffers in ({}, {"gathered_bytes": "double"}):
        model, optimizer, net = wrapped(**buffers)
        step_of(model, optimizer)
        net[3].looks_at.append(net[0].line)
        with pytest.raises(FsdpError) as error:
            model(torch.ones(2, 4))
        found.append(str(error.value))
    return found


def test_a_weight_of_another_unit_is_refused_as_where_units_are_gathered_one_by_one() -> None:
    for together, apart in run_ranks(refused, 2):
        assert together == apart and "0.line.weight" in together


def leave_out(rank: int, ranks: int, gathered_bytes: str | None) -> tuple[str, float]:
    """From the second step on rank 1 leaves a layer out."""
    model, optimizer, net = wrapped(gathered_bytes=gathered_bytes)
    step_of(model, optimizer)
    net[2].left_out = rank == 1
    began = time.monotonic()
    try:
        step_of(model, optimizer)
        model.check()
    except FsdpError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize("gathered_bytes", [None, pytest.param("double", marks=pytest.mark.sampled)])
def test_a_layer_that_one_rank_leaves_out_is_an_error_on_all_ranks(gathered_bytes: str | None) -> None:
    for text, seconds in run_ranks(leave_out, 2, gathered_bytes):
        assert "disagree" in text or "different orders" in text, text
        assert seconds < KNOWN_S, f"{seconds:.1f} s"
