"""A sum of squares that has the same bits however the numbers are cut, ordered and spread over ranks.

    tensors --> largest_exponent (this file) --> maximum over ranks --+
    tensors ------------------------------------> square_limbs (this file) --> sum over ranks --> total (this file)

Pure: no ranks, no engine; gradient_norms.py makes the exchanges. The host reads no device value.

[Note: squares on two grids] All ranks know e, the least exponent with |x| < 2**e for every x. Squares are exact in
float64 (24 bits times 24), and y = x * x < top = 2**(2 * e). A square is rounded to two grids: k1 steps of
g1 = top / 2**42, then what is left, k2 steps of g2 = top / 2**85. Both roundings are one addition of a large power of
two, after which the last bit of a float64 is worth one step. k1 and k2 depend on x and e alone. Their sums are integers
and are added as integers. So the result is a function of the set of numbers: no cut, order or chunk changes it.

Nothing overflows. 0 <= k1 <= 2**42 and |k2| <= 2**42, so sums over a chunk of at most 2**20 elements stay below 2**62.
They travel as two limbs each, of 32 bits and of the rest: those of 2**41 elements can be added.

The error: what is left after k2 is at most g2 / 2 = top / 2**86 for each element. The largest square is at least
top / 4. So N elements are off by at most N / 2**84 of the result, 2**-48 for 2**36 elements. ``total`` then rounds
three times, which adds less than 2**-50. Squares of float64 numbers are not exact: each is rounded once before, by
2**-53 of itself; from 2**500 on they count as infinite, and where all are below 2**-400 the grids stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

INFINITE, NOT_A_NUMBER = 1025, 1026  # exponents beyond those of numbers; of both the sum is NaN
CHUNK_NUMEL = {"cpu": 1 << 17}  # two buffers of float64 in a cache
CHUNK_NUMEL_ELSEWHERE = 1 << 20  # few launches
_FIRST, _SECOND = 42, 85  # bits below the largest square
_LEAST, _MOST = -400, 500  # exponents for which all powers of two below are normal float64; float32 has -148 to 128
_LIMB = 0xFFFFFFFF


def largest_exponent(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Int64 scalar: the least e with ``|x| < 2**e`` for all elements; -1022 if all are 0 or there is none.

    ``INFINITE`` if one is infinite, ``NOT_A_NUMBER`` if one is NaN. The maximum over ranks is that of all elements.
    """
    full = [one for one in tensors if one.numel()]
    if not full:
        return torch.full((), -1022, dtype=torch.int64, device=device)
    if device.type == "cpu":
        ends = [end.double() for one in full for end in torch.aminmax(one)]
    else:
        ends = [norm.double() for norm in torch._foreach_norm(full, torch.inf)]
    largest = torch.stack(ends).abs().amax()  # of NaN it is NaN
    exponent = (largest.view(torch.int64) >> 52) - 1022
    exponent = torch.where(exponent > _MOST, INFINITE, exponent)
    return torch.where(largest.isnan(), NOT_A_NUMBER, exponent)


def square_limbs(tensors: Sequence[Tensor], exponent: Tensor, *, chunk_numel: int | None = None) -> Tensor:
    """(4,) int64: the sums of k1 and of k2, two limbs each; those of all ranks may be added.

    Args:
        tensors: floating tensors of one device.
        exponent: of ``largest_exponent``, over all ranks.
        chunk_numel: elements at a time, at most 2**20. The result does not depend on it.
    Memory: two buffers of ``chunk_numel`` float64. Cost on a CPU: 1.8 ns an element.
    """
    device = exponent.device
    pieces = [one.reshape(-1) for one in tensors if one.numel()]
    room = chunk_numel or CHUNK_NUMEL.get(device.type, CHUNK_NUMEL_ELSEWHERE)
    assert room <= 1 << 20, f"sums over {room} elements pass 2**62"
    chunks = list(_chunks(pieces, room))
    if not chunks:
        return torch.zeros(4, dtype=torch.int64, device=device)
    top = _top(exponent)
    first, second = _power(top + 52 - _FIRST), 1.5 * _power(top + 52 - _SECOND)
    between = first - second  # exact
    squares, stepped = torch.empty(2, room, dtype=torch.float64, device=device)
    sums = torch.empty(len(chunks), 2, dtype=torch.int64, device=device)
    for chunk, into in zip(chunks, sums, strict=True):
        sizes = [piece.numel() for piece in chunk]
        y, h = squares[: sum(sizes)], stepped[: sum(sizes)]
        torch._foreach_copy_(list(y.split(sizes)), chunk)
        y.mul_(y)
        torch.add(y, first, out=h)  # its bits count steps of g1
        torch.sum(h.view(torch.int64), 0, out=into[0])
        h.sub_(between)  # exact: k1 * g1 + second
        h.sub_(y)  # second - what k1 leaves; its bits count steps of g2
        torch.sum(h.view(torch.int64), 0, out=into[1])
    counts = torch.tensor([[sum(piece.numel() for piece in chunk)] for chunk in chunks], device=device)
    sums -= counts * torch.stack([first, second]).view(torch.int64)  # modulo 2**64: what is left is below 2**62
    sums[:, 1].neg_()
    return torch.stack([sums >> 32, sums & _LIMB], 2).sum(0).view(4)


def total(limbs: Tensor, exponent: Tensor) -> Tensor:
    """Float64 scalar: the sum of squares that ``limbs``, added over all ranks, stand for."""
    high_1, low_1, high_2, low_2 = limbs
    # One form for each sum: digits of 32 bits, all but the highest without sign. k1 is worth 2**43 = 2**32 << 11.
    high_1, low_1 = high_1 + (low_1 >> 32), low_1 & _LIMB
    middle = (low_1 << 11) + high_2 + (low_2 >> 32)
    digits = (high_1 << 11) + (middle >> 32), middle & _LIMB, low_2 & _LIMB
    value = digits[0].double() * 2.0**64 + (digits[1].double() * 2.0**32 + digits[2].double())
    value = value * _power(_top(exponent) - _SECOND)
    value = torch.where(exponent == INFINITE, torch.inf, value)
    return torch.where(exponent == NOT_A_NUMBER, torch.nan, value)


def _top(exponent: Tensor) -> Tensor:
    """The exponent of ``top``."""
    return 2 * exponent.clamp(_LEAST, _MOST)


def _power(exponent: Tensor) -> Tensor:
    """``2.0**exponent``, by its bits: no device has to compute a power."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _chunks(pieces: Sequence[Tensor], room: int) -> Iterator[list[Tensor]]:
    """All elements, ``room`` at a time; small tensors share a chunk."""
    chunk: list[Tensor] = []
    free = room
    for piece in pieces:
        at = 0
        while at < piece.numel():
            part = piece[at : at + free]
            chunk.append(part)
            at += part.numel()
            free -= part.numel()
            if not free:
                yield chunk
                chunk, free = [], room
    if chunk:
        yield chunk
