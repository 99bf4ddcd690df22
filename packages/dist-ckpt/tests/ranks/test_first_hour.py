"""The usual ways to save, at 2 ranks, loaded at 1, 2 and 4: bit for bit, or an error that says what to do."""

import pytest
from first_hour_helpers import WAYS, Loaders, RankRng

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import PerRank, ShardingError

pytest.importorskip("numpy", reason="needs numpy, whose random state trainers save")


def save(rank, ranks, name, folder):
    way = WAYS[name](rank, ranks, 0, 2)
    dist_ckpt.save(way.state(), folder)
    return way.whole()


def load(rank, ranks, name, folder):
    way = WAYS[name](rank, ranks, 1, 1)
    way.restore(dist_ckpt.load(way.state(), folder))
    return way.whole()


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.slow
def test_a_usual_way_to_save_comes_back_bit_for_bit(tmp_path, name, ranks):
    expected, *others = run_ranks(save, 2, name, tmp_path / "c")
    assert all(other == expected for other in others)
    for found in run_ranks(load, ranks, name, tmp_path / "c"):
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == []


def of_each_rank(rank, ranks, kind, folder):
    """Refused as it is; as the error says, each rank gets its own back."""
    way = {"Loaders": Loaders, "RankRng": RankRng}[kind](rank, ranks, 0, 1)
    state, name = way.state(), "dataloader" if kind == "Loaders" else "rng"
    with pytest.raises(ShardingError) as told:
        dist_ckpt.save(state, folder)
    own = state[name]
    dist_ckpt.save({**state, name: PerRank(own)}, folder)
    loaded = dist_ckpt.load({**state, name: PerRank(None)}, folder)
    assert loaded[name] == own
    return str(told.value)


@pytest.mark.parametrize(("kind", "place"), [("Loaders", "dataloader.dp_rank_1.sample"), ("RankRng", "rng.python")])
def test_what_each_rank_has_for_itself_is_refused_with_a_remedy_that_works(tmp_path, kind, place):
    for told in run_ranks(of_each_rank, 2, kind, tmp_path / "c"):
        assert place in told
        assert "PerRank(value) keeps a value for each rank" in told
