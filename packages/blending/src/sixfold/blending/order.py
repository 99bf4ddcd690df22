"""The pure functions of the orders, in one module for users (this file).

``apportion`` shares a total, ``QuotaTree`` interleaves datasets, ``permute`` shuffles without a table, ``deal`` shares
a step among ranks; ``greedy`` and ``exhaustive`` are megatron-core's blends.
"""

from sixfold.blending.blend.deal import deal
from sixfold.blending.blend.quota_tree import QuotaTree
from sixfold.blending.megatron.greedy import exhaustive, greedy
from sixfold.blending.numbers.largest_remainder import apportion
from sixfold.blending.numbers.permutation import permute

__all__ = ["QuotaTree", "apportion", "deal", "exhaustive", "greedy", "permute"]
