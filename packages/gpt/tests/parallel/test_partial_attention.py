"""Attention to blocks of keys and its log-sum-exp, against a naive loop over whole rows."""

import math

import pytest
import torch
from context_helpers import cut, places_of, sees
from model_helpers import boundaries, naive_attention, small, varlen_by_hand

from sixfold.gpt.model import attention
from sixfold.gpt.model.attention import plan_rows
from sixfold.gpt.parallel import partial_attention
from sixfold.gpt.parallel.axes import Axes, Axis
from sixfold.gpt.parallel.partial_attention import Sight, gradients, kernel_of, partial
from sixfold.gpt.parallel.sequence_parts import SequencePart, documents_here

ROW, HEADS, GROUPS, D = 48, 4, 2, 8
PACKED = [[], [3, 20, 50, 51, 71, 90], list(range(0, 96, 5))]


def projections(d=D):
    generator = torch.Generator().manual_seed(ROW)
    return [torch.randn(2, ROW, n, d, generator=generator) for n in (HEADS, GROUPS, GROUPS, HEADS)]


def reference(cu, tensors):
    """Outputs and gradients of q, k, v in float64."""
    *leaves, g = (t.double().requires_grad_() for t in tensors)
    out = naive_attention(*leaves, cu)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def near(found, expected, bound=1e-6):
    return (found.double() - expected).norm() <= bound * expected.norm()


def by_blocks(cu, ranks, rank):
    """(out, lse, gradients) of a rank's queries, block by block, with whole keys at hand."""
    q, k, v, g = projections()
    here = documents_here(cu.numpy(), 2, SequencePart(rank, ranks))
    first, places = torch.from_numpy(here.first), torch.tensor(places_of(rank, ranks, ROW))
    q, g = cut(q, rank, ranks), cut(g, rank, ranks)
    parts = []
    for source, blocks in enumerate(here.blocks):
        for b in blocks:
            queries, keys = slice(*b.queries), places_of(source, ranks, ROW)[slice(*b.keys)]
            sight = Sight(b.seen, first[:, queries], places[queries], b.first_key)
            parts.append((queries, keys, sight, *partial(q[:, queries], k[:, keys], v[:, keys], sight)))
    shape = 2, HEADS, ROW // ranks
    total = torch.full(shape, -math.inf, dtype=torch.float64)
    for queries, _, _, _, lse in parts:
        total[..., queries] = torch.logaddexp(total[..., queries], lse.double())
    out = torch.zeros(q.shape, dtype=torch.float64)
    for queries, _, _, one, lse in parts:
        out[:, queries] += one.double() * (lse.double() - total[..., queries]).exp().transpose(1, 2).unsqueeze(-1)
    grads = [torch.zeros(t.shape) for t in (q, k, v)]
    for queries, keys, sight, _, _ in parts:
        found = gradients(
            g[:, queries],
            q[:, queries],
            k[:, keys],
            v[:, keys],
            out.float()[:, queries],
            total.float()[..., queries],
            sight,
        )
        for whole, at, one in zip(grads, (queries, keys, keys), found, strict=True):
            whole[:, at] += one
    return out, total, grads


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [512, 7])
@pytest.mark.parametrize("inner", PACKED)
def test_joined_blocks_equal_whole_rows_forward_and_backward(monkeypatch, inner, rows):
    monkeypatch.setattr(partial_attention, "ROWS", rows)
    cu, ranks = boundaries(2, ROW, inner), 3
    out, grad_q, *grads = reference(cu, projections())
    seen = sees(cu, ROW)
    q, k, _, _ = projections()
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / math.sqrt(D)
    lse = scores.masked_fill(~seen.unsqueeze(1), -math.inf).logsumexp(-1)
    summed = [torch.zeros(t.shape) for t in grads]
    for rank in range(ranks):
        found, found_lse, (found_q, *found_grads) = by_blocks(cu, ranks, rank)
        assert near(found, cut(out, rank, ranks))
        assert near(found_lse, lse[..., places_of(rank, ranks, ROW)])
        assert near(found_q, cut(grad_q, rank, ranks))
        for total, one in zip(summed, found_grads, strict=True):
            total += one
    assert all(near(*pair) for pair in zip(summed, grads, strict=True))


