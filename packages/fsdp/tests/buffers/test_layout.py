"""plan_layout against what any layout must be, checked element by element."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.fsdp import FsdpError
from sixfold.fsdp.layout import Layout, TensorSpec, plan_layout

granularities = st.one_of(st.sampled_from(["element", "row", "tensor"]), st.integers(1, 40))
shapes = st.lists(st.sampled_from([1, 2, 3, 5, 8, 33, 64]), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def spec_lists(draw: st.DrawFn) -> list[TensorSpec]:
    kinds = draw(st.lists(st.tuples(shapes, dtypes, granularities), max_size=9))
    return [TensorSpec(f"t{i}", shape, dtype, grain) for i, (shape, dtype, grain) in enumerate(kinds)]


def bytes_by_element(layout: Layout) -> dict[tuple[str, int], int]:
    """(name, element) -> byte in the gathered buffer, the naive way: one entry per element."""
    places: dict[tuple[str, int], int] = {}
    for rank in range(layout.world_size):
        for part in layout.slices(rank):
            size = next(spec for spec in layout.specs if spec.name == part.name).dtype.itemsize
            for i in range(part.start, part.stop):
                at = part.offset_bytes + (i - part.start) * size
                assert 0 <= at <= layout.shard_bytes - size, f"{part} leaves its shard"
                assert (part.name, i) not in places, f"{part.name}[{i}] lies in two shards"
                places[part.name, i] = rank * layout.shard_bytes + at
    return places


@given(spec_lists(), st.integers(1, 9), st.none() | st.lists(st.integers(0, 3), min_size=9, max_size=9))
@settings(max_examples=80, deadline=None)
@pytest.mark.slow
def test_every_element_lies_in_one_shard_and_tensors_are_contiguous_and_disjoint(specs, world_size, held):
    layout = plan_layout(specs, world_size, held=held and held[:world_size])
    places = bytes_by_element(layout)
    used: set[int] = set()
    for spec in specs:
        size = spec.dtype.itemsize
        at = [places[spec.name, i] for i in range(math.prod(spec.shape))]
        assert at == list(range(at[0], at[0] + len(at) * size, size)) if at else True
        covered = {byte + k for byte in at for k in range(size)}
        assert not covered & used
        used |= covered
    assert layout.padding_bytes == world_size * layout.shard_bytes - len(used)
    assert layout.shard_bytes % layout.align_bytes == 0


@given(spec_lists(), st.integers(1, 9), st.none() | st.lists(st.integers(0, 3), min_size=9, max_size=9))
@settings(max_examples=80, deadline=None)
@pytest.mark.slow
def test_cuts_fall_on_blocks_only(specs, world_size, held):
    layout = plan_layout(specs, world_size, held=held and held[:world_size])
    for rank in range(world_size):
        names = [part.name for part in layout.slices(rank)]
        assert len(names) == len(set(names))
        for part in layout.slices(rank):
            spec = next(spec for spec in specs if spec.name == part.name)
            numel = math.prod(spec.shape)
            row = math.prod(spec.shape[1:])
            block = {"element": 1, "row": row, "tensor": numel}.get(spec.granularity, spec.granularity)
            assert part.start % block == 0
            assert part.stop % block == 0 or part.stop == numel


@given(spec_lists(), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_element_granularity_wastes_at_most_one_alignment_per_tensor_and_rank(specs, world_size):
    elements = [TensorSpec(spec.name, spec.shape, spec.dtype) for spec in specs]
    assert plan_layout(elements, world_size).padding_bytes <= 128 * (world_size + len(specs))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_rows_of_a_transformer_block_waste_at_most_one_percent(ranks):
    h = 768
    shapes = [(h,), (3 * h, h), (h, h), (h,), (4 * h, h), (4 * h, h), (h, 4 * h)]
    layout = plan_layout([TensorSpec(f"t{i}", shape, granularity="row") for i, shape in enumerate(shapes)], ranks)
    assert layout.padding_bytes <= 0.01 * ranks * layout.shard_bytes


def test_whole_tensors_on_more_ranks_than_tensors_leave_ranks_empty():
    layout = plan_layout([TensorSpec(f"w{i}", (8, 8), granularity="tensor") for i in range(4)], 8)
    assert sorted(len(layout.slices(rank)) for rank in range(8)) == [0] * 4 + [1] * 4


def owned_bytes(layouts: list[Layout]) -> list[int]:
    """By rank, element by element of the slices: bytes of tensors that are not to be cut."""
    total = [0] * layouts[0].world_size
    for layout in layouts:
        whole = {spec.name: spec.dtype.itemsize for spec in layout.specs if spec.granularity == "tensor"}
        for rank in range(layout.world_size):
            total[rank] += sum((s.stop - s.start) * whole[s.name] for s in layout.slices(rank) if s.name in whole)
    return total


def llama_blocks(ranks: int, layers: int, small: str) -> list[Layout]:
    """Llama-3-8B's block by block, each knowing what the ones before left with whom."""
    h, kv, wide = 4096, 1024, 14336
    shapes = [(h, h), (kv, h), (kv, h), (h, h), (wide, h), (wide, h), (h, wide)]
    specs = [TensorSpec(f"w{i}", shape, torch.bfloat16, "tensor") for i, shape in enumerate(shapes)]
    specs += [TensorSpec(f"n{i}", (h,), torch.bfloat16, small) for i in range(2)]
    layouts, held = [], [0] * ranks
    for _ in range(layers):
        layouts.append(plan_layout(specs, ranks, held=held))
        held = [a + b for a, b in zip(held, layouts[-1].whole_bytes(), strict=True)]
        assert held == owned_bytes(layouts)
    return layouts


