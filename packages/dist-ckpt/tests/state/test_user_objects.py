"""Objects whose state is not what it was at the save: wrappers, moments, extra state, layers; torch is the oracle."""

import copy
import io

import pytest
import torch
from torch import nn

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, ShardingError

LARGE = 200  # squared: more than the 64 KiB of small tensors that lie in common.pt too


def linear(seed, size=4):
    torch.manual_seed(seed)
    return nn.Linear(size, size)


class Around(nn.Module):
    """A module of a user's that calls what it wraps by the name that DDP gives it."""

    def __init__(self, seed):
        super().__init__()
        self.module, self.head = linear(seed), linear(seed + 1)

    def forward(self, x):
        return self.head(self.module(x))


class Kept:
    """A data loader, a metric: its state is a tree of tensors, another one at each moment."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = state_dict


class WithExtra(nn.Linear):
    def __init__(self, extra):
        super().__init__(3, 3)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def train(model, optimizer, size=4):
    optimizer.zero_grad()
    model(torch.ones(2, size)).square().sum().backward()
    optimizer.step()


def wrap_and_load(rank, ranks, folder):
    model = nn.parallel.DistributedDataParallel(Around(0))
    dist_ckpt.save({"model": model}, folder)
    other, plain = nn.parallel.DistributedDataParallel(Around(5)), Around(6)
    dist_ckpt.load({"model": other}, folder)
    dist_ckpt.load({"model": plain}, folder)
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(plain.state_dict(), model.module.state_dict())


def test_a_model_in_ddp_may_have_a_child_called_module(tmp_path):
    run_ranks(wrap_and_load, 1, tmp_path / "c")


def norm_of_ddp(rank, ranks, folder):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(linear(0), nn.BatchNorm1d(4)))
    model(torch.full((3, 4), rank + 1.0) * torch.arange(3.0)[:, None])
    with pytest.raises(ShardingError, match="Broadcast buffers of DDP") as told:
        dist_ckpt.save({"model": model}, folder)
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)
    dist_ckpt.save({"model": model}, folder)
    return str(told.value)


def test_buffers_of_ddp_that_differ_are_refused_and_the_remedy_works(tmp_path):
    first, second = run_ranks(norm_of_ddp, 2, tmp_path / "c")
    assert first == second
    assert "model.1.running_mean" in first


@pytest.mark.parametrize("steps", [0, 1])
def test_an_optimizer_goes_back_to_fewer_moments_as_torchs_does(steps, tmp_path):
    model = nn.Sequential(linear(0), linear(1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        train(model, optimizer)
    torch.save(optimizer.state_dict(), saved := io.BytesIO())
    dist_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    model[0].requires_grad_(True)
    train(model, optimizer)
    dist_ckpt.load({"model": model, "optimizer": optimizer}, tmp_path / "c")
    saved.seek(0)
    assert_equal(optimizer.state_dict(), torch.load(saved))


def test_lbfgs_goes_back_to_a_shorter_history(tmp_path):
    model = linear(0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    dist_ckpt.save({"optimizer": optimizer}, tmp_path / "c")
    for _ in range(3):
        optimizer.step(closure)
    assert len(optimizer.state_dict()["state"][0]["old_dirs"]) > len(saved["state"][0]["old_dirs"])
    dist_ckpt.load({"optimizer": optimizer}, tmp_path / "c")
    assert_equal(optimizer.state_dict(), saved)


SHAPES = {
    "longer": ({"left": torch.arange(9)}, {"left": torch.arange(3)}),
    "from nothing": ({"left": torch.arange(9)}, {"left": torch.empty(0, dtype=torch.int64)}),
    "a longer list": ({"rows": [torch.ones(2)]}, {"rows": [torch.zeros(2), torch.zeros(2)]}),
    "a shorter list": ({"rows": [torch.ones(2), torch.ones(3)]}, {"rows": [torch.zeros(2)]}),
    "a tensor alone": (torch.ones(5), torch.ones(2)),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_an_object_gets_what_was_saved_whatever_it_holds_now(kind, tmp_path):
    saved, now = copy.deepcopy(SHAPES[kind])
    dist_ckpt.save({"loader": Kept(saved)}, tmp_path / "c")
    loader = Kept(now)
    dist_ckpt.load({"loader": loader}, tmp_path / "c")
    assert_equal(loader.state, saved)


@pytest.mark.parametrize("now", [torch.empty(0), torch.zeros(2), None])
def test_extra_state_of_a_module_may_have_another_shape_and_weights_may_not(now, tmp_path):
    model = WithExtra(torch.arange(5.0))
    dist_ckpt.save({"model": model}, tmp_path / "c")
    other = WithExtra(now)
    dist_ckpt.load({"model": other}, tmp_path / "c")
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    with pytest.raises(MismatchError, match="asked for global shape"):
        dist_ckpt.load({"model": linear(0)}, tmp_path / "c")


def test_a_lenient_load_of_another_number_of_layers_leaves_the_others_as_they_are(tmp_path):
    three = nn.Sequential(linear(0), linear(1), linear(2))
    dist_ckpt.save({"model": three}, tmp_path / "three")
    dist_ckpt.save({"model": three[:2]}, tmp_path / "two")
    more, fewer = nn.Sequential(linear(3), linear(4), linear(5)), nn.Sequential(linear(6), linear(7))
    for folder, model in (("two", more), ("three", fewer)):
        with pytest.raises((MismatchError, RuntimeError), match=r"2\.weight"):
            dist_ckpt.load({"model": copy.deepcopy(model)}, tmp_path / folder)
        dist_ckpt.load({"model": model}, tmp_path / folder, strict="log_unexpected")
        assert_equal(model[:2].state_dict(), three[:2].state_dict())
    assert_equal(more[2].state_dict(), linear(5).state_dict())


def test_a_lazy_module_takes_its_shape_from_the_checkpoint(tmp_path):
    model = nn.Sequential(linear(0))
    dist_ckpt.save({"model": model}, tmp_path / "c")
    lazy = nn.Sequential(nn.LazyLinear(4))
    dist_ckpt.load({"model": lazy}, tmp_path / "c")
    assert_equal(lazy.state_dict(), model.state_dict())


def beside_shards(rank, ranks, folder):
    """Large plain state of an optimizer, and an object that begins empty, below a key with shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def made(seed):
        model = fully_shard(linear(seed), mesh=init_device_mesh("cpu", (ranks,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made(0)
    train(model, optimizer)
    for state in optimizer.state.values():
        state["factors"] = [torch.rand(LARGE, LARGE, generator=torch.Generator().manual_seed(1))]
    loader = Kept({"rows": torch.ones(LARGE, LARGE)})
    dist_ckpt.save({"train": {"model": model, "optimizer": optimizer, "loader": loader}}, folder)
    other, new = made(1)
    empty = Kept({})
    dist_ckpt.load({"train": {"model": other, "optimizer": new, "loader": empty}}, folder)
    assert_equal(empty.state, loader.state)
    found, expected = new.state_dict()["state"], optimizer.state_dict()["state"]
    for number in expected:
        assert_equal(found[number]["factors"], expected[number]["factors"])
        assert_equal(found[number]["exp_avg"].full_tensor(), expected[number]["exp_avg"].full_tensor())


def test_objects_get_all_that_is_stored_of_them_beside_shards_too(tmp_path):
    run_ranks(beside_shards, 1, tmp_path / "c")


class Mock:
    """Takes any call, as a mock does."""

    def __getattr__(self, name):
        return lambda *given, **named: None


class Late:
    """A data loader that has not begun."""

    def state_dict(self):
        return None

    def load_state_dict(self, state):
        self.got = state


class Anything:
    """No dict, with names of its own."""

    def __getattr__(self, name):
        raise KeyError(name)


@pytest.mark.parametrize("kind", [Anything, Mock])
@pytest.mark.parametrize("wrap", [lambda node: node, lambda node: (node,), lambda node: [{"inside": node}]])
def test_an_object_that_answers_to_any_name_is_refused_with_its_path(kind, wrap, tmp_path):
    for save in (dist_ckpt.save, lambda *given: dist_ckpt.async_save(*given).wait()):
        with pytest.raises(ShardingError, match=rf"config.* (is|holds) a .*{kind.__name__}"):
            save({"config": wrap(kind()), "weight": torch.ones(2)}, tmp_path / "c")
    if kind is Anything:
        dist_ckpt.save({"weight": torch.ones(2)}, tmp_path / "d")
        loaded = dist_ckpt.load({"config": wrap(kind()), "weight": torch.zeros(2)}, tmp_path / "d")
        assert loaded["weight"].tolist() == [1, 1]


def test_a_mock_loses_nothing_without_a_word_and_a_loader_that_has_not_begun_is_none(tmp_path):
    for wrap in (lambda node: node, dist_ckpt.PerRank):
        with pytest.raises(ShardingError, match=r"config is a \S*Mock, which answers .* would be lost. Save what it"):
            dist_ckpt.save({"config": wrap(Mock()), "weight": torch.ones(2)}, tmp_path / "c")
    dist_ckpt.save({"loader": Late(), "weight": torch.ones(2)}, tmp_path / "c")
    loader = Late()
    dist_ckpt.load({"loader": loader, "weight": torch.ones(2)}, tmp_path / "c")
    assert loader.got is None
