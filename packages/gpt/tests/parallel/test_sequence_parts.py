"""What a context-parallel rank has of its rows, against loops over tokens."""

import numpy as np
import pytest
import torch
from context_helpers import places_of, sees
from model_helpers import boundaries

from sixfold.gpt.parallel.sequence_parts import SequencePart, documents_here, key_blocks

ROW = 48
CASES = [
    (ranks, rank, seed)
    for ranks, seeds in ((2, range(6)), (4, range(3)), (3, range(1)))
    for rank in range(ranks)
    for seed in seeds
]


def packed(seed: int) -> torch.Tensor:
    """Two rows of ROW: few documents, many, one that crosses all chunks, starts on and beside chunk borders."""
    rng = np.random.default_rng(seed)
    inner = rng.choice(2 * ROW, size=[0, 1, 3, 40][seed % 4], replace=False).tolist()
    return boundaries(2, ROW, inner + ([12, 24, 25, 36] if seed >= 4 else []))


def test_every_token_is_on_one_rank_and_ranks_have_equally_many_pairs():
    for ranks in (1, 2, 3, 4):
        parts = [
            [p for begin, end in SequencePart(rank, ranks).spans(ROW) for p in range(begin, end)]
            for rank in range(ranks)
        ]
        assert sorted(p for part in parts for p in part) == list(range(ROW))
        assert [sorted(part) for part in parts] == parts, "in the row's order"
        assert parts == [places_of(rank, ranks, ROW) for rank in range(ranks)]
        assert len({sum(p + 1 for p in part) for part in parts}) == 1


@pytest.mark.parametrize(("ranks", "rank", "seed"), CASES)
def test_segments_hold_the_keys_that_their_queries_see(ranks, rank, seed):
    cu = packed(seed)
    here = documents_here(cu.numpy(), 2, SequencePart(rank, ranks))
    found = torch.zeros(2, ROW // ranks, ROW, dtype=torch.bool)
    segments = list(zip(here.queries[:-1], here.queries[1:], here.keys[:-1], here.keys[1:], strict=True))
    for begin, end, key_begin, key_end in segments:
        for number, query in enumerate(range(begin, end)):
            seen = here.index[key_begin : key_end - (end - begin) + number + 1]  # causal from the last one backwards
            row, at = divmod(query, ROW // ranks)
            assert (seen // ROW == row).all()
            found[row, at, seen % ROW] = True
    assert torch.equal(found, sees(cu, ROW)[:, places_of(rank, ranks, ROW)])
    longest = max(end - begin for begin, end, _, _ in segments), max(end - begin for _, _, begin, end in segments)
    assert here.longest == longest
    assert here.index.size <= 2 * (2 * ranks + 1) * ROW // (2 * ranks), "no more than whole rows need"


@pytest.mark.parametrize(("ranks", "rank", "seed"), CASES)
def test_blocks_are_what_is_seen_of_each_rank_and_no_more(ranks, rank, seed):
    cu = packed(seed)
    here = documents_here(cu.numpy(), 2, SequencePart(rank, ranks))
    expected = sees(cu, ROW)[:, places_of(rank, ranks, ROW)]
    for source, blocks in enumerate(here.blocks):
        theirs = places_of(source, ranks, ROW)
        seen = expected[:, :, theirs]
        covered = torch.zeros(seen.shape[1:], dtype=torch.bool)
        for block in blocks:
            area = seen[:, slice(*block.queries), slice(*block.keys)]
            covered[slice(*block.queries), slice(*block.keys)] = True
            assert area.any(), "a block of which no query sees anything"
            assert theirs[block.keys[0]] == block.first_key
            whole = torch.ones(area.shape[1:], dtype=torch.bool)
            if block.seen == "full":
                assert area.all()
            elif block.seen == "causal":
                assert torch.equal(area, whole.tril().expand_as(area))
            else:
                assert not area.all()
        assert not (seen & ~covered).any(), "a key is left out"


def test_rows_of_one_document_are_one_block_for_each_rank():
    blocks = key_blocks(SequencePart(1, 4), 64)
    drawn = [[(b.queries, b.keys, b.seen) for b in some] for some in blocks]
    assert drawn == [
        [((0, 16), (0, 8), "full")],
        [((0, 16), (0, 16), "causal")],
        [((8, 16), (0, 16), "full")],
        [((8, 16), (0, 16), "full")],
    ]
    assert blocks == documents_here(np.array([0, 64, 128]), 2, SequencePart(1, 4)).blocks
