"""Nothing in a folder is run through ``dcp.Reader``: ``.metadata`` is not unpickled, values only by closed rules."""

import argparse
import collections
import dataclasses
import datetime
import os
import pathlib
import pickle
import random
import tracemalloc

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import contents, dcp_load, dcp_save
from torch.distributed.checkpoint import CheckpointException

from sixfold.dist_ckpt import CorruptError, UnsafeError, dcp
from sixfold.dist_ckpt.torch_dcp import metadata as dcp_metadata

PROOF = "SIXFOLD_CODE_OF_A_FILE_RAN"


class Bomb:
    """Unpickled, it marks this process."""

    def __reduce__(self):
        return exec, (f"import os; os.environ[{PROOF!r}] = '1'",)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.delenv(PROOF, raising=False)
    yield
    assert PROOF not in os.environ


@pytest.fixture
def folder(tmp_path):
    dcp_save({"w": torch.arange(4.0), "step": 3}, torch_dcp.FileSystemWriter(tmp_path / "c"))
    return tmp_path / "c"


def test_the_bomb_of_these_tests_goes_off_in_torchs_own_reader(folder, monkeypatch):
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointException):
        dcp_load({"w": torch.zeros(4)}, torch_dcp.FileSystemReader(folder))
    assert os.environ.pop(PROOF) == "1"


def test_hostile_metadata_is_refused_by_name_and_not_run(folder):
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UnsafeError, match="exec"):
        dcp.Reader(folder).read_metadata()
    with pytest.raises(CheckpointException, match="exec"):
        dcp_load({"w": torch.zeros(4)}, dcp.Reader(folder))


def with_paths(folder, paths):
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, planner_data=paths)))


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_deep_path_of_the_planner_is_refused_before_it_takes_memory(folder, kind):
    with_paths(folder, {"w": kind([1]) * 4000, "step": kind([2]) * 4000})
    assert (folder / ".metadata").stat().st_size < 20_000
    reader = dcp.Reader(folder)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="path of 4000 parts"):
            reader.read_metadata()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_many_deep_paths_of_the_planner_are_refused(folder, monkeypatch):
    monkeypatch.setattr(dcp_metadata, "_MOST_PLACES", 4000)
    with_paths(folder, {"w": (1,) * 64})
    assert dcp.Reader(folder).read_metadata().planner_data == {"w": (1,) * 64}
    with_paths(folder, {"w": (1,) * 64, "step": (2,) * 64})
    with pytest.raises(CorruptError, match="4032 parts deep"):
        dcp.Reader(folder).read_metadata()


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_long_list_that_a_path_stands_for_is_refused(folder, kind):
    with_paths(folder, {"w": kind(["w", 10**12])})
    with pytest.raises(CorruptError, match="lists of"):
        dcp.Reader(folder).read_metadata()


def test_code_in_the_data_of_the_planner_is_not_run(folder):
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, planner_data={"w": Bomb()})))
    with pytest.raises(UnsafeError, match="exec"):
        dcp.Reader(folder).read_metadata()


def test_a_file_outside_the_folder_is_not_opened(folder, tmp_path):
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    (name,) = [path.name for path in folder.glob("*.distcp")]
    (folder / name).rename(tmp_path / name)
    for info in metadata.storage_data.values():
        info.relative_path = f"../{name}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match=r"\.\./"):
        dcp_load({"w": torch.zeros(4)}, dcp.Reader(folder))


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"\x80\x04]\x94.", b"\x80\x04r\xff\xff\xff\xff."])
def test_mangled_metadata_is_damage(folder, content):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CorruptError, match=r"\.metadata"):
        dcp.Reader(folder).read_metadata()


def test_a_value_that_would_run_code_is_refused_and_not_run(tmp_path):
    dcp_save({"w": torch.arange(4.0), "state": Bomb()}, torch_dcp.FileSystemWriter(tmp_path / "c"))
    with pytest.raises(CheckpointException) as caught:
        dcp_load({"w": torch.zeros(4), "state": None}, dcp.Reader(tmp_path / "c"))
    (error, _) = caught.value.failures[0]
    assert isinstance(error, UnsafeError)
    assert "exec" in str(error)
    assert "state" in str(error)


def test_a_value_that_would_run_code_harms_nothing_where_it_is_not_asked_for(tmp_path):
    dcp_save({"w": torch.arange(4.0), "state": Bomb()}, torch_dcp.FileSystemWriter(tmp_path / "c"))
    assert dcp_load({"w": torch.zeros(4)}, dcp.Reader(tmp_path / "c"))["w"].tolist() == [0, 1, 2, 3]


VALUES = {
    "ints": [1, 2**70, -3],
    "sets": {1, 2},
    "tuples": ((1, 2), ("a", None)),
    "random": random.Random(3).getstate(),
    "torch generator": torch.Generator().manual_seed(3).get_state(),
    "ordered": collections.OrderedDict(a=1),
    "default": collections.defaultdict(list, {"a": [1]}),
    "deque": collections.deque([1, 2]),
    "arguments": argparse.Namespace(lr=0.1),
    "date": datetime.datetime(2026, 11, 23, 3),
    "path": pathlib.PurePosixPath("/a/b"),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
}


def comes_back(values, folder):
    dcp_save({key: (value,) for key, value in values.items()}, dcp.Writer(folder))  # torch looks into no tuple
    found = dcp_load(dict.fromkeys(values), dcp.Reader(folder))
    for key, value in values.items():
        (again,) = found[key]
        assert type(again) is type(value), key
        assert str(again) == str(value), key


def test_what_people_keep_in_checkpoints_comes_back(tmp_path):
    comes_back(VALUES, tmp_path / "c")


def test_what_people_keep_of_numpy_comes_back(tmp_path):
    numpy = pytest.importorskip("numpy", reason="numpy is not installed: values of its types")
    generator = numpy.random.RandomState(3).get_state()
    comes_back({"array": numpy.arange(4), "scalar": numpy.float64(0.5), "generator": generator}, tmp_path / "c")


@dataclasses.dataclass
class Progress:
    """A class of the user's own in a state dict."""

    tokens: int


def test_classes_of_the_user_come_back_when_the_reader_is_told_of_them(tmp_path):
    dcp_save({"progress": Progress(7)}, torch_dcp.FileSystemWriter(tmp_path / "c"))
    with pytest.raises(CheckpointException, match="safe_globals") as caught:
        dcp_load({"progress": None}, dcp.Reader(tmp_path / "c"))
    assert isinstance(caught.value.failures[0][0], UnsafeError)
    assert "Progress" in str(caught.value.failures[0][0])
    reader = dcp.Reader(tmp_path / "c", safe_globals=[Progress])
    assert dcp_load({"progress": None}, reader) == {"progress": Progress(7)}


def test_a_zip_of_rubbish_in_place_of_a_value_is_damage(tmp_path):
    dcp_save(contents(), torch_dcp.FileSystemWriter(tmp_path / "c"))
    data = torch_dcp.FileSystemReader(tmp_path / "c").read_metadata().storage_data
    (info,) = [info for index, info in data.items() if index.fqn == "text"]
    path = tmp_path / "c" / info.relative_path
    whole = bytearray(path.read_bytes())
    whole[info.offset : info.offset + info.length] = bytes(info.length)
    path.write_bytes(bytes(whole))
    with pytest.raises(CheckpointException) as caught:
        dcp_load({"text": None}, dcp.Reader(tmp_path / "c"))
    assert isinstance(caught.value.failures[0][0], CorruptError)
