"""Experts over ranks: outputs and every gradient are those of one process, whatever ep, tp and the routing are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_helpers import tiny_experts
from torch import Tensor

from ranktest import run_ranks
from sixfold.gpt import GPTModel
from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.model.attention import plan_rows
from sixfold.gpt.model.decoder import Block
from sixfold.gpt.model.initial_weights import initializer
from sixfold.gpt.parallel.axes import ALONE, Axes, Axis
from sixfold.gpt.parallel.weight_sharding import is_expert, summed_over_tp

CONFIG = tiny_experts(
    num_attention_heads=4, shared_ffn_hidden_size=20, shared_expert_gate=True, router_aux_loss=0.3, experts_per_token=3
)
NAMED = "layers.0.ffn."
ROUTINGS = ("spread", "to one", "one half", "few")


def tokens_of(routing: str, sequence: bool) -> int:
    """Of a microbatch; where all ranks have all of them their shares differ by one, and of one some share is empty."""
    if routing == "few":
        return 2 if sequence else 1
    return 10 if sequence else 9


def axes_of(rank: int, ep: int, tp: int, *, sequence: bool) -> Axes:
    """Of ``ep * tp`` ranks, tp fastest; each expert-parallel rank has a microbatch of its own."""
    size = ep * tp
    tp_group = ep_group = None
    for e in range(ep) if tp > 1 else ():
        group = dist.new_group([e * tp + t for t in range(tp)])
        tp_group = group if rank // tp == e else tp_group
    for t in range(tp) if ep > 1 else ():
        group = dist.new_group([e * tp + t for e in range(ep)])
        ep_group = group if rank % tp == t else ep_group
    along_tp = Axis(rank % tp, tp, tp_group)
    return Axes(
        tp=along_tp,
        ep=Axis(rank // tp, ep, ep_group),
        exchange=Axis(rank, size, dist.group.WORLD) if size > 1 else Axis(),
        statistics=along_tp,
        sequence=sequence,
    )


def layer_of(config: GPTConfig, axes: Axes, routing: str) -> Any:
    """A layer's mixture, eight times the initial weights, so that tokens go to different experts."""
    block = Block(config, axes)
    block.to_empty(device="cpu")
    model = GPTModel(config, axes=axes, device="meta", layers=range(1), pre_process=False, post_process=False)
    fill = initializer(config, 7, model.cuts)
    for name, module in block.named_modules():
        fill(f"layers.0.{name}", module)
    with torch.no_grad():
        for parameter in block.ffn.parameters():
            parameter.mul_(8)
        if routing == "to one":  # and to the two of lowest number behind it: most experts get none
            block.ffn.router.weight.zero_()[4] = 0.1
        if routing == "one half":  # the expert-parallel rank of the others gets no row
            block.ffn.router.weight.zero_()[3:] = torch.tensor([0.3, 0.2, 0.1]).unsqueeze(1)
    return block.ffn


def hidden(microbatch: int, seed: int, tokens: int) -> Tensor:
    return torch.randn(1, tokens, 16, generator=torch.Generator().manual_seed(10 * seed + microbatch)).abs()


def run(layer: Any, microbatch: int, axes: Axes, tokens: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x, upstream = hidden(microbatch, 1, tokens), hidden(microbatch, 2, tokens) - 0.5
    if axes.sharded_sequence:
        x, upstream = (t.chunk(axes.tp.size, 1)[axes.tp.rank] for t in (x, upstream))
    x = x.clone().requires_grad_()
    layer.zero_grad()
    rows = plan_rows(layer.config, x.detach(), position_ids=None, cu_seqlens=None, axes=axes)
    out = layer(x, rows)
    out.backward(upstream)
    return out.detach(), x.grad, {name: p.grad.clone() for name, p in layer.named_parameters()}


def on_ranks(rank: int, ranks: int, ep: int, tp: int) -> dict[tuple[str, bool], Any]:
    found = {}
    for sequence in (True, False) if tp > 1 else (True,):
        axes = axes_of(rank, ep, tp, sequence=sequence)
        for routing in ROUTINGS:
            layer = layer_of(CONFIG, axes, routing)
            made = run(layer, rank // tp, axes, tokens_of(routing, sequence))
            found[routing, sequence] = (*made, layer.load.take())
    return found


def close(found: Tensor, expected: Tensor, what: str) -> None:
    limit = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=limit, msg=lambda m: f"{what}: {m}")


def of_one_process(routing: str, microbatches: int, tokens: int) -> tuple[list[Any], dict[str, Tensor], Tensor]:
    layer = layer_of(CONFIG, ALONE, routing)
    made = [run(layer, m, ALONE, tokens) for m in range(microbatches)]
    total = {name: sum(one[2][name] for one in made) for name in made[0][2]}
    return made, total, layer.load.take()


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.slow
def test_outputs_and_all_gradients_are_those_of_one_process(ep, tp):
    parts = run_ranks(on_ranks, ep * tp, ep, tp)
    for routing, sequence in parts[0]:
        alone, total, load = of_one_process(routing, ep, tokens_of(routing, sequence))
        ranks = [part[routing, sequence] for part in parts]
        sharded = sequence and tp > 1
        for m, (out, of_input, _) in enumerate(alone):
            of_microbatch = ranks[m * tp : (m + 1) * tp]
            for which, expected in ((0, out), (1, of_input)):
                mine = [rank[which] for rank in of_microbatch]
                for one in [torch.cat(mine, 1)] if sharded else mine:
                    close(one, expected, f"{routing}, {'gradient' if which else 'output'} of microbatch {m}")
        for name, expected in total.items():
            close(whole(ranks, ep, tp, name, sequence), expected, f"{routing}, sequence {sequence}: {name}")
        assert torch.equal(sum(rank[3] for rank in ranks), load)


def whole(ranks: list[Any], ep: int, tp: int, name: str, sequence: bool) -> Tensor:
    """The canonical gradient, summed as training sums it: over data-parallel ranks, and over tp as weights are cut."""
    grid = [[ranks[e * tp + t][2][name] for t in range(tp)] for e in range(ep)]
    if is_expert(NAMED + name):
        return torch.cat([torch.cat(row, 2 if "down" in name else 1) for row in grid])
    if summed_over_tp(NAMED + name, sequence=sequence) or tp == 1:
        return sum(sum(row) for row in grid)
    if name.startswith("shared."):
        return sum(torch.cat(row, 1 if "down" in name else 0) for row in grid)
    raise AssertionError(name)
