"""For code that calls ``torch.distributed.checkpoint``: it goes through this engine by one argument.

    import torch.distributed.checkpoint as dcp
    from sixfold.dist_ckpt.dcp import Reader, Writer

    dcp.save(state, storage_writer=Writer("run/step-00000007"))
    dcp.load(state, storage_reader=Reader("run/step-00000007"))

What is gained: checksums that a load compares, a commit in one step, no code run from a file, and reads of ranges. The
folder is torch's own format; torch's ``FileSystemReader`` and ``sixfold.dist_ckpt.load`` read it too. Planners, state
dicts, DTensors and Stateful objects, process groups and ``async_save`` are torch's.

For code that names no writer there are ``save``, ``async_save`` and ``load``: torch's functions with ours put in.
Such code changes one line: ``from sixfold.dist_ckpt import dcp`` replaces ``import torch.distributed.checkpoint as
dcp``.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata

from sixfold.dist_ckpt.torch_dcp.duplicate_names import same_names
from sixfold.dist_ckpt.torch_dcp.reader import Reader
from sixfold.dist_ckpt.torch_dcp.writer import Writer

__all__ = ["Reader", "Writer", "async_save", "load", "save"]

Place = str | os.PathLike[str] | None


def save(
    state_dict: dict[str, Any], *, checkpoint_id: Place = None, storage_writer: Any = None, **options: Any
) -> Metadata:
    """``torch.distributed.checkpoint.save`` through a ``Writer`` to ``checkpoint_id``, unless a writer is given.

    Raises:
        ShardingError: ranks hold different tensors under one name, of which torch saves one; see ``same_names``.
    """
    state_dict = same_names(state_dict, options)
    writer = storage_writer or Writer(checkpoint_id or "")
    metadata: Metadata = state_dict_saver.save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, **options
    )
    return metadata


def async_save(
    state_dict: dict[str, Any], *, checkpoint_id: Place = None, storage_writer: Any = None, **options: Any
) -> Any:
    """``torch.distributed.checkpoint.async_save`` through a ``Writer``, unless a writer is given.

    Give it a ``process_group`` of its own: a thread of torch uses that group while training goes on, and messages of
    both on one group pair with each other.

    Raises: as ``save``.
    """
    state_dict = same_names(state_dict, options)
    writer = storage_writer or Writer(checkpoint_id or "")
    return state_dict_saver.async_save(state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, **options)


def load(
    state_dict: dict[str, Any], *, checkpoint_id: Place = None, storage_reader: Any = None, **options: Any
) -> None:
    """``torch.distributed.checkpoint.load`` through a ``Reader`` of ``checkpoint_id``, unless a reader is given."""
    reader = storage_reader or Reader(checkpoint_id or "")
    state_dict_loader.load(state_dict, checkpoint_id=checkpoint_id, storage_reader=reader, **options)
