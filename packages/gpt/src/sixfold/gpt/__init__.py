"""GPT pretraining from one TOML file: the five sixfold packages, wired.

    config --> mesh --> stages --> fsdp --> pipeline program --> train loop --> metrics, checkpoints

Importing this module imports nothing else: names are loaded when they are first used, and what reads a config needs no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sixfold.gpt.config import GPTConfig, TrainConfig
    from sixfold.gpt.data import Batch, global_batches
    from sixfold.gpt.errors import ConfigError, TrainError
    from sixfold.gpt.load import load_model
    from sixfold.gpt.loop import TrainResult, train
    from sixfold.gpt.model import GPTModel
    from sixfold.gpt.stages import stage_layers

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

_LAZY = {
    "Batch": "data",
    "ConfigError": "errors",
    "GPTConfig": "config",
    "GPTModel": "model",
    "TrainConfig": "config",
    "TrainError": "errors",
    "TrainResult": "loop",
    "global_batches": "data",
    "load_model": "load",
    "stage_layers": "stages",
    "train": "loop",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"sixfold.gpt.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
