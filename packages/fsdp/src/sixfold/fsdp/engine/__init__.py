"""The events of a step: gather, compute, reduce, free."""
