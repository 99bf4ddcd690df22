"""The functions behind ``sixfold-ckpt``: inspect, verify, convert, diff; each returns what ``--json`` prints."""

from sixfold.dist_ckpt.tools.commands import convert, diff, inspect, verify

__all__ = ["convert", "diff", "inspect", "verify"]
