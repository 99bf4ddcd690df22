"""Runs of packed rows that are saved, resumed on another number of ranks, and changed at any step."""

import json

import numpy as np
import pytest
from blending_helpers import blend, config, dataset, numbered, sequences_of
from packed_helpers import NaiveRows

from sixfold.blending import BlendChange, BlendedDataset, BlendingError, GPTDataset, Split
from sixfold.blending.samples import packed_rows
from sixfold.blending.source import ListSource

BOUND = 1.75  # rows, docs/design/blending/blend.md


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(packed_rows, "WINDOW_AT_LEAST", 16)


def two_datasets(**fields):
    rng = np.random.default_rng(5)
    texts = {name: sequences_of(rng.integers(1, 25, 60).tolist(), seed=n) for n, name in enumerate(("a", "b"))}
    return blend(texts, [0.6, 0.4], packing="best_fit", create_cu_seqlens=True, **fields)


def read_step(begin, batch_size, ranks, state=None):
    """Each rank opens the data for itself and reads its share; the arrays of the whole step, in order of positions."""
    shares = []
    for rank in range(ranks):
        data = two_datasets()
        assert state is None or data.load_state_dict(json.loads(state)) == begin
        low, high = (begin + batch_size * edge // ranks for edge in (rank, rank + 1))
        if high > low:
            batch = data.get_batch(range(low, high))
            shares.append([batch[name] for name in ("tokens", "labels", "loss_mask", "position_ids", "dataset_id")])
    return [np.concatenate(arrays).tobytes() for arrays in zip(*shares, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("saved_by", range(1, 9))
def test_a_step_has_the_same_bytes_on_any_ranks_before_and_after_a_save(saved_by):
    batch_size = 12
    before, behind = read_step(0, batch_size, 1), read_step(batch_size, batch_size, 1)
    assert read_step(0, batch_size, saved_by) == before
    state = json.dumps(two_datasets().state_dict(batch_size))
    for ranks in range(1, 9):
        assert read_step(batch_size, batch_size, ranks, state) == behind


def random_run(rng):
    """(texts, first weights, changes, positions): datasets come, go and come back."""
    names = [f"d{number}" for number in range(int(rng.integers(2, 6)))]
    texts = {name: numbered(rng.integers(1, 20, int(rng.integers(1, 20))).tolist()) for name in names}

    def weights():
        some = rng.permutation(names)[: int(rng.integers(1, len(names) + 1))].tolist()
        return some, rng.integers(1, 100, len(some)).tolist()

    positions = int(rng.integers(20, 120))
    at = np.unique(rng.integers(0, positions, int(rng.integers(0, 5)))).tolist()
    return texts, weights(), [BlendChange(place, blend=weights()) for place in at], positions


def check_no_repeat(data, naives, positions):
    """All rows are the naive ones, each once, and no epoch of a dataset gives a token twice."""
    dataset_P, sample_P = data.locate(range(positions))
    for number, name in enumerate(data.names):
        samples = sample_P[dataset_P == number]
        assert samples.tolist() == list(range(samples.size)), "each dataset goes on from its own count"
        naive, given = naives[name], {}
        for sample in samples.tolist():
            for document, offset, _ in naive.row(sample):
                key = (sample // naive.per_epoch, document, offset)
                assert key not in given
                given[key] = sample


def run_schedules(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        texts, (first, weights), changes, positions = random_run(rng)
        names = list(dict.fromkeys([*first, *(name for change in changes for name in change.blend[0])]))
        made = config(packing="best_fit", changes=changes)
        parts = [
            GPTDataset(ListSource(texts[name]), name, range(len(texts[name])), 0, Split.train, made) for name in names
        ]
        data = BlendedDataset(parts, weights, positions, made)
        naives = {name: NaiveRows([len(t) for t in texts[name]], 8, name=name) for name in names}
        check_no_repeat(data, naives, positions)
        segments = [(0, (first, weights)), *((change.at, change.blend) for change in changes)]
        for (begin, (some, shares)), (end, _) in zip(segments, [*segments[1:], (positions, None)], strict=True):
            target = np.array([dict(zip(some, shares, strict=True)).get(name, 0) for name in names]) / sum(shares)
            before = data.counts(begin)
            for n in range(begin, end):
                assert np.abs(data.counts(n) - before - (n - begin) * target).max() < BOUND
        step, ranks = int(rng.integers(1, 9)), int(rng.integers(1, 9))  # read by some ranks, saved, read by others
        whole = data.get_batch(range(positions))["tokens"]
        for at in range(0, positions, step):
            position = data.load_state_dict(json.loads(json.dumps(data.state_dict(at))))
            stop = min(at + step, positions)
            shares = [data.get_batch(range(position, stop)[rank::ranks])["tokens"] for rank in range(ranks)]
            together = np.empty_like(whole[at:stop])
            for rank, share in enumerate(shares):
                together[rank::ranks] = share
            assert np.array_equal(together, whole[at:stop])
            ranks = int(rng.integers(1, 9))


@pytest.mark.slow
def test_random_schedules_of_changes_repeat_nothing_and_keep_the_shares(schedule_chunk, record_property):
    run_schedules(schedule_chunk)
    record_property("schedule_chunk", {"schedules": len(schedule_chunk)})


def test_why_and_find_go_both_ways():
    data = two_datasets()
    for position in (0, 1, 17, 99):
        why = data.why(position)
        assert data.find(why.dataset_id, why.sample) == position
        naive = NaiveRows(data.datasets[why.dataset_id].part.every_length().tolist(), 8, name=why.dataset_name)
        assert [(r.document, r.offset, r.length) for r in why.ranges] == naive.row(why.sample)
        assert why.epochs == why.sample / naive.per_epoch


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"packing": "concatenate"}, "packing was"),
        ({"random_seed": 5}, "seed was 1234 and is 5"),
        ({"blend_unit": "tokens"}, "quotas"),
        ({"document_shuffle": "block"}, "document_shuffle was"),
    ],
)
def test_a_state_of_another_past_is_refused(other, message):
    state = json.loads(json.dumps(two_datasets().state_dict(7)))
    assert two_datasets().load_state_dict(state) == 7
    fields = {"packing": "best_fit"} | other
    rng = np.random.default_rng(5)
    texts = {name: sequences_of(rng.integers(1, 25, 60).tolist(), seed=n) for n, name in enumerate(("a", "b"))}
    with pytest.raises(BlendingError, match=message):
        blend(texts, [0.6, 0.4], **fields).load_state_dict(state)


def test_a_state_of_concatenated_documents_is_refused_by_name():
    texts = {"a": sequences_of([5, 9, 30])}
    state = blend(texts, [1.0]).state_dict(3)
    with pytest.raises(BlendingError, match=r"packing was null and is \"best_fit\""):
        blend(texts, [1.0], packing="best_fit").load_state_dict(state)


def test_a_change_of_the_sequence_length_is_refused():
    with pytest.raises(BlendingError, match=r"changes\[0\].sequence_length is 16 with packing=\"best_fit\""):
        config(packing="best_fit", changes=[BlendChange(5, sequence_length=16)])


def test_epochs_of_rows_are_watched():
    data = dataset(numbered([5] * 40), 0, packing="best_fit", max_epochs=2)
    with pytest.warns(UserWarning, match="are read more often than 2 times: 'a' from position 80 on"):
        data.get_batch([80])
