"""A step's positions are dealt to ranks so that none is locked to one dataset, and old states go on in turn."""

import numpy as np
import pytest
from blending_helpers import blend, naive_key, naive_permute, numbered

from sixfold.blending import BlendingError
from sixfold.blending.order import deal

torch = pytest.importorskip("torch", reason="a sampler is torch's")


def sampler(*args, **more):
    from sixfold.blending.torch import PositionSampler

    return PositionSampler(*args, **more)


def equal_blend(datasets, **fields):
    return blend({f"d{n}": numbered([20] * 5) for n in range(datasets)}, [1] * datasets, **fields)


@pytest.mark.parametrize("seed", range(10))
def test_ranks_together_have_each_position_once_and_the_loop_says_which(seed):
    rng = np.random.default_rng(seed)
    begin, size, ranks = (int(rng.integers(low, high)) for low, high in ((0, 10**6), (0, 40), (1, 9)))
    shares = [deal(begin, begin + size, rank, ranks).tolist() for rank in range(ranks)]
    key = naive_key("deal", begin)
    assert [p for share in shares for p in share] == [begin + naive_permute(key, size, place) for place in range(size)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("datasets", "ranks"), [(8, 8), (16, 8), (4, 2), (8, 4)])
def test_no_rank_is_locked_to_some_datasets(datasets, ranks):
    data, batch_size = equal_blend(datasets), 4
    for rank in range(ranks):
        seen = {name: set() for name in ("permuted", "in_turn")}
        for name, found in seen.items():
            steps = sampler(0, batch_size, rank, ranks, data=data, deal=name)
            for _, positions in zip(range(60), steps, strict=False):
                found.update(data.locate(positions)[0].tolist())
        assert len(seen["permuted"]) == datasets
        assert len(seen["in_turn"]) < datasets or batch_size >= datasets


def test_a_sampler_deals_where_it_knows_the_data_and_not_in_megatrons_order():
    assert sampler(0, 2, 0, 4).deal == "in_turn"
    assert sampler(0, 2, 0, 4, data=equal_blend(2)).deal == "permuted"
    megatron = equal_blend(2, order="megatron", size=20)
    assert sampler(0, 2, 0, 4, data=megatron).deal == "in_turn"
    with pytest.raises(BlendingError, match=r"deal is 'random'; it is \"permuted\", \"in_turn\" or None"):
        sampler(0, 2, deal="random")


def test_every_rank_of_any_number_has_the_step_of_one_rank():
    data = equal_blend(4)
    for ranks in range(1, 9):
        steps = [list(sampler(3, 8, rank, ranks, end=3 + 16 * ranks, data=data)) for rank in range(ranks)]
        for number in range(2):
            together = sorted(position for rank in steps for position in rank[number])
            assert together == list(range(3 + 8 * ranks * number, 3 + 8 * ranks * (number + 1)))


def test_a_state_says_how_it_was_dealt_and_one_of_before_goes_on_in_turn():
    data = equal_blend(4)
    one = iter(sampler(0, 2, 1, 4, data=data))
    first = [next(one) for _ in range(3)]
    assert one.state_dict() == {"position": 24, "deal": "permuted"}
    again = sampler(0, 2, 1, 4, data=data)
    again.load_state_dict({"position": 8, "deal": "permuted"})
    assert [*zip(again, range(2), strict=False)] == [(first[1], 0), (first[2], 1)]
    again.load_state_dict({"position": 8})
    assert again.state_dict() == {"position": 8}
    steps = iter(again)
    assert next(steps) == [10, 11]
    assert again.state_dict() == steps.state_dict() == {"position": 16}
    steps.load_state_dict({"position": 8, "deal": "permuted"})
    assert next(steps) == first[1]
    with pytest.raises(BlendingError, match="the state was dealt by 'twice', which this release does not know"):
        again.load_state_dict({"position": 8, "deal": "twice"})


def test_wrong_ranks_and_steps_are_refused():
    with pytest.raises(BlendingError, match=r"rank is 4 of 4 ranks; it is 0\.\.3"):
        deal(0, 8, 4, 4)
    with pytest.raises(BlendingError, match="end is 3; it is a whole number >= 5"):
        deal(5, 3, 0, 2)
    assert deal(5, 5, 0, 2).tolist() == []
