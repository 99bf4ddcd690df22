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
    def _extra_tokens(self) -> int:
        return 1 if self.config.add_extra_token_to_sequence else 0

    @property
    def _keeps_partial(self) -> bool:
        return self.index_split is Split.valid and not self.config.drop_last_partial_validation_sequence

    def new_rows(self, samples: int, sequence_length: int, out: Batch | None = None) -> TokenRows:
        return self.layout.new_rows(samples, sequence_length, out)

    def make_batch(self, rows: TokenRows, out: Batch | None = None) -> Batch:
        return self.layout.batch(rows, out)
