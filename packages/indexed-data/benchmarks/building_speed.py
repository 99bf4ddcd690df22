"""``build`` from Parquet beside the tokenizer alone on the same texts.

    python packages/indexed-data/benchmarks/building_speed.py --megabytes 100

Texts are this Python's own library, each file several documents, in a Parquet table of row groups of 1,000. The
tokenizer is a byte-level BPE of 16,000 tokens trained on a part of them. Floor: a build takes at most the time of
``encode_batch`` of the tokenizers library alone on the same cores, which reads no file and writes none. Wall time,
minimum of the rounds, both sides in turn; the pair is compared with the ids of the tokenizer in the same run.
"""

import argparse
import os
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

from sixfold.indexed_data import IndexedDataset, build


def documents(megabytes: int) -> list[str]:
    """Pieces of 4,000 characters of the library's files, again and again until there are enough."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts, total = [], 0
    while total < megabytes * 1_000_000:
        for path in files:
            text = path.read_text(encoding="utf-8", errors="ignore")
            pieces = [text[i : i + 4000] for i in range(0, len(text), 4000)]
            texts += pieces
            total += len(text)
            if total >= megabytes * 1_000_000:
                break
    return texts


def make_inputs(texts: list[str]) -> None:
    import pyarrow.parquet
    import tokenizers

    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), "a.parquet", row_group_size=1000)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=16_000, special_tokens=["<eod>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(texts[:2000], trainer)
    bpe.save("bpe.json")


def tokenizer_alone(texts: list[str], call: str) -> list[list[int]]:
    import tokenizers

    bpe = tokenizers.Tokenizer.from_file("bpe.json")
    encode = getattr(bpe, call)
    ids = []
    for begin in range(0, len(texts), 1024):
        ids += [each.ids for each in encode(texts[begin : begin + 1024], add_special_tokens=False)]
    return ids


def seconds(function, *arguments):
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    texts = documents(options.megabytes)
    size = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_inputs(texts)

        def built(workers: int) -> None:
            build(["a.parquet"], "out", tokenizer="bpe.json", eod_token="<eod>", workers=workers, overwrite=True,
                  part_bytes=8 << 20)  # fmt: skip

        sides = {
            "encode_batch alone": lambda: tokenizer_alone(texts, "encode_batch"),
            "encode_batch_fast alone": lambda: tokenizer_alone(texts, "encode_batch_fast"),
            "build, workers=1": lambda: built(1),
            "build, workers=2": lambda: built(2),
        }
        best: dict[str, float] = {}
        for _ in range(options.rounds):
            for name, side in sides.items():
                taken, result = seconds(side)
                best[name] = min(best.get(name, taken), taken)
                if result is not None:
                    ids = result
        pair = IndexedDataset("out")
        assert len(pair) == len(ids), "one sequence of each text"
        assert all(np.array_equal(pair[i][:-1], ids[i]) for i in range(len(ids))), "the ids of the tokenizer alone"
        os.chdir("/")
    print(f"{size:.0f} MB, {len(texts)} documents, {sum(map(len, ids))} tokens, {os.cpu_count()} cores")
    for name, taken in best.items():
        print(f"{name}: {taken:.2f} s, {size / taken:.1f} MB/s")


if __name__ == "__main__":
    main()
