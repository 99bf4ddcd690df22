"""Deadlines, heartbeats, and who is to blame when a rank does not come."""
