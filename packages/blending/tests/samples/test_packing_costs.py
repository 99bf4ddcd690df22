"""What the ways to fill rows cost: counted once more, token by token."""

import numpy as np
import pytest
from packed_helpers import naive_best_fit

from sixfold.blending import BlendingError, packing_costs


def pieces_of(lengths, S):
    return [min(S, length - at) for length in lengths for at in range(0, length, S)]


def naive_rows(packing, lengths, S):
    """How many rows, each a list of pieces."""
    pieces = pieces_of(lengths, S)
    if packing == "best_fit":
        return len(naive_best_fit(pieces, S))
    closed, rows = sum(piece == S for piece in pieces), [[]]
    for piece in pieces:
        if piece == S:
            continue  # a whole row of its own
        fitting = [row for row in rows[-(8 if packing == "first_fit_8" else 1) :] if sum(row) + piece <= S]
        if fitting:
            fitting[0].append(piece)
        else:
            rows.append([piece])
    return closed + sum(map(bool, rows))


@pytest.mark.parametrize("seed", range(20))
def test_costs_are_those_of_loops(seed):
    rng = np.random.default_rng(seed)
    S, lengths = int(rng.integers(1, 20)), rng.integers(0, 40, int(rng.integers(1, 60))).tolist()
    lengths[0] += 1
    some = [length for length in lengths if length]
    tokens = [number for number, length in enumerate(some) for _ in range(length)]
    rows = [tokens[at : at + S] for at in range(0, len(tokens), S)]
    concatenated, *others = packing_costs(lengths, S)
    cut = sum(
        len({at // S for at, number in enumerate(tokens) if number == document}) > 1 for document in range(len(some))
    )
    assert concatenated.packing == "concatenate"
    assert (concatenated.rows, concatenated.padding) == (len(rows), len(rows) * S - len(tokens))
    assert (concatenated.documents_cut, concatenated.loss_tokens) == (cut, len(tokens) - 1)
    for cost in others:
        assert cost.rows == naive_rows(cost.packing, some, S)
        assert cost.padding == cost.rows * S - len(tokens)
        assert cost.documents_cut == sum(length > S for length in some)
        assert cost.loss_tokens == len(tokens) - len(some)


def test_wrong_lengths_are_refused():
    with pytest.raises(BlendingError, match="there are no documents with tokens to pack"):
        packing_costs([0, 0], 8)
    with pytest.raises(BlendingError, match="a length is -1; lengths are >= 0"):
        packing_costs([3, -1], 8)
    with pytest.raises(BlendingError, match="sequence_length is 0"):
        packing_costs([3], 0)
