"""CUDA's kernels under context parallelism, without ranks: a rank's queries against the keys of whole rows."""

import pytest
import torch
from context_helpers import cut, places_of
from gpt_helpers import tiny_config
from model_helpers import boundaries, naive_attention, small

from sixfold.gpt.data.host_to_device import copy_streams
from sixfold.gpt.data.token_stream import TokenStream, build_datasets
from sixfold.gpt.model import attention
from sixfold.gpt.model.attention import plan_rows
from sixfold.gpt.parallel.axes import Axes, Axis
from sixfold.gpt.parallel.partial_attention import (
    Sight,
    efficient_backward,
    efficient_forward,
    flash_backward,
    flash_forward,
    math_backward,
    math_forward,
)
from sixfold.gpt.parallel.sequence_parts import SequencePart, documents_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]

ROW, RANKS = 512, 2
INNER = [7, 100, 300, 511, 700]


def near(found, expected, bound):
    return (found.cpu().double() - expected.cpu().double()).norm() < bound * expected.double().norm()


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
@pytest.mark.parametrize("inner", [[], INNER])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_part_of_the_rows_attends_to_all_keys(monkeypatch, backend, inner, rank):
    cu, generator = boundaries(2, ROW, inner), torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, ROW, n, 64, generator=generator).bfloat16() for n in (4, 2, 2, 4))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    expected = naive_attention(*leaves, cu)
    reference = torch.autograd.grad(cut(expected, rank, RANKS), leaves, cut(g, rank, RANKS).double())
    keys = [t.cuda().requires_grad_() for t in (k, v)]
    monkeypatch.setattr(attention, "gathered_keys", lambda k, v, axis: keys)
    hidden = torch.zeros(2, ROW // RANKS, 256, dtype=torch.bfloat16, device="cuda")
    axes = Axes(cp=Axis(rank, RANKS, object()))
    config = small(head_dim=64)
    rows = plan_rows(config, hidden, position_ids=None, cu_seqlens=cu, backend=backend, axes=axes)
    mine = cut(q, rank, RANKS).cuda().requires_grad_()
    out = rows.attend(mine, *keys)
    found = torch.autograd.grad(out, (mine, *keys), cut(g, rank, RANKS).cuda())
    assert near(out.detach(), cut(expected.detach(), rank, RANKS), 0.02)
    assert near(found[0], cut(reference[0], rank, RANKS), 0.02)
    assert all(near(*pair, 0.02) for pair in zip(found[1:], reference[1:], strict=True))


@pytest.mark.parametrize(("kernel", "dtype", "bound"), [
    ("flash", torch.bfloat16, 0.02), ("efficient", torch.bfloat16, 0.02), ("efficient", torch.float32, 1e-4),
])  # fmt: skip
def test_a_kernel_gives_what_batched_products_give(kernel, dtype, bound):
    forward, backward = {
        "flash": (flash_forward, flash_backward), "efficient": (efficient_forward, efficient_backward)
    }[kernel]  # fmt: skip
    here = documents_here(boundaries(2, ROW, INNER).numpy(), 2, SequencePart(1, RANKS))
    first, places = torch.from_numpy(here.first).cuda(), torch.tensor(places_of(1, RANKS, ROW)).cuda()
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, ROW // 2, n, 64, generator=generator).cuda().to(dtype) for n in (4, 2, 2, 4))
    seen = ("full", "causal") if kernel == "flash" else ("full", "causal", "masked")
    for sight in (Sight(kind, first, places, 128) for kind in seen):
        plain, plain_lse = math_forward(q.float(), k.float(), v.float(), sight)
        out, lse = forward(q, k, v, sight)
        visible = plain_lse > -1e4
        assert near(lse[visible], plain_lse[visible], bound)
        weight = visible.transpose(1, 2).unsqueeze(-1)
        assert near(out * weight, plain * weight, bound)
        # As if the block were joined with another of equal weight.
        joined = plain_lse.clamp(min=-5) + 1
        expected = math_backward(g.float(), q.float(), k.float(), v.float(), plain, joined, sight)
        for one, other in zip(backward(g, q, k, v, plain.to(dtype), joined, sight), expected, strict=True):
            assert near(one, other, 2 * bound)


def test_microbatches_travel_beside_a_busy_stream_and_are_awaited(tmp_path):
    config, device = tiny_config(tmp_path), torch.device("cuda", 0)
    train, _ = build_datasets(config)
    plain, stream = TokenStream(train, config), TokenStream(train, config, copies=copy_streams(device))
    for turn in range(20):  # memory of dropped microbatches is used again
        torch.cuda._sleep(10_000_000)
        batch = stream.microbatch(turn * 2, 2)
        batch.arrive()
        read = batch.tokens * 1
        expected = plain.microbatch(turn * 2, 2).tokens
        del batch
        assert torch.equal(read.cpu(), expected)
