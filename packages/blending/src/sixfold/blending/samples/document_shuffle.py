"""Documents shuffled as a whole: the line of version 1 with blocks of one document.

    part, document_shuffle --> token_line_of --> TokenLine, or GloballyShuffledLine (this file) --> chunk_grid.py

Place k of an epoch holds the document that a keyed permutation of all n sends k to. Tokens are summed up in groups of
64 places, which do not affect the order. A group is what token_line.py calls a slot. The sums begin at the first place
of the epoch and grow as in token_line.py, one look per document, so a run begins in milliseconds. If a read needs an
eighth of an epoch, one pass over the index in its own order makes all sums. It reads each page once, which matters for
a corpus that is not in memory.

[Note: of two thousand documents] ``token_line.block_size`` is 1 below 2,048 sequences: then both shuffles are one
permutation under one key, and this file is not needed.
"""

import numpy as np

from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import pointers_of
from sixfold.blending.numbers.kernels import I64, kernels
from sixfold.blending.numbers.permutation import permute, permute_range
from sixfold.blending.samples.token_line import Slots, TokenLine, block_size

GLOBAL_AT_MOST = 100_000_000  # documents that "auto" shuffles as a whole: 2 to 3 s per process and epoch
_GROUP = 64  # places whose tokens are summed up
_SLOTS_AT_LEAST = 256  # of an epoch are known at once: 16,384 documents
_PART_OF_ALL = 8  # slots over those from which on all are made in one pass


def is_shuffled_whole(documents: int, document_shuffle: str) -> bool:
    """Whether all documents of a part are permuted together."""
    return document_shuffle == "global" or (document_shuffle == "auto" and documents <= GLOBAL_AT_MOST)


def token_line_of(part: Part, seed: int, name: str, split: str, document_shuffle: str) -> TokenLine:
    """The line under ``document_shuffle``, one of ``config.config.SHUFFLES``.

    Raises:
        BlendingError: the part has no tokens.
    """
    n = len(part)
    whole = is_shuffled_whole(n, document_shuffle)
    kind = GloballyShuffledLine if whole and block_size(n) > 1 else TokenLine  # see [Note: of two thousand documents]
    return kind(part, seed, name, split)


class GloballyShuffledLine(TokenLine):
    """A line whose documents are permuted as a whole; see the module."""

    shuffle = "global"
    _slots_at_least = _SLOTS_AT_LEAST
    _scattered = True

    def _documents_per_slot(self) -> int:
        return _GROUP

    @property
    def _grows(self) -> bool:
        return True

    def _grown(self, epoch: int, known: Slots | None, slots: int) -> Slots:
        at_least = max(slots, 0 if known is None else 2 * known[1].size, self._slots_at_least)
        tokens = self._by_kernel(epoch, 0, self.blocks) if at_least > self.blocks // _PART_OF_ALL else None
        if tokens is None:
            return super()._grown(epoch, known, slots)
        prefix = np.zeros(self.blocks + 1, dtype=np.int64)
        np.cumsum(tokens, out=prefix[1:])
        return prefix, np.arange(self.blocks, dtype=np.int32)

    def _slots(self, epoch: int, begin: int, end: int) -> tuple[I64, I64]:
        """See ``TokenLine._slots``; the block of a slot is the slot.

        Raises:
            The source's own error, or BlendingError: a length does not fit its pointers.
        """
        n, slots = len(self.part), np.arange(begin, end)
        tokens = self._by_kernel(epoch, begin, end)
        if tokens is not None:
            return tokens, slots
        first, last = begin * _GROUP, min(end * _GROUP, n)
        members = np.empty(last - first, dtype=np.int64)
        permute_range(self.key(epoch), n, first, members)
        lengths = self.part.lengths(self.part.ids(members))
        return np.add.reduceat(lengths, np.arange(0, last - first, _GROUP)), slots

    def _by_kernel(self, epoch: int, begin: int, end: int) -> I64 | None:
        """The tokens of slots; None where numpy is to say them, or what is wrong."""
        native, part = kernels(), self.part
        pointers = pointers_of(part.source)
        if native is None or pointers is None or not isinstance(part.indices, range):
            return None
        tokens = np.empty(end - begin, dtype=np.int64)
        numbers = [len(part), begin, _GROUP, part.indices.start, np.dtype(part.source.dtype).itemsize]
        try:
            done = native.group_sums(
                self.key(epoch), np.array(numbers, dtype=np.int64), part.source.sequence_lengths, pointers, tokens
            )
        except (TypeError, ValueError, BufferError):  # such as lengths of another type
            return None
        return tokens if done == end - begin else None

    def _members(self, slot_K: I64, inner_K: I64, epoch: I64, block: I64, size: I64) -> I64:
        place_K = block[slot_K] * _GROUP + inner_K
        keys = {number: self.key(number) for number in np.unique(epoch).tolist()}
        key_K = np.array([keys[number] for number in epoch.tolist()], dtype=np.uint64)[slot_K]
        return permute(key_K, np.full(place_K.size, len(self.part)), place_K)
