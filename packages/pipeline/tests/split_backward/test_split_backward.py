"""I and W have the bits of one backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from split_helpers import ORDERS, call, plain, same_bits, split
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from sixfold.pipeline import defer_weight_grad

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
N = 3  # microbatches


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


LAYOUTS = {
    "vector": (lambda s, d: rand(6, seed=s, dtype=d), False),
    "matrix": (lambda s, d: rand(5, 6, seed=s, dtype=d), True),
    "one row": (lambda s, d: rand(1, 6, seed=s, dtype=d), True),
    "batch": (lambda s, d: rand(2, 3, 6, seed=s, dtype=d), True),
    "images": (lambda s, d: rand(2, 3, 2, 6, seed=s, dtype=d), True),
    "no rows": (lambda s, d: rand(0, 6, seed=s, dtype=d), True),
    "no rows of a batch": (lambda s, d: rand(2, 0, 6, seed=s, dtype=d), True),
    "rows apart": (lambda s, d: rand(5, 12, seed=s, dtype=d)[:, :6].detach().requires_grad_(), True),
    "column-major": (lambda s, d: rand(6, 5, seed=s, dtype=d).t().detach().requires_grad_(), False),
    "transposed batch": (lambda s, d: rand(3, 2, 6, seed=s, dtype=d).transpose(0, 1).detach().requires_grad_(), False),
    "expanded": (lambda s, d: rand(1, 6, seed=s, dtype=d).expand(4, 6).detach().requires_grad_(), True),
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_linear_of_any_input(layout, bias, dtype):
    make, waits = LAYOUTS[layout]
    torch.manual_seed(3)
    layer = nn.Linear(6, 4, bias=bias, dtype=dtype)
    for grad in (True, False):
        xs = [make(k, dtype).requires_grad_(grad) for k in range(N)]
        waited = same_bits(layer, xs, orders=ORDERS[:2])
        assert waited[0] == waited[1] and (waited[0] == N) >= waits


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
@pytest.mark.parametrize("grad", [True, False], ids=["input", "no input"])
def test_frozen_halves_of_a_linear(frozen, grad):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))
    for name, parameter in model[0].named_parameters():
        parameter.requires_grad_(frozen not in (name, "both"))
    assert same_bits(model, [rand(2, 3, 6, seed=k, grad=grad) for k in range(N)])[0] == N * (1 + (frozen != "both"))


@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_embedding(padding, by_frequency):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=padding, scale_grad_by_freq=by_frequency), nn.Linear(4, 3))
    xs = [torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(k)) for k in range(N)]
    assert same_bits(model, xs)[0] == 2 * N


def test_embeddings_of_another_kind_get_their_gradient_in_i():
    xs = [torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(k)) for k in range(N)]
    assert same_bits(nn.Embedding(7, 4, max_norm=0.5), xs)[0] == 0
    layer = nn.Embedding(7, 4, sparse=True)
    plain(layer, xs)
    expected, layer.weight.grad = layer.weight.grad.to_dense(), None
    assert split(layer, xs, ORDERS[0])[1] == 0
    assert torch.equal(layer.weight.grad.to_dense(), expected)


class Twice(nn.Module):
    """A layer used three times, and two layers that hold one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(torch.tanh(self.a(x)))
        return self.c(torch.relu(self.b(x))) + self.a(x)


def test_uses_of_a_parameter_are_added_within_the_microbatch_first():
    torch.manual_seed(3)
    assert same_bits(Twice(), [rand(4, 5, seed=k) for k in range(N)])[0] == 5 * N


class TiedHead(nn.Module):
    """An embedding whose weight is the head's too, by module or by hand."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding, self.body, self.how = nn.Embedding(7, 5), nn.Linear(5, 5), how
        self.norm = nn.LayerNorm(5)
        if how == "module":
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.body(self.embedding(tokens))))
        return self.head(x) if self.how == "module" else F.linear(x, self.embedding.weight)


@pytest.mark.parametrize("how", ["module", "by hand"])
@pytest.mark.parametrize("before", [False, True], ids=["no gradient before", "gradient before"])
def test_a_head_that_is_tied_to_the_embedding(how, before):
    torch.manual_seed(3)
    model = TiedHead(how)
    if before:
        for parameter in model.parameters():
            parameter.grad = rand(*parameter.shape, seed=9, grad=False)
    xs = [torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(k)) for k in range(N)]
    waited = same_bits(model, xs)
    assert min(waited) >= 2 * 2  # at least the body's


@pytest.mark.parametrize("inside", [False, True], ids=["around the step", "in the module"])
@pytest.mark.parametrize("model", ["layers", "tied", "twice", "half"])
def test_under_autocast(inside, model):
    torch.manual_seed(3)
    tokens = [torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(k)) for k in range(N)]
    floats = [rand(2, 3, 5, seed=k) for k in range(N)]
    module, xs = {
        "layers": (nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4, bias=False)), floats),
        "tied": (TiedHead("by hand"), tokens),
        "twice": (Twice(), floats),
        "half": (nn.Sequential(nn.Linear(5, 6, dtype=torch.bfloat16), nn.Linear(6, 4)), floats),
    }[model]

    def under(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(x)

    if inside:
        assert same_bits(module, xs, under)[0] >= N
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert same_bits(module, xs)[0] >= N


class Block(nn.Module):
    """Attention-free block with dropout and a checkpoint of either kind around its inner part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.position = nn.Parameter(torch.randn(6))

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        if self.kind == "none":
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant", preserve_rng_state=False)


