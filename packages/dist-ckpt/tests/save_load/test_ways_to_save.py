"""Odd tensors and odd optimizers through each way to save; what is saved changes behind the call."""

import copy

import pytest
import torch
from forked_worker import fork_workers
from torch import nn

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardingError, StorageError


def saved(state, folder):
    dist_ckpt.save(state, folder, group=None)
    return lambda: None


def compressed(state, folder):
    pytest.importorskip("zstandard", reason="the extra zstd is not installed")
    dist_ckpt.save(state, folder, group=None, compress="zstd")
    return lambda: None


def in_background(state, folder):
    return dist_ckpt.async_save(state, folder, group=None).wait


def lazily(state, folder):
    handle = dist_ckpt.async_save(state, folder, group=None, lazy=True)
    handle.fence()
    return handle.wait


WAYS = [saved, compressed, in_background, lazily]


@pytest.fixture(autouse=True)
def forked():
    fork_workers()


def tensors(size):
    ramp = torch.arange(1.0, size * size + 1).reshape(size, size)
    scales, zeros = torch.linspace(0.1, 1, size), torch.zeros(size, dtype=torch.long)
    return {
        "coo": torch.eye(size).to_sparse(),
        "csr": torch.eye(size).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(ramp, 0.1, 3, torch.qint8),
        "quantised by channel": torch.quantize_per_channel(ramp, scales, zeros, 0, torch.qint8),
        "jagged": torch.nested.nested_tensor([ramp[:2].clone(), ramp[2:].clone()], layout=torch.jagged),
        "nested": torch.nested.nested_tensor([ramp[:2].clone(), ramp[2:].clone()]),
        "conjugate": torch.complex(ramp, -ramp).conj(),
        "negative": torch.complex(ramp, -ramp).conj().imag,
        "strided": torch.cat([ramp, ramp], 1)[:, ::2],
        "transposed": ramp.clone().t(),
        "float8": ramp.to(torch.float8_e4m3fn),
        "parameter": nn.Parameter(ramp.clone(), requires_grad=False),
    }


def values_of(tensor):
    """Dense tensors with all that it holds, copied."""
    if tensor.is_nested:
        return [part.clone() for part in tensor.unbind()]
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.to_dense()
    return [
        dense.view(torch.uint8).clone() if dense.dtype.itemsize == 1 else dense.resolve_conj().resolve_neg().clone()
    ]


def change(tensor):
    inner = tensor.values() if tensor.layout is not torch.strided and not tensor.is_nested else tensor
    if tensor.layout is torch.sparse_coo:
        inner = tensor._values()
    inner.detach().zero_() if not tensor.is_quantized else tensor.copy_(torch.zeros(tensor.shape))


@pytest.mark.parametrize("size", [4, 200])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_each_kind_come_back_as_they_were_at_the_call(tmp_path, way, size):
    state = tensors(size)
    expected = {name: values_of(tensor) for name, tensor in state.items()}
    finish = way({"odd": state}, tmp_path / "c")
    for tensor in state.values():
        change(tensor)
    assert all(not all(map(torch.equal, values_of(state[name]), own)) for name, own in expected.items())
    finish()
    loaded = dist_ckpt.load({}, tmp_path / "c", group=None)["odd"]
    for name, own in expected.items():
        assert type(loaded[name]) is type(state[name]) and loaded[name].layout is state[name].layout, name
        found = values_of(loaded[name])
        assert [tuple(each.shape) for each in found] == [tuple(each.shape) for each in own], name
        assert all(map(torch.equal, found, own)), name


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 3))


class InBackward:
    """One optimizer for each weight, which steps as soon as the gradient is there."""

    def __init__(self, model):
        self.model = model
        self.optimizers = {name: torch.optim.AdamW([own], lr=0.01) for name, own in model.named_parameters()}
        for name, own in model.named_parameters():
            own.register_post_accumulate_grad_hook(lambda own, name=name: self.stepped(own, self.optimizers[name]))

    def stepped(self, own, optimizer):
        optimizer.step()
        own.grad = None

    def state(self):
        return {"model": self.model, "optimizers": self.optimizers}

    def train(self, batch):
        self.model(batch).square().mean().backward()


class Usual:
    def __init__(self, model, kind, **options):
        self.model, self.optimizer = model, kind(model.parameters(), lr=0.01, **options)

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, batch):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)


RUNS = {
    "fused AdamW": lambda: Usual(model_of(), torch.optim.AdamW, fused=True),
    "fused SGD": lambda: Usual(model_of(), torch.optim.SGD, momentum=0.9, fused=True),
    "fused Adagrad": lambda: Usual(model_of(), torch.optim.Adagrad, fused=True),
    "LBFGS": lambda: Usual(model_of(), torch.optim.LBFGS, max_iter=3, history_size=4),
    "in backward": lambda: InBackward(model_of()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", RUNS)
def test_training_goes_on_from_a_save_bit_by_bit(tmp_path, run, way):
    batches = torch.arange(240.0).sin().reshape(4, 10, 6)
    first, second = RUNS[run](), RUNS[run]()
    for batch in batches[:2]:
        first.train(batch)
    finish = way(first.state(), tmp_path / "c")
    for batch in batches[2:]:
        first.train(batch)
    finish()
    dist_ckpt.load(second.state(), tmp_path / "c", group=None)
    at_the_save = copy.deepcopy(second.model.state_dict())
    for batch in batches[2:]:
        second.train(batch)
    after = second.model.state_dict()
    for name, value in first.model.state_dict().items():
        assert torch.equal(after[name], value), name
    assert not torch.equal(at_the_save["3.weight"], after["3.weight"])


class Steps(list):
    """Of a user."""


def test_a_list_of_a_class_of_ones_own_is_refused_with_a_remedy_that_works(tmp_path):
    value = Steps([1, 2])
    with pytest.raises(ShardingError, match=r"save list\(value\), which comes back as a list"):
        dist_ckpt.save({"x": value}, tmp_path / "c", group=None)
    dist_ckpt.save({"x": list(value)}, tmp_path / "c", group=None)
    assert dist_ckpt.load({}, tmp_path / "c", group=None) == {"x": [1, 2]}


def test_errors_of_places_name_the_argument_and_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match=r"^since is 3; it is a str or a Path"):
        dist_ckpt.save({"x": 1}, tmp_path / "c", group=None, since=3)
    dist_ckpt.save({"x": 1}, tmp_path / "c", group=None)
    with pytest.raises(StorageError, match=r"is not empty \(.*\) and if_exists is 'error'; name a new folder"):
        dist_ckpt.save({"x": 1}, tmp_path / "c", group=None, if_exists="error")
