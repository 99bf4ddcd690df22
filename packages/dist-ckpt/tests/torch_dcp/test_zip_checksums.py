"""A changed byte in a folder that torch's DCP wrote is found, since each tensor has the CRC-32 of its zip."""

import pytest
import torch
import torch.distributed.checkpoint

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CorruptError, tools


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_changed_byte_of_a_value_is_found_by_load_and_by_verify(tmp_path):
    values = torch.arange(1000.0)
    torch.distributed.checkpoint.save({"a": values}, checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.find(bytes(values[100:110].clone().untyped_storage()))
    data[at + 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"record archive/data/0: CRC-32 is"):
        dist_ckpt.load({"a": torch.zeros(1000)}, tmp_path)
    assert [problem["kind"] for problem in tools.verify(tmp_path)["problems"]] == ["checksum"]
