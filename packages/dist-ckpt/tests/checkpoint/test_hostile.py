"""Checkpoints made to do harm, with every digest right, and tensors that are not what they say: our errors, at once."""

import io
import json
import os
import pickle
import warnings
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CorruptError, ShardedTensor, ShardingError, StorageError, UnsafeError
from sixfold.dist_ckpt.checkpoint import opening
from sixfold.dist_ckpt.formats.frame import check_records
from sixfold.dist_ckpt.tools import commands as tools


@pytest.fixture
def folder(tmp_path):
    dist_ckpt.save({"w": one("w", torch.arange(4.0)), "it": 3}, tmp_path / "c")
    return tmp_path / "c"


def load(folder, **options):
    return dist_ckpt.load({"w": one("w", torch.zeros(4))}, folder, **options)


def forge(folder, change):
    """Change integrity.json and put the digest right."""
    path = folder / "integrity.json"
    content = json.loads(path.read_bytes())
    del content["self"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["self"] = f"{zlib.crc32(text.encode()):08x}"
    path.write_text(json.dumps(content, sort_keys=True, separators=(",", ":")))


NAMES = ["a\0b", "\ud800", "..", "a/b", "", "a\nb"]
ENTRIES = [{"size": "7"}, {"size": None}, {"size": -1}, {"size": 2**70}, {"digests": []}, {"digests": ["0"] * 9}]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_name_in_integrity_json_cannot_leave_the_folder(folder, name):
    forge(folder, lambda content: content["files"].update({name: {"size": 1, "digests": ["0"]}}))
    with pytest.raises(UnsafeError, match="leaves the folder"):
        load(folder)
    assert not tools.verify(folder)["ok"]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("verify", ["touched", "full", "off"])
def test_sizes_and_digests_in_integrity_json_must_fit_together(folder, entry, verify):
    forge(folder, lambda content: content["files"]["__0_0.distcp"].update(entry))
    with pytest.raises(CorruptError):
        load(folder, verify=verify)


@pytest.mark.parametrize("value", [0, True, 2**23 + 1, "4"])
def test_the_block_length_in_integrity_json_is_bounded(folder, value):
    forge(folder, lambda content: content.update(block_bytes=value))
    with pytest.raises(CorruptError, match="blocks of"):
        load(folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata", "metadata.json"])
def test_a_file_that_integrity_json_does_not_cover_is_refused(folder, name):
    forge(folder, lambda content: content["files"].pop(name))
    for verify in ("touched", "full", "off"):
        with pytest.raises(CorruptError, match=r"not in integrity\.json|are not those"):
            load(folder, verify=verify)


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata", "metadata.json", "integrity.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for verify in ("touched", "off"):
        with pytest.raises(CheckpointError):
            load(folder, verify=verify)
    assert not dist_ckpt.check_is_distributed_checkpoint(folder)
    assert not tools.verify(folder)["ok"]


@pytest.mark.parametrize("backend", [["x"], {}, None, 5, True])
def test_a_backend_that_is_no_name_is_damage(folder, backend):
    config = json.loads((folder / "metadata.json").read_text())
    (folder / "integrity.json").unlink()
    (folder / "metadata.json").write_text(json.dumps({**config, "sharded_backend": backend}))
    for look in (load, dist_ckpt.load_common_state_dict, dist_ckpt.load_tensors_metadata):
        with pytest.raises(CorruptError, match=r"metadata\.json is damaged"):
            look(folder)


def test_a_name_in_a_store_cannot_lead_out_of_the_mirror(tmp_path):
    fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")
    files = fsspec.filesystem("memory").store
    dist_ckpt.save({"w": one("w", torch.arange(4.0))}, "memory://hostile")
    victim = tmp_path / "victim.pt"
    victim.write_text("mine")
    files[f"/hostile/{victim}"] = files["/hostile/.metadata"]  # "//" before an absolute path
    try:
        with pytest.raises(UnsafeError, match="leaves the folder"):
            load("memory://hostile")
    finally:
        for name in [name for name in files if name.startswith("/hostile")]:
            del files[name]
    assert victim.read_text() == "mine"


class Wrapped(torch.Tensor):
    """A tensor without memory, as DTensor and quantised weights are: it says that it is a contiguous CPU tensor."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("no value of it is asked for")


def test_a_tensor_without_memory_of_its_own_is_refused(folder, tmp_path):
    with pytest.raises(ShardingError, match=r"w\[:\]: .*Wrapped, which has no memory of its own"):
        dist_ckpt.save({"w": one("w", Wrapped((4,)))}, tmp_path / "d")
    with pytest.raises(ShardingError, match="no memory of its own"):
        dist_ckpt.load({"w": one("w", Wrapped((4,)))}, folder)
    assert not (tmp_path / "d").exists()


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def test_a_subclass_with_memory_is_saved_and_loaded(tmp_path):
    dist_ckpt.save({"w": one("w", torch.arange(4.0).as_subclass(Named))}, tmp_path / "c")
    target = torch.zeros(4).as_subclass(Named)
    dist_ckpt.load({"w": one("w", target)}, tmp_path / "c")
    assert target.tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_a_quantised_tensor_is_refused(tmp_path):
    tensor = torch._empty_affine_quantized([3], scale=0.5, zero_point=0, dtype=torch.qint8)
    with pytest.raises(ShardingError, match="quantised"):
        dist_ckpt.save({"w": one("w", tensor)}, tmp_path / "c")


OVERLAPPING = [torch.zeros(1, 3).expand(4, 3), torch.zeros(6).as_strided((4, 3), (1, 1))]
SEPARATE = [torch.zeros(3, 4).T, torch.zeros(8, 6)[::2, ::2], torch.zeros(4, 1, 3)[:, 0], torch.zeros(4, 3)]


@pytest.mark.parametrize("target", OVERLAPPING)
def test_a_target_with_two_elements_in_one_place_is_refused(tmp_path, target):
    dist_ckpt.save({"w": one("w", torch.arange(12.0).view(4, 3))}, tmp_path / "c")
    with pytest.raises(ShardingError, match="several elements in one place"):
        dist_ckpt.load({"w": one("w", target)}, tmp_path / "c")


@pytest.mark.parametrize("target", SEPARATE)
def test_any_other_strides_of_a_target_are_filled(tmp_path, target):
    dist_ckpt.save({"w": one("w", torch.arange(12.0).view(4, 3))}, tmp_path / "c")
    dist_ckpt.load({"w": one("w", target)}, tmp_path / "c")
    assert torch.equal(target, torch.arange(12.0).view(4, 3))


def test_a_state_dict_that_contains_itself_is_told(tmp_path):
    endless = []
    endless.append(endless)
    with pytest.raises(ShardingError, match="contains itself"):
        dist_ckpt.save({"a": endless, "w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}, tmp_path / "c")


def test_a_path_with_a_zero_byte_is_told():
    for call in (load, lambda path: dist_ckpt.save({}, path)):
        with pytest.raises(CheckpointError, match="zero byte"):
            call("a\0b")


@pytest.fixture
def foreign(tmp_path):
    """A plain DCP folder, whose .metadata no digest covers, and a function that changes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(8.0)}, checkpoint_id=str(tmp_path / "c"))

    def change(action):
        path = tmp_path / "c" / ".metadata"
        content = pickle.loads(path.read_bytes())
        action(content)
        path.write_bytes(pickle.dumps(content))
        return tmp_path / "c"

    return change


