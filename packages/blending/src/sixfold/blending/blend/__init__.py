"""Which dataset gives which position: quotas and their changes, exact counts, or two arrays.

From outside: deal, exact_counts, index_arrays, position_shuffle, quota_tree, schedule.
"""
