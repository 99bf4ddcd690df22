"""The functions behind ``sixfold-ckpt``: inspect, verify, convert, diff, metadata; each returns what it prints.

From outside: commands, conversion.
"""

from sixfold.dist_ckpt.tools.added_metadata import metadata
from sixfold.dist_ckpt.tools.commands import convert, diff, inspect, verify

__all__ = ["convert", "diff", "inspect", "metadata", "verify"]
