"""The endless line of tokens of one dataset: its documents, shuffled anew in every epoch.

    Part --> TokenLine (this file): a stretch of the line --> ranges of documents --> batches/reader.py
             `-> document_shuffle.py, where every document is a block

Two levels: blocks of B consecutive sequences are permuted, and the sequences inside each block.
So a position is found by a search among the block sizes and a look at one block's lengths. No
permutation is stored. n is the number of sequences, T of tokens in one epoch, P of the pieces
(stretches) that are read, K of the documents in them. A slot is a block's place on the line,
counted through all epochs.

[Note: an epoch grows] The sums of the first slots need only the pointers of the blocks in those slots. So an epoch is
known up to where it was read, and twice as far when more is needed. A corpus of 5e9 documents starts as fast as a
small one: 40 GB of its index stay unread. A place deep in an epoch costs the slots before it, once.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import pointers_of
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import I64, Kernels
from sixfold.blending.numbers.permutation import key_text, order_key, permute, permute_range

Slots = tuple[I64, npt.NDArray[np.int32]]  # tokens before each of the first slots of an epoch, the block in each
_BLOCKS_AT_LEAST = 1024
_BLOCK_AT_MOST = 256
_EPOCHS_KEPT = 8
_SLOTS_AT_LEAST = 4096  # of an epoch are known at once: a million documents
_SLOTS_AT_A_TIME = 2**18  # a few MiB of temporaries


def block_size(sequences: int) -> int:
    """Sequences per block: up to 256, as long as there are about 1,024 blocks to permute."""
    return min(_BLOCK_AT_MOST, max(1, sequences // _BLOCKS_AT_LEAST))


@dataclass(frozen=True, slots=True)
class Ranges:
    """Consecutive ranges of documents, arrays of one length.

    ``piece`` is the number of the stretch that a range belongs to. ``sequence`` is the number
    in the source. ``offset`` and ``length`` are tokens of that sequence.
    """

    piece: I64
    epoch: I64
    sequence: I64
    offset: I64
    length: I64


def no_tokens(part: Part, name: str, split: str) -> BlendingError:
    """The error for samples asked of a part that has no tokens."""
    return BlendingError(
        f"the {split} part of {name!r} has {len(part)} sequences and no tokens, but samples of it are asked; "
        f"give it a larger share of the split or leave the dataset out"
    )


class TokenLine:
    """The line of one part under one (seed, name, part); see the module.

    Raises:
        BlendingError: the part has no tokens.
    """

    def __init__(self, part: Part, seed: int, name: str, split: str) -> None:
        if part.tokens == 0:
            raise no_tokens(part, name, split)
        self.part = part
        self.names: tuple[int, str, str] = (seed, name, split)
        self.tokens = part.tokens
        self.block = self._documents_per_slot()
        self.blocks = -(-len(part) // self.block)
        self._epochs: OrderedDict[int, Slots] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": OrderedDict()}

    shuffle = "block"  # of the documents, as a state tells it
    _slots_at_least = _SLOTS_AT_LEAST
    _scattered = False  # the documents of a slot lie anywhere in the part

    def _documents_per_slot(self) -> int:
        return block_size(len(self.part))

    def key(self, *parts: int) -> int:
        """The key of (seed, name, part) and what follows."""
        return order_key(*self.names, *parts)

    def _epoch(self, epoch: int, *, tokens: int = 0, slots: int = 0) -> Slots:
        """Tokens of the epoch before each of its slots and behind the last (K + 1,), the block in each slot (K,).

        Of the first K slots: those that hold ``tokens`` tokens, ``slots`` at least. See [Note: an epoch grows].
        Kept for a few epochs: 12 bytes per slot.
        """
        known = self._epochs.get(epoch)
        while known is None or (known[1].size < self.blocks and (known[0][-1] < tokens or known[1].size < slots)):
            known = self._epochs[epoch] = self._grown(epoch, known, max(slots, self._slots_of(tokens)))
            while len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return known

    def _slots_of(self, tokens: int) -> int:
        """About so many slots hold so many tokens, and a few more."""
        return tokens * self.blocks // self.tokens + tokens * self.blocks // (16 * self.tokens)

    def _grown(self, epoch: int, known: Slots | None, slots: int) -> Slots:
        """``known`` and as many slots again, ``slots`` at least; all of a small or scattered part."""
        first = 0 if known is None else known[1].size
        last = min(self.blocks, max(slots, 2 * first, self._slots_at_least)) if self._grows else self.blocks
        prefix = np.zeros(last + 1, dtype=np.int64)
        block = np.empty(last, dtype=np.int32)
        if known is not None:
            prefix[: first + 1], block[:first] = known
        step = _SLOTS_AT_A_TIME if self._grows else self.blocks
        for begin in range(first, last, step):
            end = min(begin + step, last)
            tokens, block[begin:end] = self._slots(epoch, begin, end)
            np.cumsum(tokens, out=prefix[begin + 1 : end + 1])
            prefix[begin + 1 : end + 1] += prefix[begin]
        return prefix, block

    @property
    def _grows(self) -> bool:
        """Whether some slots are known for less than all of them."""
        return self.part.has_pointers

    def _slots(self, epoch: int, begin: int, end: int) -> tuple[I64, I64]:
        """(tokens, block) of slots ``begin`` to ``end`` of an epoch."""
        some = np.empty(end - begin, dtype=np.int64)
        permute_range(self.key(epoch), self.blocks, begin, some)
        if self.part.has_pointers and end - begin < self.blocks:
            return self.part.tokens_of_blocks(self.block, some), some
        return self.part.block_tokens(self.block)[some], some

    def _members(self, slot_K: I64, inner_K: I64, epoch: I64, block: I64, size: I64) -> I64:
        """Which of the part's sequences stands at each place ``inner_K`` of the slots that ``slot_K`` says.

        Args:
            epoch, block, size: of each slot.
        """
        if self.block > 1:
            pairs = zip(epoch.tolist(), block.tolist(), strict=True)
            block_key = np.array([self.key(*pair) for pair in pairs], dtype=np.uint64)
            inner_K = permute(block_key[slot_K], size[slot_K], inner_K)
        return block[slot_K] * self.block + inner_K

    def _slot(self, position_P: I64) -> I64:
        """The slot that holds each token of the line."""
        epoch_P = position_P // self.tokens
        slot_P = np.empty_like(position_P)
        for epoch in np.unique(epoch_P).tolist():
            here = epoch_P == epoch
            inside = position_P[here] - epoch * self.tokens
            prefix, _ = self._epoch(epoch, tokens=int(inside.max()) + 1)
            slot_P[here] = epoch * self.blocks + np.searchsorted(prefix, inside, side="right") - 1
        return slot_P

    def _documents(self, slots: I64) -> tuple[I64, I64, I64]:
        """All documents of ``slots`` (ascending) in line order, without the empty ones.

        Returns:
            position on the line (K,), sequence in the source (K,), length (K,)
        """
        epoch, place = np.divmod(slots, self.blocks)
        line_begin, tokens, block = (np.empty_like(slots) for _ in range(3))
        for number in np.unique(epoch).tolist():
            here = epoch == number
            prefix, blocks = self._epoch(number, slots=int(place[here].max()) + 1)
            line_begin[here] = number * self.tokens + prefix[place[here]]
            tokens[here] = prefix[place[here] + 1] - prefix[place[here]]
            block[here] = blocks[place[here]]
        size = np.minimum(self.block, len(self.part) - block * self.block)
        slot_K = np.repeat(np.arange(slots.size), size)
        first = np.cumsum(size) - size
        inner_K = np.arange(slot_K.size) - first[slot_K]
        sequence_K = self.part.ids(self._members(slot_K, inner_K, epoch, block, size))
        length_K = self.part.lengths(sequence_K)
        ends_K = np.cumsum(length_K)
        before = ends_K[first] - length_K[first]
        wrong = np.flatnonzero(np.add.reduceat(length_K, first) != tokens)
        if wrong.size:
            bad = int(wrong[0])
            problem = f"the lengths of block {block[bad]} do not sum to the {tokens[bad]} tokens of its pointers"
            raise self.part.damage(int(sequence_K[first[bad]]), problem)
        begin_K = line_begin[slot_K] + (ends_K - length_K - before[slot_K])
        some = np.flatnonzero(length_K)
        return begin_K[some], sequence_K[some], length_K[some]

    def ranges(self, begin_P: I64, length_P: I64) -> Ranges:
        """The documents that ``length_P`` tokens of the line from ``begin_P`` on lie in.

        Args:
            begin_P, length_P: (P,) int64, lengths >= 1.
        Returns:
            the ranges of piece 0, then of piece 1, ...; each piece in the order of the line.
        """
        end_P = begin_P + length_P
        first_P, last_P = self._slot(begin_P), self._slot(end_P - 1)
        slots = np.unique(runs(first_P, last_P + 1 - first_P)[1])
        position_K, sequence_K, tokens_K = self._documents(slots)
        first_P = np.searchsorted(position_K, begin_P, side="right") - 1
        piece, member = runs(first_P, np.searchsorted(position_K, end_P, side="left") - first_P)
        begin = np.maximum(position_K[member], begin_P[piece])
        end = np.minimum(position_K[member] + tokens_K[member], end_P[piece])
        return Ranges(
            piece=piece,
            epoch=begin // self.tokens,
            sequence=sequence_K[member],
            offset=begin - position_K[member],
            length=end - begin,
        )

    def finder(self, native: Kernels, window: int, chunks: int | None, grids: I64) -> object:
        """A handle of this line for ``Kernels.find_samples``; see ``SampleOrder.finder``."""
        part, itemsize = self.part, np.dtype(self.part.source.dtype).itemsize
        whole = isinstance(part.indices, range)
        first = part.indices[0] if isinstance(part.indices, range) else 0
        numbers = [itemsize, first, len(part), self.tokens, self.block, window, -1 if chunks is None else chunks]
        numbers.append(int(self._scattered))
        members = np.empty(0, dtype=np.int64) if whole else part.ids(np.arange(len(part)))
        names = np.frombuffer(key_text(*self.names), dtype=np.uint8)
        source: Any = part.source
        return native.open_line(
            source.sequence_lengths,
            pointers_of(source),
            members,
            names,
            np.array(numbers, dtype=np.int64),
            grids,
        )

    def add_epoch(self, native: Kernels, finder: object, epoch: int) -> None:
        """Give ``finder`` what is known of an epoch; the oldest ones go. Where it needs more, numpy makes it known."""
        before, block = self._epoch(epoch)
        native.add_epoch(finder, epoch, before, block, _EPOCHS_KEPT - 1)


def runs(first: I64, count: I64) -> tuple[I64, I64]:
    """(which run, first + 0, 1, ...) of the runs ``first[i] .. first[i] + count[i] - 1``, end to end."""
    run = np.repeat(np.arange(first.size), count)
    number = np.arange(run.size) - (np.cumsum(count) - count)[run]
    return run, first[run] + number
