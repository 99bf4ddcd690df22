"""split_backward."""
