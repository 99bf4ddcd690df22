"""Tensors that leave a unit by other ways than its outputs, and outputs that are its weights: as in the plain module.

A unit's memory is another unit's after its call. ``SETTINGS`` share memory between units in both ways, and fill
with NaN what is given up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sixfold.fsdp import BufferConfig, FsdpError, fully_shard, fully_shard_optimizer

pytestmark = pytest.mark.usefixtures("as_sharded")

WIDTH = 8
SETTINGS = {
    "double": BufferConfig(fill_freed=True),
    "budget": BufferConfig(gathered_bytes=1792, fill_freed=True),
    "all": BufferConfig(gathered_bytes="all"),
}


class Token(nn.Module):
    """A unit that gives its own parameter, in the form that ``give`` makes of it."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(3, WIDTH))
        self.give = give

    def forward(self) -> Any:
        return self.give(self.token)


@dataclasses.dataclass
class Output:
    hidden: Any


class Block(nn.Module):
    """Two linears; ``feature`` is between them."""

    def __init__(self, wrap: Any = lambda x: x) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.wrap = wrap
        self.kept: Any = None

    def forward(self, x: Any) -> Any:
        x = x.hidden if isinstance(x, Output) else x
        middle = torch.tanh(self.first(x))
        self.kept = middle * 1.0
        return self.wrap(x + self.second(torch.tanh(middle)))


class Tokens(nn.Module):
    """A token of its own before the blocks."""

    def __init__(self, give: Any, take: Any) -> None:
        super().__init__()
        self.token = Token(give)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        token = self.take(self.token())
        for block in self.blocks:
            x = block(x)
        return x + token.sum(0) + self.take(self.token()).mean()


FORMS = {
    "itself": (lambda p: p, lambda p: p),
    "a view": (lambda p: p[1:], lambda p: p),
    "expanded": (lambda p: p.expand(2, 3, WIDTH), lambda p: p[0]),
    "in a tuple": (lambda p: (p.t(), 3), lambda out: out[0].t()),
    "in a dict": (lambda p: {"token": [p.view(-1)]}, lambda out: out["token"][0].view(3, WIDTH)),
    "detached": (lambda p: p.detach(), lambda p: p),
    "multiplied": (lambda p: p * 2, lambda p: p),
}


def both(make: Any, run: Any, buffers: BufferConfig, units: list[type], *, steps: int = 2) -> list[list[Tensor]]:
    """What ``run(net, call, step)`` gave in each step with a plain module, and with a wrapped one."""
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        net = make()
        call = fully_shard(net, fsdp_unit_modules=units, buffers=buffers) if wrapped else net
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        if wrapped:
            fully_shard_optimizer(optimizer, call)
        values: list[Tensor] = []
        for step in range(steps):
            values += run(net, call, step)
            optimizer.step()
            optimizer.zero_grad()
        state = call.full_state_dict() if wrapped else net.state_dict()
        found.append([*values, *(value.clone() for value in state.values())])
    return found


def agree(found: list[list[Tensor]]) -> bool:
    plain, ours = found
    assert len(plain) == len(ours), f"{len(plain)} and {len(ours)} values"
    return all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))


def x_of(step: int, *, grad: bool = False) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_(grad)


