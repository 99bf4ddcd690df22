"""``metadata="compact"``: no ``.metadata`` is written, ours loads without it, a command writes the one torch reads."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import everything
from dist_ckpt_helpers import flip_byte, folder_bytes, names, one, state, value_of
from torch.distributed.checkpoint import FileSystemReader

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointError,
    CorruptError,
    ShardedObject,
    ShardedTensor,
    StorageError,
    dcp,
    retention,
    tools,
)
from sixfold.dist_ckpt.__main__ import main
from sixfold.dist_ckpt.stores import MemoryStore


def contents(value=1.0):
    whole = torch.arange(24.0).view(4, 6) * value
    rows = [ShardedTensor.from_rank_offsets("w", row.clone(), (0, i, 4)) for i, row in enumerate(whole.split(1))]
    return {"w": rows, "half": one("half", torch.full((5,), value).to(torch.bfloat16)), "it": 7, "o": an_object(value)}


def an_object(value):
    return ShardedObject("o", {"v": value}, (1,), (0,))


@pytest.fixture
def folder(tmp_path):
    dist_ckpt.save(contents(), tmp_path / "c", metadata="compact")
    return tmp_path / "c"


def program(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "sixfold.dist_ckpt", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def command(capsys):
    """What a program would give, without its two seconds to load torch."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        return SimpleNamespace(returncode=status, **capsys.readouterr()._asdict())

    return run


def test_a_compact_save_has_no_metadata_file_and_loads_at_any_cut(folder, tmp_path):
    assert ".metadata" not in names(folder)
    dist_ckpt.save(contents(), tmp_path / "usual")
    assert ".metadata" in names(tmp_path / "usual")
    columns = [ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2), (1, i, 3)) for i in range(3)]
    asked = {"w": columns, "half": one("half", torch.zeros(5, dtype=torch.bfloat16)), "o": an_object(None)}
    loaded = dist_ckpt.load(asked, folder, verify="full")
    assert torch.equal(torch.cat(loaded["w"], dim=1), torch.arange(24.0).view(4, 6))
    assert loaded["half"].tolist() == [1.0] * 5
    assert (loaded["it"], loaded["o"]) == (7, {"v": 1.0})


def test_every_way_to_look_at_it_works(folder):
    assert dist_ckpt.check_is_distributed_checkpoint(folder)
    assert dist_ckpt.load_tensors_metadata(folder)["w"].global_shape == (4, 6)
    assert set(dist_ckpt.load_sharded_metadata(folder)) == {"w", "half", "o/shard_0_1"}
    assert torch.equal(dist_ckpt.load_plain_tensors(folder)["w"], torch.arange(24.0).view(4, 6))
    assert dist_ckpt.load_common_state_dict(folder)["it"] == 7
    assert tools.verify(folder)["problems"] == []
    assert {tensor["key"] for tensor in tools.inspect(folder)["tensors"]} == {"w", "half"}


def test_it_equals_the_usual_save(folder, tmp_path):
    dist_ckpt.save(contents(), tmp_path / "usual", metadata="torch")
    assert tools.diff(folder, tmp_path / "usual")["equal"]


def test_retention_knows_it(tmp_path):
    for step in (1, 2, 3):
        dist_ckpt.save(state(float(step)), retention.step_path(tmp_path, step), metadata="compact")
    assert [step for step, _ in retention.checkpoints(tmp_path)] == [1, 2, 3]
    retention.prune(tmp_path, keep_last=1)
    assert value_of(retention.latest(tmp_path)) == 3.0


@pytest.mark.slow
def test_the_command_writes_the_metadata_that_torch_reads(folder):
    done = program("metadata", folder)
    assert done.returncode == 0, done.stderr
    found = everything(FileSystemReader(folder))
    assert torch.equal(found["w"], torch.arange(24.0).view(4, 6))
    assert found["half"].tolist() == [1.0] * 5
    assert tools.verify(folder)["problems"] == []  # the new file belongs to the checkpoint
    assert dist_ckpt.load({"w": one("w", torch.zeros(4, 6))}, folder, verify="full")["it"] == 7


def test_it_is_the_metadata_of_the_usual_save(folder, tmp_path, command):
    assert command("metadata", folder).returncode == 0
    dist_ckpt.save(contents(), tmp_path / "usual")
    ours, usual = (FileSystemReader(path).read_metadata() for path in (folder, tmp_path / "usual"))
    assert ours.state_dict_metadata == usual.state_dict_metadata
    assert ours.storage_data.keys() == usual.storage_data.keys()


def test_the_command_twice_or_on_a_usual_checkpoint_changes_nothing(folder, tmp_path, command):
    dist_ckpt.save(contents(), tmp_path / "usual")
    assert command("metadata", folder).returncode == 0
    for path in (folder, tmp_path / "usual"):
        before = folder_bytes(path)
        assert command("metadata", path).returncode == 0
        assert folder_bytes(path) == before


def test_the_command_tells_in_json_and_refuses_what_is_no_checkpoint(folder, tmp_path, command):
    done = command("metadata", folder, "--json")
    assert done.returncode == 0, done.err
    assert json.loads(done.out)["path"] == str(folder)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "empty"):
        done = command("metadata", path)
        assert done.returncode == 2
        assert str(path) in done.out + done.err
    assert names(tmp_path / "empty") == []


