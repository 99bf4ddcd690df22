"""An existing checkpoint, opened: found, its small files read, its large ones mapped."""
