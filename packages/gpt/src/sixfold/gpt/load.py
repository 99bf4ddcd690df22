"""A trained model in one process, whatever layout wrote it.

run folder or checkpoint --> checkpoint.find --> dist_ckpt.load (group=None) --> GPTModel   (this file)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sixfold import dist_ckpt
from sixfold.gpt.checkpoint import find
from sixfold.gpt.checks import forget_idle_keys
from sixfold.gpt.config import TABLES, TrainConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.tables import build
from sixfold.gpt.toml import read_tables

if TYPE_CHECKING:
    from sixfold.gpt.model import GPTModel


def saved_config(folder: Path) -> TrainConfig:
    """The resolved config that a checkpoint carries.

    Raises:
        ConfigError: it carries none (it was not written by sixfold train).
    """
    common = dist_ckpt.load_common_state_dict(folder)
    if "config" not in common:
        raise ConfigError(f"{folder} holds no config; only checkpoints of `sixfold train` can be loaded as a model")
    values = read_tables(common["config"], (), TABLES, str(folder))
    forget_idle_keys(values)
    return TrainConfig(**{name: build(table, values[name], name) for name, table in TABLES.items()})


def load_model(
    path: str | Path, *, step: int | None = None, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> GPTModel:
    """Load the whole model from a run folder or one checkpoint folder.

    Args:
        step: the checkpoint of that step; None takes the newest whole one.
    Returns:
        The model in evaluation mode, weights in ``dtype``.
    Raises:
        ConfigError: no checkpoint there. CheckpointError: it is damaged.
    """
    from sixfold.gpt.model import GPTModel

    folder = find(path, step)
    model = GPTModel(saved_config(folder).model, device="meta").to_empty(device="cpu")
    dist_ckpt.load(model.sharded_state_dict(), folder, group=None)
    return model.to(device=device, dtype=dtype).eval()
