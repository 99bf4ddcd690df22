"""The smallest TOML a run accepts, and a way to change one key of it."""

import re
from typing import Any

from sixfold.gpt.config.train_config import TrainConfig

MINIMAL = """
[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
ffn_hidden_size = 96
vocab_size = 257

[data]
blend = ["data/wiki", "data/code"]
seq_length = 32

[train]
steps = 100
global_batch_size = 16
micro_batch_size = 4

[optimizer]
lr = 1e-3

[run]
dir = "runs/tiny"
"""


def config_with(*overrides: str, text: str = MINIMAL) -> TrainConfig:
    """The minimal configuration with overrides."""
    return TrainConfig.from_text(text, overrides)


def without(key: str) -> str:
    """The minimal text without the line of ``key``."""
    text, count = re.subn(rf"(?m)^{key} = .*\n", "", MINIMAL)
    assert count == 1, f"{key} is on {count} lines"
    return text


def words_of(error: Any) -> str:
    """Text of the error that ``pytest.raises`` caught."""
    return str(error.value)
