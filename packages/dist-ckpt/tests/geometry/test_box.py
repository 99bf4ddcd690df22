"""Box geometry against sets of elements counted one by one."""

from collections import Counter
from itertools import combinations_with_replacement, product
from math import prod

import pytest
from dist_ckpt_helpers import EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.dist_ckpt.geometry.box import (
    Box,
    cover_weight,
    describe,
    first_element,
    holes,
    intersect,
    overlaps,
    range_boxes,
    subtract,
)

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


def elements(box):
    return set(product(*(range(o, o + s) for o, s in zip(box.offset, box.size, strict=True))))


@st.composite
def boxes_in(draw, shape):
    offset = [draw(st.integers(0, n)) for n in shape]
    return Box(tuple(offset), tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.integers(0, prod(shape)), st.integers(0, prod(shape))))
)
def test_a_range_becomes_disjoint_boxes_in_row_major_order(case):
    shape, start, stop = case
    listed = [index for box in range_boxes(shape, start, stop) for index in sorted(elements(box))]
    assert listed == sorted(product(*map(range, shape)))[start:stop]
    assert len(range_boxes(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


def test_a_range_over_three_axes_is_five_boxes():
    texts = [describe("w", box, (4, 4, 4)) for box in range_boxes((4, 4, 4), 5, 59)]
    assert texts == ["w[0:1, 1:2, 1:4]", "w[0:1, 2:4, :]", "w[1:3, :, :]", "w[3:4, 0:2, :]", "w[3:4, 2:3, 0:3]"]


@settings(max_examples=EXAMPLES, deadline=None)
@given(SHAPES.flatmap(lambda shape: st.tuples(boxes_in(shape), boxes_in(shape))))
def test_intersection_and_difference_are_those_of_the_element_sets(pair):
    a, b = pair
    common = intersect(a, b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    rest = [index for box in subtract(a, b) for index in elements(box)]
    assert len(rest) == len(set(rest))
    assert set(rest) == elements(a) - elements(b)


@settings(max_examples=EXAMPLES, deadline=None)
@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes_in(shape), max_size=6))))
def test_holes_and_overlaps_are_those_of_the_element_sets(case):
    shape, boxes = case
    covered = set().union(*map(elements, boxes)) if boxes else set()
    assert {index for box in holes(shape, boxes) for index in elements(box)} == elements(
        Box((0,) * len(shape), shape)
    ) - covered
    naive = [(i, j) for j in range(len(boxes)) for i in range(j) if elements(boxes[i]) & elements(boxes[j])]
    assert overlaps(boxes) == sorted(naive)


@pytest.mark.parametrize(
    ("shape", "most"), [((9,), 3), ((4,), 5), ((3, 4), 2), ((2, 3), 3), ((2, 2), 4), ((2, 2, 2), 3), ((), 3)]
)
def test_weights_add_up_to_the_whole_for_tilings_and_for_nothing_else(shape, most):
    """Every choice of up to ``most`` boxes, counted element by element."""
    axes = [[(low, high - low) for low in range(n) for high in range(low + 1, n + 1)] for n in shape]
    boxes = [Box(tuple(o for o, _ in axis), tuple(n for _, n in axis)) for axis in product(*axes)]
    places = {place: 1 << (4 * n) for n, place in enumerate(product(*map(range, shape)))}  # four bits count to `most`
    counted = [sum(places[place] for place in elements(box)) for box in boxes]
    weights = [cover_weight(box) for box in boxes]
    once, whole = sum(places.values()), cover_weight(Box((0,) * len(shape), shape))
    told: Counter[tuple[bool, bool]] = Counter()
    for count in range(1, most + 1):
        for chosen in combinations_with_replacement(range(len(boxes)), count):
            told[sum(counted[i] for i in chosen) == once, sum(weights[i] for i in chosen) == whole] += 1
    assert told[True, False] == told[False, True] == 0
    assert told[True, True] > 0
    assert told[False, False] > 0


@settings(max_examples=EXAMPLES, deadline=None)
@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape))))
def test_contiguous_parts_are_runs_of_the_flat_tensor(case):
    shape, part = case
    if not part.volume:
        return
    order = {index: n for n, index in enumerate(sorted(product(*map(range, shape))))}
    places = sorted(order[index] for index in elements(part))
    is_run = places == list(range(places[0], places[0] + len(places)))
    moved = Box(tuple(3 + axis for axis in range(len(shape))), shape)
    assert first_element(part.shifted(moved.offset), moved) == (places[0] if is_run else None)


@pytest.mark.parametrize(
    ("box", "flattened", "text"),
    [
        (Box((512, 0), (512, 8)), None, "decoder.qkv[512:1024, :]"),
        (Box((512, 0), (512, 8)), (96, 192), "decoder.qkv[512:1024, :]{96:192}"),
    ],
)
def test_text_form_of_a_shard(box, flattened, text):
    assert describe("decoder.qkv", box, (1024, 8), flattened) == text
