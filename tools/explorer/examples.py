"""Programs to begin with in the box for one's own: PyTorch's CSV, right and wrong.

The page offers them by these names; ``tests-integration/test_explorer.py`` says of each what it is.
"""

from __future__ import annotations

__all__ = ["EXAMPLES"]

EXAMPLES = {
    "1F1B, right": "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n",
    # Rank 0 sends an activation before it takes a gradient, rank 1 the other way round: each waits for the other.
    "sends that cross: a deadlock": (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n"
    ),
    # Rank 0 wants the gradient of microbatch 0 before it makes activation 1, which rank 1 wants first.
    "two orders that do not meet: a deadlock": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
    "a backward that is missing": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n",
    "a cell that is no action": "0F0,0F1,0B0,0B1\n1F0,1B0,1F,1B1\n",
}
