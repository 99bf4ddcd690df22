"""What a folder's ``metadata.json`` says, under the names that megatron-core gives it (``dist_checkpointing/core.py``).

    folder --> maybe_load_config (this file) --> CheckpointingConfig

There is no ``save_config``: ``metadata.json`` commits a checkpoint, and ``save`` writes it last.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sixfold.dist_ckpt.checkpoint.opening import read_config
from sixfold.dist_ckpt.errors import CheckpointingException as CheckpointingException
from sixfold.dist_ckpt.serialization import check_is_distributed_checkpoint as check_is_distributed_checkpoint
from sixfold.dist_ckpt.serialization import with_local_view


@dataclass(frozen=True)
class CheckpointingConfig:
    """The formats of a checkpoint: of its sharded part and of its common data."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """What ``metadata.json`` of a folder or URL says; None if there is none that can be read.

    It says nothing of the rest: ``check_is_distributed_checkpoint`` tells whether the checkpoint is whole.
    """
    config = with_local_view(checkpoint_dir, read_config)
    return None if config is None else CheckpointingConfig(*config[0], *config[1])
