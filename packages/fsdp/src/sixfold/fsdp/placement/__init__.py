"""Where gathered weights lie, and which stay within a byte budget.

From outside: parking, placement, residency, use_order.
"""
