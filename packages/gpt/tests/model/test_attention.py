"""Attention back ends against a naive loop over documents and heads."""

from dataclasses import replace

import pytest
import torch
from model_helpers import boundaries, naive_attention, small, varlen_by_hand

from sixfold.gpt.model import attention
from sixfold.gpt.model.attention import BLOCKS_LONGEST, QUERY_BLOCK, Documents, choose_backend, plan_rows
from sixfold.gpt.model.decoder import GPTModel

CPU_BACKENDS = ["blocks", "sdpa", "varlen"]


@pytest.fixture(autouse=True)
def kernel_by_hand(monkeypatch):
    """CUDA's kernel of packed documents in plain torch: all that is around it is what a device runs."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_hand)


def rows_of(config, b, s, cu_seqlens, backend, dtype=torch.float32):
    hidden = torch.zeros(b, s, config.hidden_size, dtype=dtype)
    return plan_rows(config, hidden, position_ids=None, cu_seqlens=cu_seqlens, backend=backend)


def projections(b, s, heads, groups, d, dtype=torch.float32):
    generator = torch.Generator().manual_seed(b * s + heads)
    sizes = (heads, groups, groups)
    return [torch.randn(b, s, n, d, generator=generator).to(dtype).requires_grad_() for n in sizes]


@pytest.mark.sampled
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("s", "inner"),
    [
        (40, []),
        (40, [1, 17, 39, 41, 79]),
        (QUERY_BLOCK + 9, [QUERY_BLOCK, QUERY_BLOCK + 1, 200]),
        (2 * QUERY_BLOCK, []),
        (1, []),
    ],
)
@pytest.mark.slow
def test_a_back_end_equals_the_naive_loop_forward_and_backward(backend, groups, s, inner):
    config, cu = small(num_query_groups=groups), boundaries(2, s, inner)
    q, k, v = projections(2, s, 4, groups, config.head_dim)
    out = rows_of(config, 2, s, cu, backend).attend(q, k, v)
    expected = naive_attention(q, k, v, cu)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, (q, k, v), upstream)
    for gradient, reference in zip(found, torch.autograd.grad(expected, (q, k, v), upstream.double()), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("window", [1, 7, 150, 1000])
@pytest.mark.parametrize(("s", "inner"), [(40, []), (QUERY_BLOCK + 9, [QUERY_BLOCK, 200])])
def test_a_window_equals_the_naive_loop_forward_and_backward(backend, window, s, inner):
    config, cu = small(sliding_window=window), boundaries(2, s, inner)
    q, k, v = projections(2, s, 4, 2, config.head_dim)
    out = rows_of(config, 2, s, cu, backend).attend(q, k, v)
    expected = naive_attention(q, k, v, cu, window=window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, (q, k, v), upstream)
    for gradient, reference in zip(found, torch.autograd.grad(expected, (q, k, v), upstream.double()), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["blocks", "math"])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(("s", "inner"), [(40, [1, 17, 39, 41, 79]), (QUERY_BLOCK + 9, [])])
def test_soft_caps_equal_the_naive_loop_forward_and_backward(backend, window, s, inner):
    config, cu = small(attn_logit_softcapping=0.7, sliding_window=window), boundaries(2, s, inner)
    q, k, v = projections(2, s, 4, 2, config.head_dim)
    out = rows_of(config, 2, s, cu, backend).attend(q, k, v)
    expected = naive_attention(q, k, v, cu, window=window, cap=0.7)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, (q, k, v), upstream)
    for gradient, reference in zip(found, torch.autograd.grad(expected, (q, k, v), upstream.double()), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=2e-5)


def test_soft_caps_are_not_given_to_kernels_that_do_not_have_them():
    capped = small(attn_logit_softcapping=0.7)
    for backend in ("sdpa", "varlen"):
        with pytest.raises(AssertionError, match=r"no soft cap of 0\.7"):
            rows_of(capped, 1, 8, None, backend)
    layout = Documents(
        b=1, s=4096, heads=4, key_heads=4, dtype=torch.bfloat16, device=torch.device("cuda"), cu_seqlens=None,
        first=None, cap=0.7,
    )  # fmt: skip
    assert choose_backend(layout) == "math" == choose_backend(replace(layout, device=torch.device("cpu")))


def test_layers_of_both_types_have_rows_of_their_own_and_a_stage_only_those_it_needs():
    config = small(sliding_window=3, layer_types=("sliding_attention", "full_attention", "sliding_attention"))
    hidden = torch.zeros(1, 20, 32)
    rows = plan_rows(config, hidden, position_ids=None, cu_seqlens=None)
    q, k, v = projections(1, 20, 4, 2, config.head_dim)
    for slides, window in ((True, 3), (False, 0)):
        out = rows.of(sliding=slides).attend(q, k, v)
        expected = naive_attention(q, k, v, boundaries(1, 20, []), window=window)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    alone = plan_rows(config, hidden, position_ids=None, cu_seqlens=None, layers=[0, 2])
    assert alone.sliding is None and torch.equal(
        alone.of(sliding=True).attend(q, k, v), rows.of(sliding=True).attend(q, k, v)
    )


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_back_end_in_bfloat16_is_as_near_as_its_dtype_allows(backend):
    config, cu = small(), boundaries(2, 200, [33, 250])
    q, k, v = projections(2, 200, 4, 2, config.head_dim, torch.bfloat16)
    out = rows_of(config, 2, 200, cu, backend, torch.bfloat16).attend(q, k, v)
    expected = naive_attention(q, k, v, cu)
    found = torch.autograd.grad(out.double().square().sum(), (q, k, v))
    reference = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for a, b in [(out, expected), *zip(found, reference, strict=True)]:
        assert (a.double() - b.double()).norm() < 0.012 * b.double().norm()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_nothing_leaks_between_documents_or_from_the_future(backend):
    config, cu = small(), boundaries(1, 60, [20])
    q, k, v = projections(1, 60, 4, 2, config.head_dim)
    attend = rows_of(config, 1, 60, cu, backend).attend
    base = attend(q, k, v)
    with torch.no_grad():
        v[:, 30] += 100.0
        k[:, 30] -= 5.0
    moved = (attend(q, k, v) != base).any(-1).any(-1)[0]
    assert not moved[:30].any()
    assert moved[30:].all()
    with torch.no_grad():
        v[:, 5] += 100.0
    assert not (attend(q, k, v) != attend(q, k, v.detach().clone())).any()
    later = (attend(q, k, v) != base).any(-1).any(-1)[0]
    assert later[5:20].all()
    assert not later[20:30].any()


def test_positions_restart_at_documents_and_empty_documents_do_no_harm():
    hidden = torch.zeros(2, 6, 32)
    plain = plan_rows(small(), hidden, position_ids=None, cu_seqlens=None)
    cu = torch.tensor([0, 2, 2, 6, 11, 12, 12], dtype=torch.int32)
    packed = plan_rows(small(), hidden, position_ids=None, cu_seqlens=cu)
    expected = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0]])
    for table, reference in ((packed.cos, plain.cos), (packed.sin, plain.sin)):
        assert torch.equal(table[:, :, 0], reference[0, :, 0][expected])


def test_given_positions_win():
    hidden, positions = torch.zeros(1, 4, 32), torch.tensor([[7, 3, 3, 0]])
    given = plan_rows(small(), hidden, position_ids=positions, cu_seqlens=boundaries(1, 4, [2]))
    plain = plan_rows(small(), torch.zeros(1, 8, 32), position_ids=None, cu_seqlens=None)
    assert torch.equal(given.cos, plain.cos[:, positions[0]])


@pytest.mark.parametrize(
    ("device", "dtype", "s", "documents", "backend"),
    [
        ("cpu", torch.bfloat16, BLOCKS_LONGEST, True, "blocks"),
        ("cpu", torch.float32, BLOCKS_LONGEST, False, "blocks"),
        ("cpu", torch.bfloat16, BLOCKS_LONGEST + 1, True, "sdpa"),
        ("cuda", torch.bfloat16, 4096, True, "varlen"),
        ("cuda", torch.bfloat16, 4096, False, "sdpa"),
        ("cuda", torch.float32, 4096, True, "sdpa"),
    ],
)
def test_the_back_end_follows_device_dtype_and_length(device, dtype, s, documents, backend):
    first = torch.zeros(1, s) if documents else None
    layout = Documents(
        b=1, s=s, heads=4, key_heads=4, dtype=dtype, device=torch.device(device), cu_seqlens=None, first=first
    )
    assert choose_backend(layout) == backend
    if device == "cuda":  # no mask of a row's square
        assert choose_backend(replace(layout, window=8)) == ("sdpa" if dtype == torch.float32 else "varlen")


@pytest.mark.parametrize(("groups_itself", "window"), [(True, 0), (False, 0), (True, 5)])
@pytest.mark.slow
def test_cudas_kernel_is_given_each_key_head_once_where_it_groups_queries(monkeypatch, groups_itself, window):
    seen = {}

    def grouping(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, enable_gqa=False):
        seen.update(keys=k.shape[1], enable_gqa=enable_gqa, window=window_size)
        return torch.zeros_like(q)

    def plain(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size):
        return grouping(q, k, v, cu_q, cu_k, max_q, max_k, window_size=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", grouping if groups_itself else plain)
    q, k, v = projections(2, 8, 4, 2, 8)
    out = rows_of(small(sliding_window=window), 2, 8, boundaries(2, 8, [3]), "varlen").attend(q, k, v)
    assert out.shape == q.shape
    assert seen == {"keys": 2 if groups_itself else 4, "enable_gqa": groups_itself, "window": (window - 1, 0)}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_model_over_cudas_kernel_has_the_losses_and_gradients_of_one_over_blocks(monkeypatch, recompute):
    config = small(sliding_window=9, layer_types=("sliding_attention", "full_attention", "sliding_attention"))
    model, cu = GPTModel(config), boundaries(2, 40, [7, 30, 66])
    model.recompute = recompute
    tokens = torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(1))
    found = []
    for backend in ("blocks", "varlen"):
        monkeypatch.setattr(attention, "choose_backend", lambda documents, backend=backend: backend)
        model.zero_grad()
        losses = model(tokens, labels=tokens, cu_seqlens=cu)
        losses.sum().backward()
        found.append((losses.detach(), *(p.grad for p in model.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)