def test_a_hole_behind_chunks_that_overlap_is_found(foreign):
    def repeat(content):
        entry = content.state_dict_metadata["w"]
        entry.chunks, entry.size = entry.chunks * 2, torch.Size([16])

    folder = foreign(repeat)
    with pytest.raises(CorruptError, match=r"w\[:\]: chunks of the checkpoint overlap"):
        dist_ckpt.load({"w": one("w", torch.zeros(16))}, folder)


def nested():
    """A value of 60 lists whose text would fill every disk."""
    value = [1]
    for _ in range(60):
        value = [value, value]
    return value


@pytest.mark.timeout(20)
def test_an_error_about_endless_nesting_is_short(foreign):
    folder = foreign(lambda content: setattr(content.state_dict_metadata["w"], "size", nested()))
    with pytest.raises(CorruptError, match="size of w") as caught:
        dist_ckpt.load_tensors_metadata(folder)
    assert len(str(caught.value)) < 10_000


def test_a_shape_that_nothing_is_stored_of_is_not_allocated(foreign):
    def claim(content):
        entry = content.state_dict_metadata["w"]
        entry.chunks, entry.size = [], torch.Size([2**60])

    with pytest.raises(CorruptError, match="do not fill its shape"):
        dist_ckpt.load_plain_tensors(foreign(claim))


