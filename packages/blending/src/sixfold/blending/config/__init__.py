"""What a user says about a blend, checked when it is said: fields, prefixes and their names, splits.

From outside: config, order_names, prefixes, splits.
"""
