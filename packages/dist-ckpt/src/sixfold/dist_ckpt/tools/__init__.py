"""The functions behind ``sixfold-ckpt``: inspect, verify, convert, consolidate, diff, metadata; each returns
what it prints.

From outside: commands, conversion.
"""

from sixfold.dist_ckpt.tools.added_metadata import metadata
from sixfold.dist_ckpt.tools.commands import convert, diff, inspect, verify
from sixfold.dist_ckpt.tools.conversion import consolidate

__all__ = ["consolidate", "convert", "diff", "inspect", "metadata", "verify"]
