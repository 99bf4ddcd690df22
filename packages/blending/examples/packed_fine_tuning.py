"""Conversations packed whole into samples, with loss on the answers alone: your own data in the same order."""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, GPTDatasetConfig
from sixfold.blending.sample import Batch, TokenRows
from sixfold.blending.source import ListSource

PAD, EOD, ANSWER = 0, 1, 2  # other bytes are themselves


@dataclass(frozen=True, kw_only=True)
class PackedConfig(GPTDatasetConfig):
    add_extra_token_to_sequence: bool = False  # a sample is one pack, whole: its last label is padding
    longest_first: bool = True  # fewer, fuller packs


class PackedDataset(GPTDataset):
    config: PackedConfig

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "longest_first"]  # other packs under another name

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: PackedConfig) -> ListSource:
        talks = map(json.loads, Path(dataset_path).read_text().splitlines())
        ids = [[*talk["question"].encode(), ANSWER, *talk["answer"].encode(), EOD] for talk in talks]
        return ListSource(packs(ids, config.sequence_length, config.longest_first))

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: ListSource) -> int:
        return len(low_level_dataset.sequence_lengths)  # a split divides packs

    def make_batch(self, rows: TokenRows, out: Batch | None = None) -> Batch:
        batch = super().make_batch(rows, out)
        place = np.arange(batch["tokens"].shape[1])
        answer, end = (np.maximum.accumulate(np.where(batch["tokens"] == id_, place, -1), 1) for id_ in (ANSWER, EOD))
        batch["loss_mask"] *= answer > end  # from the mark on, until the conversation ends
        return batch


def packs(talks: list[list[int]], size: int, longest_first: bool) -> list[list[int]]:
    """Each talk in the first pack with room for it; every pack filled up to ``size`` ids."""
    made: list[list[int]] = []
    for talk in sorted(talks, key=len, reverse=True) if longest_first else talks:
        if len(talk) > size:
            raise BlendingError(f"a conversation has {len(talk)} ids; a sample of {size} does not hold it: shorten it")
        fitting = next((pack for pack in made if len(pack) + len(talk) <= size), None)
        if fitting is None:
            made.append(fitting := [])
        fitting += talk
    return [pack + [PAD] * (size - len(pack)) for pack in made]


def main() -> None:
    talks = [{"question": f"{a} times {b}? ", "answer": f"{a * b}"} for a in range(30) for b in range(30)]
    with TemporaryDirectory() as folder:
        path = Path(folder, "talks.jsonl")
        path.write_text("\n".join(map(json.dumps, talks)))
        config = PackedConfig(
            random_seed=1, sequence_length=62, tokenizer=SimpleNamespace(eod=EOD, pad=PAD), create_cu_seqlens=True,
            blend=([path], None), split="90,10", dataset_names={str(path): "talks"},
        )  # fmt: skip
        train, valid, _ = BlendedMegatronDatasetBuilder(PackedDataset, [500, None, 0], lambda: True, config).build()
    sample = train[0]
    print(
        f"{len(train.indices)} packs to train on, {len(valid)} to validate; parts of the first:", sample["cu_seqlens"]
    )
    for name, ids in (("tokens", sample["tokens"]), ("labels", np.where(sample["loss_mask"], sample["labels"], 32))):
        print(name, "".join({PAD: "_", EOD: "|", ANSWER: ">"}.get(id_) or chr(id_) for id_ in ids.tolist()))


if __name__ == "__main__":
    main()
