"""Runs that go on when a rank or a node is lost: generations of ranks, who leads, the processes that become ranks.

From outside: generation, heartbeat, memory_folder, nodes, sizes, supervisor.
"""
