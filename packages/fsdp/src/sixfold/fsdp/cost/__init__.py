"""What a strategy costs, from formulas: no torch, no processes."""
