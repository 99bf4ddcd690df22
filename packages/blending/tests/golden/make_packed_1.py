"""Writes packed-1.json: rows of packed documents by tests/packed_helpers.py, which shares nothing with the package.

python packages/blending/tests/golden/make_packed_1.py     # only when a new version of the order is made
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))


def main() -> None:
    from packed_helpers import NaiveRows

    cases = []
    for seed, (documents, longest, S, shuffle) in enumerate(
        [(100, 30, 8, "global"), (100, 9, 8, "block"), (2200, 7, 4, "block"), (3, 100, 7, "global")]
    ):
        lengths = [random.Random(seed * 10_000 + number).randrange(longest) for number in range(documents)]
        naive = NaiveRows(lengths, S, window=16, shuffle=shuffle)
        samples = [0, 1, 2, naive.per_epoch - 1, naive.per_epoch, 3 * naive.per_epoch + 5]
        cases.append(
            {
                "lengths": lengths,
                "sequence_length": S,
                "shuffle": shuffle,
                "rows_of_windows": [*map(len, naive.windows)],
                "rows": [[sample, naive.row(sample)] for sample in samples],
            }
        )
    (HERE / "packed-1.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
