"""batches."""
