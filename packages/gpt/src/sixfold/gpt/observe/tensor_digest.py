"""Digests of tensors: whether two tensors have the same bits, whatever pieces they lie in.

    pieces of a tensor --> DigestSums.of --> add them up --> tensor_digest (this file) --> digest_file.py

[Note: sums of words] A tensor's bits are a sequence of 32-bit words, the first word of element 0 first. Types of less
than 32 bits have one word for each element, their bits with the sign extended. The words lie in a grid with rows of
8,192 words. For each row take the sum of its words, and for each pair of columns the sum of theirs, modulo 2**64.
Words of odd columns count 2**32-fold in the sums of rows, those of even columns in the sums of columns; so two words
are added at once. Each of these sums has two odd weights of 64 bits, which are hashes of its place. The weighted sums
are added up modulo 2**64: 128 bits. All of it is linear. So pieces add up to the whole in any order, and may be cut at
any element. No element is hashed, which makes a digest as fast as memory.

[Note: what a digest can miss] Tensors that differ in one element never have one digest. Others have one digest with a
probability of 2**-(128 - 2 v), where 2**v is the largest power of two that divides all sums that differ; v is at most
31 unless differences cancel. They do so altogether if the sums of every row and of every pair of columns are equal:
that takes at least four elements in the corners of a rectangle of the grid. Nobody hides a difference from it by
accident; somebody who knows the weights can.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 8192  # words
LANES = 2  # of 64 bits
_CHUNK_ROWS = {"cpu": 64, "cuda": 512}  # 2 MB stay in a cache; a GPU takes more at a time
_LESS_THAN_A_WORD = {1: torch.int8, 2: torch.int16}


class DigestSums:
    """Sums of pieces on one device, with the memory that they need: two chunks, and the weights of columns."""

    def __init__(self, device: torch.device) -> None:
        self._chunk_rows = _CHUNK_ROWS.get(device.type, 512)
        self._turned = torch.empty(self._chunk_rows * ROW, dtype=torch.int32, device=device)
        self._copied: Tensor | None = None  # of pieces that are not aligned, or of a type of less than 32 bits
        self._columns_L = _weights(0, ROW // 2, 1, device)
        self._rows_L = _weights(0, self._chunk_rows, 0, device)  # of the largest tensor so far

    def of(self, piece: Tensor, start: int) -> Tensor:
        """(2,) int64: the sums of elements ``[start, start + piece.numel())`` of a flattened tensor.

        Args:
            piece: of any dtype; on this device.
        """
        words, each = _words(piece)
        first, count = start * each, words.numel()
        total_L = torch.zeros(LANES, dtype=torch.int64, device=words.device)
        if not count:
            return total_L
        columns = torch.zeros(ROW // 2, dtype=torch.int64, device=words.device)
        rows = torch.empty(-(-(first % ROW + count) // ROW), dtype=torch.int64, device=words.device)
        some = torch.empty_like(columns)
        at = done = 0
        while at < count:
            offset = (first + at) % ROW
            whole = min((count - at) // ROW, self._chunk_rows) if offset == 0 else 0
            size = whole * ROW or min(ROW - offset, count - at)
            here = self._block(words[at : at + size], offset if whole == 0 else None)
            turned = self._turned[: here.numel()]
            turned[:-1].copy_(here[1:])
            turned[-1:].copy_(here[:1])
            n = max(whole, 1)
            torch.sum(here.view(torch.int64).view(n, ROW // 2), 1, out=rows[done : done + n])
            torch.sum(turned.view(torch.int64).view(n, ROW // 2), 0, out=some)
            columns.add_(some)
            at, done = at + size, done + n
        assert done == rows.numel(), f"{done} rows were summed of {rows.numel()}"
        row = first // ROW
        if row + done > self._rows_L.shape[1]:
            self._rows_L = _weights(0, 2 * (row + done), 0, words.device)
        return (rows * self._rows_L[:, row : row + done]).sum(1) + (columns * self._columns_L).sum(1)

    def _block(self, words: Tensor, offset: int | None) -> Tensor:
        """Whole rows as aligned words; with ``offset`` a part of one row, with zeros around it."""
        if offset is None and words.dtype == torch.int32 and words.storage_offset() % 2 == 0:
            return words
        if self._copied is None:
            self._copied = torch.empty_like(self._turned)
        if offset is None:
            return self._copied[: words.numel()].copy_(words)
        row = self._copied[:ROW].zero_()
        row[offset : offset + words.numel()].copy_(words)
        return row


def tensor_digest(name: str, dtype: str, shape: Sequence[int], sums: Sequence[int]) -> str:
    """32 hexadecimal digits of a whole tensor, of its name and the sums of all its pieces."""
    said = repr((name, dtype, tuple(shape), tuple(value % 2**64 for value in sums)))
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def run_digest(digests: Sequence[str]) -> str:
    """32 hexadecimal digits of all tensors, whose digests come in the order of their names."""
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def _words(piece: Tensor) -> tuple[Tensor, int]:
    """The bits as integers of at most 32 bits, and how many of them an element has."""
    flat = piece.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.dtype.itemsize
    each = piece.dtype.itemsize // 4 if size >= 4 else piece.dtype.itemsize // size
    return flat.view(_LESS_THAN_A_WORD.get(size, torch.int32)), each


def _weights(first: int, count: int, family: int, device: torch.device) -> Tensor:
    """(2, count) odd weights of the rows or pairs of columns ``first`` ...; a hash of each place."""
    places = torch.arange(first, first + count, dtype=torch.int64, device=device)
    lanes = torch.arange(LANES, dtype=torch.int64, device=device)[:, None]
    x = places * 4 + family * 2 + lanes + 1
    for factor, shift in ((0x1E3779B97F4A7C15, 30), (0x3F58476D1CE4E5B9, 27), (0x14D049BB133111EB, 31)):
        x = x * factor  # wraps, on every device
        x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
    return x | 1
