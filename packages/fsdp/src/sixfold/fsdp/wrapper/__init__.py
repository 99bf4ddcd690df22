"""What a user calls: the wrapped model, its pipeline stages, and the members it has not.

From outside: fully_sharded.
"""
