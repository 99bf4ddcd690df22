"""Plain tensors that not all ranks have, as stages of a pipeline: saved by who has them, loaded by any layout."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardingError

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
