"""Text to token pairs; the code is in data/prepare.py."""

from sixfold.gpt.data.prepare import Prepared, PreparedCorpus, prepare, prepare_cpython

__all__ = ["Prepared", "PreparedCorpus", "prepare", "prepare_cpython"]
