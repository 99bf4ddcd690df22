"""Lightning's way: a ``meta.pt`` of its own is put into the folder of torch's checkpoint, which stays one."""

import pytest
import torch
from dist_ckpt_dcp_helpers import blank, contents, dcp_load, dcp_save, same
from dist_ckpt_helpers import folder_bytes
from torch.distributed.checkpoint import CheckpointException

from sixfold.dist_ckpt import StorageError, dcp, tools


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "last.ckpt").mkdir()
    dcp_save(contents(), dcp.Writer(tmp_path / "last.ckpt"))
    torch.save({"epoch": 3, "callbacks": {}}, tmp_path / "last.ckpt" / "meta.pt")
    return tmp_path / "last.ckpt"


@pytest.mark.parametrize("verify", ["touched", "full"])
def test_a_file_put_beside_the_checkpoints_own_disturbs_no_load(folder, verify):
    assert same(dcp_load(blank(), dcp.Reader(folder, verify=verify)), contents())
    assert torch.load(folder / "meta.pt")["epoch"] == 3
    assert tools.inspect(folder)["integrity"] is True


def test_a_save_over_it_is_refused_rather_than_the_file_lost(folder):
    before = folder_bytes(folder)
    with pytest.raises(CheckpointException, match=r"meta\.pt") as caught:
        dcp_save(contents(2), dcp.Writer(folder))
    assert isinstance(caught.value.failures[0][0], StorageError)
    assert folder_bytes(folder) == before
