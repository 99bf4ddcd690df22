"""fp8 experts on meshes of their own: a scale belongs to the tensor of those ranks that share it."""

from __future__ import annotations

import pytest
import torch
from fp8_oracle import quantized
from fsdp_helpers import make_adamw, same, train_steps
from fsdp_mesh_helpers import MoeBlock, MoeNet, emulate_meshes, kind_of
from torch.distributed.device_mesh import init_device_mesh

from ranktest import run_ranks
from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

STEPS, ACCUMULATE = 2, 2
# ranks, replicas of the main mesh, ranks that share an expert
LAYOUTS = {"2 ranks": (2, 1, 1), "4 ranks hsdp": (4, 2, 2)}


def is_fp8(name):
    """Matrices of all three meshes, frozen, tied and unused ones too; norms and biases beside them are not."""
    return name.startswith("blocks.") and name.endswith("weight") and "norm" not in name


def seen(name, main):
    if not is_fp8(name):
        return main
    q, scale = quantized(main)
    return q.float() * scale


def train(rank, ranks, layout, strategies):
    _, replicas, sharing = LAYOUTS[layout]
    main = init_device_mesh("cpu", (replicas, ranks // replicas)) if replicas > 1 else init_device_mesh("cpu", (ranks,))
    names = ("sharing", "experts")
    expert = init_device_mesh("cpu", (sharing, ranks // sharing), mesh_dim_names=names)["sharing"]
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("all", "alone"))["alone"]
    found = []
    for strategy in strategies:
        net = MoeNet(rank % (ranks // sharing), rank)
        model = FullyShardedDataParallel(
            net,
            mesh=main,
            fsdp_unit_modules=[MoeBlock],
            mesh_for=lambda name: {"shared": None, "expert": expert, "own": alone}[kind_of(name)],
            mixed_precision=MixedPrecision(grad_sum="rank_order", fp8=is_fp8, param_dtype=torch.bfloat16),
            strategy=strategy,
        )
        optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
        train_steps(model, optimizer, rank, steps=STEPS, accumulate=ACCUMULATE)
        found.append((model.full_state_dict(), model.report()["fp8"]["scale_reductions"]))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_fp8_on_three_meshes_equals_the_definition(layout):
    ranks, replicas, sharing = LAYOUTS[layout]
    width, experts = ranks // replicas, ranks // sharing

    def groups(kind, rank):
        if kind == "shared":
            return [range(at, at + width) for at in range(0, ranks, width)]
        return [[rank]] if kind == "own" else [range(rank % experts, ranks, experts)]

    strategies = ("optim", "optim_grads_params")
    results = run_ranks(train, ranks, layout, strategies)
    for at, per_microbatch in enumerate((False, True)):
        expected = emulate_meshes(
            [MoeNet(rank % experts, rank) for rank in range(ranks)],
            groups,
            steps=STEPS,
            accumulate=ACCUMULATE,
            per_microbatch=per_microbatch,
            param_dtype=torch.bfloat16,
            seen=seen,
        )
        for rank, result in enumerate(results):
            assert same(expected[rank], result[at][0]) == [], f"{strategies[at]}, rank {rank}"
            # One for each mesh of several ranks and each step's weights; frozen experts have theirs once.
            assert result[at][1] == (STEPS + (STEPS + 1 if sharing > 1 else 0))
