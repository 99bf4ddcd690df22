"""Cross entropy per token, in float32, a chunk of tokens at a time.

    head's logits in the model's dtype --> token_losses (this file) --> (b, s) float32, summed by the train loop

Float32 logits of the whole micro-batch never exist: a chunk is cast, used and dropped, in backward once more.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Float32 elements of a chunk. On a CPU a chunk stays in the cache; elsewhere few launches count more.
_CHUNK_ELEMENTS = {"cpu": 2**18}
_CHUNK_ELEMENTS_ELSEWHERE = 2**26


def token_losses(logits: Tensor, labels: Tensor, loss_mask: Tensor | None, vocab_size: int) -> Tensor:
    """-log softmax(logits)[label] of each token.

    Args:
        logits: (b, s, padded vocabulary), any floating dtype; columns from ``vocab_size`` on are padding
            and take no part.
        labels: (b, s) int64 in [0, vocab_size) where the mask is not 0; elsewhere of no account.
        loss_mask: (b, s), 0 where a target does not count; None counts all.
    Returns:
        (b, s) float32, exactly 0 where masked. Padding and masked tokens get gradient 0.
    """
    losses: Tensor = _TokenLosses.apply(logits, labels, loss_mask, vocab_size)  # type: ignore[no-untyped-call]
    return losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, loss_mask: Tensor | None, vocab_size: int) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        targets = labels.reshape(-1)
        if loss_mask is not None:
            dropped = loss_mask.reshape(-1) == 0
            targets = targets.masked_fill(dropped, 0)  # any column: its loss is dropped
        normaliser = torch.empty(flat.shape[0], dtype=torch.float32, device=flat.device)
        losses = torch.empty_like(normaliser)
        for rows in _chunks(flat):
            chunk = flat[rows, :vocab_size].float()
            normaliser[rows] = torch.logsumexp(chunk, -1)
            losses[rows] = normaliser[rows] - chunk.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
        if loss_mask is not None:
            losses.masked_fill_(dropped, 0.0)
            ctx.save_for_backward(flat, targets, normaliser, dropped)
        else:
            ctx.save_for_backward(flat, targets, normaliser)
        ctx.vocab_size, ctx.shape = vocab_size, logits.shape
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        flat, targets, normaliser, *masked = ctx.saved_tensors
        upstream = gradients[0].reshape(-1, 1)
        if masked:
            upstream = upstream.masked_fill(masked[0].unsqueeze(1), 0.0)
        grad = torch.empty_like(flat)
        grad[:, ctx.vocab_size :] = 0
        for rows in _chunks(flat):
            chunk = flat[rows, : ctx.vocab_size].float().sub_(normaliser[rows].unsqueeze(1)).exp_()
            hit = targets[rows].unsqueeze(1)
            chunk.scatter_(1, hit, chunk.gather(1, hit) - 1)  # not scatter_add_, which has no fixed order on a GPU
            grad[rows, : ctx.vocab_size] = chunk.mul_(upstream[rows]).to(grad.dtype)
        return grad.view(ctx.shape), None, None, None


def _chunks(flat: Tensor) -> list[slice]:
    """Slices of rows that together are all of them."""
    elements = _CHUNK_ELEMENTS.get(flat.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    size = max(1, elements // flat.shape[1])
    return [slice(begin, min(begin + size, flat.shape[0])) for begin in range(0, flat.shape[0], size)]
