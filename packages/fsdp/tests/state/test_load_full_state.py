"""load_full_state_dict, stream_full_state and full_state_dict in one process; ranks/test_streamed_ranks.py has ranks.

The oracle is torch's own load_state_dict on a plain module.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from fsdp_memory_helpers import peak_bytes
from torch import nn

from sixfold.fsdp import FsdpError, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer
from sixfold.fsdp.torch_state import get_model_state_dict


def other_state(**options):
    """Values that no fresh net has."""
    net = make_net(**options)
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.add_(0.25 + number)
    return net.state_dict()


def make(net=None, **options):
    return FullyShardedDataParallel(net or make_net(), fsdp_unit_modules=[Block], **options)


class Lazy(Mapping):
    """What an open file gives: names at once, a tensor when it is asked for."""

    def __init__(self, values):
        self.values_by_name = values
        self.read = []

    def __getitem__(self, name):
        self.read.append(name)
        return self.values_by_name[name].clone()

    def __iter__(self):
        return iter(self.values_by_name)

    def __len__(self):
        return len(self.values_by_name)


FORMS = {
    "dict": lambda values: values,
    "lazy mapping": Lazy,
    "pairs": lambda values: iter(values.items()),
    "pairs backwards": lambda values: reversed(values.items()),
}


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("form", FORMS)
def test_a_loaded_model_is_the_plain_one_with_the_same_state(form, strategy):
    plain, state = make_net(tied=True), other_state(tied=True)
    plain.load_state_dict(state)
    model = make(make_net(tied=True), strategy=strategy)
    model(batch(0, 0, 0))  # gathered copies of the old weights
    model.load_full_state_dict(FORMS[form](state))
    assert torch.equal(model(batch(0, 0, 0)), plain(batch(0, 0, 0)))
    assert same(plain.state_dict(), model.full_state_dict()) == []


def test_training_goes_on_from_loaded_weights_as_from_plain_ones():
    plain, net = make_net(), make_net()
    twin = make_adamw(plain.parameters())
    model = make(net, mixed_precision=MixedPrecision(param_dtype=None))
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    plain.load_state_dict(other_state())
    model.load_full_state_dict(other_state())
    for step in range(2):
        for one, steps in ((plain, twin), (model, optimizer)):
            loss_of(one(batch(step, 0, 0)), batch(step, 0, 0)).backward()
            steps.step()
            steps.zero_grad()
    assert same(plain.state_dict(), model.full_state_dict()) == []


def test_buffers_are_loaded_and_a_narrower_dtype_is_widened():
    plain, net = (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))
    plain(torch.randn(5, 3))
    state = {name: v.bfloat16() if v.is_floating_point() else v for name, v in plain.state_dict().items()}
    model = FullyShardedDataParallel(net)
    model.load_full_state_dict(state)
    found = model.full_state_dict()
    assert int(found["1.num_batches_tracked"]) == 1
    assert {name: v.dtype for name, v in found.items()} == {name: v.dtype for name, v in plain.state_dict().items()}
    assert same({name: v.to(found[name].dtype) for name, v in state.items()}, found) == []


def test_a_tied_tensor_may_come_under_one_of_its_names():
    for kept in ("embedding.weight", "head.weight"):
        model = make(make_net(tied=True))
        state = other_state(tied=True)
        gone = ({"embedding.weight", "head.weight"} - {kept}).pop()
        model.load_full_state_dict({name: value for name, value in state.items() if name != gone})
        assert same(state, model.full_state_dict()) == []


def without(name):
    return lambda state: {n: v for n, v in state.items() if n != name}


def with_(name, change):
    return lambda state: {**state, name: change(state.get(name))}


UNFIT = [
    (without("norm.weight"), "missing: norm.weight"),
    (with_("extra", lambda _: torch.zeros(2)), "unexpected: extra"),
    (with_("norm.bias", lambda v: v[:-1]), r"unfit: norm.bias has shape \(12,\) where \(13,\) is kept"),
    (with_("norm.bias", lambda v: v.double()), "norm.bias is torch.float64 where torch.float32 is kept"),
    (with_("norm.bias", lambda v: v.to(torch.float8_e4m3fn)), "norm.bias is torch.float8_e4m3fn where"),
    (with_("norm.bias", lambda v: v.long()), "norm.bias is torch.int64 where"),
    (with_("norm.bias", lambda v: v.to("meta")), "norm.bias is on the meta device"),
    (with_("norm.bias", lambda v: v.tolist()), "norm.bias is a list, no tensor"),
    (with_("head.weight", lambda v: v + 1), "embedding.weight and head.weight are one tensor here"),
]


@pytest.mark.parametrize(("change", "says"), UNFIT, ids=[says[:30] for _, says in UNFIT])
def test_what_does_not_fit_is_named_and_a_dict_loads_nothing_then(change, says):
    model = make(make_net(tied=True))
    before = model.full_state_dict()
    with pytest.raises(FsdpError, match=says) as caught:
        model.load_full_state_dict(change(other_state(tied=True)))
    if "one tensor" not in says:
        assert "nothing was loaded" in str(caught.value)
        assert same(before, model.full_state_dict()) == []


def test_all_that_is_wrong_with_a_dict_is_in_one_error():
    state = other_state()
    state["other.weight"] = state.pop("norm.weight")
    state["norm.bias"] = torch.zeros(2)
    with pytest.raises(FsdpError, match=r"unexpected: other.weight; missing: norm.weight; unfit: norm.bias has shape"):
        make().load_full_state_dict(state)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda pairs: pairs[:-1], "missing: head.weight. 18 of 19 tensors were loaded before.*load again"),
        (lambda pairs: [*pairs[:3], ("extra", pairs[0][1])], "unexpected: extra. 3 of 19 tensors"),
        (lambda pairs: [*pairs[:3], pairs[1]], r"\S+ came twice. 3 of 19"),
        (lambda pairs: (1 / 0 for _ in pairs), "its source raised ZeroDivisionError.*nothing was loaded"),
    ],
    ids=["too few", "unexpected", "twice", "broken source"],
)
def test_an_iterable_that_goes_wrong_says_how_much_of_it_was_loaded(change, says):
    model, state = make(), other_state()
    before = model.full_state_dict()
    with pytest.raises(FsdpError, match=says):
        model.load_full_state_dict(change(list(state.items())))
    found = model.full_state_dict()
    assert all(torch.equal(value, state[name]) or torch.equal(value, before[name]) for name, value in found.items())
    model.load_full_state_dict(state)  # and can be loaded again
    assert same(state, model.full_state_dict()) == []


def test_a_load_inside_a_call_and_a_source_of_nobody_are_refused():
    model = make()
    model.module.blocks[0].register_forward_hook(lambda *_: model.load_full_state_dict(other_state()))
    with pytest.raises(FsdpError, match="inside a forward"):
        model(batch(0, 0, 0))
    with pytest.raises(FsdpError, match="ranks \\[\\] of 1 give a state"):
        make().load_full_state_dict(None)


class Wide(nn.Module):
    """Six units of 1 MiB."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(6))


