"""Records of megatron-core's own classes, as its models give them, are saved and loaded like ours."""

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardingError

peer = pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is the oracle of these tests")
mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping", reason="it has the records")


def fused(key, data, kinds):
    """A record of a weight that is stored as its two halves."""

    def build(key, data, replica_id, flattened_range):
        halves = data.chunk(2)
        return {
            name: kinds.ShardedTensor.from_rank_offsets(f"{key}.{name}", halves[at]) for at, name in enumerate("ab")
        }

    return kinds.ShardedTensorFactory(key, data, build, lambda parts: torch.cat([parts["a"], parts["b"]]))


def state(kinds, start):
    """The same state in records of one of the two packages, as one rank of one has it."""
    rows = torch.arange(12.0).reshape(4, 3) + start
    return {
        "model": {
            "rows": [
                kinds.ShardedTensor.from_rank_offsets("rows", rows[at : at + 2], (0, at // 2, 2)) for at in (0, 2)
            ],
            "fused": fused("fused", torch.arange(4.0) + start, kinds),
            "extra": kinds.ShardedObject("extra", [start, "x"], (1,), (0,)),
        },
        "own": kinds.LocalNonpersistentObject(start),
    }


def values(loaded):
    model = loaded["model"]
    return [part.tolist() for part in model["rows"]], model["fused"].tolist(), model["extra"], loaded["own"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("saves", ["records of theirs", "records of ours"])
@pytest.mark.parametrize("loads", ["records of theirs", "records of ours"])
def test_records_of_either_package_are_saved_and_loaded(tmp_path, saves, loads, background):
    kinds = {"records of theirs": mapping, "records of ours": dist_ckpt}
    given = state(kinds[saves], 5)
    if background:
        dist_ckpt.async_save(given, tmp_path / "c").wait()
    else:
        dist_ckpt.save(given, tmp_path / "c")
    assert [type(record) for record in given["model"]["rows"]] == [kinds[saves].ShardedTensor] * 2
    asked = state(kinds[loads], 70)
    loaded = dist_ckpt.load(asked, tmp_path / "c")
    rows = [[[5.0, 6.0, 7.0], [8.0, 9.0, 10.0]], [[11.0, 12.0, 13.0], [14.0, 15.0, 16.0]]]
    assert values(loaded) == (rows, [5.0, 6.0, 7.0, 8.0], [5, "x"], 70)
    assert [record.data.tolist() for record in asked["model"]["rows"]] == rows


def test_a_record_of_theirs_that_no_load_would_find_is_refused(tmp_path):
    record = mapping.ShardedTensor.from_rank_offsets("w", torch.ones(3))
    with pytest.raises(ShardingError, match="model is a tuple that holds a ShardedTensor"):
        dist_ckpt.save({"model": (record,)}, tmp_path / "c")
