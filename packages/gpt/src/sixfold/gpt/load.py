"""A trained model in one process; the code is in checkpoints/trained_model.py."""

from sixfold.gpt.checkpoints.trained_model import load_model, saved_config, saved_model, saved_tokenizer

__all__ = ["load_model", "saved_config", "saved_model", "saved_tokenizer"]
