"""GPT pretraining from one TOML file: the five sixfold packages, wired.

    config --> mesh --> stages --> fsdp --> pipeline program --> train loop --> metrics, checkpoints

Importing this module imports nothing else: names are loaded when they are first used, and what reads a config needs no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sixfold.gpt.checkpoints.trained_model import load_model
    from sixfold.gpt.config.train_config import GPTConfig, TrainConfig
    from sixfold.gpt.data.token_stream import Batch, global_batches
    from sixfold.gpt.errors import ConfigError, TrainError
    from sixfold.gpt.model.decoder import GPTModel
    from sixfold.gpt.parallel.stages import stage_layers
    from sixfold.gpt.training.loop import TrainResult, train

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
    "Batch": "data.token_stream",
    "ConfigError": "errors",
    "GPTConfig": "config.train_config",
    "GPTModel": "model.decoder",
    "TrainConfig": "config.train_config",
    "TrainError": "errors",
    "TrainResult": "training.loop",
    "global_batches": "data.token_stream",
    "load_model": "checkpoints.trained_model",
    "stage_layers": "parallel.stages",
    "train": "training.loop",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"sixfold.gpt.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
