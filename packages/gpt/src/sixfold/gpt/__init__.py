"""GPT pretraining from one TOML file: the five sixfold packages, wired.

    config --> mesh --> stages --> fsdp --> pipeline program --> train loop --> metrics, checkpoints

Importing this module, or reading a config, does not import torch: names that need it are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sixfold.gpt.config import GPTConfig, TrainConfig
from sixfold.gpt.data import Batch, global_batches
from sixfold.gpt.errors import ConfigError, TrainError
from sixfold.gpt.stages import stage_layers

if TYPE_CHECKING:
    from sixfold.gpt.load import load_model
    from sixfold.gpt.loop import TrainResult, train
    from sixfold.gpt.model import GPTModel

__all__ = [
    "Batch",
    "ConfigError",
    "GPTConfig",
    "GPTModel",
    "TrainConfig",
    "TrainError",
    "TrainResult",
    "global_batches",
    "load_model",
    "stage_layers",
    "train",
]

_LAZY = {"GPTModel": "model", "TrainResult": "loop", "load_model": "load", "train": "loop"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"sixfold.gpt.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
