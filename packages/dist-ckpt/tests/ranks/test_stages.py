"""Plain tensors that not all ranks have, as stages of a pipeline: saved by who has them, loaded by any layout."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, ShardedTensor, ShardingError, optimizers
from sixfold.dist_ckpt.state import tree

LAYERS = 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(LAYERS)))


def stage(rank, ranks, fill=None):
    """The layers of one rank under their names in the whole model, and a tensor that all ranks have."""
    own = {
        name: value.clone()
        for name, value in model().state_dict().items()
        if int(name.split(".")[0]) * ranks // LAYERS == rank
    }
    state = {"model": own, "mean": torch.full((3,), 5.0), "step": 7}
    if fill is not None:
        for value in [*own.values(), state["mean"]]:
            value.fill_(fill)
    return state


def save_stages(rank, ranks, folder):
    dist_ckpt.save(stage(rank, ranks), folder)


def load_stages(rank, ranks, folder):
    asked = stage(rank, ranks, fill=-1.0)
    loaded = dist_ckpt.load(asked, folder)
    assert loaded["step"] == 7
    for name, value in stage(rank, ranks)["model"].items():
        assert torch.equal(asked["model"][name], value), name
    assert asked["mean"].tolist() == [5.0] * 3


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_stages_are_saved_by_who_has_them_and_loaded_by_another_number_of_ranks(ranks, tmp_path):
    run_ranks(save_stages, 2, tmp_path / "c")
    run_ranks(load_stages, ranks, tmp_path / "c")
    theirs = {"model": {name: torch.zeros_like(value) for name, value in model().state_dict().items()}}
    torch_dcp.load(theirs, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(theirs["model"][name], value) for name, value in model().state_dict().items())


def save_rank(rank, ranks, folder, states):
    try:
        dist_ckpt.save(states[rank], folder)
    except ShardingError as error:
        return str(error)
    return None


@pytest.mark.parametrize("first", [0, 1])
def test_a_tensor_that_one_rank_has_is_saved_once(first, tmp_path):
    states = [{"same": 1}, {"same": 1}]
    states[first]["alone"] = torch.arange(3.0)
    assert run_ranks(save_rank, 2, tmp_path / "c", states) == [None, None]
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["alone"].tolist() == [0, 1, 2]


OF_STAGES = [
    {"model": {"0.w": torch.zeros(2)}, "rows": [torch.zeros(1)], "first": {"a": torch.ones(1)}},
    {"model": OrderedDict({"1.w": torch.ones(2)}), "rows": [torch.zeros(1), torch.ones(30_000)]},
    {"rows": [torch.zeros(1)], "last": [[torch.full((3,), 2.0)]], 7: {"a.b": torch.ones(4)}},
]
WHOLE = {
    "model": {"0.w": torch.zeros(2), "1.w": torch.ones(2)},
    "rows": [torch.zeros(1), torch.ones(30_000)],
    "first": {"a": torch.ones(1)},
    "last": [[torch.full((3,), 2.0)]],
    7: {"a.b": torch.ones(4)},
}


def save_and_load_in_part(rank, ranks, folder, states):
    dist_ckpt.save(states[rank], folder)
    asked = {}, {"model": {}}, {"model": {"0.w": torch.empty(2)}, "rows": []}, states[rank]
    return [flat(dist_ckpt.load(each, folder)) for each in asked]


def flat(state):
    """Leaves by path, comparable."""
    return {path: getattr(leaf, "tolist", lambda leaf=leaf: leaf)() for path, leaf in tree.leaves(state)}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_what_ranks_have_alone_is_returned_whole_where_it_stood(order, tmp_path):
    found = run_ranks(save_and_load_in_part, 3, tmp_path / "c", [OF_STAGES[at] for at in order])
    for loaded in [part for parts in found for part in parts]:
        assert loaded == flat(WHOLE)
    assert flat(dist_ckpt.load({}, tmp_path / "c")) == flat(WHOLE)
    names = {"model.0.w", "model.1.w", "rows.0", "rows.1", "first.a", "last.0.0", "7.a.b"}
    assert dist_ckpt.load_plain_tensors(tmp_path / "c").keys() == names


def test_a_tensor_below_what_is_a_number_on_the_first_rank_is_an_error_on_all(tmp_path):
    texts = run_ranks(save_rank, 2, tmp_path / "c", [{"model": None}, {"model": {"w": torch.ones(2)}}])
    assert len(set(texts)) == 1
    assert "model: rank 0 has a NoneType there, and other ranks have tensors below it" in texts[0]


def test_a_full_state_dict_of_the_first_rank_says_which_option_to_leave_out(tmp_path):
    states = [{"model": {"w": torch.ones(2)}, "step": 1}, {"model": {}, "step": 1}]
    texts = run_ranks(save_rank, 2, tmp_path / "c", states)
    assert len(set(texts)) == 1 and "model: ranks [1] hold it, ranks [0] do not have it" in texts[0]
    assert "Rank 0 has this dict and others an empty one, as torch's full_state_dict=True" in texts[0]
    others = run_ranks(save_rank, 2, tmp_path / "c", [{"step": 1}, {"model": {}, "step": 1}])
    assert "full_state_dict" not in others[0]


def save_uneven(rank, ranks, folder):
    """Three rows and five; the remedy of the error saves them."""
    mesh, rows = init_device_mesh("cpu", (2,)), torch.arange(8.0)[slice(0, 3) if rank == 0 else slice(3, 8)]
    uneven = DTensor.from_local(rows, mesh, [Shard(0)], shape=(8,), stride=(1,), run_check=False)
    with pytest.raises(ShardingError) as error:
        dist_ckpt.save({"x": uneven}, folder)
    record = ShardedTensor("x", rows, rows.dtype, tuple(rows.shape), (8,), (3 * rank,), None)
    dist_ckpt.save({"x": record}, folder)
    return str(error.value)


def test_uneven_shards_of_one_mesh_axis_are_an_error_whose_remedy_works(tmp_path):
    texts = run_ranks(save_uneven, 2, tmp_path / "c")
    assert all("Describe others by ShardedTensor, whose global_offset says where each begins" in text for text in texts)
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["x"].tolist() == [*range(8)]


def save_by_copies(rank, ranks, folder):
    """What is compared is a copy, as megatron-core's own function makes it."""
    state = {"same": torch.ones(2)} | ({"alone": torch.arange(3.0)} if rank else {})
    with pytest.raises(ShardingError, match=r"alone: ranks \[1\] hold it, ranks \[0\] do not have it"):
        dist_ckpt.save(state, folder, preprocess_common_before_consistancy_check=copy.deepcopy)


