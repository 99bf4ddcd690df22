"""Every table and worked example of the datasets guide, with its numbers as they are printed there.

The guide's tables fit one dataset: its document index has document 8 in the first two places, and both are 1536 long in
the sample index. So they are written as the cache of one run, which is then used as it is.
"""

import numpy as np
import pytest
from blending_helpers import blend, config, numbered

import sixfold.blending
from sixfold.blending import BlendedMegatronDatasetBuilder, GPTDataset, Split
from sixfold.blending.megatron.document_index import EpochPlan
from sixfold.blending.megatron.sample_index import sample_index
from sixfold.blending.order import greedy
from sixfold.blending.source import ListSource

INDEXED_INDICES = [5, 6, 7, 8, 9]
DO_IDX = [8, 8, 9, 6, 7, 5, 8, 5, 6, 6, 5, 9, 7, 7, 9]  # N = 15, E = 3
S = 1024
SA_IDX = [(0, 0), (0, 1024), (1, 512), (2, 0), (5, 300), (6, 24)]
SH_IDX = [4, 0, 2, 6, 1, 9, 5, 8, 7, 3]  # N = 10
LENGTHS = {8: 1536, 9: 400, 6: 200, 7: 124, 5: 1300}  # 400 + 200 + 124 + 300 = S: "shorter documents"

W, DA_IDX, DA_SA_IDX = [1 / 2, 1 / 4, 1 / 4], [0, 1, 2, 0], [0, 0, 0, 1]


def guides_documents():
    """Ten documents of which 5 to 9 have the guide's lengths; every token has an id of its own."""
    return numbered([3, 3, 3, 3, 3, *(LENGTHS[number] for number in INDEXED_INDICES)])


def rows_by_hand():
    """(place, offset) of every S-th token, document after document."""
    rows, places = [], [(i, offset) for i, document in enumerate(DO_IDX) for offset in range(LENGTHS[document])]
    for j in range(len(SH_IDX) + 1):
        rows.append(places[j * S])
    return rows


class GuideDataset(GPTDataset):
    """Opens the guide's documents, and the three datasets of its blend."""

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        if dataset_path == "guide":
            return ListSource(guides_documents())
        return ListSource(numbered([9] * 6, begin={"d0": 1, "d1": 101, "d2": 201}[dataset_path]))


def build(sizes, **fields):
    made = config(token_dtype=np.int64, **fields)
    return BlendedMegatronDatasetBuilder(GuideDataset, sizes, lambda: True, made).build()


def guides_dataset(folder):
    """The second half of the ten documents, which is INDEXED_INDICES."""
    fields = {"blend": (["guide"], None), "split": "50,50", "order": "megatron", "path_to_cache": str(folder)}
    return build([0, len(SH_IDX), 0], sequence_length=S, **fields)[1]


@pytest.fixture(scope="module")
def from_the_guides_cache(tmp_path_factory):
    """The dataset over a cache folder in which the three files hold the guide's tables."""
    folder = tmp_path_factory.mktemp("cache")
    guides_dataset(folder)
    for path in folder.glob("*-sixfold.json"):
        path.unlink()
    stem = str(next(folder.glob("*-valid-description.txt"))).removesuffix("description.txt")
    np.save(f"{stem}document_index.npy", np.array(DO_IDX, dtype=np.int32))
    np.save(f"{stem}sample_index.npy", np.array(rows_by_hand(), dtype=np.int32))
    np.save(f"{stem}shuffle_index.npy", np.array(SH_IDX, dtype=np.uint32))
    return guides_dataset(folder)


def test_names_of_the_guide_are_public_names():
    for name in ("BlendedMegatronDatasetConfig", "BlendedMegatronDatasetBuilder", "MegatronDataset", "BlendedDataset"):
        assert name in sixfold.blending.__all__
    assert {"GPTDataset", "GPTDatasetConfig"} <= set(sixfold.blending.__all__)


def test_document_index_example_has_e_times_the_indices_shuffled_by_the_seed():
    made = config(sequence_length=4, order="megatron", add_extra_token_to_sequence=False)
    data = GPTDataset(ListSource([[1] * 4] * 10), None, INDEXED_INDICES, 15, Split.train, made)
    assert data.document_index.shape == (len(DO_IDX),), "N = 15 samples of one document each: E = 3"
    assert data.document_index.dtype == np.int32
    assert sorted(data.document_index.tolist()) == sorted(DO_IDX)
    epochs = np.array(INDEXED_INDICES * 3, dtype=np.int32)
    np.random.RandomState(1234).shuffle(epochs)
    assert data.document_index.tolist() == epochs.tolist()


def test_document_index_example_is_used_from_a_cache_as_printed(from_the_guides_cache):
    assert from_the_guides_cache.document_index.tolist() == DO_IDX


