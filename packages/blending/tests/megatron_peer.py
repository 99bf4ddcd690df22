"""megatron-core's own dataset classes as the oracle of ``order="megatron"``, and random configs to put to both."""

import importlib
import importlib.util
import sys
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest

from sixfold.blending import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig

GPT_ARRAYS = ("document_index", "sample_index", "shuffle_index")
BLEND_ARRAYS = ("dataset_index", "dataset_sample_index")
STAND_INS = {"megatron.core.utils": "log_single_rank", "megatron.core.tokenizers": "MegatronTokenizerBase"}


@contextmanager
def in_place(modules):
    """``modules`` where imports look, and those of the peer gone again behind it; of torch nothing is undone."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("megatron")}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.startswith("megatron")]:
                del sys.modules[name]
            sys.modules.update(before)


@cache
def loaded():
    """megatron-core's dataset modules as they are, without the 2,800 modules that its package loads first.

    Stand-ins: ``megatron.core`` without its __init__, a logger, and the name of a tokenizer.
    """
    pytest.importorskip("torch", reason="megatron-core needs torch")
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip("needs megatron-core, a peer that only tests use")
    package = ModuleType("megatron.core")
    package.__path__ = found.submodule_search_locations
    modules = {package.__name__: package}
    for name, needed in STAND_INS.items():
        modules[name] = ModuleType(name)
        setattr(modules[name], needed, type(needed, (), {"__new__": lambda *_, **__: None}))
    with in_place(modules):
        for name in ("gpt_dataset", "blended_dataset", "blended_megatron_dataset_builder", "helpers"):
            importlib.import_module(f"megatron.core.datasets.{name}")
        return {name: module for name, module in sys.modules.items() if name.startswith("megatron")}


def peer(name):
    """One of its modules."""
    return loaded()[f"megatron.core.datasets.{name}"]


@contextmanager
def as_rank_0():
    """The peer asks for its rank where it writes the cache of a blend, whether or not there is a group."""
    modules = loaded()
    import torch

    with mock.patch.object(torch.distributed, "get_rank", return_value=0), in_place(modules):
        yield


class Tokenizer:
    """Fit for both sides: the peer asks for ``vocab_size``, and for ``unique_identifiers`` in the cache's key."""

    eod = 0
    vocab_size = 256
    unique_identifiers = {"class": "Toy", "path": "no where"}  # noqa: RUF012


def write_pairs(folder, rng):
    """Prefixes of .idx/.bin pairs of many shapes: long and short documents, empty ones, a single one, equal ones."""
    indexed_data = pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which writes pairs")
    shapes = [
        rng.integers(1, 60, 40), rng.integers(0, 9, 170) * rng.integers(0, 2, 170), np.full(75, 16),
        rng.integers(0, 400, 52), np.r_[0, rng.integers(1, 30, 60), 0], [513], [300, 0, 1],
    ]  # fmt: skip
    prefixes = []
    for number, lengths in enumerate(shapes):
        prefixes.append(str(folder / f"data-{number}"))
        with indexed_data.IndexedDatasetBuilder(f"{prefixes[-1]}.bin", dtype=np.uint16) as builder:
            for length in lengths:
                builder.add_document(rng.integers(0, 256, length).tolist())
    return prefixes


def random_case(rng, prefixes):
    """(fields of the config, sizes) that both sides understand."""
    fields = {
        "random_seed": int(rng.integers(0, 2**32)),
        "sequence_length": int(rng.choice([2, 3, 8, 16, 31, 100])),
        "mid_level_dataset_surplus": float(rng.choice([0.0, 0.005, 0.5])),
        "add_extra_token_to_sequence": bool(rng.random() < 0.7),
        "drop_last_partial_validation_sequence": bool(rng.random() < 0.5),
    }

    def blend(weighted, prefixes):
        chosen = rng.choice(prefixes, int(rng.integers(1, 6)), replace=bool(rng.random() < 0.1)).tolist()
        if not weighted:
            return chosen, None
        weights = rng.random(len(chosen)) + 0.01 if rng.random() < 0.6 else rng.integers(1, 9, len(chosen))
        return chosen, weights.tolist()

    def size(weighted):
        return int(rng.integers(0, 300)) if weighted or rng.random() < 0.6 else None

    if rng.random() < 0.6:
        weighted = bool(rng.random() < 0.6)
        split = str(rng.choice(["969,30,1", "80,10,10", "1", "98,2,0", "0,1,1", ".5,.25,.25"]))
        several = prefixes[:-2]  # of a single document most parts would have none
        return fields | {"blend": blend(weighted, several), "split": split}, [size(weighted) for _ in range(3)]
    chance = rng.random(3) * [0.8, 1, 1]  # without any blend the peer makes its data up
    blends = [blend(share < 0.5, prefixes) if share < 0.8 else None for share in chance.tolist()]
    return fields | {"blend_per_split": blends}, [size(one is None or one[1] is not None) for one in blends]


def build_peer(fields, sizes):
    """The peer's [train, valid, test]."""
    gpt = peer("gpt_dataset")
    flags = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    with as_rank_0():
        config = gpt.GPTDatasetConfig(tokenizer=Tokenizer(), **flags, **fields)
        builder = peer("blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
        return builder(gpt.GPTDataset, sizes, lambda: True, config).build()


def build(fields, sizes, group=None, **more):
    """Our [train, valid, test] of the same fields."""
    config = GPTDatasetConfig(tokenizer=Tokenizer(), order="megatron", **fields, **more)
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config, group=group).build()


def arrays_of(data):
    """Every index of a dataset or blend by name; of a blend, its datasets' too."""
    if data is None:
        return {}
    if not hasattr(data, "datasets"):
        return {name: np.asarray(getattr(data, name)) for name in GPT_ARRAYS}
    found = {name: np.asarray(getattr(data, name)) for name in BLEND_ARRAYS}
    for number, dataset in enumerate(data.datasets):
        found |= {f"{number} {name}": array for name, array in arrays_of(dataset).items()}
    return found


def files_of(folder):
    """Content of every file that the peer knows, by name."""
    return {path.name: path.read_bytes() for path in Path(folder).glob("*") if not path.name.endswith("sixfold.json")}


def parts_of(built):
    """The datasets of what a builder returned."""
    return [part for data in built if data is not None for part in getattr(data, "datasets", [data])]


def would_loop_for_ever(problem):
    """Whether we refuse what megatron-core never ends."""
    return "no tokens" in problem or "size 0 is 0" in problem


def assert_same_indices(ours, theirs):
    """``arrays_of`` each part of both sides: names, types and numbers."""
    for got, expected in zip(ours, theirs, strict=True):
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            assert got[name].dtype == array.dtype, name
            assert np.array_equal(got[name], array), name
