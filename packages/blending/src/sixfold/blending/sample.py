"""Public path of what a dataset class of your own works with: rows of ids and batches (this file)."""

from sixfold.blending.batches.gpt_arrays import Batch, SampleLayout, TokenRows

__all__ = ["Batch", "SampleLayout", "TokenRows"]