@pytest.mark.parametrize("kind", ["none", "reentrant", "non-reentrant"])
def test_under_activation_checkpointing(kind):
    torch.manual_seed(3)
    model = nn.Sequential(Block(kind), Block(kind))
    assert same_bits(model, [rand(4, 6, seed=k) for k in range(N)])[0] == 4 * N


def test_a_tied_head_inside_a_checkpoint():
    torch.manual_seed(3)
    xs = [torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(k)) for k in range(N)]

    def run(m: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(m, x, use_reentrant=False)

    same_bits(TiedHead("by hand"), xs, run)


class Own(nn.Module):
    """An operator of a user that defers by itself."""

    def __init__(self, style: str = "function") -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4))
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = x @ self.weight.detach().t() + self.bias.detach()
        saved = x.detach()
        return defer_weight_grad((self.weight, self.bias), lambda g: (g.t() @ saved, g.sum(0)), y)


def test_an_operator_of_a_user_defers_its_gradient():
    torch.manual_seed(3)
    model = nn.Sequential(Own(), nn.Linear(4, 5), Own())
    for grad in (True, False):
        assert same_bits(model, [rand(6, 5, seed=k, grad=grad) for k in range(N)])[0] == 3 * N


def test_outside_of_a_pipeline_it_gives_the_gradient_at_once():
    torch.manual_seed(3)
    own, x = Own(), rand(6, 5)
    own(x).square().sum().backward()
    mine = [p.grad.clone() for p in own.parameters()], x.grad.clone()
    own.zero_grad()
    x.grad = None
    F.linear(own.norm(x), own.weight, own.bias).square().sum().backward()
    for a, b in zip(mine[0], (p.grad for p in own.parameters()), strict=True):
        assert torch.allclose(a, b)
    assert torch.allclose(mine[1], x.grad)


def test_gradients_that_lie_on_each_other_stay_apart():
    """A parameter's first gradient may be a view of the output gradient that a W still needs."""

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.aside = nn.Linear(5, 4), nn.Parameter(torch.randn(12))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.aside.view(3, 4)

    torch.manual_seed(3)
    same_bits(Aside(), [rand(3, 5, seed=k) for k in range(N)])


def test_wrappers_are_left_as_they_are():
    torch.manual_seed(3)

    class Lora(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
    old = nn.utils.spectral_norm(nn.Linear(5, 5)).eval()
    pruned = nn.Linear(5, 5)
    prune.l1_unstructured(pruned, "weight", 0.3)
    patched = nn.Linear(5, 5)
    plain_forward = patched.forward
    patched.forward = lambda x: plain_forward(x) + 1
    model = nn.Sequential(Lora(5, 5), weighted, pruned, nn.Linear(5, 5))
    for module in (model, nn.Sequential(old, patched)):
        xs = [rand(4, 5, seed=k) for k in range(N)]
        plain(module, xs)
        expected = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        waited = split(module, xs, ORDERS[1])[1]
        assert all(torch.equal(a, p.grad) for a, p in zip(expected, module.parameters(), strict=True))
        assert waited == (N if module is model else 0)


def test_modules_in_eval_mode_and_nested_ones():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)), nn.ModuleList([nn.Linear(5, 5)])[0]).eval()
    assert same_bits(model, [rand(4, 5, seed=k) for k in range(N)])[0] == 2 * N


def test_a_transformer():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    assert same_bits(nn.Sequential(layer, nn.Linear(8, 8)), [rand(2, 3, 8, seed=k) for k in range(N)])[0] >= 3 * N
    assert call(layer, rand(2, 3, 8)).shape == (2, 3, 8)
