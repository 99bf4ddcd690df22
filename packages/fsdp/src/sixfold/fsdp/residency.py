"""Which units to gather, keep and free under a byte budget: the public names of placement/residency.py."""

from sixfold.fsdp.placement.residency import Action, Solution, plan, solve

__all__ = ["Action", "Solution", "plan", "solve"]
