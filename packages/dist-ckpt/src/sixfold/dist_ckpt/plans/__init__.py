"""Tables of all ranks, plans of what moves where, and all that can be wrong with them. Pure.

From outside: balance, batches, plan, shard_table.
"""
