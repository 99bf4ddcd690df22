"""A state dict: records, factories, leaves, and the tree that holds them. No file, no rank."""
