"""The reference guide's first examples on real ranks, saved by two and loaded by four."""

import guide_helpers
import pytest
import torch

from ranktest import run_ranks


def run_example(rank, ranks, code, folder):
    torch.distributed.init_process_group = lambda: None  # the test helper has made the group
    return guide_helpers.run(code, folder)["world_size"]


@pytest.mark.slow
def test_the_basic_example_runs_with_its_import_changed(tmp_path):
    assert run_ranks(run_example, 2, guide_helpers.SAVE, tmp_path) == [2, 2]
    assert run_ranks(run_example, 4, guide_helpers.LOAD, tmp_path) == [4] * 4
