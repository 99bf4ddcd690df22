"""The group of a wrap that was given none: all ranks, where torch.distributed is initialised.

    process_group="world" --> resolve_group (this file) --> setup/options.py

The one file of this package that asks for the default group. Under torchrun a wrap without a group once trained every
rank alone, without a word.
"""

from __future__ import annotations

import torch.distributed as dist

from sixfold.fsdp.errors import FsdpError


def resolve_group(process_group: dist.ProcessGroup | str | None) -> dist.ProcessGroup | None:
    """The group that is meant: None is one process, ``"world"`` all ranks (one process where there are none).

    Raises:
        FsdpError: another text.
    """
    if isinstance(process_group, str):
        if process_group != "world":
            raise FsdpError(
                f"process_group is {process_group!r}; it is a ProcessGroup, None for one process, or 'world' for all "
                "ranks"
            )
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return process_group
