"""The order in which a training run reads samples from many token datasets, computed instead of built.

    token files + weights --> config --> builder --> position --> (dataset, sample) --> ranges --> arrays

Any process computes the sample of any position from the configuration alone. Start at ``builder/builder.py`` and read
along the arrow. ``blend/schedule.py`` and ``blend/quota_tree.py`` say which dataset, ``samples/chunk_grid.py`` and
``samples/token_line.py`` which tokens, ``batches/gpt_arrays.py`` which arrays. docs/design/blending.md has the folders.
"""

from sixfold.blending.batches.prefetch import Prefetcher
from sixfold.blending.builder.builder import BlendedMegatronDatasetBuilder
from sixfold.blending.config.config import BlendChange, BlendedMegatronDatasetConfig, GPTDatasetConfig
from sixfold.blending.config.splits import Split
from sixfold.blending.dataset.base import MegatronDataset
from sixfold.blending.dataset.blended import BlendedDataset
from sixfold.blending.dataset.gpt import GPTDataset
from sixfold.blending.dataset.mock import MockGPTDataset
from sixfold.blending.dataset.provenance import TokenRange, Why
from sixfold.blending.documents.source import DocumentSource
from sixfold.blending.errors import BlendingError
from sixfold.blending.samples.packing_costs import PackingCost, packing_costs

__all__ = [
    "BlendChange",
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "BlendedMegatronDatasetConfig",
    "BlendingError",
    "DocumentSource",
    "GPTDataset",
    "GPTDatasetConfig",
    "MegatronDataset",
    "MockGPTDataset",
    "PackingCost",
    "Prefetcher",
    "Split",
    "TokenRange",
    "Why",
    "packing_costs",
]
