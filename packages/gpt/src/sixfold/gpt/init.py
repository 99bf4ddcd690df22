"""Initial weights as a function of seed, name and index; the code is in model/initial_weights.py."""

from sixfold.gpt.model.initial_weights import initial_values, initializer

__all__ = ["initial_values", "initializer"]
