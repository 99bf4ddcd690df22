"""Which layers a pipeline stage holds; the code is in parallel/stages.py."""

from sixfold.gpt.parallel.stages import stage_layers

__all__ = ["stage_layers"]
