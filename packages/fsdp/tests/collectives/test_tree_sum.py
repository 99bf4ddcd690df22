"""Ranks added in pairs: every rank has the bits of the recursive sum, which plain left-to-right sums do not have."""

from __future__ import annotations

import pytest
import torch
from fsdp_tree_helpers import differ, tree_sum

from sixfold.fsdp.collectives.gradient_sums import RankOrderSum, TreeSum


class FakeComm:
    """One of ``everyone``'s ranks; what others send is known."""

    def __init__(self, everyone: list[torch.Tensor], rank: int) -> None:
        self.everyone, self.size, self.rank = everyone, len(everyone), rank

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        for other, tensor in enumerate(self.everyone):
            received.view(self.size, -1)[other].copy_(tensor.view(self.size, -1)[self.rank])

    def swap(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        received.copy_(self.everyone[1 - self.rank].view(2, -1)[self.rank])

    def spread(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        received.copy_(torch.stack(self.everyone).view(-1))


def summed(how: type[RankOrderSum], everyone: list[torch.Tensor], rank: int, *, whole: bool) -> torch.Tensor:
    comm, sent = FakeComm(everyone, rank), everyone[rank].clone()
    result = torch.full((sent.numel() if whole else sent.numel() // comm.size,), float("nan"))
    scratch = torch.full((comm.size * sent.numel(),), float("nan"))
    start = how().all_reduce if whole else how().reduce_scatter
    return start(comm, sent, result, scratch, None)(lambda work: None)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_shards_and_whole_sums_have_the_bits_of_the_recursive_sum(ranks):
    generator = torch.Generator().manual_seed(ranks)
    for _ in range(5):
        everyone = [torch.randn(ranks * 9, generator=generator) for _ in range(ranks)]
        odd = [one[: ranks * 8 + 1].clone() for one in everyone]  # does not divide: every rank adds all
        expected, expected_odd = (tree_sum(dict(enumerate(one))) for one in (everyone, odd))
        for rank in range(ranks):
            found = summed(TreeSum, everyone, rank, whole=False)
            assert not differ(found, expected.view(ranks, -1)[rank]), rank
            assert not differ(summed(TreeSum, odd, rank, whole=True), expected_odd), rank
        if ranks > 2:
            assert differ(summed(RankOrderSum, odd, 0, whole=True), expected_odd), "this test cannot fail"


def test_nothing_is_minus_zero_in_a_sum_of_ranks():
    everyone = [torch.tensor([-0.0, 0.0, -0.0, 3.0]), *[torch.full((4,), -0.0) for _ in range(3)]]
    found = torch.cat([summed(TreeSum, everyone, rank, whole=False) for rank in range(4)])
    assert not differ(found, everyone[0])