@pytest.mark.slow
def test_a_background_save_may_be_compact(tmp_path):
    dist_ckpt.async_save(contents(), tmp_path / "c", metadata="compact").wait()
    assert ".metadata" not in names(tmp_path / "c")
    assert tools.verify(tmp_path / "c")["ok"]


def test_a_compact_save_replaces_a_usual_one_and_the_other_way_round(tmp_path):
    for value, kind in ((1.0, "torch"), (2.0, "compact"), (3.0, "torch")):
        dist_ckpt.save(state(value), tmp_path / "c", metadata=kind)
        assert (".metadata" in names(tmp_path / "c")) == (kind == "torch")
        assert value_of(tmp_path / "c") == value


def test_every_file_of_a_compact_save_is_covered(folder):
    for name in names(folder):
        whole = (folder / name).read_bytes()
        flip_byte(folder / name, len(whole) // 2)
        assert not tools.verify(folder)["ok"], name
        with pytest.raises(CheckpointError):
            dist_ckpt.load({"w": one("w", torch.zeros(4, 6))}, folder, verify="full")
        (folder / name).write_bytes(whole)
    for name in names(folder):
        (folder / name).rename(folder.parent / name)
        with pytest.raises(CheckpointError):
            dist_ckpt.load({"w": one("w", torch.zeros(4, 6))}, folder)
        (folder.parent / name).rename(folder / name)
    assert tools.verify(folder)["ok"]


def test_the_command_makes_nothing_of_a_damaged_checkpoint(folder, command):
    largest = max(names(folder), key=lambda name: (not name.endswith((".distcp", ".json", ".pt")), name))
    flip_byte(folder / largest, (folder / largest).stat().st_size // 2)
    done = command("metadata", folder)
    assert done.returncode in (1, 2)
    assert ".metadata" not in names(folder)


def test_torch_without_the_metadata_says_that_it_is_not_there(folder):
    with pytest.raises(FileNotFoundError):
        FileSystemReader(folder).read_metadata()


def test_another_word_than_torch_or_compact_is_refused(tmp_path):
    with pytest.raises((CheckpointError, ValueError), match="thin"):
        dist_ckpt.save(state(1.0), tmp_path / "c", metadata="thin")
    assert names(tmp_path) == []


def test_a_file_missing_from_a_compact_save_is_named(folder):
    (file,) = folder.glob("*.distcp")
    file.unlink()
    with pytest.raises(CorruptError, match=file.name):
        dist_ckpt.load({"w": one("w", torch.zeros(4, 6))}, folder)


@pytest.mark.parametrize("form", ["compact", "torch"])
@pytest.mark.parametrize("verify", ["touched", "full", "off"])
def test_what_torch_saves_over_it_is_never_passed_over_for_the_older_values(form, verify):
    fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    url = "memory://compact/c"
    try:
        dist_ckpt.save({"w": one("w", torch.ones(8))}, url, metadata=form)
        torch_dcp.save({"w": torch.full((8,), 2.0)}, storage_writer=FsspecWriter(url), no_dist=True)
        with pytest.raises(CorruptError, match=r"\.metadata"):
            dist_ckpt.load({"w": one("w", torch.zeros(8))}, url, verify=verify)
        with pytest.raises(torch_dcp.CheckpointException, match=r"\.metadata"):
            torch_dcp.load({"w": torch.zeros(8)}, storage_reader=dcp.Reader(url, verify=verify), no_dist=True)
        assert not dist_ckpt.check_is_distributed_checkpoint(url)
    finally:
        fsspec.filesystem("memory").rm("/compact", recursive=True)


def test_a_metadata_of_another_save_is_refused_and_not_written_over(folder, tmp_path):
    dist_ckpt.save(contents(2.0), tmp_path / "other")
    (folder / ".metadata").write_bytes((tmp_path / "other" / ".metadata").read_bytes())
    before = folder_bytes(folder)
    with pytest.raises(CorruptError, match="two saves are mixed"):
        dist_ckpt.load_common_state_dict(folder)
    with pytest.raises(CorruptError, match="two saves are mixed"):
        tools.metadata(folder)
    assert folder_bytes(folder) == before and not tools.verify(folder)["ok"]


@pytest.mark.parametrize("known", [True, False])
def test_a_compact_save_to_a_store_is_whole_from_the_moment_it_shows(known):
    class Slow(MemoryStore):
        def delete(self, name):
            if any(found.endswith("metadata.json") for found in self.files):
                raise StorageError("nothing is removed after the commit")
            super().delete(name)

    store = Slow()
    dist_ckpt.save(contents(1.0), store)
    if not known:  # as a save of an older version that was killed
        lost = ("integrity.json", "metadata.json", "shard_manifest.pt")
        flat = {name.rpartition("/")[2]: data for name, data in store.files.items()}
        store.files = {name: data for name, data in flat.items() if name not in lost}
    dist_ckpt.save(contents(2.0), store, metadata="compact")
    assert dist_ckpt.load({"o": an_object(None)}, store)["o"] == {"v": 2.0}
