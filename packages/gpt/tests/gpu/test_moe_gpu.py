"""Experts on a CUDA device: grouped products in bfloat16, and a layer that the host never waits for."""

import pytest
import torch
from moe_helpers import plain_mixture, tiny_experts

from sixfold.gpt import GPTModel
from sixfold.gpt.model.attention import plan_rows
from sixfold.gpt.model.grouped_experts import grouped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]


def test_grouped_products_give_the_outputs_and_gradients_of_the_definition_without_a_host_read():
    config = tiny_experts(hidden_size=32, moe_ffn_hidden_size=16, experts_per_token=2, router_aux_loss=0.3)
    layer = GPTModel(config, layers=range(1), pre_process=False, post_process=False).layers["0"].ffn.bfloat16()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(8)
    x, upstream = (torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    weights = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    out, balance = plain_mixture(config, weights, x.double().flatten(0, 1))
    (out.view(x.shape) * upstream.double()).sum().add(balance).backward()
    layer.cuda()
    here = x.cuda().requires_grad_()
    assert grouped(here[0], layer.experts.gate.weight)
    upstream, rows = upstream.cuda(), plan_rows(config, here.detach(), position_ids=None, cu_seqlens=None)
    for _ in range(2):  # the first may load kernels
        layer.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if _ else "default")
        try:
            found = layer(here, rows)
            found.backward(upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (found.detach().cpu().double().view_as(out) - out.detach()).norm() < 0.02 * out.detach().norm()
    for name, parameter in layer.named_parameters():
        expected = weights[name].grad
        assert (parameter.grad.cpu().double() - expected).norm() < 0.03 * expected.norm(), name
