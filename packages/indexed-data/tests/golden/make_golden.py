"""Write the golden pairs of this folder with megatron-core 0.16.1, and what is in them as expected.json.

    python make_golden.py

Each pair is a list of documents, a document a list of sequences, a sequence [ids, mode].
"""

import json
import os

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

PAIRS = {
    "plain-uint16": ("uint16", False, [[[[5, 6, 7], 0]], [[[65535, 0], 0]], [[[1], 0]]]),
    "sequences-int32": ("int32", False, [[[[1, 2], 0], [[], 0], [[-100], 0]], [], [[[2147483647], 0]]]),
    "wide-int64": ("int64", False, [[[[2**40, -1], 0]]]),
    "modes-uint8": ("uint8", True, [[[[10, 11], 0], [[255], 3]], [[[0], -1]]]),
    "empty-uint16": ("uint16", False, []),
}


def main() -> None:
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    for name, (dtype, multimodal, documents) in PAIRS.items():
        builder = IndexedDatasetBuilder(f"{name}.bin", getattr(np, dtype), multimodal)
        for document in documents:
            for ids, mode in document:
                builder.add_item(torch.tensor(ids, dtype=torch.int64), mode)
            builder.end_document()
        builder.finalize(f"{name}.idx")
    with open("expected.json", "w") as file:
        json.dump(PAIRS, file, indent=1)


if __name__ == "__main__":
    main()
