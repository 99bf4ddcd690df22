"""One CUDA device: the same code on streams gives the bits of plain training on that device."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same

from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def train(strategy, steps=3, param_dtype=None, **options):
    net = make_net(**options).cuda()
    model = net
    if strategy is not None:
        precision = MixedPrecision(param_dtype=param_dtype)
        model = FullyShardedDataParallel(
            net, strategy=strategy, fsdp_unit_modules=[Block], mixed_precision=precision, initial="trust"
        )
    optimizer = make_adamw(net.parameters())
    if strategy is not None:
        fully_shard_optimizer(optimizer, model)
    for step in range(steps):
        for k in range(2):
            tokens = batch(step, k, 0).cuda()
            loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict() if strategy is None else model.full_state_dict()


@pytest.mark.parametrize("strategy", [strategy.value for strategy in ShardingStrategy])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"recompute": "around"}])
def test_all_strategies_equal_plain_training_on_the_device(strategy, options):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert same(train(None, **options), train(strategy, **options)) == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_strategies_agree_in_bf16():
    results = [train(strategy, param_dtype=torch.bfloat16) for strategy in ("no_shard", "optim_grads_params")]
    assert same(*results) == []


def test_a_meta_model_is_made_on_the_default_device():
    with torch.device("meta"):
        net = make_net()
    with torch.device("cuda"):
        model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block])
    assert all(main.is_cuda for _, main in model.main_parameters())
