"""Snapshots in the memory of hosts: files in a tmpfs, copied to other hosts, which outlive the processes.

generations.py, placement.py, settling.py: pure rules. tier.py: the story, with handles.py; savers.py, jobs.py: what
workers do of it; restoring.py: a load. domain_folder.py, record.py: files of a host. peers.py: what hosts send others.

From outside: tier.
"""

from sixfold.dist_ckpt.memory_tier.handles import Restored, Snapshot
from sixfold.dist_ckpt.memory_tier.placement import bytes_per_domain
from sixfold.dist_ckpt.memory_tier.tier import MemoryTier

__all__ = ["MemoryTier", "Restored", "Snapshot", "bytes_per_domain"]
