"""The mirror of a store: a local folder that the ranks of a host fill and share while they load.

From outside: leases, local_view, mirror.
"""
