"""Made-up documents for throughput runs without data (this file): what a config without a blend reads.

    tokenizer --> MockGPTLowLevelDataset --> MockGPTDataset --> builder/builder.py

Lengths and ids are megatron-core's (``gpt_dataset.py``): 100,000 documents of 1 to 4,095 tokens that count up from 1
and end with eod. Nothing is stored but their lengths.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.config.config import BlendedMegatronDatasetConfig, GPTDatasetConfig, special_token
from sixfold.blending.config.splits import Split
from sixfold.blending.dataset.gpt import GPTDataset
from sixfold.blending.documents.source import DocumentSource
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import I64


class MockGPTLowLevelDataset:
    """The documents; a ``DocumentSource``."""

    seed = 0
    size = 100_000
    max_sequence_length = 4096
    dtype = np.dtype(np.int64)

    def __init__(self, tokenizer: Any) -> None:
        """Make the lengths up.

        Raises:
            BlendingError: the tokenizer has no vocab_size or no eod.
        """
        vocab_size, eod = special_token(tokenizer, "vocab_size"), special_token(tokenizer, "eod")
        if not vocab_size or eod is None:
            raise BlendingError("mock data is made of a vocabulary; give a tokenizer with vocab_size and eod")
        self.vocab_size, self.eod_token = vocab_size, eod
        random = np.random.default_rng(seed=self.seed)
        self.sequence_lengths: npt.NDArray[np.int32] = random.integers(
            low=1, high=self.max_sequence_length, size=self.size, dtype=np.int32
        )
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        self.sequence_pointers: I64 = (ends - self.sequence_lengths) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> I64:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> I64:
        """Ids ``offset`` to ``offset + length`` of document ``idx``."""
        whole = int(self.sequence_lengths[idx])
        end = whole if length is None else offset + length
        ids: I64 = np.arange(offset + 1, end + 1) % self.vocab_size
        if end == whole and ids.size:
            ids[-1] = self.eod_token
        return ids


class MockGPTDataset(GPTDataset):
    """GPT samples of made-up documents; see ``MegatronDataset`` for the arguments.

    Raises:
        BlendingError: the config has a blend.
    """

    def __init__(
        self,
        indexed_dataset: DocumentSource,
        dataset_path: str | None,
        indexed_indices: "range | npt.ArrayLike",
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        refuse_a_blend(config)
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: BlendedMegatronDatasetConfig) -> DocumentSource:
        """Make the documents up; there is no path."""
        refuse_a_blend(config)
        return MockGPTLowLevelDataset(config.tokenizer)


def refuse_a_blend(config: BlendedMegatronDatasetConfig) -> None:
    """BlendingError for data that nobody would read."""
    if not config.mock:
        raise BlendingError("MockGPTDataset makes its data up: give it a config without blend and blend_per_split")