@pytest.mark.parametrize("small", ["tensor", "element"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 64])
@pytest.mark.slow
def test_owners_of_whole_matrices_are_even_over_all_units(ranks, small):
    owned = owned_bytes(llama_blocks(ranks, 32, small))
    assert max(owned) <= 1.1 * sum(owned) / ranks
    alone = [plan_layout(one.specs, ranks) for one in llama_blocks(ranks, 1, small) * 32]
    assert max(owned) < max(owned_bytes(alone)) or ranks == 2
    assert min(owned) > 0


def test_shards_that_share_a_tensor_keep_their_places():
    specs = [
        TensorSpec("a", (96,)),
        TensorSpec("w", (32,), granularity="tensor"),
        TensorSpec("v", (16,), granularity="tensor"),
    ]
    layout = plan_layout(specs, 4, held=[5, 5, 5, 0])
    plain = plan_layout(specs, 4)
    assert layout.shard_bytes == plain.shard_bytes
    assert layout.parts("a") == plain.parts("a") and len(layout.parts("a")) > 1
    assert (plain.parts("v")[0][0], layout.parts("v")[0][0]) == (2, 3)


def test_the_heaviest_shard_goes_to_the_rank_that_owns_least():
    specs = [TensorSpec(name, (n,), granularity="tensor") for name, n in (("big", 64), ("small", 32))]
    assert [plan_layout(specs, 3, held=[9, 0, 4]).parts(name)[0][0] for name in ("big", "small")] == [1, 2]
    assert [plan_layout(specs, 3, held=[0, 0, 0]).parts(name)[0][0] for name in ("big", "small")] == [0, 1]


def test_a_thousand_tensors_over_4096_ranks_are_planned_in_under_a_second():
    specs = [TensorSpec(f"t{i}", (1000 + i, 64 * (1 + i % 3)), granularity="row") for i in range(1000)]
    began = time.perf_counter()
    layout = plan_layout(specs, 4096)
    assert time.perf_counter() - began < 1.0
    assert layout.padding_bytes < 0.05 * 4096 * layout.shard_bytes


def test_the_text_form_shows_shards_padding_and_places():
    layout = plan_layout([TensorSpec("w", (10,)), TensorSpec("b", (3,))], 2)
    assert str(layout) == "2 x 128 pad 204: w 0..40, b 128..140"
    assert [str(part) for part in layout.slices(1)] == ["b[0:3]@0"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: plan_layout([TensorSpec("w", (2,))] * 2, 2), "w is in the list twice"),
        (lambda: plan_layout([], 0), "world_size is 0"),
        (lambda: TensorSpec("w", (2,), granularity="column"), "'column'"),
        (lambda: TensorSpec("w", (2,), granularity=0), "granularity is 0"),
        (lambda: plan_layout([TensorSpec("w", (2,))], 2, align_bytes=2), "align_bytes is 2"),
        (lambda: plan_layout([TensorSpec("w", (2,))], 2).slices(2), "rank is 2"),
    ],
)
def test_bad_layouts_are_refused_with_the_value(make, says):
    with pytest.raises(FsdpError, match=says):
        make()
