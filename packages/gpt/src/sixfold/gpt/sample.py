"""Let a model write; the code is in commands/sample.py."""

from sixfold.gpt.commands.sample import Draws, Opened, next_token, open_run, sample, sample_run, stream, stream_run

__all__ = ["Draws", "Opened", "next_token", "open_run", "sample", "sample_run", "stream", "stream_run"]
