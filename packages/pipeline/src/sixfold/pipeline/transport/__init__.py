"""How messages reach another rank: shared memory, gloo, NCCL, threads; the same few classes in front of all.

From outside: acknowledgements, agreement, back_ends, protocol.
"""

from sixfold.pipeline.transport.back_ends import one_thread, over, threads
from sixfold.pipeline.transport.protocol import Control, Lane, Links, Receipt, Transport, Values

__all__ = ["Control", "Lane", "Links", "Receipt", "Transport", "Values", "one_thread", "over", "threads"]
