"""No wait without a deadline, and one error on every rank when one fails.

From outside: deadlines, report.
"""