def test_a_tensor_of_one_rank_is_not_lost_where_copies_are_compared(tmp_path):
    run_ranks(save_by_copies, 2, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_tensors_of_one_name_that_differ_are_an_error_on_all(tmp_path):
    three = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}, {"other": torch.zeros(1)}]
    texts = run_ranks(save_rank, 3, tmp_path / "c", three)
    assert len(set(texts)) == 1
    assert "w: ranks [0], [1] hold different values, ranks [2] do not have it" in texts[0]
    assert not (tmp_path / "c").exists()


def test_two_tensors_of_one_name_that_not_all_ranks_have_are_an_error_on_all(tmp_path):
    alike = [{"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, {"c": torch.zeros(1)}]
    texts = run_ranks(save_rank, 2, tmp_path / "c", alike)
    assert texts[0] == texts[1]
    assert "a.b: two tensors have this name, and not all ranks have them" in texts[0]


def test_what_is_no_tensor_and_the_first_rank_lacks_stays_an_error(tmp_path):
    texts = run_ranks(save_rank, 2, tmp_path / "c", [{"w": torch.zeros(2)}, {"w": torch.zeros(2), "n": 1}])
    assert all("n: ranks [1] hold it, ranks [0] do not have it" in text for text in texts)


def test_a_module_that_lost_a_layer_is_an_error_before_its_weights_change_however_it_is_sharded(tmp_path):
    texts = run_ranks(load_with_fewer_layers, 2, tmp_path)
    assert texts[0] == texts[1]
    assert len({*texts[0]}) == 1
    assert "model.3.bias, model.3.weight: in the checkpoint, asked for by no rank" in texts[0][0]


def load_with_fewer_layers(rank, ranks, folder):
    """The errors of plain and sharded modules; the remedy of each loads the rest."""
    texts = []
    for wrap in (lambda module: module, sharded):
        dist_ckpt.save({"model": wrap(model())}, folder / wrap.__name__)
        fewer = wrap(zeroed(model()[: LAYERS - 1]))
        with pytest.raises(MismatchError) as raised:
            dist_ckpt.load({"model": fewer}, folder / wrap.__name__)
        texts.append(str(raised.value))
        assert not any(whole(value).any() for value in fewer.state_dict().values())
        assert "strict='raise_unexpected'" in texts[-1]
        dist_ckpt.load({"model": fewer}, folder / wrap.__name__, strict="raise_unexpected")
        assert_layers(fewer)
    return texts


def sharded(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def sharded_alone(module):
    """A stage of its own: other ranks hold other layers."""
    return fully_shard(
        module, mesh=init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pp", "dp"))["dp"]
    )


def zeroed(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_layers(module):
    expected = model().state_dict()
    assert all(torch.equal(whole(value), expected[name]) for name, value in module.state_dict().items())


class Extra(nn.Linear):
    """A layer with state that is no tensor."""

    scale = 0

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def stage_module(layers, size=6):
    """A module with some layers of the whole model, under their names in it."""
    torch.manual_seed(0)
    every, found = [nn.Linear(size, size) for _ in range(LAYERS)], nn.Module()
    for at in layers:
        found.add_module(str(at), every[at])
    return found


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_unexpected", "raise_all", "log_all"])
@pytest.mark.parametrize("size", [6, 200])  # its weights are small tensors of common.pt, or are not
def test_modules_of_stages_load_into_other_stages_sharded_or_not(size, strict, tmp_path):
    assert all(run_ranks(load_stage_modules, 2, tmp_path, size, strict))


def load_stage_modules(rank, ranks, folder, size, strict):
    wraps = {"plain": lambda module: module, "sharded": sharded_alone}
    same, other = ([0, 1], [2, 3])[rank], ([0], [1, 2, 3])[rank]
    expected = {name: value.clone() for name, value in stage_module(range(LAYERS), size).state_dict().items()}
    for before, wrap in wraps.items():
        dist_ckpt.save({"model": wrap(stage_module(same, size)), "step": 7}, folder / before)
        for after in wraps.values():
            for layers in (same, other):
                found = after(zeroed(stage_module(layers, size)))
                loaded = dist_ckpt.load({"model": found}, folder / before, strict=strict)
                assert loaded["step"] == 7
                assert len(found.state_dict()) == 2 * len(layers)
                for name, value in found.state_dict().items():
                    assert torch.equal(whole(value), expected[name]), name
    return True


def test_extra_state_of_a_layer_that_is_gone_is_an_error_and_a_lacking_one_too(tmp_path):
    with_extra, without = nn.Sequential(nn.Linear(2, 2), Extra(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    dist_ckpt.save({"model": with_extra}, tmp_path / "with")
    dist_ckpt.save({"model": without}, tmp_path / "without")
    with pytest.raises(MismatchError, match=r"model\.1\._extra_state: in the checkpoint, asked for by no rank"):
        dist_ckpt.load({"model": without}, tmp_path / "with")
    with pytest.raises(MismatchError, match=r"model\.1\._extra_state: asked for, not in the checkpoint"):
        dist_ckpt.load({"model": with_extra}, tmp_path / "without")
    dist_ckpt.load({"model": without}, tmp_path / "with", strict="raise_unexpected")
    assert torch.equal(without[1].weight, with_extra[1].weight)


class History:
    """Keeps a list of losses, of any length."""

    def __init__(self, count):
        self.losses = torch.arange(float(count))

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def load_histories(rank, ranks, folder):
    beside = {"alone": dict, "fsdp2": lambda: {"model": sharded(model())}, "plain": lambda: {"model": model()}}
    for name, others in beside.items():
        for saved, own in ((50, 1), (2, 50), (50_000, 3), (3, 50_000)):
            place = folder / f"{name}-{saved}"
            dist_ckpt.save(others() | {"history": History(saved)}, place)
            found = History(own)
            dist_ckpt.load(others() | {"history": found}, place)
            assert found.losses.tolist() == list(range(saved)), (name, saved, own)
    return True


def test_an_object_gets_its_tensors_in_the_shape_that_was_saved_on_all_ranks(tmp_path):
    assert all(run_ranks(load_histories, 2, tmp_path))


def own_layers(rank, ranks):
    """Layers of a stage under their names in the whole model, and an optimizer of its own after a step."""
    layers = nn.ModuleDict(
        {str(at): nn.Linear(4, 4) for at in range(LAYERS * rank // ranks, LAYERS * (rank + 1) // ranks)}
    )
    for name, parameter in layers.named_parameters():
        nn.init.constant_(parameter, float(name[0]))
        parameter.grad = torch.full_like(parameter, float(name[0]) + 1)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    optimizer.step()
    return layers, optimizer


def records_of(layers, optimizer):
    """What the error of such a save says to make."""
    model = {
        name: ShardedTensor.from_rank_offsets(name, own) for name, own in layers.state_dict(keep_vars=True).items()
    }
    state = optimizer.state_dict()
    records = optimizers.get_param_id_to_sharded_param_map(model, layers.parameters())
    optimizers.optim_state_to_sharding_state(state, records, exclude_keys=["step"])
    return {"model": model, "optimizer": state, "step": 1}


def save_optimizers_of_stages(rank, ranks, folder):
    layers, optimizer = own_layers(rank, ranks)
    with pytest.raises(ShardingError) as told:
        dist_ckpt.save({"model": layers, "optimizer": optimizer}, folder)
    dist_ckpt.save(records_of(layers, optimizer), folder)
    return str(told.value), {name: optimizer.state[own]["exp_avg"] for name, own in layers.named_parameters()}


def test_optimizers_of_stages_are_an_error_whose_remedy_works(tmp_path):
    told, moments = zip(*run_ranks(save_optimizers_of_stages, 2, tmp_path / "c"), strict=True)
    assert all("optim_state_to_sharding_state of sixfold.dist_ckpt.optimizers" in text for text in told)
    layers, optimizer = own_layers(0, 1)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    dist_ckpt.load(records_of(layers, optimizer), tmp_path / "c")
    held = {name: optimizer.state[own]["exp_avg"] for name, own in layers.named_parameters()}
    assert len(held) == 2 * LAYERS == sum(map(len, moments))
    assert all(torch.equal(held[name], value) for own in moments for name, value in own.items())


def test_other_values_that_differ_are_not_told_of_optimizers(tmp_path):
    told = run_ranks(save_rank, 2, tmp_path / "c", [{"step": 0, "state": [1]}, {"step": 1, "state": [2]}])
    assert all("differ between ranks" in text and "optimizer" not in text for text in told)


def trains(rank, case):
    """A stage of two layers, and an optimizer after a step; which layers are frozen differs between the ranks."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for at, layer in enumerate(layers):
        layer.requires_grad_({"others": at == rank, "none": rank == 1}[case])
    optimizer = torch.optim.AdamW(layers.parameters())
    out = layers(torch.ones(1, 3)).sum()
    if out.requires_grad:
        out.backward()
        optimizer.step()
    return optimizer.state_dict()


def save_unlike_optimizers(rank, ranks, folder):
    texts = []
    for case in ("others", "none"):
        for state in ({"parts": [trains(rank, case)]}, trains(rank, case), {"parts": {"o": trains(rank, case)}}):
            with pytest.raises(ShardingError) as told:
                dist_ckpt.save(state, folder / "c")
            texts.append(str(told.value))
    return texts


def test_optimizers_of_stages_that_train_other_parameters_are_refused_under_one_name(tmp_path):
    first, second = run_ranks(save_unlike_optimizers, 2, tmp_path)
    assert first == second
    for text in first:
        assert "state[2].exp_avg: ranks [1] hold it, ranks [0] do not have it" in text
        assert "optim_state_to_sharding_state" in text
    assert not (tmp_path / "c").exists()


def save_one_optimizer(rank, ranks, folder):
    """One rank alone has it; what it trains is whole."""
    dist_ckpt.save({"model": {f"{rank}.w": torch.ones(2)}} | ({} if rank else {"o": trains(1, "others")}), folder)
    return sorted(dist_ckpt.load({}, folder)["o"]["state"])


def test_an_optimizer_that_the_first_rank_alone_has_is_saved(tmp_path):
    assert run_ranks(save_one_optimizer, 2, tmp_path / "c") == [[2, 3]] * 2
