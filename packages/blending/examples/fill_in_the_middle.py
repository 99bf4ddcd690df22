"""Documents read as prefix, suffix, middle: a dataset class that changes the ids of a batch."""

from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from types import SimpleNamespace

import numpy as np

from sixfold.blending import GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.sample import Batch, TokenRows
from sixfold.blending.source import ListSource

EOD, PREFIX, SUFFIX, MIDDLE = 0, 256, 257, 258  # bytes of text are 1..255


@dataclass(frozen=True, kw_only=True)
class MiddleConfig(GPTDatasetConfig):
    middle_rate: float = 0.5  # share of documents; no sequence and no length depends on it: not in the cache key


class MiddleDataset(GPTDataset):
    config: MiddleConfig

    def make_batch(self, rows: TokenRows, out: Batch | None = None) -> Batch:
        for tokens, labels, begins in zip(rows.tokens, rows.labels, rows.begins, strict=True):
            ids = np.append(tokens, labels[-1])
            # Drawn from the sample's own ids: the same in any batch, on any rank, after any restart.
            rng = np.random.default_rng(int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest(), "little"))
            edges = np.flatnonzero(np.append(begins, False) | (np.append(EOD, ids[:-1]) == EOD))
            for begin, end in pairwise([*edges.tolist(), ids.size]):
                end -= int(ids[end - 1] == EOD)  # it stays last
                if end - begin > 8 and self.layout.pad not in ids[begin:end] and rng.random() < self.config.middle_rate:
                    ids[begin:end] = middle_last(ids[begin : end - 3], rng)  # the marks take the room of three ids
            tokens[:], labels[:] = ids[:-1], ids[1:]
        return super().make_batch(rows, out)


def middle_last(text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Text cut at two places, its middle moved behind its end."""
    low, high = sorted(rng.integers(0, text.size + 1, 2))
    return np.concatenate([[PREFIX], text[:low], [SUFFIX], text[high:], [MIDDLE], text[low:high]])


def main() -> None:
    source = ListSource([[*f"def add_{n}(a, b):\n    return a + b + {n}\n".encode(), EOD] for n in range(200)])
    config = MiddleConfig(random_seed=1, sequence_length=96, tokenizer=SimpleNamespace(eod=EOD), middle_rate=0.7)
    data = MiddleDataset(source, "code", range(200), 1000, Split.train, config)
    marks = {EOD: "<|end|>\n", PREFIX: "<|prefix|>", SUFFIX: "<|suffix|>", MIDDLE: "<|middle|>"}
    print("".join(marks.get(id_) or chr(id_) for id_ in data[0]["tokens"].tolist()))
    same = np.array_equal(data[3]["tokens"], data.get_batch([9, 3])["tokens"][1])
    print("\nsample 3 is the same alone and in a batch:", same)


if __name__ == "__main__":
    main()
