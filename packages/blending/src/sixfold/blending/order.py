"""The pure functions behind the orders, under one roof (this file).

``apportion`` shares a total, ``QuotaTree`` interleaves datasets, ``permute`` shuffles without a table; ``greedy`` and
``exhaustive`` are megatron-core's blends.
"""

from sixfold.blending.apportion import apportion
from sixfold.blending.megatron.greedy import exhaustive, greedy
from sixfold.blending.permute import permute
from sixfold.blending.quota import QuotaTree

__all__ = ["QuotaTree", "apportion", "exhaustive", "greedy", "permute"]
