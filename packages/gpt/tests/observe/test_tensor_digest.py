"""Digests of tensors: the sums against plain integers, pieces in any order, and what they have to tell apart."""

import hashlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.gpt.observe.tensor_digest import ROW, DigestSums, run_digest, tensor_digest

CPU = torch.device("cpu")
DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.uint8, torch.int64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip
MASK = 2**64 - 1


@pytest.fixture(scope="module")
def sums():
    return DigestSums(CPU)


def digits(sums, tensor, start=0):
    return [value & MASK for value in sums.of(tensor, start).tolist()]


def weight(place, family, lane):
    """An odd hash of a place, in integers without a bound that are cut to 64 bits."""
    x = place * 4 + family * 2 + lane + 1
    for factor, shift in ((0x1E3779B97F4A7C15, 30), (0x3F58476D1CE4E5B9, 27), (0x14D049BB133111EB, 31)):
        x = x * factor & MASK
        x ^= x >> shift
    return x | 1


def by_the_note(tensor):
    """The sums as the module's note says, word by word."""
    raw = tensor.contiguous().view(torch.uint8).flatten().tolist()
    size = min(tensor.element_size(), 4)
    words = []
    for at in range(0, len(raw), size):
        value = int.from_bytes(bytes(raw[at : at + size]), "little", signed=True)
        words.append(value & 0xFFFFFFFF)
    found = []
    for lane in (0, 1):
        total = 0
        rows, columns = {}, {}
        for i, word in enumerate(words):
            row, column = divmod(i, ROW)
            rows[row] = rows.get(row, 0) + (word << 32 if column % 2 else word)
            # Pairs of columns are (1, 2), (3, 4), ... and (8191, 0).
            pair = column // 2 if column % 2 else (column // 2 - 1) % (ROW // 2)
            columns[pair] = columns.get(pair, 0) + (word if column % 2 else word << 32)
        total += sum(weight(row, 0, lane) * value for row, value in rows.items())
        total += sum(weight(pair, 1, lane) * value for pair, value in columns.items())
        found.append(total & MASK)
    return found


def some(dtype, count, seed=0):
    torch.manual_seed(seed)
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sums_are_those_of_plain_integers(sums, dtype):
    tensor = some(dtype, 9001) if dtype != torch.bool else some(torch.uint8, 9001) > 127
    assert digits(sums, tensor) == by_the_note(tensor)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_of_any_cut_add_up_to_the_whole(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    sums = DigestSums(CPU)
    tensor = some(dtype, data.draw(st.sampled_from([1, 100, ROW - 1, ROW, 3 * ROW + 7, 70 * ROW + 3])))
    cuts = sorted(data.draw(st.lists(st.integers(0, tensor.numel()), max_size=6)))
    pieces = list(zip([0, *cuts], [*cuts, tensor.numel()], strict=True))
    random.Random(0).shuffle(pieces)
    # A copy of a piece lies at another place of memory than the piece itself.
    copies = data.draw(st.booleans())
    parts = [sums.of(tensor[i:j].clone() if copies else tensor[i:j], i) for i, j in pieces]
    assert torch.equal(torch.stack(parts).sum(0), sums.of(tensor, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_bit_of_every_element_counts(sums, dtype):
    tensor = some(dtype, 300)
    before = digits(sums, tensor)
    raw = tensor.view(torch.uint8)
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert digits(sums, tensor) != before, f"bit {bit} of byte {byte}"
            raw[byte] ^= 1 << bit
    assert digits(sums, tensor) == before


@pytest.mark.parametrize("far", [1, 2, ROW, ROW + 1, 5 * ROW + 2], ids=lambda far: f"{far} apart")
def test_two_elements_that_change_places_are_told(sums, far):
    tensor = torch.randn(8 * ROW)
    before = digits(sums, tensor)
    for i in random.Random(far).sample(range(tensor.numel() - far), 300):
        other = tensor.clone()
        other[i], other[i + far] = tensor[i + far], tensor[i]
        assert digits(sums, other) != before, f"elements {i} and {i + far}"


def test_two_signs_that_flip_are_told_wherever_they_are(sums):
    """Highest bits are the weakest of sums modulo a power of two: two of 64-bit words would cancel."""
    tensor = torch.rand(4 * ROW) + 0.5
    before = digits(sums, tensor)
    for i in range(0, 200, 7):
        for j in range(i + 1, 4 * ROW, 997):
            other = tensor.clone()
            other[i], other[j] = -other[i], -other[j]
            assert digits(sums, other) != before, f"elements {i} and {j}"


def test_what_repeats_or_moves_as_a_whole_is_told(sums):
    matrix = torch.randn(256, 128)
    others = {
        "negated": -matrix,
        "doubled": matrix * 2,
        "transposed": matrix.T.reshape(256, 128).contiguous(),
        "rows turned": matrix.roll(1, 0),
        "columns turned": matrix.roll(1, 1),
        "two rows swapped": matrix[[1, 0, *range(2, 256)]],
        "mirrored": matrix.flip(0),
        "rounded": matrix.bfloat16().float(),
        "one unit in the last place": torch.nextafter(matrix, torch.tensor(torch.inf)),
        "negative zeros": torch.where(matrix.abs() < 0.01, -0.0, matrix),
        "zeros": torch.where(matrix.abs() < 0.01, 0.0, matrix),
    }
    found = {name: tuple(digits(sums, other)) for name, other in others.items()}
    found["itself"] = tuple(digits(sums, matrix))
    assert len(set(found.values())) == len(found), found


def test_the_smallest_difference_that_is_missed_is_a_rectangle_of_the_grid(sums):
    """What the note says that no digest tells; if it did, the note would be wrong."""
    words = some(torch.int32, 2 * ROW) // 4
    other = words.clone()
    for row, column, change in ((0, 3, 5), (0, 7, -5), (1, 3, -5), (1, 7, 5)):
        other[row * ROW + column] += change
    assert not torch.equal(words, other) and digits(sums, words) == digits(sums, other)
    other[3] += 1
    assert digits(sums, words) != digits(sums, other)


def test_name_dtype_and_shape_are_part_of_a_digest():
    one = tensor_digest("a.weight", "float32", (2, 3), (1, 2))
    assert len(one) == 32 and one == tensor_digest("a.weight", "float32", (2, 3), (1 - 2**64, 2))
    others = [
        tensor_digest("b.weight", "float32", (2, 3), (1, 2)),
        tensor_digest("a.weight", "bfloat16", (2, 3), (1, 2)),
        tensor_digest("a.weight", "float32", (3, 2), (1, 2)),
        tensor_digest("a.weight", "float32", (2, 3), (2, 1)),
    ]
    assert len({one, *others}) == 5
    assert run_digest([one, *others]) == hashlib.blake2b("".join([one, *others]).encode(), digest_size=16).hexdigest()


def test_an_empty_piece_adds_nothing_and_a_strided_one_is_read_in_its_order(sums):
    assert digits(sums, torch.empty(0), 17) == [0, 0]
    matrix = torch.randn(40, 50)
    assert digits(sums, matrix.T) == digits(sums, matrix.T.contiguous())
