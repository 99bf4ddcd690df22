"""Doors: ways into this engine by the interfaces of other libraries."""
