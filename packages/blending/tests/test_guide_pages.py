"""What docs/guide/ tells a reader is so: its blocks print what stands below them, and the remedies are remedies."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import ListDataset, blend, config, numbered

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError
from sixfold.blending.order import QuotaTree, greedy, permute
from sixfold.blending.source import ListSource

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "blending-changing-a-run.md"


def test_the_blocks_of_changing_a_run_print_what_stands_below_them():
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "text"}
    names, printed = {"__name__": "page"}, io.StringIO()
    for language, text in blocks:
        if language == "python":
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile(text, PAGE.name, "exec"), names)
        else:
            assert printed.getvalue() == text


def ranks_by_datasets(dataset, shares):
    """(R, D): whether a rank reads a dataset at any of its positions."""
    seen = np.zeros((len(shares), dataset.max() + 1), dtype=bool)
    for rank, positions in enumerate(shares):
        seen[rank, dataset[positions]] = True
    return seen


@pytest.mark.parametrize("order", ["stateless", "greedy"])
@pytest.mark.parametrize(("ranks", "datasets"), [(2, 2), (4, 8), (8, 8), (8, 16), (6, 12), (16, 4)])
def test_equal_weights_line_up_with_the_ranks_and_a_shuffle_of_each_step_undoes_it(order, ranks, datasets):
    """Also in the greedy order, so the shuffle is a remedy for runs that stay with Megatron's."""
    steps, share = 200, 2
    batch = ranks * share
    positions = np.arange(steps * batch)
    if order == "greedy":
        dataset = greedy([1 / datasets] * datasets, positions.size)[0]
    else:
        dataset = QuotaTree([1] * datasets).locate(positions)[0]
    strided = [positions[rank::ranks] for rank in range(ranks)]
    assert not ranks_by_datasets(dataset, strided).all(), "they line up"
    begins = np.repeat(positions[::batch], share)
    inside = np.tile(np.arange(share), steps)
    shuffled = [begins + permute(begins, batch, rank * share + inside) for rank in range(ranks)]
    assert ranks_by_datasets(dataset, shuffled).all()
    by_step = np.sort(np.concatenate(shuffled).reshape(ranks, steps, share).swapaxes(0, 1).reshape(steps, batch))
    assert np.array_equal(by_step, positions.reshape(steps, batch)), "each step reads what it read before"


def test_turning_the_ranks_by_one_each_step_is_no_remedy_for_twice_as_many_datasets_as_ranks():
    steps, ranks = 400, 8
    dataset = QuotaTree([1] * 16).locate(np.arange(steps * ranks))[0]
    turned = [np.arange(steps) * ranks + (rank + np.arange(steps)) % ranks for rank in range(ranks)]
    assert ranks_by_datasets(dataset, turned).sum(axis=1).tolist() == [8] * ranks


def test_a_state_of_megatrons_order_is_refused_by_the_stateless_one(monkeypatch):
    lists = {"a": numbered([30] * 9), "b": numbered([20] * 5)}
    monkeypatch.setattr(ListDataset, "pairs", {name: ListSource(sequences) for name, sequences in lists.items()})
    made = config(blend=(["a", "b"], [1, 2]), split="1", order="megatron")
    data = BlendedMegatronDatasetBuilder(ListDataset, [40, 0, 0], lambda: True, made).build()[0]
    other = blend(lists, [1, 2])
    with pytest.raises(BlendingError, match=r'order was "megatron" and is "stateless"'):
        other.load_state_dict(data.state_dict(20))
