"""Loads that once passed over what was asked for: values of ranks, objects without memory; and the words of others."""

import pytest
import torch
from torch import nn

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, PerRank, ShardedObject, ShardingError, hugging_face


def trained():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("asked", [None, {}, {"at": 0}, [1]])
def test_a_value_of_each_rank_that_is_asked_for_as_a_common_one_is_an_error_with_what_to_ask(tmp_path, asked):
    dist_ckpt.save({"own": PerRank({"at": 3}), "weight": torch.ones(2)}, tmp_path / "c", group=None)
    with pytest.raises(MismatchError, match=r"own: asked for as a common value, .*\(1,\).*; ask for it as PerRank"):
        dist_ckpt.load({"own": asked, "weight": torch.ones(2)}, tmp_path / "c", group=None)
    assert dist_ckpt.load({"own": PerRank(asked)}, tmp_path / "c", group=None)["own"] == {"at": 3}
    assert "own" not in dist_ckpt.load({"weight": torch.zeros(2)}, tmp_path / "c", group=None), "it was not asked for"


def test_a_record_of_that_key_elsewhere_is_asking_for_it(tmp_path):
    dist_ckpt.save({"a": ShardedObject("own", 3, (1,), (0,))}, tmp_path / "c", group=None)
    asked = {"own": {"rate": 0.5}, "a": ShardedObject("own", None, (1,), (0,))}
    assert dist_ckpt.load(asked, tmp_path / "c", group=None)["a"] == 3


def test_an_optimizer_or_a_module_without_memory_is_refused_by_its_whole_name(tmp_path):
    model, optimizer = trained()
    dist_ckpt.save({"nets": {"model": model}, "optimizer": optimizer}, tmp_path / "c", group=None)
    empty, fresh = on_meta()
    for asked, name in (
        ({"nets": {"model": empty}}, r"nets\.model\.0\.weight"),
        ({"optimizer": fresh}, r"optimizer\."),
    ):
        with pytest.raises(ShardingError, match=rf"{name}.*: data is on the meta device .*; give it memory first"):
            dist_ckpt.load(asked, tmp_path / "c", group=None)
    with pytest.raises(ShardingError, match=r"^model\.0\.weight: data is on the meta device .*; give it memory first"):
        dist_ckpt.save({"model": empty}, tmp_path / "d", group=None)


def test_an_optimizer_that_made_no_step_may_stand_on_the_meta_device(tmp_path):
    model, _ = trained()
    dist_ckpt.save({"optimizer": torch.optim.AdamW(model.parameters(), lr=0.25)}, tmp_path / "c", group=None)
    _, fresh = on_meta()
    dist_ckpt.load({"optimizer": fresh}, tmp_path / "c", group=None)
    assert fresh.param_groups[0]["lr"] == 0.25 and not fresh.state


def test_another_shape_of_a_module_names_no_option_of_records(tmp_path):
    pytest.importorskip("safetensors")
    hugging_face.export(nn.Linear(3, 2), tmp_path / "c", group=None)
    with pytest.raises(MismatchError) as error:
        hugging_face.load(nn.Linear(3, 4), tmp_path / "c", group=None)
    assert "weight: asked for global shape (4, 3), stored is (2, 3); ask for the stored shape" in str(error.value)
    assert "allow_shape_mismatch" not in str(error.value)