@pytest.mark.parametrize("buffers", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_a_unit_may_return_its_own_parameter(form, buffers):
    def run(net, call, step):
        with torch.no_grad():
            seen = call(x_of(step)).clone()
        loss = call(x_of(step)).square().mean()
        loss.backward()
        return [seen, loss.detach()]

    assert agree(both(lambda: Tokens(*FORMS[form]), run, buffers, [Block, Token]))


def test_an_object_that_holds_a_parameter_of_its_unit_is_refused():
    torch.manual_seed(0)
    call = fully_shard(Tokens(Output, lambda out: out.hidden), fsdp_unit_modules=[Block, Token])
    with pytest.raises(FsdpError, match=r"token: its forward returns weights of the unit inside a Output"):
        call(x_of(0))


@pytest.mark.parametrize("root_units", [True, False])
def test_a_raw_parameter_that_the_root_returns_trains_in_every_step(root_units):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = block(x)
            return x, self.scale

    def run(net, call, step):
        out, scale = call(x_of(step))
        loss = (out * scale).square().mean()
        loss.backward()
        return [loss.detach()]

    assert agree(both(Net, run, BufferConfig(), [Block], steps=3))


class Chain(nn.Module):
    def __init__(self, layers: int = 5, wrap: Any = lambda x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(wrap) for _ in range(layers))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def by_forward_hook(net: Chain) -> Any:
    found: dict[int, Tensor] = {}
    handle = net.blocks[1].first.register_forward_hook(lambda module, args, out: found.update({1: out}))
    return lambda: found[1], handle.remove


def by_attribute(net: Chain) -> Any:
    return lambda: net.blocks[1].kept, lambda: None


@pytest.mark.parametrize("buffers", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seen", [by_forward_hook, by_attribute])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.slow
def test_a_gradient_may_enter_a_unit_at_a_tensor_from_inside_it(seen, frozen, buffers):
    def make():
        net = Chain()
        net.blocks[:-1].requires_grad_(not frozen)
        return net

    def run(net, call, step):
        x = x_of(step, grad=True)
        feature, end = seen(net)
        loss = call(x).square().mean()
        end()
        (of_x,) = torch.autograd.grad(feature().square().sum(), x, retain_graph=True)
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        feature().sum().backward()  # into trainable weights too
        return [of_x, first, x.grad.clone()]

    assert agree(both(make, run, buffers, [Block]))


def test_a_hook_that_comes_after_the_first_step_is_seen():
    def run(net, call, step):
        x = x_of(step, grad=True)
        feature, end = by_forward_hook(net) if step else (None, lambda: None)
        loss = call(x).square().mean()
        end()
        values = [] if feature is None else list(torch.autograd.grad(feature().square().sum(), x, retain_graph=True))
        loss.backward()
        return [*values, x.grad]

    assert agree(both(Chain, run, BufferConfig(), [Block], steps=3))


@pytest.mark.parametrize("form", ["dataclass", "object", "generator of a list"])
def test_prompt_tuning_through_frozen_units_that_return_objects(form):
    class Holder:
        __slots__ = ("hidden",)

        def __init__(self, hidden: Tensor) -> None:
            self.hidden = hidden

    wrap, unwrap = {
        "dataclass": (Output, lambda out: out.hidden),
        "object": (lambda x: Holder(x), lambda out: out.hidden),
        "generator of a list": (lambda x: iter([x]), lambda out: next(out)),
    }[form]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(5, WIDTH))
            self.blocks = nn.ModuleList(Block(wrap) for _ in range(5))
            self.blocks.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.prompt
            for block in self.blocks:
                x = unwrap(block(x))
            return x

    def run(net, call, step):
        loss = call(x_of(step)).square().mean()
        loss.backward()
        return [loss.detach()]

    assert agree(both(Net, run, BufferConfig(), [Block], steps=3))


def test_a_weight_that_autograd_saved_is_refused_once_another_unit_has_its_memory():
    """A way out that opens after the first step, which no hook tells of: torch's own error, not other weights."""
    torch.manual_seed(0)
    net = Chain()
    call = fully_shard(net, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), call)
    call(x_of(0)).sum().backward()
    optimizer.step()
    x = x_of(1, grad=True)
    call(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(net.blocks[1].kept.sum(), x)


def test_a_graph_from_before_a_step_is_refused_wherever_it_is_entered():
    torch.manual_seed(0)
    net = Chain()
    call = fully_shard(net, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), call)
    x = x_of(0, grad=True)
    call(x).sum().backward(retain_graph=True)
    kept = net.blocks[4].kept
    optimizer.step()
    with pytest.raises(FsdpError, match="graph from before an optimizer step"):
        torch.autograd.grad(kept.sum(), x)


def test_an_activation_that_was_written_to_is_refused_in_the_first_step_too():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                with torch.no_grad():
                    x.mul_(2.0)  # tanh saved it
            return x

    call = fully_shard(Writes(), fsdp_unit_modules=[nn.Sequential])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        call(x_of(0)).sum().backward()


