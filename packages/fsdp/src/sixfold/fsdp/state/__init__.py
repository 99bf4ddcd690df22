"""State out and in: live records, full tensors.

From outside: full_state, load_full_state, records.
"""
