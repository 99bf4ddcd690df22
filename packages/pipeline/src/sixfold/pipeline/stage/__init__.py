"""stage."""
