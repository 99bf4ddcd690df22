"""From how many neighbourhoods of a file a sample comes, under both shuffles: docs/guide/blending-document-shuffle.md.

    python packages/blending/benchmarks/neighbours.py [--documents 1000000] [--tokens 500] [--sequence-length 8192]

A neighbourhood is a run of 256 consecutive documents of the file: one domain, if the file is sorted by domain.
Counted, not timed: any machine gives the same figures.
"""

import argparse

import numpy as np

from sixfold.blending import GPTDataset, GPTDatasetConfig, Split

RUN = 256


class Equal:
    """Documents of equal length, none of them stored."""

    dtype = np.dtype(np.uint16)
    tokens = None

    def __init__(self, documents: int, tokens: int) -> None:
        self.sequence_lengths = np.full(documents, tokens, dtype=np.int32)
        self.sequence_pointers = np.arange(documents) * tokens * 2

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        raise AssertionError("nothing is read here")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=2000)
    options = parser.parse_args()
    source = Equal(options.documents, options.tokens)
    print(f"{options.documents} documents of {options.tokens} tokens, samples of {options.sequence_length}")
    for shuffle in ("block", "global"):
        config = GPTDatasetConfig(random_seed=1, sequence_length=options.sequence_length, document_shuffle=shuffle)
        data = GPTDataset(source, "a", range(options.documents), 10**6, Split.train, config)
        largest, runs = [], []
        for position in range(options.samples):
            documents = np.array([part.document for part in data.why(position).ranges])
            _, counts = np.unique(documents // RUN, return_counts=True)
            largest.append(counts.max() / documents.size)
            runs.append(counts.size)
        print(
            f"{shuffle}: {100 * np.mean(largest):.1f} % of a sample's documents lie in one run of {RUN}; "
            f"they lie in {np.mean(runs):.2f} runs"
        )


if __name__ == "__main__":
    main()
