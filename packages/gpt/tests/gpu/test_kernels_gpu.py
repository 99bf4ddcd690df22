"""CUDA's kernels beside the forms that stand for them in the tests on a CPU, and compiled layers beside plain ones."""

import pytest
import torch
from float8_helpers import products
from gpt_helpers import tiny_config
from model_helpers import boundaries, small, varlen_by_hand
from run_helpers import losses

from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.model.decoder import GPTModel
from sixfold.gpt.model.float8_linear import use_float8
from sixfold.gpt.training.loop import train_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]
has_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="torch._scaled_mm needs compute capability 8.9",
)


def near(found, wanted, bound):
    return (found.detach().double() - wanted.detach().double()).norm() < bound * wanted.detach().double().norm()


@pytest.mark.parametrize("window", [(-1, 0), (16, 0)], ids=["all keys", "a window"])
@pytest.mark.parametrize("more", [0, 40], ids=["as many keys", "more keys"])
def test_the_kernel_of_packed_documents_computes_what_stands_for_it(window, more):
    from torch.nn.attention.varlen import varlen_attn

    lengths = torch.tensor([7, 93, 1, 200])
    cu_q = torch.cat((torch.zeros(1), lengths.cumsum(0))).int().cuda()
    cu_k = torch.cat((torch.zeros(1), (lengths + more).cumsum(0))).int().cuda()
    generator = torch.Generator().manual_seed(0)
    shapes = [(int(cu_q[-1]), 4, 64), (int(cu_k[-1]), 4, 64), (int(cu_k[-1]), 4, 64), (int(cu_q[-1]), 4, 64)]
    q, k, v, g = (torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes)
    found = []
    for attend, dtype in ((varlen_attn, torch.bfloat16), (varlen_by_hand, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = attend(*leaves, cu_q, cu_k, 200, 200 + more, window_size=window)
        found.append((out, *torch.autograd.grad(out, leaves, g.to(dtype))))
    assert all(near(*pair, 0.02) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_compiled_layers_have_the_losses_and_gradients_of_plain_ones(dtype, bound):
    config, cu = small(head_dim=64, hidden_size=64), boundaries(2, 128, [30, 200]).cuda()
    tokens = torch.randint(0, 100, (2, 128), generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for compiled in (False, True):
        model = GPTModel(config, device="cuda").to(dtype)
        if compiled:
            for block in model.layers.values():
                block.compile_layer()
        out = model(tokens, labels=tokens, cu_seqlens=cu)
        out.float().mean().backward()
        found.append((out, *(p.grad for p in model.parameters())))
    torch.compiler.reset()
    assert all(near(*pair, bound) for pair in zip(*found, strict=True))


@has_float8
@pytest.mark.parametrize("compiled", [False, True])
def test_torchaos_products_are_those_of_the_definition(compiled):
    pytest.importorskip("torchao.float8", reason="needs torchao, the extra float8")
    model = GPTModel(small(num_layers=1, hidden_size=64, num_query_groups=4), device="cuda").bfloat16()
    use_float8(model)
    linear = model.layers["0"].attention.q
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, 64, generator=generator).bfloat16().cuda().requires_grad_()
    g = torch.randn(2, 64, linear.out_features, generator=generator).bfloat16().cuda()
    out = (torch.compile(linear) if compiled else linear)(x)
    found = (out, *torch.autograd.grad(out, (x, linear.weight), g))
    torch.compiler.reset()
    wanted = products(x.flatten(0, 1), linear.weight, g.flatten(0, 1))
    assert all(near(one.view(other.shape), other, 0.01) for one, other in zip(found, wanted, strict=True))


@has_float8
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_run_with_float8_products_is_near_that_of_bfloat16(tmp_path, compiled):
    pytest.importorskip("torchao.float8", reason="needs torchao, the extra float8")
    world = World(rank=0, size=1, local_rank=0, store=None, device=torch.device("cuda", 0))
    options = ("run.device=cuda", "train.precision=bf16", f"train.compile={compiled}")
    plain, ours = (tiny_config(tmp_path, *options, f"train.float8_products={on}", run=on) for on in ("false", "true"))
    for config in (plain, ours):
        train_in(config, world)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-2)
    assert losses(ours) != losses(plain)
