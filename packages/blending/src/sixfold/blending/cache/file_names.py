"""What an index depends on, as the text whose md5 names its cache files.

    dataset, blend --> identifiers --> describe, digest (this file) --> indices.py, index_files.py

Source: megatron-core 0.16.1 ``megatron_dataset.py``, ``blended_dataset.py``: the same keys in the same order.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sixfold.blending.config.splits import Bookends
from sixfold.blending.errors import BlendingError

Identifiers = dict[str, Any]


def dataset_identifiers(
    cls: str, dataset_path: str | None, num_samples: int | None, index_split: str, key_fields: Mapping[str, Any]
) -> Identifiers:
    """Of one part of one dataset; ``key_fields`` are the config's, in their order."""
    first = {"class": cls, "dataset_path": dataset_path, "num_samples": num_samples, "index_split": index_split}
    return first | {name: _as_peer(name, value) for name, value in key_fields.items()}


def blend_identifiers(
    cls: str, datasets: Sequence[Identifiers], split: str, weights: Sequence[float], size: int | None
) -> Identifiers:
    """Of a blend; ``weights`` are normalised, or the datasets' lengths where ``size`` is None."""
    return {"class": cls, "datasets": list(datasets), "split": split, "weights": list(weights), "size": size}


def record_name(cls: str, samples: Mapping[str, int | None], split: str, key_fields: Mapping[str, Any]) -> str:
    """The file that tells of all index files of one part of an apportioned blend: ``samples`` of each prefix."""
    identifiers = dataset_identifiers(
        cls, None, None, split, {**key_fields, "order": "apportioned", "samples": samples}
    )
    return f"{digest(describe(identifiers))}-BlendedDataset-{split}-sixfold.json"


def _as_peer(name: str, value: Any) -> Any:
    if name == "split_matrix" and value is not None:
        matrix: list[Bookends | None] = value
        # The peer's first bookend is the integer 0, which JSON tells from 0.0.
        return [(0, part[1]) if number == 0 and part else part for number, part in enumerate(matrix)]
    return int(value) if name == "random_seed" else value


def describe(identifiers: Identifiers) -> str:
    """The text of ``description.txt``.

    Raises:
        BlendingError: a value that is neither JSON nor has ``unique_identifiers``.
    """
    try:
        return json.dumps(identifiers, indent=4, default=lambda value: value.unique_identifiers)
    except (AttributeError, TypeError) as error:
        raise BlendingError(
            f"cache files of this order are named after a JSON text, which cannot be made: {error}. Give the "
            "tokenizer, and other objects in key fields, unique_identifiers: a dict of JSON values"
        ) from error


def digest(description: str) -> str:
    """md5 of a description, in hex."""
    return hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
