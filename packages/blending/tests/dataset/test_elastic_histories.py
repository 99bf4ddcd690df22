"""Random elastic histories: everything about a run changes at random, and no token comes twice or is lost.

A history is a few jobs. Each begins from the state of the one before it, through JSON, with other ranks and batches,
and most with other weights, datasets or sequence lengths. ``--histories 500`` runs that many, each at one level of the
kernels.
"""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
from blending_helpers import ListDataset, config, numbered, shuffle_as_a_whole
from elastic_helpers import Stated

from sixfold.blending import BlendChange, BlendedMegatronDatasetBuilder
from sixfold.blending.numbers.kernels import forced, levels
from sixfold.blending.samples import chunk_grid as grid
from sixfold.blending.source import ListSource

NAMES = "abcde"
POSITIONS = 160  # at least so many in a history


def draw_sequences(rng):
    """{name: sequences}: short and empty ones; every token of a dataset has an id of its own."""
    found = {}
    for name in NAMES:
        lengths = rng.integers(0, rng.integers(2, 25), int(rng.integers(1, 12)))
        lengths[rng.integers(lengths.size)] = rng.integers(1, 30)
        if rng.random() < 0.01:
            lengths = rng.integers(0, 2, 2100)  # shuffled in blocks of two
        found[name] = numbered(lengths.tolist())
    return found


def draw_weights(rng):
    """{name: weight} of some datasets in some order; None for all of them is their tokens."""
    names = rng.permutation(list(NAMES))[: rng.integers(1, 4)].tolist()
    if rng.random() < 0.2:
        return dict.fromkeys(names)
    return dict(zip(names, (rng.random(len(names)) + 0.05).tolist(), strict=True))


def as_blend(weights):
    values = list(weights.values())
    return list(weights), None if values[0] is None else values


def draw_changes(rng, position):
    """Up to three changes from ``position`` on, often so close that one falls into the left-over of another."""
    changes, at = [], position - 1
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        at += int(rng.integers(1, 4 if rng.random() < 0.5 else 40))
        weights = draw_weights(rng) if rng.random() < 0.6 else None
        length = int(rng.integers(1, 14)) if weights is None or rng.random() < 0.6 else None
        changes.append((at, weights, length))
    return changes