def test_a_shape_without_memory_for_it_is_told(foreign):
    def claim(content):
        entry = content.state_dict_metadata["w"]
        entry.chunks[0].sizes = entry.size = torch.Size([2**60])

    with pytest.raises(CheckpointError, match="no memory for a tensor"):
        dist_ckpt.load_plain_tensors(foreign(claim))


def test_records_of_a_frame_that_lie_in_one_another_are_not_hashed_again_and_again():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("a", bytes(1000))
    content = data.getvalue()
    at = content.rindex(b"PK\x01\x02")
    entry, end = content[at:-22], bytearray(content[-22:])
    end[8:12] = (3).to_bytes(2, "little") * 2
    end[12:16] = (3 * len(entry)).to_bytes(4, "little")
    repeated = b"".join(entry[:-1] + name for name in (b"a", b"b", b"c"))
    with pytest.raises(CorruptError, match="lie in one another"):
        check_records(memoryview(content[:at] + repeated + bytes(end)))


DOUBLE = {"DUP": lambda at: b"2\x86\x94", "BINGET": lambda at: b"0h%ch%c\x86\x94" % (at, at)}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("double", DOUBLE.values(), ids=DOUBLE.keys())
def test_a_key_whose_hash_takes_for_ever_is_not_hashed(tmp_path, double):
    doubled = b"".join(map(double, range(60)))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04}K\x01\x85\x94" + doubled + b"K\x01s.")
    with pytest.raises(CorruptError, match="makes a tuple of more than"):
        dist_ckpt.load_tensors_metadata(tmp_path)


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "..", "a/b"])
def test_a_file_name_in_metadata_cannot_leave_the_folder(foreign, name):
    def rename(content):
        for place in content.storage_data.values():
            place.relative_path = name

    folder = foreign(rename)
    for look in (load, tools.inspect):
        with pytest.raises(UnsafeError, match="leaves the folder"):
            look(folder)


def test_a_conversion_asks_for_space_before_it_makes_a_file(foreign, tmp_path):
    def claim(content):
        entry = content.state_dict_metadata["w"]
        entry.chunks, entry.size = [], torch.Size([2**60])

    with pytest.raises(CheckpointError, match="ENOSPC"):
        tools.convert(foreign(claim), tmp_path / "d", to="torch_dist")


@pytest.mark.parametrize("moment", ["_open_integrity", "_check_ranges"])
def test_a_save_that_overtakes_the_opening_of_a_checkpoint_is_no_damage(folder, monkeypatch, moment):
    real, left = getattr(opening, moment), ["once"]

    def overtaken(*arguments):
        result = real(*arguments)
        if left:
            left.pop()
            dist_ckpt.save({"w": one("w", torch.ones(4)), "it": 4}, folder)
        return result

    monkeypatch.setattr(opening, moment, overtaken)
    with pytest.raises(StorageError, match="was replaced while it was read"):
        load(folder)
    assert load(folder)["it"] == 4
