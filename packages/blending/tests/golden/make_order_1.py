"""Writes order-1.json and order-1-global.json from the plain statement in blending_helpers.py (not from the package).

    PYTHONPATH=.. python make_order_1.py

Version 1 of the order is frozen: a difference here is a new version, never a new golden file.
"""

import json
from pathlib import Path

from blending_helpers import NaiveLine, naive_blend, naive_key, naive_permute, naive_quotas


def main() -> None:
    keys = [["a"], [1234, "a", "train", 0], [1234, "a", "train", 0, 17], [7, "wiki/é", "valid", 0, 3, 1]]
    sizes = [(0, 1), (1, 2), (5, 10), (naive_key("a"), 100), (2**64 - 1, 65_536), (123456789, 2**40)]
    lengths = [3, 0, 11, 5, 8, 1, 20, 2, 9, 4] * 4
    line = NaiveLine(lengths, 8)
    samples = [line.take() for _ in range(60)]
    many = NaiveLine([1 + i * i % 7 for i in range(2100)], 100, seed=7, name="b", part="valid")
    weights = [0.7, 0.2, 0.1]
    golden = {
        "keys": [[parts, naive_key(*parts)] for parts in keys],
        "permutations": [
            [key, n, index, [naive_permute(key, n, i) for i in index]]
            for key, n in sizes
            for index in [sorted({i * n // 12 for i in range(12)})]
        ],
        "quotas": naive_quotas(weights),
        "datasets_of_0.7_0.2_0.1": [dataset for dataset, _ in naive_blend(naive_quotas(weights), 200)],
        "line_lengths": lengths,
        "begins_of_samples": [sample[0][0] for sample in samples],
        "first_tokens_of_samples": [line.token(sample[0][0]) for sample in samples],
        "first_tokens_in_blocks_of_2": [many.token(many.take()[0][0]) for _ in range(20)],
    }
    write("order-1", golden)
    whole = NaiveLine([1 + i * i % 7 for i in range(2100)], 100, seed=7, name="b", part="valid", shuffle="global")
    write("order-1-global", {"first_tokens_of_2100_documents": [whole.token(whole.take()[0][0]) for _ in range(20)]})


def write(name: str, golden: dict[str, object]) -> None:
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in golden.items())
    (Path(__file__).parent / f"{name}.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
