"""The pure functions behind the orders, under one roof (this file).

``apportion`` shares a total, ``QuotaTree`` interleaves datasets, ``permute`` shuffles without a table.
"""

from sixfold.blending.apportion import apportion
from sixfold.blending.permute import permute
from sixfold.blending.quota import QuotaTree

__all__ = ["QuotaTree", "apportion", "permute"]
