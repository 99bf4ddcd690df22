"""`--fill-recycled`, the mode in which memory that is given back is filled, holds in ranks too."""

from ranktest import run_ranks
from sixfold.dist_ckpt.reused_memory import CHECK


def fills(rank, ranks):
    return CHECK.fills


def test_ranks_fill_memory_that_is_given_back_where_pytest_itself_does():
    assert run_ranks(fills, 1) == [CHECK.fills]
