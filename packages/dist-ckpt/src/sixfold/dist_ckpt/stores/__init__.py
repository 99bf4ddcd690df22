"""Where bytes lie: paths, folders, opened checkpoints; commit in one step."""
