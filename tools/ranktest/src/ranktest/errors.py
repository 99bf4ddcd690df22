"""What a job of ranks can end with, other than results.

Both are AssertionErrors, so that pytest reports a failed test and not a broken one.
"""


class RankFailed(AssertionError):
    """A rank raised, or died before it gave a result. The text holds the rank and its own traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


class RanksTimeout(AssertionError):
    """The deadline passed. The text holds the Python stack of every rank that was still running."""
