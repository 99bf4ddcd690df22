"""Weights written to or read in a unit's call by ways that torch tells nobody of, and states that hold less or more."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from fsdp_helpers import Block, batch, make_net, same
from torch import Tensor, nn

from sixfold.fsdp import BufferConfig, FsdpError, fully_shard, fully_shard_optimizer
from sixfold.fsdp.torch_state import StateDictOptions, set_model_state_dict

TURNS = BufferConfig(gathered_bytes="double")


class Teacher(nn.Module):
    """A unit that follows another one's weight in its own forward, as ``way`` writes it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.requires_grad_(False)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == ".data":
            self.line.weight.data.mul_(0.5)
        elif self.way == "no_grad":
            with torch.no_grad():
                self.line.weight.mul_(0.5)
        elif self.way == "detach":
            self.line.weight.detach().mul_(0.5)
        elif self.way == "reads":
            assert self.line.weight.data.isfinite().all(), "start values are"
        return self.line(x)


class Pupil(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.teacher = Teacher(way)

    def forward(self, x: Tensor) -> Tensor:
        y = self.teacher(x)
        for line in self.lines:
            x = line(x)
        return x + y


@pytest.mark.parametrize("units", [[Teacher], []], ids=["a unit", "the root"])
@pytest.mark.parametrize("way", [".data", "no_grad", "detach"])
def test_a_write_in_the_parameters_own_unit_raises_before_a_state_is_read(way, units):
    model = fully_shard(Pupil(way), fsdp_unit_modules=units, buffers=TURNS)
    with pytest.raises(FsdpError, match=r"teacher.line.weight: it was written to .*load_full_state_dict"):
        model(torch.ones(2, 4))
        model.full_state_dict()


def test_reading_data_in_the_parameters_own_unit_is_no_write():
    model = fully_shard(Pupil("reads"), fsdp_unit_modules=[Teacher], buffers=TURNS)
    model(torch.ones(2, 4)).sum().backward()
    model.full_state_dict()


def test_what_the_refusal_of_a_write_says_sets_the_weight():
    model = fully_shard(Pupil(".data"), fsdp_unit_modules=[Teacher], buffers=TURNS)
    name, value = "teacher.line.weight", torch.full((4, 4), 3.0)
    with pytest.raises(FsdpError, match=r"load_full_state_dict\(\{name: value\}, strict=False\)"):
        model(torch.ones(2, 4))
    before = model.full_state_dict()
    missing, unexpected = model.load_full_state_dict({name: value}, strict=False)
    after = model.full_state_dict()
    assert same(before, after) == [name] and torch.equal(after[name], value)
    assert set(missing) == before.keys() - {name} and unexpected == []


@pytest.mark.parametrize("gathered", ["double", "all"])
def test_a_part_of_the_root_called_by_itself_is_refused_at_every_moment(gathered):
    net = make_net()
    buffers = BufferConfig(gathered_bytes=gathered)
    model = fully_shard(net, fsdp_unit_modules=[Block], root_units=False, buffers=buffers)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
    hidden = torch.ones(2, 13)

    def refused() -> None:
        with pytest.raises(FsdpError, match=r"head.weight: linear\(\) reads .*model.entry\(child\)\(x\)"):
            net.head(hidden)

    refused()
    model(batch(0, 0, 0)).sum().backward()
    refused()
    optimizer.step()
    refused()
    with torch.no_grad():
        model(batch(0, 0, 0))
    refused()
    expected = nn.functional.linear(hidden, model.full_state_dict()["head.weight"])
    assert torch.equal(model.entry(net.head)(hidden), expected)


class Counted(nn.Module):
    """As TransformerEngine's layers: state that is neither a parameter nor a buffer."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"amax": [1.0, 2.0]}, torch.arange(5, dtype=torch.uint8), None])
def test_extra_state_is_saved_and_loaded_as_torch_does(extra):
    torch.manual_seed(0)
    saved = fully_shard(nn.Sequential(Counted(extra), Counted(7)), fsdp_unit_modules=[Counted]).full_state_dict()
    assert saved["1._extra_state"] == 7
    net, plain = (nn.Sequential(Counted("old"), Counted("old")) for _ in range(2))
    plain.load_state_dict(saved)
    model = fully_shard(net, fsdp_unit_modules=[Counted])
    assert model.load_full_state_dict(saved) == ([], [])
    for module in (net, plain):
        assert type(module[0].extra) is type(extra) and module[1].extra == 7
        assert torch.equal(module[0].extra, extra) if isinstance(extra, Tensor) else module[0].extra == extra


@pytest.mark.parametrize("form", ["a dict", "pairs", "torch_state"])
def test_a_state_that_is_not_strict_gives_what_torch_gives(form):
    torch.manual_seed(1)
    plain, net = make_net(), make_net()
    given = {"head.weight": torch.ones(17, 13), "nobody": torch.ones(2)}
    expected = plain.load_state_dict(given, strict=False)
    model = fully_shard(net, fsdp_unit_modules=[Block])
    if form == "torch_state":
        found = set_model_state_dict(model, given, options=StateDictOptions(strict=False))
    else:
        found = model.load_full_state_dict(given if form == "a dict" else given.items(), strict=False)
    assert set(found.missing_keys) == set(expected.missing_keys)
    assert found.unexpected_keys == expected.unexpected_keys == ["nobody"]
    assert same(plain.state_dict(), model.full_state_dict()) == []


def test_a_shape_is_refused_without_strict_too():
    model = fully_shard(make_net(), fsdp_unit_modules=[Block])
    with pytest.raises(FsdpError, match=r"unfit: head.weight has shape \(3,\)"):
        model.load_full_state_dict({"head.weight": torch.ones(3)}, strict=False)


HOLDS = {
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    ".data": lambda grad: grad.data,
    "a view": lambda grad: grad.view(-1)[1:],
}


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("hold", HOLDS)
def test_a_gradient_that_is_held_keeps_its_values_as_in_plain_torch(hold, strategy):
    net, plain = make_net(), make_net()
    model = fully_shard(net, fsdp_unit_modules=[Block], strategy=strategy, buffers=TURNS)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    held: list[list[Tensor]] = [[], []]
    for step in range(4):
        for call, own, stepper, kept in (
            (model, [main for _, main in model.main_parameters()], optimizer, held[0]),
            (plain, list(plain.parameters()), other, held[1]),
        ):
            for _ in range(2 if step == 2 else 1):  # also gradients that are added to
                call(batch(step, 0, 0)).square().mean().backward()
                if step % 2 == 0:
                    kept += [HOLDS[hold](one.grad) for one in own]
            stepper.step()
            stepper.zero_grad()
    ours, theirs = ({tuple(one.flatten().tolist()) for one in kept} for kept in held)
    assert len(held[0]) == len(held[1]) and ours == theirs
    assert same(plain.state_dict(), model.full_state_dict()) == []


def test_one_process_gathers_nothing_unless_it_is_told_how_much_and_refuses_what_more_ranks_refuse():
    def trained(**options: object) -> tuple[dict[str, object], dict[str, Tensor], object]:
        net = make_net()
        model = fully_shard(net, fsdp_unit_modules=[Block], **options)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)
        for step in range(2):
            for part in range(2):
                model(batch(step, part, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.report(), model.full_state_dict(), net

    usual = BufferConfig(
        fill_freed=False
    )  # under --fill-freed too: filling gathers in one process, to have what it frees
    (report, weights, net), (kept, same_weights, _) = (
        trained(buffers=usual),
        trained(strategy="no_shard", buffers=usual),
    )
    turns, other_weights, _ = trained(buffers=TURNS)
    assert same(weights, same_weights) == same(weights, other_weights) == []
    assert report["bytes"] == kept["bytes"] and report["strategy"] == "optim_grads_params"
    assert report["bytes"]["gather_arena"] == report["bytes"]["gather_source"] == 0 < turns["bytes"]["gather_arena"]
    with pytest.raises(FsdpError, match=r"head.weight: sum\(\) reads its values outside a call of its unit"):
        net.head.weight.sum()


def rows_from(p: Tensor, offset: int) -> Tensor:
    return torch.as_strided(p, (8,), (1,), storage_offset=offset)


class Strided(nn.Module):
    """Reads its weight through ``view(weight)``, behind another parameter of its unit."""

    def __init__(self, view=None, offset: int = 0) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(8))
        self.weight = nn.Parameter(torch.arange(64.0).view(8, 8))
        self.view = view
        self.offset = offset

    def read(self) -> Tensor:
        return self.view(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.read() + self.before


class StridedByFunction(Strided):
    def read(self) -> Tensor:
        return torch.as_strided(self.weight, (8,), (1,), self.offset)


class StridedByHelper(Strided):
    def read(self) -> Tensor:
        return rows_from(self.weight, self.offset)


class StridedByMethod(Strided):
    def read(self) -> Tensor:
        take = getattr(self.weight, "as" + "_strided")
        return take((8,), (1,), self.offset)


def strided_net(layer, strategy):
    net = nn.Sequential(nn.Linear(8, 8), layer)
    buffers = TURNS if strategy == "optim_grads_params" else BufferConfig()
    return fully_shard(net, fsdp_unit_modules=[nn.Linear, Strided], strategy=strategy, buffers=buffers)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("offset", [8, 0])
@pytest.mark.parametrize("kind", [StridedByFunction, StridedByHelper, StridedByMethod])
def test_an_offset_in_the_storage_of_a_weight_is_refused_where_it_would_read_another(kind, offset, strategy):
    model = strided_net(kind(offset=offset), strategy)
    with pytest.raises(FsdpError, match=r"1.weight: as_strided\(\) is given a storage_offset.*flatten\(\)\[offset:\]"):
        model(torch.zeros(2, 8))


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_what_the_refusal_of_an_offset_says_reads_that_weight(strategy):
    model = strided_net(Strided(lambda p: p.flatten()[8:].as_strided((8,), (2,))), strategy)
    with torch.no_grad():
        hidden = model.entry(model.module[0])(torch.zeros(2, 8))
    assert torch.equal(model(torch.zeros(2, 8)), hidden + torch.arange(8.0, 24.0, 2.0) + 1)


def test_striding_a_weight_without_an_offset_is_of_that_weight():
    model = strided_net(Strided(lambda p: p.as_strided((8,), (9,))), "optim_grads_params")
    with torch.no_grad():
        hidden = model.entry(model.module[0])(torch.zeros(2, 8))
    assert torch.equal(model(torch.zeros(2, 8)), hidden + torch.arange(0.0, 64.0, 9.0) + 1)


class Capped(nn.Embedding):
    """As the refusal of ``max_norm`` says: looks up a copy."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.weight.clone(), max_norm=self.max_norm)


TOKENS = torch.tensor([[0, 1, 2], [3, 1, 0]])


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_max_norm_of_a_table_is_named_where_its_write_is_refused(table, strategy):
    torch.manual_seed(0)
    net = nn.Sequential(table(6, 4, max_norm=0.5), nn.Linear(4, 4))
    model = fully_shard(net, fsdp_unit_modules=[table, nn.Linear], strategy=strategy)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
    with pytest.raises(FsdpError, match=r"0.weight: it was .* as Embedding(Bag)? does with max_norm=0.5.*renorm\(2, 0"):
        model(TOKENS).sum().backward()
        optimizer.step()


def test_what_the_refusal_of_max_norm_says_keeps_rows_within_it():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 4))
    plain = copy.deepcopy(net)
    net[0].max_norm = plain[0].max_norm = None
    model = fully_shard(net, fsdp_unit_modules=[nn.Embedding, nn.Linear], buffers=TURNS)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
    peer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for run, steps in ((model, optimizer), (plain, peer)):
            run(TOKENS).square().sum().backward()
            steps.step()
            steps.zero_grad()
        name, max_norm = "0.weight", 0.5
        model.load_full_state_dict({name: model.full_state_dict()[name].renorm(2, 0, max_norm)}, strict=False)
        with torch.no_grad():
            rows = plain[0].weight
            rows.mul_((max_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1.0))
    torch.testing.assert_close(model.full_state_dict()["0.weight"], plain[0].weight.detach())


