"""Let a model write; the code is in commands/sample.py."""

from sixfold.gpt.commands.sample import (
    Draws,
    Opened,
    next_token,
    open_run,
    sample,
    sample_many,
    sample_run,
    sample_run_many,
    stream,
    stream_run,
)
from sixfold.gpt.model.key_value_cache import KeyValueCache

__all__ = [
    "Draws",
    "KeyValueCache",
    "Opened",
    "next_token",
    "open_run",
    "sample",
    "sample_many",
    "sample_run",
    "sample_run_many",
    "stream",
    "stream_run",
]
