"""Where a flat buffer's local gradients lie, and what memory their reduction takes beside them; in integers.

    sizes, dtypes, bucket_bytes --> ReductionSizes (this file) --> engine/reduction_paths.py; stored_bytes.py

No torch, no tensors, no ranks: a model asks when it is wrapped, and a plan of a run that nobody has started.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from sixfold.fsdp.buffers.column_ranges import columns, round_up

_ALIGN = 128
_MOST_PIECES = 16  # small repeated units do not cut a large one to shreds: each piece is a collective


class State(Enum):
    """[Note: states of local gradients]"""

    IDLE = "idle"
    HELD = "held"
    OWN = "summing"
    SLOT = "summing in a slot"
    REDUCING = "reducing"


OPEN = (State.OWN, State.SLOT, State.HELD)  # gradients may be added


@dataclass(frozen=True, slots=True)
class ReductionPath:
    """One path of a flat buffer to its main gradients.

    Attributes:
        kind: where its local gradients lie. [Note: states of local gradients]
        pieces: column ranges, one collective each.
        staged: what travels is a copy in a slot, in the dtype that travels.
        nbytes: of sent, received, result, received from replicas, for the widest piece; each is aligned.
    """

    kind: State
    pieces: tuple[tuple[int, int], ...]
    staged: bool
    nbytes: tuple[int, int, int, int]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that one piece takes."""
        return sum(self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionSizes:
    """What the paths of a flat buffer follow from.

    Attributes:
        row: elements of a rank's part of the sums, of which there are ``parts``.
        ranks, replicas: that a sum goes over; ``exchanges``: whether over each of the two it is an exchange.
        main, reduce: bytes of an element of sums, and of what travels; ``narrow``: the two have not one dtype.
        bucket_bytes: of a piece, all ranks' parts of the sums together.
    """

    row: int
    parts: int
    ranks: int
    replicas: int
    exchanges: tuple[bool, bool]
    main: int
    reduce: int
    narrow: bool
    bucket_bytes: int

    def own(self) -> ReductionPath:
        """The path of whole sums in the flat buffer's own memory."""
        direct = not self.narrow and self._scratch(self.row) == (0, 0)
        pieces = ((0, self.row),) if direct else self._pieces()
        return self._path(State.OWN, pieces, staged=self.narrow or len(pieces) > 1)

    def fused(self, *, alone: bool) -> ReductionPath:
        """That of gradients that are reduced in the backward that makes them: in a slot where they fit and travel as
        they are. ``alone``: no other flat buffer of the unit is reduced, and all come through one backward (not the
        root's).
        """
        pieces = self._pieces()
        if alone and len(pieces) == 1 and not self.narrow:
            return self._path(State.SLOT, pieces, staged=False)
        return self._path(State.HELD, pieces, staged=True)

    def _pieces(self) -> tuple[tuple[int, int], ...]:
        # Borders that keep pieces divisible by the ranks that share a sum.
        unit = 64 * self.replicas * (self.ranks if self.parts == 1 else 1)
        found = columns(self.row, self.parts, self.main, self.bucket_bytes, unit=unit)
        return found or ((0, 0),)  # tensors without elements

    def _scratch(self, width: int) -> tuple[int, int]:
        """Elements that the sums over shards and over replicas need for ``width`` columns, beside what is sent."""
        over_shards = exchanged_numel(self.parts * width, self.ranks) if self.exchanges[0] else 0
        return over_shards, exchanged_numel(width, self.replicas) if self.exchanges[1] else 0

    def _path(self, kind: State, pieces: tuple[tuple[int, int], ...], *, staged: bool) -> ReductionPath:
        widths = {stop - start for start, stop in pieces}
        received, from_replicas = (max(one) for one in zip(*map(self._scratch, widths), strict=True))
        sent = self.parts * max(widths) if staged or kind is State.SLOT else 0
        result = max(widths) if kind is State.HELD and self.narrow else 0
        each = sent * self.reduce, received * self.reduce, result * self.main, from_replicas * self.main
        a, b, c, d = (round_up(one, _ALIGN) for one in each)
        return ReductionPath(kind, pieces, staged, (a, b, c, d))


def pool_slots(paths: Iterable[Sequence[ReductionPath]], slots: int) -> tuple[int, int]:
    """(slots of the pool, bytes of each): at most ``slots``, each large enough for a piece of any flat buffer."""
    of_flat_buffers = [list(one) for one in paths]
    largest = max((path.slot_bytes for one in of_flat_buffers for path in one), default=0)
    pieces = sum(max(len(path.pieces) for path in one) for one in of_flat_buffers)
    return (min(slots, pieces), largest) if largest else (0, 0)


def largest_repeated(sums: Iterable[tuple[object, int]]) -> int:
    """Bytes of a bucket, from (class of a unit, bytes of local sums of its largest flat buffer): the largest of a class
    that occurs twice; the largest if none does. At least a sixteenth of the largest of all.
    """
    sizes = list(sums)
    kinds = Counter(kind for kind, _ in sizes)
    repeated = max((nbytes for kind, nbytes in sizes if kinds[kind] > 1), default=0)
    largest = max((nbytes for _, nbytes in sizes), default=0)
    return max(repeated or largest, math.ceil(largest / _MOST_PIECES))


def exchanged_numel(sent: int, ranks: int) -> int:
    """Elements that a sum in the order of ranks receives for ``sent`` of them: what every rank sent for this rank's
    shard (of two: the other); all of it where that does not divide; none where there is nothing to add."""
    if ranks == 1:
        return 0
    if sent % ranks:
        return ranks * sent
    return sent // 2 if ranks == 2 else sent
