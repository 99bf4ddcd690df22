"""Stages under torch's ``fully_shard``: behind a call they have their shards as parameters again.

    runner's call begins, is over --> parts that forwards left gathered are sharded (this file) --> run

A root of FSDP2 stays gathered behind a forward, for the backward that follows; behind an evaluation none does. Its
parameters would then be gathered copies that no optimizer knows: without gradients, and of the weights before its step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from sixfold.pipeline.stage import Stage

__all__ = ["shard_again"]


def shard_again(stages: Iterable[Stage]) -> None:
    """Give every part of the stages that is under ``fully_shard`` its shards as parameters; nothing is sent."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is None:  # nobody has loaded it
        return
    for stage in stages:
        for part in stage.module.modules() if stage.module is not None else ():
            if isinstance(part, sharded):
                part.reshard()
