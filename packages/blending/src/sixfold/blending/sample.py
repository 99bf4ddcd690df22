"""What a dataset of one's own makes arrays of, by the path that examples name (this file)."""

from sixfold.blending.batches.gpt_arrays import Batch, SampleLayout, TokenRows

__all__ = ["Batch", "SampleLayout", "TokenRows"]