class History:
    """One run, what it has read, and what the spec states that it reads."""

    def __init__(self, seed, document_shuffle):
        self.document_shuffle = document_shuffle
        self.rng = np.random.default_rng(seed)
        self.seed, self.position, self.changes = seed, 0, []
        self.sequences, self.weights = draw_sequences(self.rng), draw_weights(self.rng)
        self.first_length = int(self.rng.integers(1, 12))
        self.stated = Stated(self.sequences, self.weights, self.first_length, seed, grid.WINDOW, document_shuffle)
        self.read, self.lengths = [], []  # by position: (dataset, tokens, labels); sequence length
        self.given = {}  # dataset: set of (epoch, sequence, offset)
        self.newest = Counter()  # dataset: newest epoch in which a sample has begun
        self.found = Counter()

    def job(self):
        """The dataset as a new process would make it, with the changes known now."""
        changes = [
            BlendChange(at=at, blend=None if weights is None else as_blend(weights), sequence_length=length)
            for at, weights, length in self.changes
        ]
        changes = changes or [BlendChange(at=10**9, blend=(["a"], None))]  # of one dataset it is a blend all the same
        fields = {"random_seed": self.seed, "sequence_length": self.first_length, "changes": changes}
        fields["document_shuffle"] = self.document_shuffle
        made = config(blend=as_blend(self.weights), split="1", **fields)
        size = int(self.rng.integers(1, 10**6))  # another one each time: positions do not depend on it
        data = BlendedMegatronDatasetBuilder(ListDataset, [size, 0, 0], lambda: True, made).build()[0]
        return pickle.loads(pickle.dumps(data)) if self.rng.random() < 0.2 else data

    def restart(self, before):
        """Plans of the future are dropped or kept, new ones made; the state must fit."""
        rng = self.rng
        state = None if before is None else json.loads(json.dumps(before.state_dict(self.position)))
        if rng.random() < 0.3:
            self.changes = [change for change in self.changes if change[0] < self.position]
        known = max((at for at, _, _ in self.changes), default=-1)
        self.changes += draw_changes(rng, max(known + 1, self.position))
        data = self.job()
        if state is not None:
            assert data.load_state_dict(state) == self.position
            self.found["restarts"] += 1
        return data

    def expect(self, upto):
        """What the spec states of the positions below ``upto``."""
        known = {at: (weights, length) for at, weights, length in self.changes}
        for position in range(len(self.read), upto):
            if position in known:
                weights, length = known[position]
                self.found["changes"] += 1
                self.found["double changes of the length"] += bool(length and any(
                    line.left_over for line in self.stated.lines.values()
                ))  # fmt: skip
                self.stated.change(weights, length)
            number, tokens, labels, places = self.stated.take()
            self.read.append((number, tokens, labels))
            self.lengths.append(self.stated.S)
            self.note(number, places, position)

    def note(self, number, places, position):
        """Promise 3, of the statement: it would be of no use as an oracle if it lost or repeated a token itself."""
        given = self.given.setdefault(number, set())
        assert given.isdisjoint(places) and len(set(places)) == len(places), f"position {position} repeats"
        given.update(places)
        epoch = places[0][0]
        if epoch >= 2 and epoch > self.newest[number]:
            tokens = self.stated.lines[self.stated.numbers[number]].tokens
            counts = Counter(epoch for epoch, _, _ in given)
            assert all(counts[old] == tokens for old in range(epoch - 1)), f"position {position}: a token is missing"
        self.newest[number] = max(self.newest[number], epoch)

    def steps(self, data):
        """Global batches of one job, each shared out among its ranks; every rank reads its own part."""
        rng = self.rng
        ranks, micro_batch, strided = int(rng.integers(1, 6)), int(rng.integers(1, 5)), rng.random() < 0.5
        for _ in range(int(rng.integers(1, 9))):
            batch = range(self.position, self.position + ranks * micro_batch)
            self.expect(batch.stop)
            for rank in rng.permutation(ranks).tolist():
                begin = batch.start + rank * micro_batch
                mine = batch[rank::ranks] if strided else range(begin, begin + micro_batch)
                self.check(data, list(mine))
            self.position = batch.stop
            self.found["steps"] += 1

    def check(self, data, positions):
        """Datasets, tokens and labels of ``positions``, in one batch for each sequence length."""
        for length in sorted({self.lengths[position] for position in positions}):
            some = [position for position in positions if self.lengths[position] == length]
            batch = data.get_batch(some)
            for row, position in enumerate(some):
                got = tuple(batch[name][row].tolist() for name in ("dataset_id", "tokens", "labels"))
                assert got == self.read[position], f"position {position}"

    def check_places(self, data):
        """What ``why`` tells of every position is each (dataset, epoch, token) once, and all that was given."""
        told = {}
        for position, (number, tokens, _) in enumerate(self.read):
            why = data.why(position)
            places = [(part.epoch, part.document, part.offset + i) for part in why.ranges for i in range(part.length)]
            ids = self.sequences[self.stated.numbers[number]]
            assert why.dataset_id == number
            assert [ids[sequence][offset] for _, sequence, offset in places] == tokens, f"position {position}"
            assert told.setdefault(number, set()).isdisjoint(places), f"position {position} repeats"
            told[number].update(places)
        assert told == self.given

    def check_inverse(self, data):
        positions = range(self.position)
        dataset, sample = (array.tolist() for array in data.locate(positions))
        assert dataset == [number for number, _, _ in self.read]
        for position in self.rng.choice(self.position, 12).tolist():
            assert data.find(dataset[position], sample[position]) == position
            assert sample[position] == dataset[:position].count(dataset[position])

    def play(self):
        data = None
        while self.position < POSITIONS:
            data = self.restart(data)
            earlier = self.rng.choice(self.position, min(self.position, 6), replace=False).tolist()
            self.check(data, earlier)
            self.steps(data)
        data = self.restart(data)
        self.check(data, self.rng.permutation(self.position).tolist())  # the past is fixed, read in any order
        self.check_places(data)
        self.check_inverse(data)
        self.found["positions"] += self.position
        return self.found


@pytest.mark.parametrize("document_shuffle", ["block", "global"])
@pytest.mark.slow
def test_no_history_repeats_or_loses_a_token_and_each_position_is_the_stated_one(
    history_chunk, document_shuffle, monkeypatch, record_property
):
    found = Counter()
    if document_shuffle == "global":
        shuffle_as_a_whole(monkeypatch)
    for seed in history_chunk:
        monkeypatch.setattr(grid, "WINDOW", (3, 7, 65_536)[seed % 3])
        history, level = History(seed, document_shuffle), levels()[seed % len(levels())]
        monkeypatch.setattr(
            ListDataset, "pairs", {name: ListSource(lists) for name, lists in history.sequences.items()}
        )
        with forced(level):
            found += history.play()
        found["histories"] += 1
    record_property("history_chunk", found)