def test_queries_that_see_nothing_of_a_block_weigh_nothing():
    sight = Sight("masked", torch.tensor([[4, 4]]), torch.tensor([4, 5]), 0)
    q, k, v = (torch.randn(1, n, 2, 8) for n in (2, 4, 4))
    _, lse = partial(q, k, v, sight)
    assert lse.isfinite().all()
    assert ((lse - 0.0).exp() == 0).all()
    found = gradients(q, q, k, v, torch.zeros_like(q), torch.zeros(1, 2, 2), sight)
    assert all((one == 0).all() for one in found)


@pytest.mark.parametrize(
    ("device", "dtype", "d", "seen", "kernel"),
    [
        ("cpu", torch.bfloat16, 64, "full", "math"),
        ("cuda", torch.bfloat16, 64, "full", "flash"),
        ("cuda", torch.float16, 64, "causal", "flash"),
        ("cuda", torch.bfloat16, 64, "masked", "efficient"),
        ("cuda", torch.float32, 64, "full", "efficient"),
        ("cuda", torch.bfloat16, 512, "full", "efficient"),
        ("cuda", torch.bfloat16, 36, "full", "math"),
    ],
)
def test_the_kernel_follows_device_dtype_and_mask(device, dtype, d, seen, kernel):
    assert kernel_of(torch.device(device), dtype, d, seen) == kernel


def scores_of(q, k, bias, causal, scale):
    """(b, heads, m, n) of what CUDA's kernels take; key heads may be fewer."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(2, 3) * scale
    if bias is not None:
        scores = scores + bias
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf) if causal else scores


def stand_in_backward(g, q, k, v, out, lse, bias, causal, scale):
    """From the joined result, as the kernels' own: probabilities are exp(score - lse)."""
    heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
    p = (scores_of(q, k, bias, causal, scale) - lse[..., : q.shape[2], None]).exp()
    wide_k, wide_v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    inner = p * (g @ wide_v.transpose(2, 3) - (g * out).sum(-1, keepdim=True)) * scale
    folded = [(t.transpose(2, 3) @ x).unflatten(1, (heads, repeats)).sum(2) for t, x in ((inner, q), (p, g))]
    return inner @ wide_k, *folded


class Kernels:
    """torch.ops.aten's two kernels as its schemas say, on the CPU."""

    def flash(self, q, k, v, dropout, causal, debug, *, scale):
        scores = scores_of(q, k, None, causal, scale)
        out = scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return out, scores.logsumexp(-1), None, None, q.shape[2], k.shape[2], None, None, None

    def flash_backward(self, g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, *, scale):
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert lse.is_contiguous()
        return stand_in_backward(g, q, k, v, out, lse, None, causal, scale)

    def efficient(self, q, k, v, bias, with_lse, dropout, causal, *, scale):
        assert with_lse
        assert q.shape[1] == k.shape[1], "it groups no queries"
        assert bias is None or bias.stride(2) % 16 == 0, "rows of the bias are aligned"
        scores = scores_of(q, k, bias, causal, scale)
        lse = torch.nn.functional.pad(scores.logsumexp(-1), (0, -q.shape[2] % 32), value=math.inf)
        return scores.softmax(-1) @ v, lse, None, None

    def efficient_backward(self, g, q, k, v, bias, out, lse, seed, offset, dropout, mask, causal, *, scale):
        assert lse.shape[-1] % 32 == 0
        return *stand_in_backward(g, q, k, v, out, lse, bias, causal, scale), None


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_cudas_kernels_are_handed_what_their_schemas_say(monkeypatch, kernel):
    kernels = Kernels()
    for name in ("flash", "efficient"):
        op = f"_scaled_dot_product_{name}_attention"
        monkeypatch.setattr(torch.ops.aten, op, getattr(kernels, name))
        monkeypatch.setattr(torch.ops.aten, f"{op}_backward", getattr(kernels, f"{name}_backward"))
    monkeypatch.setattr(
        partial_attention,
        "kernel_of",
        lambda device, dtype, d, seen, cap: "efficient" if seen == "masked" else kernel if seen == "full" else "flash",
    )
    for inner in PACKED:
        cu = boundaries(2, ROW, inner)
        expected, grad_q, *_ = reference(cu, projections())
        for rank in range(3):
            out, _, (found_q, *_) = by_blocks(cu, 3, rank)
            assert near(out, cut(expected, rank, 3))
            assert near(found_q, cut(grad_q, rank, 3))


