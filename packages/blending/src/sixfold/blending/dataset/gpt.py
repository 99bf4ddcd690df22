"""GPT samples: S ids, their successors as labels, loss mask, positions, document boundaries.

base.py --> TokenRows --> GPTDataset (this file) --> SampleLayout
"""

from functools import cached_property

import numpy.typing as npt

from sixfold.blending.batches.gpt_arrays import Batch, SampleLayout, TokenRows
from sixfold.blending.config.config import GPTDatasetConfig, special_token
from sixfold.blending.config.splits import Split
from sixfold.blending.dataset.base import MegatronDataset
from sixfold.blending.documents.eod_check import warn_of_other_eod
from sixfold.blending.documents.source import DocumentSource


class GPTDataset(MegatronDataset):
    """The samples of one part of one dataset for a GPT; see ``MegatronDataset`` for the arguments."""

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: DocumentSource,
        dataset_path: str | None,
        indexed_indices: "range | npt.ArrayLike",
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        eod, options = special_token(config.tokenizer, "eod"), config.options_of_eod
        if options and eod is not None:
            warn_of_other_eod(self.part, f"{self.name} ({index_split.name})", eod, options)

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
