"""What a strategy costs, from formulas: no torch, no processes.

From outside: command, formulas, terms.
"""