class Own(torch.autograd.Function):
    """Keeps its weight as an attribute of its context, where autograd does not look."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight.t(), None


def test_a_weight_kept_in_a_context_of_a_function_is_read_where_it_is_or_refused():
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
            self.kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = Own.apply(x, self.weight)
            return self.kept.tanh()

    torch.manual_seed(0)
    net = nn.Sequential(*(Custom() for _ in range(5)))
    call = fully_shard(net, fsdp_unit_modules=[Custom], buffers=BufferConfig(merge_bytes=None))
    x = x_of(0, grad=True)
    call(x).sum().backward()
    call(x)
    with pytest.raises(FsdpError, match=r"0.weight: t\(\) reads its values outside a call of its unit"):
        torch.autograd.grad(net[0].kept.sum(), x)


class Stash(nn.Module):
    """A unit that leaves a view of its weight where ``keep`` puts it; ``reads``: what it adds to its output."""

    def __init__(self, keep: Any, reads: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.keep, self.reads = keep, reads

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self.weight)
        return x @ self.weight + self.reads()


def stashing(place: str, view: Any) -> nn.Sequential:
    """Units of which the first leaves ``view`` of its weight in ``place``, and the third reads it."""
    shared, listed = nn.Module(), []

    class Holder:
        def __init__(self) -> None:
            self.w: Any = None

    holder, cell = Holder(), None

    def into_cell(weight: Tensor) -> None:
        nonlocal cell
        cell = view(weight)

    keep, take = {
        "another module": (lambda w: setattr(shared, "w", view(w)), lambda: shared.w),
        "a list": (lambda w: listed.append(view(w)), lambda: listed[-1]),
        "an object": (lambda w: setattr(holder, "w", view(w)), lambda: holder.w),
        "a closure": (into_cell, lambda: cell),
    }[place]
    return nn.Sequential(
        Stash(keep, lambda: 0), Stash(lambda w: None, lambda: 0), Stash(lambda w: None, lambda: take().sum())
    )


APART = BufferConfig(merge_bytes=None)
VIEWS = {
    "slice": lambda w: w[:3],
    "detached": lambda w: w.detach(),
    "of .data": lambda w: w.data[1:],
    "view of a view": lambda w: w.t()[1].view(2, -1),
}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(("place", "view"), [("another module", v) for v in VIEWS] + [
    ("a list", "slice"), ("an object", "detached"), ("a closure", "slice")
])  # fmt: skip
def test_a_view_left_behind_by_one_unit_is_refused_in_another(place, view, graph):
    torch.manual_seed(0)
    call = fully_shard(stashing(place, VIEWS[view]), fsdp_unit_modules=[Stash], buffers=APART)
    with torch.set_grad_enabled(graph), pytest.raises(FsdpError, match=r"0.weight: sum\(\) reads a view of it that"):
        call(x_of(0))


def test_a_clone_left_behind_by_one_unit_trains_another_as_in_the_plain_module():
    """What the refusal advises."""
    for place in ("another module", "a list"):

        def run(net, call, step):
            loss = call(x_of(step)).square().mean()
            loss.backward()
            return [loss.detach()]

        found = both(lambda where=place: stashing(where, lambda w: w[:3].clone()), run, APART, [Stash])
        assert agree(found), place


def test_a_view_that_a_unit_keeps_for_itself_is_read_in_its_own_calls():
    def make():
        kept = {}
        net = nn.Sequential()
        for at in range(4):
            net.append(Stash(lambda w, at=at: kept.setdefault(at, w.detach().t()), lambda at=at: kept[at][0]))
        return net

    def run(net, call, step):
        with torch.no_grad():
            seen = [call(x_of(step)) for _ in range(2)]
        loss = call(x_of(step)).square().mean()
        loss.backward()
        return [*seen, loss.detach()]

    assert agree(both(make, run, APART, [Stash], steps=3))


def test_models_that_leave_no_view_are_never_searched_for_one(monkeypatch):
    """Linear, attention, norms, dropout and a frozen unit, with a graph and without."""
    from sixfold.fsdp.parameter_access import saved_weights as views

    monkeypatch.setattr(views.EscapedViews, "_find", lambda self: pytest.fail(f"{self._unit.name} was searched"))
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True) for _ in range(3)))
    net[1].requires_grad_(False)
    call = fully_shard(net, fsdp_unit_modules=[nn.TransformerEncoderLayer])
    optimizer = fully_shard_optimizer(torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), call)
    for step in range(2):
        with torch.no_grad():
            call(x_of(step)[None])
        call(x_of(step)[None]).square().mean().backward()
        optimizer.step()


def test_an_array_of_a_weight_that_is_read_unseen_is_nan_in_the_debug_mode():
    pytest.importorskip("numpy", reason="needs numpy, whose array it is")

    class Lends(nn.Module):
        def __init__(self, lender: list[Any]) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.lender = lender

        def forward(self, x: Tensor) -> Tensor:
            first = not self.lender
            self.lender.append(self.weight.detach().numpy())  # asks nobody whose memory it shows
            return x @ self.weight if first else x @ self.weight + float(self.lender[0].sum())

    lender: list[Any] = []
    net = nn.Sequential(*(Lends(lender) for _ in range(4)))
    buffers = BufferConfig(prefetch_bytes=0, merge_bytes=None, fill_freed=True)
    call = fully_shard(net, fsdp_unit_modules=[Lends], buffers=buffers)
    with torch.no_grad():
        assert bool(call(x_of(0)).isnan().all())


@pytest.mark.slow
def test_perceiver_of_transformers_trains_as_plain():
    transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")
    config = transformers.PerceiverConfig(
        num_latents=256, d_latents=16, d_model=16, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=2, num_cross_attention_heads=2, vocab_size=20, max_position_embeddings=8,
    )  # fmt: skip

    def make():
        net = transformers.PerceiverForMaskedLM(config)
        return net.train(mode=False)

    def run(net, call, step):
        tokens = torch.randint(0, 20, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach()]

    assert agree(both(make, run, BufferConfig(), ["PerceiverLayer"]))


def test_saved_weights_cost_no_hook_after_the_first_step():
    torch.manual_seed(0)
    net = Chain()
    call = fully_shard(net, fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), call)
    tops = []
    net.blocks[2].wrap = lambda x: (tops.append(torch._C._autograd._top_saved_tensors_default_hooks(True)), x)[1]
    for step in range(3):
        F.mse_loss(call(x_of(step)), x_of(9)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [top is None for top in tops] == [False, True, True]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
