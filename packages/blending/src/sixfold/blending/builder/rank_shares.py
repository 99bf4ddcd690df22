"""Which rank builds which indices.

    documents, tokens, samples of each --> build_cost --> shares (this file) --> builder.py

Pure: every rank computes the same shares alone.
"""

import heapq
from collections.abc import Sequence


def build_cost(documents: int, tokens: int, samples: int | None, sequence_length: int) -> int:
    """Entries that the indices of a part will have: places of documents, and samples twice.

    Args:
        documents, tokens: of one epoch.
        samples: asked for, None for one epoch.
    """
    if tokens == 0:
        return 0
    epochs = 1 if samples is None else max(1, -(-samples * sequence_length // tokens))
    return epochs * documents + 2 * (epochs * tokens // sequence_length)


def shares(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of the tasks of each rank: the largest first, each to the rank with the least so far.

    The busiest rank has at most 4/3 of what the best division gives it. Source: Graham 1969 (longest first).
    """
    taken: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        least, rank = heapq.heappop(load)
        taken[rank].append(number)
        heapq.heappush(load, (least + costs[number], rank))
    return taken
