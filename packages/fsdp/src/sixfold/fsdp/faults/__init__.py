"""Deadlines, heartbeats, and who is to blame when a rank does not come.

From outside: deadlines, disagreement, heartbeat, local_processes, model_store.
"""
