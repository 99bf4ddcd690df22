"""Loads into tied weights: two names of one memory, of a checkpoint where the two are equal or not."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, ShardedTensor, dcp

BOTH = r"m\.head\.weight: .* m\.embed\.weight .* two that differ"


class Net(torch.nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
        torch.nn.init.normal_(self.head.weight)
        if tie:
            self.head.weight = self.embed.weight


def shards(model):
    return {name: ShardedTensor.from_rank_offsets(f"m.{name}", value) for name, value in model.state_dict().items()}


FORMS = {"tensors": lambda model: model.state_dict(), "object": lambda model: model, "shards": shards}


@pytest.mark.parametrize("form", FORMS)
def test_tied_weights_take_equal_values_and_refuse_unlike_ones(tmp_path, form):
    describe = FORMS[form]
    tied, loose = Net(True), Net(False)
    dist_ckpt.save({"m": describe(tied)}, tmp_path / "tied")
    dist_ckpt.save({"m": describe(loose)}, tmp_path / "loose")
    model = Net(True)
    loaded = dist_ckpt.load({"m": describe(model)}, tmp_path / "tied")["m"]
    assert torch.equal(model.head.weight, tied.head.weight)
    if form != "object":
        assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr() == model.head.weight.data_ptr()
    with pytest.raises(MismatchError, match=BOTH):
        dist_ckpt.load({"m": describe(Net(True))}, tmp_path / "loose")
    untied = Net(False)  # what the error says to do
    dist_ckpt.load({"m": describe(untied)}, tmp_path / "loose")
    assert torch.equal(untied.embed.weight, loose.embed.weight)
    assert torch.equal(untied.head.weight, loose.head.weight)
    one = {"embed.weight": FORMS["shards" if form == "shards" else "tensors"](model := Net(True))["embed.weight"]}
    dist_ckpt.load({"m": one}, tmp_path / "loose", strict="raise_unexpected")
    assert torch.equal(model.head.weight, loose.embed.weight)


class Autoencoder(torch.nn.Module):
    """Its decoder has the encoder's weight, transposed, as such models are tied."""

    def __init__(self, tie):
        super().__init__()
        self.encode = torch.nn.Linear(5, 3, bias=False)
        self.decode = torch.nn.Linear(3, 5, bias=False)
        if tie:
            self.decode.weight = torch.nn.Parameter(self.encode.weight.data.t())


def test_transposed_tied_weights_take_equal_values_and_refuse_unlike_ones(tmp_path):
    tied, model = Autoencoder(True), Autoencoder(True)
    dist_ckpt.save({"m": tied}, tmp_path / "tied")
    dist_ckpt.load({"m": model}, tmp_path / "tied")
    assert torch.equal(model.decode.weight, tied.decode.weight)
    assert torch.equal(model.encode.weight, tied.encode.weight)
    dist_ckpt.save({"m": Autoencoder(False)}, tmp_path / "loose")
    with pytest.raises(MismatchError, match=r"m\.decode\.weight: .* m\.encode\.weight .* two that differ"):
        dist_ckpt.load({"m": model}, tmp_path / "loose")


def fsdp2(rank, ranks, folder, strategy):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    def made(seed, tie):
        torch.manual_seed(seed)
        return fully_shard(Net(tie), mesh=init_device_mesh("cpu", (ranks,)))

    tied = made(0, True)
    dist_ckpt.save({"m": made(0, False).state_dict()}, folder / "loose")
    dist_ckpt.save({"m": tied.state_dict()}, folder / "tied")
    plan = None
    if strategy:
        plan = FullyParallelLoadStrategyWrapper(
            dist_ckpt.serialization.get_default_load_sharded_strategy(folder / "tied")
        )
    model = made(1, True)
    loaded = dist_ckpt.load({"m": model.state_dict()}, folder / "tied", plan)["m"]
    same = [torch.equal(loaded[name].full_tensor(), tied.head.weight.full_tensor()) for name in loaded]
    held = torch.equal(model.head.weight.full_tensor(), tied.head.weight.full_tensor())
    with pytest.raises(MismatchError, match=BOTH):
        dist_ckpt.load({"m": made(1, True).state_dict()}, folder / "loose", plan)
    return [*same, held]


@pytest.mark.parametrize("strategy", [False, True])
def test_tied_weights_of_fsdp2_take_equal_values_and_refuse_unlike_ones(tmp_path, strategy):
    assert run_ranks(fsdp2, 2, tmp_path, strategy) == [[True] * 3] * 2


def test_weights_saved_whole_are_refused_where_they_are_loaded_into_tied_shards(tmp_path):
    loose, tied = Net(False), Net(True)
    dist_ckpt.save({"m": loose.state_dict()}, tmp_path / "loose")
    dist_ckpt.save({"m": tied.state_dict()}, tmp_path / "tied")
    dist_ckpt.load({"m": shards(model := Net(True))}, tmp_path / "tied")
    assert torch.equal(model.head.weight, tied.head.weight)
    with pytest.raises(MismatchError, match=BOTH):
        dist_ckpt.load({"m": shards(Net(True))}, tmp_path / "loose")


@pytest.mark.parametrize("size", [4, 3_000_000])  # large ones are read by several threads at a time
def test_the_door_takes_equal_values_into_one_tensor_and_refuses_unlike_ones(tmp_path, size):
    a = torch.arange(size, dtype=torch.float32)
    dcp.save({"m": {"embed.weight": a, "head.weight": a.clone()}}, checkpoint_id=tmp_path / "equal", no_dist=True)
    dcp.save({"m": {"embed.weight": a, "head.weight": a + 1}}, checkpoint_id=tmp_path / "loose", no_dist=True)
    one = torch.zeros(size)
    dcp.load({"m": {"embed.weight": one, "head.weight": one}}, checkpoint_id=tmp_path / "equal", no_dist=True)
    assert torch.equal(one, a)
    with pytest.raises(torch_dcp.api.CheckpointException) as told:
        dcp.load({"m": {"embed.weight": one, "head.weight": one}}, checkpoint_id=tmp_path / "loose", no_dist=True)
    (failure,) = (error for error, _ in told.value.failures.values())
    assert isinstance(failure, MismatchError)
    assert failure.args[0].startswith("m.head.weight: ")


def warm_up(steps):
    """As torch's compiled optimizers want it: the learning rate a tensor. Two schedulers that follow on each other."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], torch.tensor(0.1))
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[3])
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return schedule


@pytest.mark.parametrize("form", ["object", "dict"])
def test_rates_of_a_schedule_that_a_new_one_holds_as_one_tensor_come_back_each(tmp_path, form):
    saved, new = warm_up(5), warm_up(0)
    want = copy.deepcopy(saved.state_dict())
    dist_ckpt.save({"schedule": saved if form == "object" else saved.state_dict()}, tmp_path)
    assert new._last_lr[0] is new._schedulers[0]._last_lr[0]
    loaded = dist_ckpt.load({"schedule": new if form == "object" else new.state_dict()}, tmp_path)
    if form == "dict":
        new.load_state_dict(loaded["schedule"])
    assert new.state_dict() == want
