"""Checkpoints of more files than a process may open: everything that reads them keeps few descriptors and few maps."""

import os
import pickle
import resource
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import in_child, one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor, StorageError, retention
from sixfold.dist_ckpt.checkpoint import opening
from sixfold.dist_ckpt.checkpoint.opening import Mapped
from sixfold.dist_ckpt.errors import typed
from sixfold.dist_ckpt.formats.metadata import CONFIG_JSON
from sixfold.dist_ckpt.plans.plan import plan_save
from sixfold.dist_ckpt.plans.shard_table import tabulate
from sixfold.dist_ckpt.save_load import writer
from sixfold.dist_ckpt.save_load.saving import index_of
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes
from sixfold.dist_ckpt.storage.store import Save, write_small
from sixfold.dist_ckpt.stores import LocalStore
from sixfold.dist_ckpt.tools import commands as tools

FILES, RANKS = 140, 140  # more than twice as many as a process may open here, and than maps are kept
LIMIT, KEPT_MAPS = 64, 60
WHOLE = torch.arange(RANKS * 8, dtype=torch.float32).view(RANKS, 8)


def few_descriptors(action):
    """``action`` in a child that may open files up to number ``LIMIT``."""

    def run():
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        return action()

    return in_child(run)


@pytest.fixture(autouse=True)
def _few_maps_are_kept(monkeypatch):
    monkeypatch.setattr(opening, "KEPT_MAPS", KEPT_MAPS)