def test_sample_index_example_has_the_rows_as_printed(from_the_guides_cache):
    rows = [tuple(row) for row in np.asarray(from_the_guides_cache.sample_index).tolist()]
    assert rows[:6] == SA_IDX
    assert len(rows) == len(SH_IDX) + 1, "[N + 1, 2]"
    assert rows == rows_by_hand()


def test_sample_index_example_is_built_from_the_document_index_as_printed():
    lengths = np.array([LENGTHS.get(number, 3) for number in range(10)])
    tokens = sum(LENGTHS[document] for document in DO_IDX)
    plan = EpochPlan(epochs=3, tokens=tokens // 3, sequence_length=S, extra=1, samples=10, before_last=None)
    rows = sample_index(np.array(DO_IDX, dtype=np.int32), lengths[np.array(DO_IDX)], plan)
    assert [tuple(row) for row in rows.tolist()][:6] == SA_IDX


def test_shuffle_index_example_is_a_permutation_of_n_samples_by_the_seed(tmp_path):
    data = guides_dataset(tmp_path)
    assert sorted(data.shuffle_index.tolist()) == sorted(SH_IDX)
    assert data.shuffle_index.dtype == np.uint32
    random = np.random.RandomState(1234)
    documents, samples = np.array(INDEXED_INDICES * 3, dtype=np.int32), np.arange(len(SH_IDX), dtype=np.uint32)
    random.shuffle(documents)
    random.shuffle(samples)
    assert data.document_index.tolist() == documents.tolist()
    assert data.shuffle_index.tolist() == samples.tolist(), "drawn behind the document index"


def test_shuffle_index_example_is_used_from_a_cache_as_printed(from_the_guides_cache):
    assert from_the_guides_cache.shuffle_index.tolist() == SH_IDX


@pytest.mark.parametrize("k", range(len(SH_IDX)))
def test_query_of_the_gpt_dataset_reads_what_the_guides_lines_read(k, from_the_guides_cache):
    indexed_dataset, rows = guides_documents(), rows_by_hand()
    j = SH_IDX[k]
    i, offset = rows[j]
    i_next, offset_next = rows[j + 1]
    sample = []
    if i == i_next:
        sample += indexed_dataset[DO_IDX[i]][offset:offset_next]
    else:
        sample += indexed_dataset[DO_IDX[i]][offset:]
        for document in DO_IDX[i + 1 : i_next]:
            sample += indexed_dataset[document]
        sample += indexed_dataset[DO_IDX[i_next]][:offset_next]
    assert len(sample) == S
    assert from_the_guides_cache[k]["tokens"].tolist() == sample


def test_dataset_index_and_dataset_sample_index_example_as_printed():
    dataset_index, dataset_sample_index = greedy(W, 4)
    assert dataset_index.tolist() == DA_IDX
    assert dataset_sample_index.tolist() == DA_SA_IDX
    assert (dataset_index.dtype, dataset_sample_index.dtype) == (np.int16, np.int64)


def test_each_draw_of_the_blend_takes_the_dataset_of_the_greatest_sampling_error():
    given = np.zeros(3)
    for n, dataset in enumerate(greedy(W, 400)[0].tolist()):
        errors = np.array(W) * max(n, 1) - given
        assert errors[dataset] == errors.max()
        given[dataset] += 1


@pytest.fixture(scope="module")
def guides_blend():
    return build([4, 0, 0], blend=(["d0", "d1", "d2"], W), split="1", order="megatron")[0]


def test_a_blend_of_d_w_and_s_has_the_indices_as_printed(guides_blend):
    assert guides_blend.dataset_index.tolist() == DA_IDX
    assert guides_blend.dataset_sample_index.tolist() == DA_SA_IDX


@pytest.mark.parametrize("k", range(4))
def test_query_of_the_blended_dataset_reads_the_sample_of_its_dataset(k, guides_blend):
    sample = guides_blend.datasets[DA_IDX[k]][DA_SA_IDX[k]]
    assert guides_blend[k]["tokens"].tolist() == sample["tokens"].tolist()
    assert guides_blend[k]["dataset_id"] == DA_IDX[k]


def test_the_other_two_orders_give_the_counts_of_the_example():
    data = blend({"d0": [[1] * 99], "d1": [[1] * 99], "d2": [[1] * 99]}, W, size=4)
    assert np.bincount(data.locate(range(4))[0]).tolist() == [2, 1, 1]
    apportioned = build([4, 0, 0], blend=(["d0", "d1", "d2"], W), split="1", order="apportioned")[0]
    assert sorted(apportioned.dataset_index.tolist()) == sorted(DA_IDX)
