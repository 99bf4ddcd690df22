"""Values that are no tensors in folders of torch's own writer: a load that asks for them by their place gets them."""

import io
import os

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import blank, contents, dcp_save, same
from dist_ckpt_helpers import flip_byte, one
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, MismatchError, StrictHandling, UnsafeError, dcp

PROOF = "SIXFOLD_CODE_OF_A_FILE_RAN"


class Bomb:
    def __reduce__(self):
        return exec, (f"import os; os.environ[{PROOF!r}] = '1'",)


@pytest.fixture(params=[FileSystemWriter, dcp.Writer])
def folder(request, tmp_path):
    dcp_save(contents(), request.param(tmp_path / "c"))
    return tmp_path / "c"


def test_values_are_asked_for_by_their_place_in_the_state_dict(folder):
    asked = {"step": 0, "lr": None, "text": "", "raw": b"", "stream": io.BytesIO(), "nothing": 5, "plan": []}
    loaded = dist_ckpt.load(asked, folder)
    expected = contents()
    assert same(loaded, {key: expected[key] for key in asked})


def test_plain_tensors_are_asked_for_by_their_place_too(folder):
    """As with torch: a job on one rank has plain tensors where a larger one has DTensors."""
    loaded = dist_ckpt.load(blank(), folder)
    assert same(loaded, contents())


def test_sharded_tensors_and_values_are_asked_for_together(folder):
    loaded = dist_ckpt.load({"weights": one("model.w", torch.zeros(4, 6)), "step": None}, folder)
    assert torch.equal(loaded["weights"], contents()["model"]["w"])
    assert loaded["step"] == 1


def test_a_value_that_is_not_there_is_unexpected(folder):
    with pytest.raises(MismatchError, match="epoch"):
        dist_ckpt.load({"epoch": 0, "step": 0}, folder)
    loaded, missing, unexpected = dist_ckpt.load({"epoch": 0, "step": 0}, folder, strict=StrictHandling.RETURN_ALL)
    assert loaded == {"step": 1}
    assert unexpected == {"epoch"}
    assert {"lr", "text", "model.w"} <= missing
    assert "step" not in missing


def test_only_what_is_asked_for_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.delenv(PROOF, raising=False)
    dcp_save({"w": torch.arange(4.0), "step": 3, "bad": Bomb()}, FileSystemWriter(tmp_path / "c"))
    assert dist_ckpt.load({"step": 0}, tmp_path / "c") == {"step": 3}
    with pytest.raises(UnsafeError, match="exec"):
        dist_ckpt.load({"bad": None}, tmp_path / "c")
    assert PROOF not in os.environ


def test_a_flipped_bit_of_a_value_is_named(folder):
    data = FileSystemReader(folder).read_metadata().storage_data
    (info,) = [at for index, at in data.items() if index.fqn == "text"]
    # Not in the padding between the records of a zip file, which no checksum of torch's covers.
    flip_byte(folder / info.relative_path, (folder / info.relative_path).read_bytes().index(b"a b", info.offset))
    with pytest.raises(CorruptError, match=info.relative_path):
        dist_ckpt.load({"text": ""}, folder)


def test_a_stateful_gets_what_torch_saved_of_it(tmp_path):
    saved, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr, momentum=0.9) for lr in (0.5, 0.1))
    dcp_save({"optimizer": saved, "step": 3}, FileSystemWriter(tmp_path / "c"))
    dist_ckpt.load({"optimizer": other, "step": 0}, tmp_path / "c")
    assert other.param_groups[0]["lr"] == 0.5


def test_the_usual_reader_agrees(folder):
    asked = {"step": 0, "plan": [0, {"a": (0, 0)}]}
    theirs = {**asked}
    torch_dcp.load(theirs, storage_reader=FileSystemReader(folder), no_dist=True)
    assert same(dist_ckpt.load(asked, folder), theirs)
