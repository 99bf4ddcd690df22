"""Bytes that stay on a rank of eight at a vocabulary of 128k: the formulas plus the stated padding, to the byte.

A process with a fake group --> storages alive after a backward --> formulas written here by hand
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fsdp_count_helpers import Traffic, fake_world
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.fsdp import FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

WORDS, WIDTH, RANKS = 131_072, 8, 8
SCALAR_BYTES = 8  # a divisor, an optimizer's step
STATE = 8  # bytes of AdamW's state per parameter
# bf16 compute, fp32 sums and main weights, without the state, in bytes per parameter (spec, section 2.5).
BYTES = {
    "no_shard": lambda n: 18.0 - STATE,
    "optim": lambda n: 6 + (12 - STATE) / n,
    "optim_grads": lambda n: 2 + (16 - STATE) / n,
    "optim_grads_params": lambda n: (18 - STATE) / n,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 33), nn.Linear(33, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, head: str) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if head != "by hand":
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if head == "tied":
            self.head.weight = self.embedding.weight
        self.by_hand = head == "by hand"

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return (F.linear(x, self.embedding.weight) if self.by_hand else self.head(x)).float().square().mean()


def storages() -> int:
    """Bytes of all storages of tensors made since ``gc.freeze()``, scalars apart."""
    gc.collect()
    found = (item.untyped_storage() for item in gc.get_objects() if issubclass(type(item), Tensor))
    sizes = {storage.data_ptr(): storage.nbytes() for storage in found}
    return sum(nbytes for nbytes in sizes.values() if nbytes > SCALAR_BYTES)


def measure(group: Any, strategy: str, head: str = "own", **options: Any) -> dict[str, Any]:
    gc.collect()
    gc.freeze()
    with torch.device("meta"):
        net = Net(head)
    model = FullyShardedDataParallel(
        net,
        process_group=group,
        strategy=strategy,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        initial="trust",
        checks="off",
        **options,
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), foreach=False), model)
    x = torch.arange(2).view(1, 2)  # two words: its storage counts as a scalar and less
    for step in range(2):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        with Traffic() as traffic:
            model(x).backward()
    model.check()  # the message that is under way is read, and its rows are gone
    report = model.report()
    sizes = [p.numel() for p in net.parameters()]
    return {
        "held": storages() - x.nbytes * (x.nbytes > SCALAR_BYTES),
        "parameters": sum(sizes),
        "here": sum(main.numel() for _, main in model.main_parameters()),
        "report": report,
        "gathers": traffic.calls("all_gather"),
        "reductions": traffic.calls("reduce_scatter") + traffic.calls("all_reduce"),
    }


def measure_all(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    group = fake_world(RANKS)
    found = {strategy: measure(group, strategy) for strategy in BYTES}
    found["root"] = measure(group, "optim_grads_params", root_units=False)
    found["tied"] = measure(group, "optim_grads_params", "tied")
    with pytest.raises(FsdpError, match=r"embedding.weight: linear\(\) reads.*root_units=False"):
        measure(group, "optim_grads_params", "by hand")
    measure(group, "optim_grads_params", "by hand", root_units=False)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return run_ranks(measure_all, 1)[0]


@pytest.mark.parametrize("strategy", BYTES)
@pytest.mark.slow
def test_persistent_bytes_are_the_formula_and_the_stated_padding(found, strategy):
    one = found[strategy]
    units, stated = one["report"]["units"], one["report"]["bytes"]
    elements = one["parameters"] + sum(unit["padding_bytes"] for unit in units.values()) // 2
    beside = stated["reduce_scratch"]
    if strategy in ("optim_grads", "optim_grads_params"):
        beside += stated["reduce_buffers"]
        if strategy == "optim_grads_params":
            beside += stated["gather_arena"] + units[""]["gathered_bytes"]
    # Padding is in the buffers, which are equal on all ranks; an optimizer makes state for what a rank holds.
    assert one["held"] == elements * BYTES[strategy](RANKS) + STATE * one["here"] + beside
    share = one["parameters"] / (1 if strategy == "no_shard" else RANKS)
    assert abs(one["here"] - share) <= elements - one["parameters"]
    assert sum(unit["padding_bytes"] for unit in units.values()) <= 0.01 * 2 * one["parameters"]


def test_embedding_and_head_are_units_and_the_root_holds_a_norm(found):
    report = found["optim_grads_params"]["report"]
    assert list(report["units"]) == ["", "embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert report["root"] == {"units_made": ["embedding", "head"], "tied": {}}
    assert report["units"][""]["parameters"] == 2 * WIDTH
    assert report["bytes"]["kept_gathered"] <= RANKS * 128


def test_they_move_once_for_each_use_and_reduce_with_their_units(found):
    one, root = found["optim_grads_params"], found["root"]
    pieces = 16  # of a table: blocks are far smaller, and no unit goes in more
    assert one["reductions"] == 4 + 2 * pieces and len(one["report"]["units"]) == 6 and one["gathers"] <= 2 * 6
    assert root["reductions"] == 3 + pieces + 1 and len(root["report"]["units"]) == 4


def test_without_root_units_the_root_holds_them_for_good_as_before(found):
    table = WORDS * WIDTH
    stated = found["root"]["report"]
    assert stated["root"]["units_made"] == [] and stated["units"][""]["gathered_bytes"] >= 2 * 2 * table
    assert stated["bytes"]["local_gradients"] == 0, "its gradients go in pieces"


def test_a_tied_table_stays_with_the_root_and_the_report_says_what_it_costs(found):
    table, stated = WORDS * WIDTH, found["tied"]["report"]
    assert stated["root"] == {
        "units_made": [],
        "tied": {"embedding.weight": {"gathered_bytes": 2 * table, "local_gradient_bytes": 0}},
    }
    assert stated["bytes"]["kept_gathered"] >= 2 * table and stated["bytes"]["local_gradients"] == 0
