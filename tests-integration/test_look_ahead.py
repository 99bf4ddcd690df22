"""Exact look-ahead: a blend has pairs that come from afar fetch what its next batches read, and nothing else."""

from pathlib import Path

import numpy as np
import pytest
from blending_helpers import config, numbered

from sixfold.blending import BlendedDataset, GPTDataset, Prefetcher, Split
from sixfold.blending.source import ListSource
from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder

COUNTS = {"near": 5, "a": 20, "b": 27}


class Far:
    """A file that is read by position, and remembers what it was told to fetch and asked to read, in order."""

    said = []  # noqa: RUF012

    def __init__(self, path):
        self.path, self.bytes = path, Path(path).read_bytes()

    def size(self):
        return len(self.bytes)

    def read(self, offset, nbytes):
        if self.path.endswith(".bin"):
            self.said.append(("read", offset, offset + nbytes))
        return self.bytes[offset : offset + nbytes]

    def prefetch(self, begins, ends):
        self.said.append(("fetch", sorted(zip(begins.tolist(), ends.tolist(), strict=True))))


@pytest.fixture
def far(tmp_path, monkeypatch):
    """A blend of two pairs that come from afar, and one that is near."""
    monkeypatch.setattr(Far, "said", [])
    sources = {"near": ListSource(numbered([40] * 5, 5000))}
    for name, lengths in {"a": [30] * 20, "b": [7, 90, 3] * 9}.items():
        with IndexedDatasetBuilder(tmp_path / f"{name}.bin", np.int32) as builder:
            for sequence in numbered(lengths):
                builder.add_document(sequence)
        sources[name] = IndexedDataset(tmp_path / name, mmap=False, open_bytes=Far)
    made = config()
    parts = [GPTDataset(source, name, range(COUNTS[name]), 0, Split.train, made) for name, source in sources.items()]
    return BlendedDataset(parts, [1, 2, 2], 1000, made)


def test_ids_from_afar_are_fetched_exactly_so_many_batches_ahead(far):
    positions = [range(step * 6, step * 6 + 6) for step in range(20)]
    expected = [far.get_batch(some)["tokens"].tolist() for some in positions]
    wanted = []
    for some in positions:
        Far.said.clear()
        far.look_ahead(some)
        wanted.append(list(Far.said))
        assert wanted[-1] and all(kind == "fetch" for kind, _ in wanted[-1])
        Far.said.clear()
        far.get_batch(some)
        told = {pair for _, pairs in wanted[-1] for pair in pairs}
        read = {word[1:] for word in Far.said if word[0] == "read"}
        assert told == read, "what is read, and no more"
    Far.said.clear()
    with Prefetcher(far, iter(positions), 1, ahead=5) as batches:
        assert [batch["tokens"].tolist() for batch in batches] == expected
    first_read = next(at for at, word in enumerate(Far.said) if word[0] == "read")
    before = [word for word in Far.said[:first_read] if word[0] == "fetch"]
    assert before[: sum(map(len, wanted[:6]))] == [word for words in wanted[:6] for word in words]
    Far.said.clear()
    with Prefetcher(far, iter(positions[:2]), 1, ahead=0) as batches:
        assert [batch["tokens"].tolist() for batch in batches] == expected[:2]


def test_what_positions_raise_comes_behind_the_batches_before_it_also_with_look_ahead(far):
    def positions():
        yield range(4)
        yield range(4, 8)
        raise RuntimeError("no more")

    with Prefetcher(far, positions(), 1, ahead=5) as batches:
        assert [next(batches)["tokens"].tolist() for _ in range(2)] == [
            far.get_batch(some)["tokens"].tolist() for some in (range(4), range(4, 8))
        ]
        with pytest.raises(RuntimeError, match="no more"):
            next(batches)
