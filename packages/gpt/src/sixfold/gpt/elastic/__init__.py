"""Runs that go on when a rank is lost: generations of ranks, their supervisor, the processes that become ranks.

From outside: generation, heartbeat, memory_folder, sizes, supervisor.
"""
