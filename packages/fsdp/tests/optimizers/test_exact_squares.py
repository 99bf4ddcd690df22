"""Square sums on two grids: within 2**-40 of the fraction, and of the same bits however the numbers are cut."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from sixfold.fsdp.optimizers import exact_squares

CPU = torch.device("cpu")
BOUND = Fraction(1, 2**40)


def square_sum(ranks: list[list[Tensor]], chunk_numel: int | None = None) -> float:
    """As ranks do it, each with a list of tensors."""
    exponent = torch.stack([exact_squares.largest_exponent(one, CPU) for one in ranks]).amax()
    limbs = sum(exact_squares.square_limbs(one, exponent, chunk_numel=chunk_numel) for one in ranks)
    return float(exact_squares.total(limbs, exponent))


def fraction(numbers: Tensor) -> Fraction:
    """The sum of squares, in whole multiples of the least float64."""
    ratios = (x.as_integer_ratio() for x in numbers.double().tolist())
    return Fraction(sum((over * (2**1074 // under)) ** 2 for over, under in ratios), 2**2148)


def cuts(numbers: Tensor, seed: int) -> list[list[Tensor]]:
    """Shuffled, for 1 to 8 ranks, each with tensors of any length, also empty ones."""
    draw = random.Random(seed)
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    shuffled = numbers[order]
    places = sorted(draw.randint(0, len(numbers)) for _ in range(draw.randint(0, 24)))
    pieces = [shuffled[a:b] for a, b in zip([0, *places], [*places, len(numbers)], strict=True)]
    ranks: list[list[Tensor]] = [[] for _ in range(draw.randint(1, 8))]
    for piece in pieces:
        draw.choice(ranks).append(piece)
    return ranks


def normal(generator: torch.Generator) -> Tensor:
    return torch.randn(3001, generator=generator) * 1e-3


def spread_exponents(generator: torch.Generator) -> Tensor:
    """Float32 of all exponents, subnormal ones included."""
    bits = torch.randint(0, 2**31 - 2**23, (2000,), dtype=torch.int32, generator=generator)
    return bits.view(torch.float32)


def narrow_spread(generator: torch.Generator) -> Tensor:
    """Squares from 2**-100 to 1: around both grids."""
    exponents = torch.randint(-50, 1, (3000,), generator=generator)
    return torch.ldexp(torch.rand(3000, generator=generator) * 2 - 1, exponents).float()


def subnormal(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2**23, (500,), dtype=torch.int32, generator=generator).view(torch.float32)


def one_large(generator: torch.Generator) -> Tensor:
    """The largest square is far above all others, whose sum still counts."""
    return torch.cat([torch.ones(1), torch.rand(4000, generator=generator) * 2.0**-21])


def on_the_edge(generator: torch.Generator) -> Tensor:
    """Squares halfway between steps of either grid, next to powers of two."""
    base = torch.tensor([1.0, 1.0 - 2**-24, 2.0**-21, 2.0**-22, 3 * 2.0**-22, 2.0**-42, 3 * 2.0**-43, 2.0**-43])
    return base.repeat(200) * torch.randint(0, 2, (1600,), generator=generator).mul(2).sub(1)


def bfloat16(generator: torch.Generator) -> Tensor:
    return torch.randn(2500, generator=generator).to(torch.bfloat16)


def float64(generator: torch.Generator) -> Tensor:
    return torch.randn(2500, generator=generator, dtype=torch.float64)


def largest_there_is(generator: torch.Generator) -> Tensor:
    return torch.full((777,), torch.finfo(torch.float32).max)


KINDS = (
    normal,
    spread_exponents,
    narrow_spread,
    subnormal,
    one_large,
    on_the_edge,
    bfloat16,
    float64,
    largest_there_is,
)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_has_the_same_bits_and_is_the_fraction_within_its_bound(kind, seed):
    numbers = kind(torch.Generator().manual_seed(seed))
    whole = square_sum([[numbers]])
    exact = fraction(numbers)
    assert abs(Fraction(whole) - exact) <= BOUND * exact
    for number in range(6):
        chunk_numel = (None, 64, 5, 1 << 20, 37, 1000)[number]
        found = square_sum(cuts(numbers, 100 * seed + number), chunk_numel)
        assert found == whole, f"{found.hex()} and {whole.hex()} of {kind.__name__}, cut {number}"


def test_a_plain_sum_of_the_same_numbers_depends_on_cuts():
    numbers = normal(torch.Generator().manual_seed(0)).double()
    sums = {sum(float(part.square().sum()) for part in numbers.split(size)) for size in (1, 7, 64, 999, 3001)}
    assert len(sums) > 1


def test_many_small_numbers_beside_a_large_one_are_not_lost():
    """2**20 squares of 2**-64 of the largest: no single one is seen by a float64 sum from the left."""
    numbers = torch.full((2**20 + 1,), 2.0**-32)
    numbers[0] = 1.0
    assert square_sum([[numbers]]) == 1.0 + 2.0**-44
    assert square_sum([list(numbers.split(999))]) == 1.0 + 2.0**-44


def test_full_chunks_of_the_largest_numbers_do_not_overflow():
    largest = torch.full((2**20,), 1.0 - 2.0**-24)  # the square rounds to a whole step of the first grid, or nearly
    exact = 2**20 * Fraction(float(largest[0])) ** 2
    for chunk_numel in (2**20, 2**17, 2**10):
        assert square_sum([[largest]] * 4, chunk_numel) == float(4 * exact)


def test_sums_of_2_to_the_40_elements_do_not_overflow():
    """Limbs of 2**20 such chunks are added as an all-reduce would."""
    largest = torch.full((2**20,), 1.0 - 2.0**-24)
    exponent = exact_squares.largest_exponent([largest], CPU)
    limbs = exact_squares.square_limbs([largest], exponent, chunk_numel=2**20) * 2**20
    exact = 2**40 * Fraction(float(largest[0])) ** 2
    assert float(exact_squares.total(limbs, exponent)) == float(exact)


@pytest.mark.parametrize(
    ("special", "expected"),
    [([math.inf], math.inf), ([-math.inf], math.inf), ([math.nan], math.nan), ([math.nan, math.inf], math.nan)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_infinite_gradients_make_it_infinite_and_nan_makes_it_nan(special, expected, dtype):
    ordinary = torch.randn(100).to(dtype)
    numbers = torch.cat([ordinary, torch.tensor(special, dtype=dtype)])
    for ranks in ([[numbers]], [[ordinary], [numbers]], [[one] for one in numbers.split(1)]):
        found = square_sum(ranks)
        assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_negative_nan_is_nan():
    numbers = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)  # sign, exponent and first bit set
    assert math.isnan(square_sum([[torch.ones(9)], [numbers]]))


@pytest.mark.parametrize("ranks", [[[]], [[], []], [[torch.empty(0)]], [[torch.zeros(5)], []], [[-torch.zeros(3, 3)]]])
def test_nothing_and_zeros_are_zero(ranks):
    found = square_sum(ranks)
    assert found == 0.0 and math.copysign(1.0, found) == 1.0


def test_tensors_of_any_shape_stride_and_dtype_may_come_together():
    draw = torch.Generator().manual_seed(5)
    wide, narrow = torch.randn(12, 34, generator=draw), torch.randn(5, generator=draw).to(torch.bfloat16)
    ranks = [[wide.t(), narrow], [torch.tensor(2.5), wide[:, ::3]]]
    exact = sum(fraction(one.reshape(-1)) for rank in ranks for one in rank)
    assert abs(Fraction(square_sum(ranks)) - exact) <= BOUND * exact
    assert square_sum(ranks) == square_sum([[one for rank in ranks for one in rank]], 10)


@pytest.mark.parametrize("value", [2.0**-390, 2.0**499])
def test_float64_of_wide_exponents(value):
    numbers = torch.full((10,), value, dtype=torch.float64)
    exact = fraction(numbers)
    assert abs(Fraction(square_sum([[numbers]])) - exact) <= BOUND * exact


def test_float64_whose_squares_leave_its_range_are_infinite():
    assert square_sum([[torch.full((2,), 2.0**600, dtype=torch.float64)]]) == math.inf


def test_float64_below_the_grids_is_off_by_less_than_the_grid():
    assert 0.0 <= square_sum([[torch.full((10,), 2.0**-600, dtype=torch.float64)]]) < 2.0**-880