def test_a_copy_looked_up_with_max_norm_has_the_outputs_of_torchs_table():
    torch.manual_seed(0)
    net = nn.Sequential(Capped(6, 4, max_norm=0.5), nn.Linear(4, 4))
    plain = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 4))
    plain.load_state_dict(net.state_dict())
    model = fully_shard(net, fsdp_unit_modules=[Capped, nn.Linear], buffers=TURNS)
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    model(TOKENS).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "write",
    [
        lambda net: nn.init.zeros_(net[0].weight),
        lambda net: net[0].reset_parameters(),
        lambda net: torch.add(net[0].bias, 1, out=net[0].bias),
        lambda net: net[0].weight.__imul__(2),
    ],
    ids=["init", "reset_parameters", "out", "imul"],
)
def test_a_write_between_calls_is_told_as_a_write_and_the_remedy_sets_it(write):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = fully_shard(net, fsdp_unit_modules=[nn.Linear], buffers=TURNS)
    with (
        pytest.raises(FsdpError, match=r"writes to it, .*copy into model.state_records\(\) and call model.refresh\(\)"),
        torch.no_grad(),
    ):
        write(net)
    for record in model.state_records():
        record.tensor.zero_()
    model.refresh()
    assert not model(torch.ones(2, 4)).any() and not any(w.any() for w in model.full_state_dict().values())


def bias_gelu(bias: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x + bias)


class Scripted(nn.Module):
    """Megatron's form: the bias of a linear is added outside it, by a scripted function."""

    def __init__(self, bias_gelu: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.bias_gelu = bias_gelu

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias_gelu(self.up.bias, x @ self.up.weight.t())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.usefixtures("as_sharded")
def test_a_scripted_function_reads_weights_of_the_unit_that_calls_it():
    states, scripted = [], torch.jit.script(bias_gelu)
    for wrapped in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*(Scripted(scripted) for _ in range(4)))
        optimizer, call = torch.optim.SGD(net.parameters(), lr=0.1), net
        if wrapped:
            call = fully_shard(net, process_group=None, fsdp_unit_modules=[Scripted], buffers=TURNS)
            fully_shard_optimizer(optimizer, call)
        for step in range(4):  # scripted functions specialise themselves in their first calls
            call(torch.full((2, 4), 0.5 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(call.full_state_dict() if wrapped else net.state_dict())
    assert same(*states) == []