@pytest.mark.parametrize("seen", ["full", "causal", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_installed_torch_takes_and_gives_those_shapes(seen, dtype):
    name = kernel_of(torch.device("cuda"), dtype, 16, seen)
    q, k, lse = (torch.zeros(shape, device="meta") for shape in ((2, 5, 4, 16), (2, 5, 2, 16), (2, 4, 5)))
    q, k = q.to(dtype), k.to(dtype)
    sight = Sight(seen, torch.zeros(2, 5, device="meta"), torch.zeros(5, device="meta"), 0)
    out, found = getattr(partial_attention, f"{name}_forward")(q, k, k, sight)
    assert (out.shape, found.shape) == (q.shape, lse.shape)
    grads = getattr(partial_attention, f"{name}_backward")(q, q, k, k, out, lse, sight)
    assert [t.shape for t in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("backend", ["blocks", "sdpa", "by chunk", "varlen"])
def test_every_back_end_attends_from_a_part_of_the_rows_to_all_keys(monkeypatch, backend):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_hand)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    monkeypatch.setattr(attention, "BACKENDS", {**attention.BACKENDS, "by chunk": attention._sdpa_by_chunk})
    for inner in PACKED[:1] if backend == "by chunk" else PACKED:
        cu = boundaries(2, ROW, inner)
        expected, grad_q, *grads = reference(cu, projections())
        summed = [torch.zeros(t.shape) for t in grads]
        for rank in range(2):
            q, k, v, g = projections()
            whole = [t.requires_grad_() for t in (k, v)]
            monkeypatch.setattr(attention, "gathered_keys", lambda k, v, axis, whole=whole: whole)
            axes = Axes(cp=Axis(rank, 2, object()))
            hidden = torch.zeros(2, ROW // 2, 32)
            rows = plan_rows(small(), hidden, position_ids=None, cu_seqlens=cu, backend=backend, axes=axes)
            mine = cut(q, rank, 2).requires_grad_()
            out = rows.attend(mine, k, v)
            found_q, *found = torch.autograd.grad(out, (mine, *whole), cut(g, rank, 2))
            assert near(out.detach(), cut(expected, rank, 2))
            assert near(found_q, cut(grad_q, rank, 2))
            for total, one in zip(summed, found, strict=True):
                total += one
        assert all(near(*pair) for pair in zip(summed, grads, strict=True))


def test_positions_of_a_part_are_those_of_its_tokens_in_their_documents():
    whole = plan_rows(small(), torch.zeros(2, ROW, 32), position_ids=None, cu_seqlens=boundaries(2, ROW, [7, 30, 60]))
    plain = plan_rows(small(), torch.zeros(2, ROW, 32), position_ids=None, cu_seqlens=None)
    for rank in range(2):
        axes, hidden = Axes(cp=Axis(rank, 2, object())), torch.zeros(2, ROW // 2, 32)
        part = plan_rows(small(), hidden, position_ids=None, cu_seqlens=boundaries(2, ROW, [7, 30, 60]), axes=axes)
        assert torch.equal(part.cos, cut(whole.cos, rank, 2))
        assert torch.equal(part.sin, cut(whole.sin, rank, 2))
        alone = plan_rows(small(), hidden, position_ids=None, cu_seqlens=None, axes=axes)
        assert torch.equal(alone.cos, cut(plain.cos, rank, 2))
