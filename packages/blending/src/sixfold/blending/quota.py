"""The quota tree under its older path (this file). New code imports it from ``order.py``."""

from sixfold.blending.blend.quota_tree import QuotaTree

__all__ = ["QuotaTree"]