UNIT_BYTES = 512 * 512 * 4
SLACK_BYTES = 100_000


@pytest.mark.parametrize("form", ["lazy mapping", "pairs"])
def test_no_more_than_one_unit_is_in_memory_while_a_state_is_loaded(form):
    model = FullyShardedDataParallel(Wide(), fsdp_unit_modules=[nn.Linear])
    names = [f"blocks.{n}.weight" for n in range(6)]
    pairs = ((name, torch.full((512, 512), 1.5)) for name in names)
    source = pairs if form == "pairs" else LazyFull(names)
    assert UNIT_BYTES <= peak_bytes(lambda: model.load_full_state_dict(source)) <= UNIT_BYTES + SLACK_BYTES


class LazyFull(Lazy):
    def __init__(self, names):
        super().__init__(dict.fromkeys(names))

    def __getitem__(self, name):
        return torch.full((512, 512), 1.5)


def test_a_consumer_gets_every_tensor_of_the_state_dict_one_unit_at_a_time():
    model = FullyShardedDataParallel(make_net(tied=True), fsdp_unit_modules=[Block])
    found = {}
    model.stream_full_state(lambda name, value: found.__setitem__(name, value.clone()))
    expected = model.full_state_dict()
    assert same(expected, {name: found[name] for name in expected}) == [] and len(found) == len(expected)


def test_a_consumer_that_raises_raises():
    def consume(name, value):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make().stream_full_state(consume)


def test_full_state_dict_of_one_rank_and_another_device():
    model = make()
    assert {v.device.type for v in model.full_state_dict(rank=0, device="meta").values()} == {"meta"}
    with pytest.raises(FsdpError, match="rank is 1; this model has ranks 0 to 0"):
        model.full_state_dict(rank=1)


def test_an_entry_of_a_state_dict_hook_cannot_be_streamed_and_says_so():
    net = nn.Linear(2, 2)
    net.register_state_dict_post_hook(lambda module, state, prefix, local: state.update({"made": 1}))
    model = FullyShardedDataParallel(net)
    assert model.full_state_dict()["made"] == 1
    with pytest.raises(
        FsdpError, match="made of the module's state dict is no parameter, module buffer or extra state"
    ):
        model.load_full_state_dict(model.full_state_dict())


class Halved(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach() / 2


class Hooked(nn.Linear):
    """Changes its own state dict behind torch: ``post`` of a subclass."""

    def __init__(self, *shape):
        super().__init__(*shape)
        self.register_state_dict_post_hook(self.post)


class Doubled(Hooked):
    @staticmethod
    def post(module, state, prefix, local):
        state[prefix + "weight"] = state[prefix + "weight"] * 2


class Transposed(Hooked):
    @staticmethod
    def post(module, state, prefix, local):
        state[prefix + "weight_t"] = state[prefix + "weight"].t().contiguous()


def stepped_net(layer, **options):
    """A net after a step, and its wrapper; or a plain net."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(layer(4, 4), nn.ReLU()) for _ in range(3)))
    optimizer, model = torch.optim.SGD(net.parameters(), lr=0.5), net
    if options:
        model = FullyShardedDataParallel(net, process_group=None, fsdp_unit_modules=[layer], **options)
        fully_shard_optimizer(optimizer, model)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return model, net


@pytest.mark.parametrize("layer", [Halved, Doubled, Transposed])
def test_a_state_dict_that_is_made_out_of_weights_has_torchs_numbers_or_is_refused(layer, request):
    plain, _ = stepped_net(layer)
    whole, net = stepped_net(layer, strategy="no_shard")
    assert same(whole.full_state_dict(), plain.state_dict()) == []
    assert same(net.state_dict(), plain.state_dict()) == []
    request.getfixturevalue("as_sharded")
    sharded, net = stepped_net(layer, strategy="optim_grads_params")
    assert same(net.state_dict(), plain.state_dict()) == []
    text = r"^0\.0\.weight: .* reads its values .* makes an entry out of it"
    for save in (
        sharded.full_state_dict,
        lambda: sharded.stream_full_state(None),
        lambda: get_model_state_dict(sharded),
    ):
        with pytest.raises(FsdpError, match=text) as caught:
            save()
        assert caught.value.unit == "0.0"
    sharded(torch.ones(2, 4)).sum().backward()  # nothing has changed
