"""Token data on disk: the .bin/.idx pairs that Megatron-LM, NeMo, GPT-NeoX and Fast-LLM read, byte for byte.

    text --> build --> IndexedDatasetBuilder --> PREFIX.bin, PREFIX.idx --> IndexedDataset --> token ids

Needs numpy and nothing else.
"""

from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.filtering import FilterReport, filter_pair
from sixfold.indexed_data.format import DType
from sixfold.indexed_data.merging import merge
from sixfold.indexed_data.reader import IndexedDataset
from sixfold.indexed_data.remote import RemoteOptions, RemoteStore, StoreError
from sixfold.indexed_data.text.build import BuildReport, build
from sixfold.indexed_data.verifying import VerifyReport, verify
from sixfold.indexed_data.writer import IndexedDatasetBuilder

__all__ = [
    "BuildReport",
    "DType",
    "FilterReport",
    "IndexedDataError",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Problem",
    "RemoteOptions",
    "RemoteStore",
    "StoreError",
    "VerifyReport",
    "build",
    "filter_pair",
    "merge",
    "verify",
]
