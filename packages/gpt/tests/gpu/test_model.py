"""The model on a CUDA device against itself on the CPU."""

import pytest
import torch
from model_helpers import boundaries, naive_attention, small

from sixfold.gpt.model.attention import plan_rows
from sixfold.gpt.model.decoder import GPTModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_documents_in_half_precision_equal_the_naive_loop(backend):
    config, cu = small(head_dim=64), boundaries(2, 256, [7, 100, 300, 511])
    hidden = torch.zeros(2, 256, 32, dtype=torch.bfloat16, device="cuda")
    attend = plan_rows(config, hidden, position_ids=None, cu_seqlens=cu.cuda(), backend=backend).attend
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 256, n, 64, generator=generator).bfloat16().requires_grad_() for n in (4, 2, 2))
    out, expected = attend(*(t.cuda() for t in (q, k, v))).cpu(), naive_attention(q, k, v, cu)
    found = torch.autograd.grad(out.double().square().sum(), (q, k, v))
    reference = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for a, b in [(out, expected), *zip(found, reference, strict=True)]:
        assert (a.double() - b.double()).norm() < 0.02 * b.double().norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_losses_equal_those_of_the_cpu(dtype, tolerance):
    config, cu = small(head_dim=64), boundaries(2, 128, [30, 200])
    tokens = torch.randint(0, 100, (2, 128), generator=torch.Generator().manual_seed(1))
    expected = GPTModel(config)(tokens, labels=tokens, cu_seqlens=cu)
    model = GPTModel(config, device="cuda").to(dtype)
    losses = model(tokens.cuda(), labels=tokens.cuda(), cu_seqlens=cu.cuda())
    losses.sum().backward()
    assert (losses.cpu() - expected).abs().max() < tolerance
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_forward_reads_nothing_from_the_device():
    config, tokens = small(head_dim=64), torch.zeros(2, 128, dtype=torch.int64, device="cuda")
    model, cu = GPTModel(config, device="cuda").bfloat16(), boundaries(2, 128, [30]).cuda()
    model(tokens, labels=tokens, cu_seqlens=cu).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(tokens, labels=tokens, cu_seqlens=cu).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
