"""An exact, endless, elastic sample order over many token datasets, with nothing to build.

    token files + weights --> config --> builder --> position --> (dataset, sample) --> ranges --> arrays

Any process computes any position from the configuration alone. Start at ``builder.py`` and read
along the arrow: ``schedule.py`` and ``quota.py`` say which dataset, ``grid.py`` and ``line.py`` which tokens,
``sample.py`` which arrays.
"""

from sixfold.blending.blended import BlendedDataset
from sixfold.blending.builder import BlendedMegatronDatasetBuilder
from sixfold.blending.config import BlendChange, BlendedMegatronDatasetConfig, GPTDatasetConfig
from sixfold.blending.dataset import MegatronDataset
from sixfold.blending.errors import BlendingError
from sixfold.blending.gpt import GPTDataset
from sixfold.blending.mock import MockGPTDataset
from sixfold.blending.prefetch import Prefetcher
from sixfold.blending.source import DocumentSource
from sixfold.blending.splits import Split
from sixfold.blending.why import TokenRange, Why

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
    "Prefetcher",
    "Split",
    "TokenRange",
    "Why",
]
