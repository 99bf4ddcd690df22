"""GPT samples: S ids, their successors as labels, loss mask, positions, document boundaries.

dataset.py --> TokenRows --> GPTDataset (this file) --> SampleLayout
"""

from functools import cached_property

from sixfold.blending.config import GPTDatasetConfig
from sixfold.blending.dataset import MegatronDataset
from sixfold.blending.sample import Batch, SampleLayout, TokenRows
from sixfold.blending.splits import Split


class GPTDataset(MegatronDataset):
    """The samples of one part of one dataset for a GPT; see ``MegatronDataset`` for the arguments."""

    config: GPTDatasetConfig

    @cached_property
    def layout(self) -> SampleLayout:
        return SampleLayout(self.config)

    @property
    def samples_per_epoch(self) -> int:
        """(T - x) // S; rounded up, the last one padded, for validation that keeps its partial sample."""
        extra = 1 if self.config.add_extra_token_to_sequence else 0
        keeps_partial = self.index_split is Split.valid and not self.config.drop_last_partial_validation_sequence
        tokens = max(0, self.part.tokens - extra)
        S = self.config.sequence_length
        return -(-tokens // S) if keeps_partial else tokens // S

    def new_rows(self, samples: int, sequence_length: int, out: Batch | None = None) -> TokenRows:
        return self.layout.new_rows(samples, sequence_length, out)

    def make_batch(self, rows: TokenRows, out: Batch | None = None) -> Batch:
        return self.layout.batch(rows, out)
