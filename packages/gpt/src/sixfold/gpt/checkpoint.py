"""Which checkpoint a path means; the code is in checkpoints/training_state.py."""

from sixfold.gpt.checkpoints.training_state import find

__all__ = ["find"]
