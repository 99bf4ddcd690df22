"""Files of background saves have the mode that the caller's umask leaves at the call."""

import os

import pytest
import torch
from forked_worker import fork_workers

from sixfold.dist_ckpt.background.lost_ranks import own_umask
from sixfold.dist_ckpt.background.saver import AsyncSaver


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def modes(folder):
    return {file.stat().st_mode & 0o777 for file in folder.iterdir()}


def test_a_worker_that_began_under_another_umask_takes_that_of_the_call(tmp_path, umask):
    fork_workers()
    with AsyncSaver(group=None) as saver:
        for mask, mode in ((0o077, 0o600), (0o022, 0o644), (0o027, 0o640)):
            umask(mask)
            assert own_umask() == mask
            saver.save({"w": torch.ones(30_000), "step": mask}, tmp_path / f"{mask:o}").wait()
            assert modes(tmp_path / f"{mask:o}") == {mode}
