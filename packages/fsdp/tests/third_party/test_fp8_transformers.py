"""An unmodified Llama whose projections are fp8 trains, checkpoints activations and generates, emulated or scaled."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra 'test'")

from fsdp_helpers import same  # noqa: E402
from fsdp_transformers_helpers import loss_of, make, tokens  # noqa: E402

from sixfold.fsdp import MixedPrecision, fully_shard, fully_shard_optimizer  # noqa: E402


def train(matmul, reentrant=None):
    net = make("llama", reentrant)
    precision = MixedPrecision(fp8=lambda name: name.endswith("proj.weight"), fp8_matmul=matmul)
    model = fully_shard(net, fsdp_unit_modules=["LlamaDecoderLayer"], mixed_precision=precision)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)
    losses = []
    for _ in range(6):
        loss = loss_of(net, 0, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return net, model, losses


@pytest.mark.parametrize("matmul", ["scaled", "scaled_rows"])
@pytest.mark.slow
def test_bytes_train_as_what_they_stand_for(matmul):
    emulated, scaled = train("emulate")[2], train(matmul)
    assert emulated[-1] < 0.8 * emulated[0]
    assert scaled[2] == pytest.approx(emulated, rel=0.03)
    generated = scaled[1].entry(scaled[0], method="generate")(tokens(0, 0)[:, :4], max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > 4


@pytest.mark.parametrize("matmul", ["emulate", "scaled"])
@pytest.mark.slow
def test_activation_checkpointing_changes_no_bit(matmul):
    plain = train(matmul)[1].full_state_dict()
    for reentrant in (True, False):
        assert same(plain, train(matmul, reentrant)[1].full_state_dict()) == []
