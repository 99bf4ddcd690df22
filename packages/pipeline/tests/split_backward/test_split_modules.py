"""What users hang on modules and parameters sees a split backward as it sees a plain one, and finds nothing left."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_helpers import ORDERS, equal_bits, plain, same_bits, split
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as hooks

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, defer_weight_grad, zb_h1
from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

N = 3


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def small() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


XS = [rand(2, 3, 5, seed=k) for k in range(N)]


def told(module: nn.Module) -> list[Any]:
    """A log of what hooks of every kind are given."""
    log: list[Any] = []
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if number == 0:
            parameter.register_hook(lambda g: log.append(("tensor", g.clone())))
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: log.append((n, p.grad.clone())))
    module[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    module[2].register_forward_hook(lambda m, args, out: out * 3)
    module[2].register_full_backward_hook(lambda m, gi, go: log.append(("full", gi[0].clone(), go[0].clone())))
    module[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 5,))
    return log


@pytest.mark.parametrize("known", [False, True], ids=["first step", "later step"])
def test_hooks_see_what_they_see_in_a_plain_backward(known):
    mine, oracle = small(), small()
    store = WeightGradientStore(Stage(mine, 0))
    if known:  # a layer with a tensor hook is not deferred before it went through an I without
        split(mine, XS, ORDERS[0], store=store)
        mine.zero_grad()
    logs = told(mine), told(oracle)
    plain(oracle, XS)
    assert split(mine, XS, ORDERS[0], store=store)[1] == N * (1 + known)
    for log in logs:
        log.sort(key=lambda entry: entry[0])  # W comes later than I; each hook keeps its own order
    assert [entry[0] for entry in logs[0]] == [entry[0] for entry in logs[1]]
    for a, b in zip(*logs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a[1:], b[1:], strict=True)), a[0]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(mine.parameters(), oracle.parameters(), strict=True))


def every_kind(log: list[Any]) -> dict[str, Callable[[], Any]]:
    """Registers a hook of all modules of the process."""

    def note(module: nn.Module, *given: Any) -> None:
        log.append((type(module).__name__, [None if g is None else g.clone() for one in given for g in one]))

    return {
        "forward pre": lambda: hooks.register_module_forward_pre_hook(lambda module, given: (given[0] * 2,)),
        "forward": lambda: hooks.register_module_forward_hook(lambda module, given, output: output * 3),
        "full": lambda: hooks.register_module_full_backward_hook(note),
        "full pre": lambda: hooks.register_module_full_backward_pre_hook(lambda module, given: (given[0] * 5,)),
        "old": lambda: hooks.register_module_backward_hook(note),
    }


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("kind", ["forward pre", "forward", "full", "full pre", "old"])
def test_hooks_of_all_modules_see_what_they_see_in_a_plain_backward(kind):
    found, xs = [], [*XS[:2], rand(4, 5)]  # an old hook sees the operator, of a matrix that with the weights
    for run in (plain, lambda module, xs: split(module, xs, ORDERS[0])[0]):
        log: list[Any] = []
        model = small()
        handle = every_kind(log)[kind]()
        try:
            of_inputs = run(model, xs)
        finally:
            handle.remove()
            hooks._global_is_full_backward_hook = None  # which torch leaves
        found.append((of_inputs, [p.grad for p in model.parameters()], log))
    (inputs, weights, told), (their_inputs, their_weights, their_told) = found
    assert all(equal_bits(a, b) for a, b in zip(inputs, their_inputs, strict=True))
    assert equal_bits(weights, their_weights)
    assert [name for name, _ in told] == [name for name, _ in their_told]
    assert all(equal_bits(a, b) for (_, a), (_, b) in zip(told, their_told, strict=True))


def test_older_weights_get_the_gradients_of_microbatches_that_read_them():
    model = small()
    older = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def run(module: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, older, (x,))

    plain(model, XS, run)
    expected = [p.grad for p in older.values()]
    for parameter in older.values():
        parameter.grad = None
    assert split(model, XS, ORDERS[1], run)[1] == 2 * N
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, older.values(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_older_weights_are_let_go_behind_their_w():
    model = small()
    store = WeightGradientStore(Stage(model, 0))
    for k in range(2):  # no drop between them: a program without end
        older = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        alive = [weakref.ref(leaf) for leaf in older.values()]
        y = store.forward(k, torch.func.functional_call, (model, older, (rand(2, 5),)), {})
        store.backward(k, (get_gradient_edge(y),), (torch.ones_like(y),))
        store.backward_weight(k)
        assert all(leaf.grad is not None for leaf in older.values())
        del older, y
        gc.collect()
        assert not any(ref() is not None for ref in alive)


def test_an_object_that_accumulates_is_handed_what_w_made():
    class Sums:
        def __init__(self) -> None:
            self.found: dict[Tensor, list[Tensor]] = {}

        def accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
            self.found.setdefault(parameter, []).append(gradient.clone())

    model, oracle, sums = small(), small(), Sums()
    stage = Stage(model, 0, data_parallel=sums)  # type: ignore[arg-type]
    split(model, XS, ORDERS[0], store=WeightGradientStore(stage))
    plain(oracle, XS)
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert p.grad is None and len(sums.found[p]) == N
        assert torch.equal(sum(sums.found[p][1:], sums.found[p][0]), q.grad)


def test_the_gradient_of_a_gradient_is_refused():
    model, x = small(), rand(2, 5)
    store = WeightGradientStore(Stage(model, 7))
    with pytest.raises(ScheduleError, match="stage 7: a backward with create_graph"):
        store.forward(0, lambda: torch.autograd.grad(model(x).sum(), x, create_graph=True), (), {})
    store.drop()


def test_what_w_needs_may_not_change_before_it():
    model, x = small(), rand(2, 5)
    store = WeightGradientStore(Stage(model, 0))
    y = store.forward(0, model, (x,), {})
    store.backward(0, (get_gradient_edge(y),), (torch.ones_like(y),))
    with torch.no_grad():
        x.zero_()
    with pytest.raises(ScheduleError, match="was changed in place before W"):
        store.backward_weight(0)


def test_a_microbatch_whose_i_runs_twice_has_its_gradients_twice():
    mine, oracle = small(), small()
    store = WeightGradientStore(Stage(mine, 0))
    y = store.forward(0, mine, (XS[0],), {})

    def twice() -> None:
        y.sum().backward(retain_graph=True)
        y.sum().backward()

    store.forward(0, twice, (), {})
    store.backward_weight(0)
    store.backward_weight(0)  # nothing is left
    y = oracle(XS[0])
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    for p, q in zip(mine.parameters(), oracle.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad)


def test_a_closed_store_leaves_nothing_on_the_module():
    model = small()
    stores = [WeightGradientStore(Stage(model, 0)) for _ in range(2)]  # two runners on one module
    for store in stores:
        split(model, XS, ORDERS[1], store=store)
    assert all("forward" not in part.__dict__ for part in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    copies.append(torch.load(memory, weights_only=False))
    for other in copies:
        assert torch.equal(other(XS[0]), model(XS[0]))
    gone = weakref.ref(stores.pop()), weakref.ref(model)
    del store, stores, model
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_a_stage_that_fails_in_its_forward_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(4, 4))
    store = WeightGradientStore(Stage(model, 0))
    with pytest.raises(RuntimeError):
        split(model, XS, "F0", store=store)
    assert all("forward" not in part.__dict__ for part in model.modules())


@pytest.mark.slow
def test_compiled_parts_get_their_gradients_in_i():
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(5, 5), nn.Linear(5, 4)
            self.inside = torch.compile(self.function, backend="eager")

        def function(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inside(x))

    torch.manual_seed(3)
    whole = torch.compile(small(), backend="eager")
    attribute = small()
    attribute[0].compile(backend="eager")
    for model, deferred in ((whole, 0), (attribute, 1), (Part(), 1)):
        for _ in range(2):
            model.zero_grad()
            plain(model, XS)
            expected = [p.grad for p in model.parameters()]
            model.zero_grad()
            assert split(model, XS, ORDERS[0])[1] <= (deferred + 1) * N
            assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda g: g, "returned 1 gradients for 2"),
        (lambda g: (g.t(), g), "a gradient of shape"),
    ],
)
def test_a_wrong_weight_grad_is_told(made, words):
    weight, bias = nn.Parameter(torch.zeros(4, 5)), nn.Parameter(torch.zeros(4))
    y = defer_weight_grad((weight, bias), made, rand(3, 4) * 1)
    with pytest.raises(ScheduleError, match=words):
        y.sum().backward()


@pytest.mark.parametrize(
    "arguments", [("w", print, torch.zeros(1)), (torch.zeros(1), 3, torch.zeros(1)), ((), print, 1)]
)
def test_wrong_arguments_of_defer_weight_grad(arguments):
    with pytest.raises(ScheduleError, match="defer_weight_grad"):
        defer_weight_grad(*arguments)


def test_a_runner_defers():
    """I of the runner leaves the weights' gradients, W brings them."""
    program = zb_h1(2, 4)
    modules = [small(), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5))]
    oracle = copy.deepcopy(modules)
    x, y = torch.randn(8, 5), torch.randn(8, 5)
    runner = PipelineRunner(program, [Stage(m, s) for s, m in enumerate(modules)], None, nn.functional.mse_loss)
    runner.step(x, y)
    for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        (nn.functional.mse_loss(oracle[1](oracle[0](a)), b) / 4).backward()
    for mine, theirs in zip(modules, oracle, strict=True):
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_a_weight_that_lies_otherwise_is_not_deferred():
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 1), nn.Linear(1, 3))
    model[0].weight = nn.Parameter(torch.randn(5, 6).t())
    assert same_bits(model, [rand(1, 5, seed=k) for k in range(N)])[0] == N


class Swish(nn.Module):
    """Changes what layers gave it in place, as ``nn.ReLU(inplace=True)`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 6), nn.Embedding(3, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        hidden += self.places(torch.arange(3))
        hidden = self.up(hidden).relu_()
        return self.down(hidden).mul_(2).sigmoid_()


def test_what_a_layer_gave_may_be_changed_in_place():
    torch.manual_seed(3)
    ids = [torch.randint(7, (2, 3), generator=torch.Generator().manual_seed(k)) for k in range(N)]
    assert same_bits(Swish(), ids)[0] == 4 * N
