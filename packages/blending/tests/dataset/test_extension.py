"""The extension contract of ``MegatronDataset``: what the builder asks of a subclass, and the two examples of it."""

import importlib.util
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from blending_helpers import LargeTokenizer, numbered

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.source import ListSource

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class Config(GPTDatasetConfig):
    reversed: bool = False  # in the key
    shown: str = "all"  # not in it


class Extended(GPTDataset):
    @staticmethod
    def _key_config_attributes():
        return [*GPTDataset._key_config_attributes(), "reversed"]

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        sequences = numbered([9] * int(dataset_path))
        return ListSource(sequences[::-1] if config.reversed else sequences)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset):
        return len(low_level_dataset.sequence_lengths) - 10  # the last ten are held out


def build(prefixes, sizes=(30, 0, 0), split="80,20", **fields):
    fields = {"random_seed": 7, "sequence_length": 8, "tokenizer": LargeTokenizer()} | fields
    made = Config(blend=(prefixes, None), split=split, **fields)
    return BlendedMegatronDatasetBuilder(Extended, list(sizes), lambda: True, made).build()


@pytest.mark.parametrize("order", ["stateless", "megatron", "apportioned"])
def test_a_subclass_opens_its_own_data_and_says_what_a_split_divides(order):
    train, valid, _ = build(["60"], sizes=(30, 5, 0), order=order)
    assert list(train.indices) == list(range(40))
    assert list(valid.indices) == list(range(40, 50))
    assert train.get_batch(range(30))["tokens"].max() <= 40 * 9  # ids count through the tokens


def test_the_config_says_how_the_data_is_opened():
    forward, backward = (build(["60"], reversed=value)[0].get_batch(range(30))["tokens"] for value in (False, True))
    assert forward.min() < 10 * 9 + 1 <= backward.min()


def test_fields_of_the_key_name_the_cache_files_and_others_do_not(tmp_path):
    def files(**fields):
        folder = tmp_path / "cache"
        build(["60", "30"], split="1", order="megatron", path_to_cache=str(folder), **fields)
        return {path.name for path in folder.iterdir()}

    first = files()
    assert files(shown="none") == first
    both = files(reversed=True)
    assert first < both
    assert len(both) == 2 * len(first)
    described = [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("*-Extended-*-description.txt")]
    assert Counter(found["reversed"] for found in described) == {False: 2, True: 2}
    assert all("shown" not in found for found in described)


def test_packs_hold_every_conversation_once_and_answers_alone_are_trained_on(tmp_path):
    packed = example("packed_fine_tuning")
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(1, 14))) for _ in range(200)]
    talks = [{"question": word, "answer": word.upper()[:5]} for word in words]
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, talks)))
    tokenizer = SimpleNamespace(eod=packed.EOD, pad=packed.PAD)
    fields = {"random_seed": 1, "sequence_length": 40, "tokenizer": tokenizer, "split": "1"}
    config = packed.PackedConfig(blend=([path], None), **fields)
    (data, *_) = BlendedMegatronDatasetBuilder(packed.PackedDataset, [None, 0, 0], lambda: True, config).build()
    read, trained = Counter(), Counter()
    for sample in (data[n] for n in range(len(data))):
        text = bytes(sample["tokens"].astype(np.uint8)).rstrip(b"\0")
        assert text.endswith(bytes([packed.EOD]))  # none is cut
        read.update(text[:-1].split(bytes([packed.EOD])))
        answers = bytes(sample["labels"][sample["loss_mask"] == 1].astype(np.uint8))
        trained.update(answers[:-1].split(bytes([packed.EOD])))
    assert read == Counter(bytes([*w.encode(), packed.ANSWER, *w.upper()[:5].encode()]) for w in words)
    assert trained == Counter(word.upper()[:5].encode() for word in words)
    with pytest.raises(BlendingError, match="a sample of 10 does not hold it"):
        packed.PackedDataset.build_low_level_dataset(path, packed.PackedConfig(**fields | {"sequence_length": 10}))


def test_a_document_read_middle_last_is_the_document_and_its_neighbours_stay():
    middle = example("fill_in_the_middle")
    source = ListSource([[*range(1, 40), middle.EOD] for _ in range(50)])
    fields = {"random_seed": 1, "sequence_length": 80, "tokenizer": SimpleNamespace(eod=middle.EOD)}

    def data(rate):
        config = middle.MiddleConfig(middle_rate=rate, **fields)
        return middle.MiddleDataset(source, "a", range(50), 100, Split.train, config)

    plain, moved = GPTDataset(source, "a", range(50), 100, Split.train, GPTDatasetConfig(**fields)), data(1.0)
    assert all(np.array_equal(data(0.0)[5][name], plain[5][name]) for name in plain[5])
    for n in range(100):
        tokens, labels = moved[n]["tokens"], moved[n]["labels"]
        assert np.array_equal(tokens[1:], labels[:-1])
        tokens = tokens.tolist()
        assert np.array_equal(np.flatnonzero(np.array(tokens) == 0), np.flatnonzero(plain[n]["tokens"] == 0))
        for text in " ".join(map(str, tokens)).split(" 0 ")[:-1]:  # whole documents and a first part
            ids = list(map(int, text.split()))
            if middle.PREFIX in ids:
                assert ids[0] == middle.PREFIX
                suffix, last = ids.index(middle.SUFFIX), ids.index(middle.MIDDLE)
                whole = ids[1:suffix] + ids[last + 1 :] + ids[suffix + 1 : last]
                assert whole == list(range(whole[0], whole[0] + len(ids) - 3))
