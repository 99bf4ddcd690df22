"""Which message an action is an end of.

    action --> Route, directed edge (this file) --> back ends

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from sixfold.pipeline.program.action import Action, Kind

__all__ = ["Edge", "Route", "forward_edges", "in_rounds", "route_of", "window_of"]

Edge = tuple[int, int]  # source rank, destination rank


class Route(NamedTuple):
    """A message, the same at both its ends.

    Attributes:
        stage: the lower of the two stages between which it travels.
        forward: an output, else gradients.
        slot: microbatch, modulo those of a batch.
    """

    stage: int
    forward: bool
    slot: int


def route_of(action: Action, microbatches: int) -> Route:
    """The message of a SEND or RECV."""
    assert action.microbatch is not None, f"{action}: a message has a microbatch"
    lower = min(action.stage, action.peer_stage)
    return Route(lower, action.kind in (Kind.SEND_F, Kind.RECV_F), action.microbatch % microbatches)


def forward_edges(placement: Sequence[int]) -> dict[Edge, int]:
    """Directed edges on which outputs travel -> how many stages' outputs do."""
    edges: dict[Edge, int] = {}
    for edge in pairwise(placement):
        if edge[0] != edge[1]:
            edges[edge] = edges.get(edge, 0) + 1
    return edges


def in_rounds(edges: Iterable[Edge]) -> list[Edge]:
    """The order in which all ranks connect their edges, each with its other end.

    First those whose lower rank is even, then the odd ones: a chain of any number of ranks is connected in as many
    rounds as a rank has edges, not one edge after another.
    """
    return sorted(edges, key=lambda edge: (min(edge) % 2, edge))


def window_of(placement: Sequence[int], microbatches: int, edge: Edge) -> int:
    """Messages that may be sent on an edge and not be asked for: those of a batch.

    So a SEND waits for a peer that is a whole batch behind, and never within a flush. The runner takes programs that
    only pass where a SEND never waits. And a receive whose shape is not agreed yet is asked for late.
    """
    forward = forward_edges(placement)
    return microbatches * (forward.get(edge, 0) + forward.get((edge[1], edge[0]), 0))
