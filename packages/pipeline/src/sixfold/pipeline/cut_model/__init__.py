"""cut_model."""
