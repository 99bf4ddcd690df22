"""The quota tree, by the path that pages have named (this file); ``order.py`` has it too, and is the one to import."""

from sixfold.blending.blend.quota_tree import QuotaTree

__all__ = ["QuotaTree"]