@pytest.fixture(scope="module")
def of_dcp(tmp_path_factory):
    """A folder of torch's own: each tensor in a file of its own, as as many writers would leave it."""
    path = tmp_path_factory.mktemp("dcp") / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({f"w{i}": torch.full((3,), float(i)) for i in range(FILES)}, checkpoint_id=str(path))
    content = pickle.loads((path / ".metadata").read_bytes())
    data = (path / "__0_0.distcp").read_bytes()
    for number, place in enumerate(content.storage_data.values()):
        name = f"__{number}_0.distcp"
        (path / f"{name}.new").write_bytes(data[place.offset : place.offset + place.length])
        place.relative_path, place.offset = name, 0
    (path / "__0_0.distcp").unlink()
    for file in path.glob("*.new"):
        file.rename(file.with_suffix(""))
    (path / ".metadata").write_bytes(pickle.dumps(content))
    return path


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """A checkpoint that many ranks saved: the steps of ``save`` for each of them, in one process, without fsync."""
    path = tmp_path_factory.mktemp("ranks") / "step-00000001"
    path.mkdir()
    written = []
    store, save = LocalStore(path), Save(save_id="5" * 16, target="", staging=str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        for rank in range(RANKS):
            record = ShardedTensor.from_rank_offsets("w", WHOLE[rank : rank + 1].clone(), (0, rank, RANKS))
            table, pieces = tabulate([record])
            writes = plan_save([record], pieces)
            content = writer.RankContent(store, [record], writes, [], {}, b"", 0, table.encode())
            written.append(writer.write(content, save, rank, check_finite=False))
        torch.save({"it": 1}, path / "common.pt")
        small = {"common.pt": (path / "common.pt").read_bytes(), "metadata.json": CONFIG_JSON}
        (path / "common.pt").unlink()
        parts = {name: digest for part in written for name, digest in part.files.items()}
        write_small(store, save, parts, index_of(written, save.save_id, None) | small)
    return path


@pytest.fixture(scope="module")
def of_zarr(tmp_path_factory):
    """A zarr array of as many chunk files."""
    path = tmp_path_factory.mktemp("zarr") / "c"
    parts = [ShardedTensor.from_rank_offsets("w", WHOLE[i : i + 1].clone(), (0, i, RANKS)) for i in range(RANKS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.fsync", lambda handle: None)
            dist_ckpt.save({"w": parts}, path, ("zarr", 1))
    return path


def load_all(path):
    return dist_ckpt.load_plain_tensors(path)


def load_columns(path):
    """A strided read of every file."""
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(RANKS, 4), (1, 1, 2))
    return dist_ckpt.load({"w": part}, path, validate_access_integrity=False)["w"]


@pytest.mark.slow
def test_a_folder_of_torch_loads_with_fewer_descriptors_than_files(of_dcp):
    loaded = few_descriptors(lambda: {key: value.tolist() for key, value in load_all(of_dcp).items()})
    assert loaded == {f"w{i}": [float(i)] * 3 for i in range(FILES)}


@pytest.mark.parametrize("kind", ["of_ranks", "of_zarr"])
@pytest.mark.parametrize("verify", ["touched", "off"])
@pytest.mark.slow
def test_the_files_of_many_ranks_load_with_fewer_descriptors(request, kind, verify):
    path = request.getfixturevalue(kind)

    def load():
        whole = dist_ckpt.load({"w": one("w", torch.zeros(RANKS, 8))}, path, verify=verify)["w"]
        return torch.equal(whole, WHOLE), torch.equal(load_columns(path), WHOLE[:, 4:])

    assert few_descriptors(load) == (True, True)


@pytest.mark.parametrize("kind", ["of_dcp", "of_ranks", "of_zarr"])
@pytest.mark.slow
def test_every_tool_reads_them_with_few_descriptors(request, tmp_path, kind):
    path = request.getfixturevalue(kind)

    def use():
        assert tools.verify(path)["ok"]
        assert tools.verify(path, quick=True)["ok"]
        assert len(tools.inspect(path)["tensors"]) == (FILES if kind == "of_dcp" else 1)
        assert tools.convert(path, tmp_path / "out", to="torch_dist")["tensors"] == (FILES if kind == "of_dcp" else 1)
        report = tools.diff(path, tmp_path / "out")
        assert not report["different"] and not report["only_in_a"]
        assert opening.is_complete(path)
        return retention.checkpoints(path.parent)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = few_descriptors(use)
    assert [step for step, _ in found] == ([1] if kind == "of_ranks" else [])


@pytest.mark.slow
def test_a_damaged_file_among_them_is_named_with_few_descriptors(of_ranks, tmp_path):
    def use():
        copy = tmp_path / "c"
        copy.mkdir()
        for file in of_ranks.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        last = copy / "__77_0.distcp"
        data = bytearray(last.read_bytes())
        data[data.index(bytes(tensor_bytes(WHOLE[77])))] ^= 1
        last.write_bytes(bytes(data))
        with pytest.raises(dist_ckpt.CorruptError, match=r"__77_0\.distcp.*damaged: w"):
            load_all(copy)
        return [problem["file"] for problem in tools.verify(copy)["problems"]]

    assert few_descriptors(use) == ["__77_0.distcp"]


def test_views_of_a_file_outlive_the_checkpoint_and_its_maps(of_ranks):
    """What is handed out keeps its own file mapped; a checkpoint keeps a bounded number of maps and no descriptor."""
    checkpoint = opening.open_checkpoint(of_ranks)
    frames = [chunk.frame for chunk in checkpoint.manifest.tensors["w"].chunks]
    for frame in frames:
        checkpoint.frame(frame)
    assert 0 < Path("/proc/self/maps").read_text().count(str(of_ranks)) <= KEPT_MAPS + 1, "and the manifest"
    views = [checkpoint.frame(frame) for frame in frames]
    opened = len(list(Path("/proc/self/fd").iterdir()))
    assert opened < LIMIT
    before = [(of_ranks / frame.file).read_bytes() for frame in frames]
    del checkpoint
    assert all(bytes(view) == data for view, data in zip(views, before, strict=True))
    mapped = Path("/proc/self/maps").read_text().count(str(of_ranks))
    del views
    left = Path("/proc/self/maps").read_text().count(str(of_ranks))
    assert (mapped, left) == (RANKS, 0)


def test_a_file_that_does_not_fit_into_this_process_is_an_error_of_the_system(tmp_path):
    path = tmp_path / "f"
    path.touch()
    os.truncate(path, 1 << 32)

    def mapped():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28),) * 2)
        with pytest.raises(StorageError, match=f"memory.*: {path}"):
            typed(lambda: Mapped(path))

    in_child(mapped)
