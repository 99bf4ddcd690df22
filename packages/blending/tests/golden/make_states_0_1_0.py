"""Writes states-0.1.0.json: states that release 0.1.0 saved. Run with the sources of that release on the path.

git archive <release 0.1.0> packages/blending | tar -x -C /tmp/old
PYTHONPATH=/tmp/old/packages/blending/src:.. python make_states_0_1_0.py
"""

import json
from importlib.metadata import version
from pathlib import Path

from sixfold.blending import BlendedDataset, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.source import ListSource


class Tokenizer:
    """As in blending_helpers."""

    eod = 0
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012


def stream(order: str, documents: int = 600, seed: int = 1234, **fields: object) -> BlendedDataset:
    """A blend of two; the second has ``documents``, so that more than one pointer is hashed."""
    config = GPTDatasetConfig(random_seed=seed, sequence_length=8, tokenizer=Tokenizer(), order=order, **fields)
    sources = {"a": [[1] * 20, [2] * 9], "b": [[3] * (5 + number % 3) for number in range(documents)]}
    parts = [
        GPTDataset(ListSource(lists), name, range(len(lists)), 0 if order == "stateless" else 60, Split.train, config)
        for name, lists in sources.items()
    ]
    return BlendedDataset(parts, [1, 3], 60, config)


def main() -> None:
    assert version("sixfold-blending") == "0.1.0", version("sixfold-blending")
    states = {order: stream(order).state_dict(30) for order in ("stateless", "megatron", "apportioned")}
    states["of 3000 documents"] = stream("stateless", 3000).state_dict(30)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(state)}" for name, state in states.items())
    (Path(__file__).parent / "states-0.1.0.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
