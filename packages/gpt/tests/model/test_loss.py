"""Chunked cross entropy against torch's own, vocabulary padding, mask."""

import pytest
import torch
import torch.nn.functional as F

from sixfold.gpt.model import loss as loss_module
from sixfold.gpt.model.loss import LossTerms, token_losses


def sample(b=3, s=7, vocab=100, padded=128, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(b, s, padded, generator=generator) * 4).to(dtype).requires_grad_()
    return logits, torch.randint(0, vocab, (b, s), generator=generator)


@pytest.mark.parametrize("chunk_elements", [1, 500, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_torchs_whatever_the_chunk(chunk_elements, dtype, monkeypatch):
    monkeypatch.setitem(loss_module._CHUNK_ELEMENTS, "cpu", chunk_elements)
    logits, labels = sample(dtype=dtype)
    upstream = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    losses = token_losses(logits, labels, None, 100)
    assert losses.dtype == torch.float32
    expected = F.cross_entropy(logits[..., :100].float().flatten(0, 1), labels.flatten(), reduction="none").view(3, 7)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(losses, logits, upstream)
    (reference,) = torch.autograd.grad(expected, logits, upstream)
    assert found.dtype == dtype
    torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_leaves_the_logits_as_they_were(dtype):
    logits, labels = sample(dtype=dtype)
    before = logits.detach().clone()
    losses = token_losses(logits, labels, None, 100).sum()
    first, second = (torch.autograd.grad(losses, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(logits, before), "they are the caller's"
    assert torch.equal(first, second)


def test_padding_takes_no_part_and_gets_no_gradient():
    logits, labels = sample()
    with torch.no_grad():
        logits[..., 100:] = 1e4
    losses = token_losses(logits, labels, None, 100)
    losses.sum().backward()
    assert losses.max() < 100
    assert not logits.grad[..., 100:].any()
    assert logits.grad[..., :100].any()


def test_masked_tokens_are_exactly_zero_whatever_their_logits_and_labels():
    logits, labels = sample()
    mask = torch.ones(3, 7)
    mask[0, :3] = mask[2, 6] = 0
    with torch.no_grad():
        logits[0, 1] = torch.linspace(-3e4, 3e4, 128)
    labels[0, 0], labels[2, 6] = -1, 127
    losses = token_losses(logits, labels, mask, 100)
    losses.sum().backward()
    assert (losses == 0).equal(mask == 0)
    assert (logits.grad.abs().sum(-1) == 0).equal(mask == 0)


@pytest.mark.parametrize("chunk_elements", [500, 2**20])
@pytest.mark.parametrize(("z_loss", "smoothing"), [(1e-2, 0.0), (0.0, 0.1), (1e-2, 0.1)])
def test_a_z_loss_and_label_smoothing_are_torchs_in_the_gradient_and_not_in_the_value(
    chunk_elements, z_loss, smoothing, monkeypatch
):
    monkeypatch.setitem(loss_module._CHUNK_ELEMENTS, "cpu", chunk_elements)
    logits, labels = sample()
    mask = torch.ones(3, 7)
    mask[1, 3] = 0
    upstream = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    losses = token_losses(logits, labels, mask, 100, terms=LossTerms(z_loss=z_loss, label_smoothing=smoothing))
    assert torch.equal(losses, token_losses(logits, labels, mask, 100))
    (found,) = torch.autograd.grad(losses, logits, upstream)
    real = logits[..., :100].flatten(0, 1)
    whole = F.cross_entropy(real, labels.flatten(), reduction="none", label_smoothing=smoothing)
    whole = (whole + z_loss * torch.logsumexp(real, -1) ** 2).view(3, 7) * mask
    (reference,) = torch.autograd.grad(whole, logits, upstream)
    torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-6)
