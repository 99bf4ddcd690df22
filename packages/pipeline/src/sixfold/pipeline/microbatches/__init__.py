"""microbatches."""
