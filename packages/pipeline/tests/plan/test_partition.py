"""Layers into stages, and PipeDream-2BW's planner, beside every possibility tried."""

import itertools
import random

import pytest

from sixfold.pipeline import ScheduleError
from sixfold.pipeline.plan.partition import partition
from sixfold.pipeline.plan.two_bw import LayerProfile, plan_2bw


def piece_costs(layer_costs, sizes, first, last):
    ends = list(itertools.accumulate(sizes))
    costs = [sum(layer_costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    costs[0] += first
    costs[-1] += last
    return costs


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(60))
def test_the_largest_piece_is_as_small_as_any_cut_makes_it(seed):
    rng = random.Random(seed)
    layers, stages, allow_empty = rng.randint(1, 8), rng.randint(1, 5), rng.random() < 0.5
    if layers < stages and not allow_empty:
        layers = stages
    layer_costs = [rng.choice((0, 1, 2, 0.3, 0.7)) for _ in range(layers)]
    first, last = rng.choice((0, 1, 2.5)), rng.choice((0, 3))
    every = [
        sizes
        for sizes in itertools.product(range(layers + 1), repeat=stages)
        if sum(sizes) == layers and (allow_empty or min(sizes) > 0)
    ]
    smallest = min(max(piece_costs(layer_costs, sizes, first, last)) for sizes in every)
    sizes = partition(layer_costs, stages, first=first, last=last, allow_empty=allow_empty)
    assert sizes in every
    costs = piece_costs(layer_costs, sizes, first, last)
    assert max(costs) == pytest.approx(smallest)
    others = [piece_costs(layer_costs, sizes, first, last) for sizes in every]
    squares = [sum(cost * cost for cost in costs) for costs in others if max(costs) <= smallest + 1e-9]
    assert sum(cost * cost for cost in costs) == pytest.approx(min(squares))


def test_other_pieces_are_even_and_earlier_ones_take_the_rest():
    assert partition([1.0] * 8, 4) == (2, 2, 2, 2)
    assert partition([1.0] * 6, 4) == (2, 2, 1, 1)
    assert partition([1.0] * 8, 4, last=1.0) == (3, 2, 2, 1)
    assert partition([1.0, 1.0], 4, first=5.0, allow_empty=True)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1.0], 0), "stages is 0; it is >= 1"),
        (([1.0], 2), "1 layers for 2 stages"),
        (([1.0, -1.0], 2), r"layer_costs[1] is -1.0; costs are finite and >= 0"),
        (([1.0, float("nan")], 2), r"layer_costs[1] is nan"),
    ],
)
def test_impossible_cuts_are_refused(arguments, says):
    with pytest.raises(ScheduleError) as error:
        partition(*arguments)
    assert says in str(error.value)


def profile(**changes):
    fields = {
        "forward_s": 1.0, "backward_s": 2.0, "weight_bytes": 10.0, "activation_bytes": 4.0, "input_bytes": 1.0,
        "hop_s": 0.5, "reduce_s": 8.0,
    }  # fmt: skip
    return LayerProfile(**fields | changes)


def test_with_memory_to_spare_replicas_alone_win_until_their_reduction_costs_more():
    best = plan_2bw({1: profile(reduce_s=0.0)}, layers=4, devices=4, batch=16, memory_cap=1e9)
    # Depth 1: 4 replicas, 4 samples per 12 s. Depth 2: 2 per 7 s; depth 4: 1 per 4 s.
    assert (best.depth, best.width, best.recompute, best.samples_per_s) == (1, 4, False, 4 / 12)
    # Reduction of 4 layers over m = 4 microbatches takes 4 * 32 / 4 = 32 s each: depth 1 gives 4 / 32, depth 2 (m = 8)
    # 2 / max(7, 8), depth 4 has none to reduce and gives 1 / 4, as depth 2 does: the shallower wins.
    best = plan_2bw({1: profile(reduce_s=32.0)}, layers=4, devices=4, batch=16, memory_cap=1e9)
    assert (best.depth, best.width, best.samples_per_s) == (2, 2, 1 / 4)


def test_the_cap_buys_depth_first_and_recomputation_where_that_is_not_enough():
    profiles = {1: profile(reduce_s=0.0)}
    # Depth 1 holds 3 * 10 * 4 + 1 * 4 * 4 = 136 bytes, depth 2 60 + 2 * 4 * 2 = 76, depth 4 30 + 4 * 4 = 46;
    # depth 4 with recomputation 30 + 4 * 1 + 4 = 38.
    found = [plan_2bw(profiles, layers=4, devices=4, batch=16, memory_cap=cap) for cap in (136, 135, 75, 45)]
    assert [(p.depth, p.recompute, p.memory) for p in found] == [
        (1, False, 136),
        (2, False, 76),
        (4, False, 46),
        (4, True, 38),
    ]
    with pytest.raises(ScheduleError, match="memory_cap is 37 bytes; the least that any arrangement needs is 38"):
        plan_2bw(profiles, layers=4, devices=4, batch=16, memory_cap=37)


@pytest.mark.parametrize("seed", range(40))
def test_no_arrangement_that_fits_is_faster_and_of_equal_ones_the_shallowest_is_taken(seed):
    rng = random.Random(seed)
    layers, devices, batch = rng.choice((4, 6, 12)), rng.choice((1, 4, 6, 8)), rng.choice((12, 16, 48))
    sizes = rng.sample((1, 2, 3, 4), 2)
    # Whole numbers: sums are exact, so equal speeds are equal.
    table = {b: [rng.randint(1, 9) for _ in range(7)] for b in sizes}
    cap = rng.choice((60, 120, 400))
    # (negative samples per second, depth) and memory of every choice, as in section 4 of the paper
    every = []
    for d, b, again in itertools.product(range(1, devices + 1), sizes, (False, True)):
        forward, backward, weight, activation, given, hop, reduce = table[b]
        w = devices / d
        m, k = batch / (w * b), layers / d
        if w % 1 or k % 1 or m % 1 or m < d:
            continue
        held = d * given + activation * k if again else d * activation * k
        compute = k * (forward + backward + (forward if again else 0)) + (2 * hop if d > 1 else 0)
        every.append((-w * b / max(compute, k * reduce / m if w > 1 else 0), d, 3 * weight * k + held))
    profiles = {b: LayerProfile(*numbers) for b, numbers in table.items()}
    ask = lambda: plan_2bw(profiles, layers=layers, devices=devices, batch=batch, memory_cap=cap)  # noqa: E731
    fitting = [choice for choice in every if choice[2] <= cap]
    if not fitting:
        with pytest.raises(ScheduleError):
            ask()
        return
    best = ask()
    assert (-best.samples_per_s, best.depth) == pytest.approx(min(fitting)[:2])
    assert best.memory <= cap and best.depth * best.width == devices


def test_a_batch_that_no_arrangement_divides_is_refused():
    with pytest.raises(ScheduleError, match="batch 3 on 4 devices with 5 layers"):
        plan_2bw({2: profile()}, layers=5, devices=4, batch=3, memory_cap=1e9)
    with pytest.raises(ScheduleError, match=r"LayerProfile.hop_s is -1.0; it is finite and >= 0"):
        profile(hop_s=-1)
