"""Writes peer.json: splits and sample arrays as megatron-core 0.16.1 makes them.

    python make_peer.py        # with megatron-core installed

Loading megatron-core takes seconds, so the tests read its answers from here.
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset

EOD, PAD, S = 0, 9, 12
TEXTS = [
    [3, 4, 0, 5, 6, 7, 0, 0, 1, 2, 3, 4, 5],
    [0, 4, 1, 5, 6, 7, 2, 8, 1, 2, 3, 0, 0],
    [3, 4, 0, 5, 6, 7, 9, 9, 9, 9, 9, 9, 9],
    [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5],
]
SPLITS = ["98,2,0", "1", "969, 30, 1", ".5,.25,.25", "1,1,1", "0,1,0", "99.9,0.1", "7,2.,1"]


def peer_sample(text: list[int], flags: dict[str, bool]) -> dict[str, object]:
    """One sample through the peer's own ``__getitem__``, with ``text`` in place of a file."""
    data = GPTDataset.__new__(GPTDataset)
    data.config = SimpleNamespace(tokenizer=SimpleNamespace(eod=EOD), create_attention_mask=True, **flags)
    data._pad_token_id = PAD
    data.masks_and_position_ids_are_cacheable = False
    extra = int(flags["add_extra_token_to_sequence"])
    data._query_document_sample_shuffle_indices = lambda _: (np.array(text[: S + extra]), None)
    sample = {name: array.numpy() for name, array in data[0].items()}
    sample["attention_mask"] = np.packbits(sample["attention_mask"])
    return {name: array.tolist() for name, array in sample.items()}


def main() -> None:
    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "add_extra_token_to_sequence")
    cases = []
    for values in itertools.product([False, True], repeat=len(names)):
        flags = dict(zip(names, values, strict=True))
        cases += [[flags, text, peer_sample(text, flags)] for text in TEXTS]
    splits = [[split, convert_split_vector_to_split_matrix(parse_and_normalize_split(split))] for split in SPLITS]
    Path(__file__).with_name("peer.json").write_text(
        '{"splits": '
        + json.dumps(splits)
        + ',\n"samples": [\n'
        + ",\n".join(map(json.dumps, cases))
        + f'],\n"eod": {EOD}, "pad": {PAD}}}\n'
    )


if __name__ == "__main__":
    main()
