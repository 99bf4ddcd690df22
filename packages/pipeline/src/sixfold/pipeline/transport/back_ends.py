"""Which back end carries messages: process groups, threads of this process, or one thread for all ranks.

group, edges --> over (this file) --> Transport
"""

from __future__ import annotations

from typing import Any, Literal

from sixfold.pipeline.transport.protocol import EdgeFactory, Transport

__all__ = ["one_thread", "over", "threads"]


def over(
    group: Any,
    edges: EdgeFactory | Literal["groups", "one", "host"] | None = None,
    *,
    debug_memory: bool = False,
) -> Transport:
    """The transport over a process group; ``edges`` and ``debug_memory`` as in PipelineRunner."""
    from sixfold.pipeline.transport.process_groups import GroupTransport

    return GroupTransport(group, edges, debug_memory=debug_memory)


def threads(ranks: int) -> list[Transport]:
    """One transport per rank, for ranks that are threads of this process: one PipelineRunner in each.

    Tensors are handed over as they are, without a copy.
    """
    from sixfold.pipeline.transport.thread_queues import ThreadQueues, ThreadTransport

    queues = ThreadQueues(ranks)
    return [ThreadTransport(queues, rank) for rank in range(ranks)]


def one_thread(ranks: int) -> list[Transport]:
    """One transport per rank, for ranks whose calls one thread makes, in an order in which every input is there."""
    from sixfold.pipeline.transport.same_thread import Mailbox, SameThreadTransport

    mailbox = Mailbox(ranks)
    return [SameThreadTransport(mailbox, rank) for rank in range(ranks)]
