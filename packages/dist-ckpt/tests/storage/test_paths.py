"""Every public function with every way to write a path: it works, or is refused by name and nothing is made."""

import errno
import os
from pathlib import Path

import pytest
import torch
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, StorageError, core, retention, serialization
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.storage import url
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from sixfold.dist_ckpt.tools import commands as tools

fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")


def state(value=1.0):
    return {"w": one("w", torch.full((5,), value)), "it": 7}


class Place:
    """A path of neither str nor Path."""

    def __init__(self, text):
        self.text = text

    def __fspath__(self):
        return self.text


#: How a local folder ``c`` of the working directory ``here`` may be written.
LOCAL = {
    "str": lambda here: f"{here}/c",
    "Path": lambda here: here / "c",
    "a slash at the end": lambda here: f"{here}/c/",
    "relative": lambda here: "c",
    "relative with dots": lambda here: "./d/../c",
    "relative Path": lambda here: Path("c"),
    "symlink to the folder": lambda here: here / "link",
    "file URL": lambda here: f"file://{here}/c",
    "local URL": lambda here: f"local://{here}/c",
    "PathLike": lambda here: Place(f"{here}/c"),
}
URL = {"URL": lambda here: "memory://run/c", "URL with a slash at the end": lambda here: "memory://run/c/"}
NO_PLACE = {
    "URL as a Path": (lambda here: Path("memory://run/c"), "URL with one slash"),
    "URL with one slash": (lambda here: "s3:/bucket/c", "URL with one slash"),
    "file URL as a Path": (lambda here: Path(f"file://{here}/c"), "URL with one slash"),
    "home": (lambda here: "~/c", "expanduser"),
    "home as a Path": (lambda here: Path("~/c"), "expanduser"),
    "home of somebody": (lambda here: "~root/c", "expanduser"),
    "file URL of home": (lambda here: "file://~/c", "from the root"),
    "file URL without a root": (lambda here: "file://c", "from the root"),
    "empty": (lambda here: "", "name a folder"),
    "zero byte": (lambda here: "a\0b", "zero byte"),
    "bytes": (lambda here: b"c", "a str or a Path"),
    "number": (lambda here: 5, "a str or a Path"),
    "no library": (lambda here: "nosuch://run/c", "nosuch"),
}
REFUSED = {name: make for name, (make, _) in NO_PLACE.items()}

#: What is called with a path, and what it gives for a folder that holds ``state()``.
READS = {
    "load": lambda p: dist_ckpt.load(state(0.0), p)["w"].tolist() == [1.0] * 5,
    "load_common_state_dict": lambda p: dist_ckpt.load_common_state_dict(p) == {"it": 7},
    "load_content_metadata": lambda p: dist_ckpt.load_content_metadata(p) is None,
    "load_tensors_metadata": lambda p: list(dist_ckpt.load_tensors_metadata(p)) == ["w"],
    "load_sharded_metadata": lambda p: list(dist_ckpt.load_sharded_metadata(p)) == ["w"],
    "load_plain_tensors": lambda p: dist_ckpt.load_plain_tensors(p)["w"].tolist() == [1.0] * 5,
    "check": lambda p: dist_ckpt.check_is_distributed_checkpoint(p),
    "default strategy": lambda p: str(dist_ckpt.serialization.get_default_load_sharded_strategy(p)).startswith("Torch"),
    "inspect": lambda p: [t["key"] for t in tools.inspect(p)["tensors"]] == ["w"],
    "verify": lambda p: tools.verify(p)["ok"],
    "diff": lambda p: tools.diff(p, p)["equal"],
    "convert from": lambda p: tools.convert(p, Path("made").resolve(), to="torch_dist")["tensors"] == 1,
}
WRITES = {
    "save": lambda p: dist_ckpt.save(state(), p),
    "save zarr": lambda p: dist_ckpt.save(state(), p, ("zarr", 1)),
    "async_save": lambda p: background._saver_of(os.getpid()).save(state(), p).wait(60),
    "convert to torch_dist": lambda p: tools.convert(Path("source").resolve(), p, to="torch_dist"),
    "convert to zarr": lambda p: tools.convert(Path("source").resolve(), p, to="zarr"),
    "convert to safetensors": lambda p: tools.convert(Path("source").resolve(), p, to="safetensors"),
}
#: What a strategy does when it is called directly: in a folder that is there.
ON_FOLDERS = {
    "strategy save": lambda p: TorchDistSaveShardedStrategy().save({"w": one("w", torch.ones(5))}, p),
    "strategy load": lambda p: TorchDistLoadShardedStrategy().load({"w": one("w", torch.ones(5))}, p),
    "strategy lists": lambda p: TorchDistLoadShardedStrategy().load_tensors_metadata(p),
}
RETENTION = {
    "step_path": lambda p: retention.step_path(p, 3),
    "checkpoints": retention.checkpoints,
    "latest": retention.latest,
    "prune": lambda p: retention.prune(p, keep_last=1),
}
NO_URL = {"save zarr", "async_save", "convert to zarr", "convert to safetensors"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, and an empty store."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield folder
    store.store.clear()


def tree(folder):
    store = fsspec.filesystem("memory")
    return sorted([*map(str, folder.rglob("*")), *store.find("/")])


@pytest.mark.parametrize("form", LOCAL)
@pytest.mark.slow
def test_every_function_that_reads_takes_every_form_of_a_folder(here, form):
    dist_ckpt.save(state(), here / "c", group=None)
    (here / "link").symlink_to("c")
    (here / "d").mkdir()
    for name, read in READS.items():
        assert read(LOCAL[form](here)), name


@pytest.mark.parametrize("form", URL)
def test_every_function_that_reads_takes_a_url(here, form):
    dist_ckpt.save(state(), "memory://run/c", group=None)
    for name, read in READS.items():
        assert read(URL[form](here)), name


@pytest.mark.filterwarnings("ignore:the zarr format")
@pytest.mark.parametrize("form", [*LOCAL, *URL])
@pytest.mark.slow
def test_every_function_that_writes_writes_there_or_says_that_it_does_not(here, form):
    pytest.importorskip("safetensors", reason="needs the safetensors library (extra safetensors)")
    dist_ckpt.save(state(), here / "source", group=None)
    (here / "d").mkdir()
    for number, (name, write) in enumerate(WRITES.items()):
        target = here / f"target-{number}"
        target.mkdir()
        for link in ("c", "link"):  # another folder for each, by the same words
            (here / link).unlink(missing_ok=True)
            (here / link).symlink_to(target)
        fsspec.filesystem("memory").store.clear()
        place, before = (LOCAL | URL)[form](here), tree(here)
        if form in URL and name in NO_URL:
            with pytest.raises(CheckpointError, match="memory://run/c"):
                write(place)
            assert tree(here) == before, name
            continue
        write(place)
        made = list(fsspec.filesystem("memory").find("/run/c")) if form in URL else os.listdir(target)
        assert made, name
        assert {*os.listdir(here)} == {"c", "d", "link", "source"} | {f"target-{n}" for n in range(number + 1)}


@pytest.mark.parametrize("form", REFUSED)
def test_what_is_no_place_is_refused_by_every_function_before_anything_is_made(here, form):
    dist_ckpt.save(state(), here / "source", group=None)
    before = tree(here)
    for name, call in {**READS, **WRITES, **ON_FOLDERS, **RETENTION}.items():
        if form == "no library" and name == "step_path":
            continue  # it opens nothing
        with pytest.raises(CheckpointError) as caught:
            call(REFUSED[form](here))
            pytest.fail(name)
        assert NO_PLACE[form][1] in str(caught.value), name
        assert tree(here) == before, name


def test_strategies_called_directly_refuse_a_url(here):
    for call in ON_FOLDERS.values():
        with pytest.raises(CheckpointError, match="memory://run/c"):
            call("memory://run/c")
    assert tree(here) == []


ROOTS = {
    "str": (lambda here: f"{here}/run", lambda here, name: here / "run" / name),
    "Path": (lambda here: here / "run", lambda here, name: here / "run" / name),
    "a slash at the end": (lambda here: f"{here}/run/", lambda here, name: here / "run" / name),
    "relative": (lambda here: "run", lambda here, name: Path("run") / name),
    "relative Path": (lambda here: Path("run"), lambda here, name: Path("run") / name),
    "symlink": (lambda here: here / "link", lambda here, name: here / "link" / name),
    "file URL": (lambda here: f"file://{here}/run", lambda here, name: here / "run" / name),
    "URL": (lambda here: "memory://run", lambda here, name: f"memory://run/{name}"),
    "URL with a slash at the end": (lambda here: "memory://run/", lambda here, name: f"memory://run/{name}"),
    "URL of a whole store": (lambda here: "memory://", lambda here, name: f"memory://{name}"),
}


@pytest.mark.parametrize("form", ROOTS)
@pytest.mark.slow
def test_retention_keeps_what_the_rule_says_at_every_form_of_a_root(here, form):
    root, expected = ROOTS[form][0](here), ROOTS[form][1]
    (here / "link").symlink_to("run")
    places = {step: expected(here, f"step-{step:08d}") for step in (1, 5, 20, 100)}
    assert retention.latest(root) is None
    for step, place in places.items():
        found = retention.step_path(root, step)
        assert (found, type(found)) == (place, type(place) if isinstance(place, str) else type(here))
        dist_ckpt.save({"w": one("w", torch.full((5,), float(step))), "it": step}, found, group=None)
    assert retention.checkpoints(root) == list(places.items())
    assert retention.latest(root) == places[100]
    assert dist_ckpt.load_common_state_dict(retention.latest(root)) == {"it": 100}
    assert retention.prune(root, keep_last=1, keep_every=5) == [places[1]]
    assert retention.prune(root, keep_last=1) == [places[5], places[20]]
    assert retention.checkpoints(root) == [(100, places[100])]
    assert {name.partition("step-")[2].partition("/")[0] for name in tree(here) if "step-" in name} == {"00000100"}


def test_in_a_store_unfinished_saves_do_not_count_and_old_ones_go(here):
    store = fsspec.filesystem("memory")
    for step in (1, 2, 3, 4, 5):
        dist_ckpt.save(state(), retention.step_path("memory://run", step), group=None)
    for path in store.find("/run"):
        step, name = path.split("/")[2], path.rpartition("/")[2]
        if step in ("step-00000002", "step-00000005") and name == "metadata.json":
            store.rm_file(path)  # a save that died, or a deletion that was cut short
        elif step == "step-00000001" and name == "common.pt":
            store.pipe_file(path, b"short")  # damaged, and somebody may want to see it
    store.pipe_file("/run/notes.txt", b"mine")
    assert [step for step, _ in retention.checkpoints("memory://run")] == [3, 4]
    assert retention.latest("memory://run") == "memory://run/step-00000004"
    assert retention.prune("memory://run", keep_last=1) == ["memory://run/step-00000003"]
    left = {path.split("/")[2] for path in store.find("/run")}
    assert left == {"step-00000001", "step-00000004", "step-00000005", "notes.txt"}


@pytest.mark.parametrize("function", RETENTION)
def test_a_store_that_does_not_answer_is_no_empty_run(here, monkeypatch, function):
    dist_ckpt.save(state(), retention.step_path("memory://run", 3), group=None)

    def refuse(*_, **__):
        raise ConnectionError("the store is gone")

    monkeypatch.setattr(url, "PATIENCE_S", 0.05)  # it is asked again for so long
    memory = type(fsspec.filesystem("memory"))
    for name in ("find", "cat_file"):
        with monkeypatch.context() as patch:
            patch.setattr(memory, name, refuse)
            if function != "step_path":
                with pytest.raises(dist_ckpt.StorageError, match="the store is gone"):
                    RETENTION[function]("memory://run")


@pytest.mark.parametrize("gone", [".metadata", "integrity.json"])
def test_a_step_that_another_process_prunes_while_a_store_is_looked_at_does_not_count(here, monkeypatch, gone):
    for step in (1, 2):
        dist_ckpt.save(state(), retention.step_path("memory://run", step), group=None)
    store = fsspec.filesystem("memory")
    plain = type(store).cat_file

    def cat_file(self, path, *arguments, **options):
        if "/step-00000002/" in path and path.endswith(f"/{gone}") and store.exists(path):
            store.rm("/run/step-00000002", recursive=True)
        return plain(self, path, *arguments, **options)

    monkeypatch.setattr(type(store), "cat_file", cat_file)
    assert retention.latest("memory://run") == "memory://run/step-00000001"
    assert retention.checkpoints("memory://run") == [(1, "memory://run/step-00000001")]
    dist_ckpt.save(state(), retention.step_path("memory://run", 2), group=None)
    with pytest.raises(dist_ckpt.StorageError, match=r"step-00000002/.* was replaced or removed while it was read"):
        dist_ckpt.load_common_state_dict("memory://run/step-00000002")


def test_files_that_another_process_has_deleted_do_not_end_a_prune_of_a_store(here, monkeypatch):
    for step in (1, 2):
        dist_ckpt.save(state(), retention.step_path("memory://run", step), group=None)
    memory = type(fsspec.filesystem("memory"))
    plain = memory.rm_file

    def rm_file(self, path):
        plain(self, path)
        plain(self, path)

    monkeypatch.setattr(memory, "rm_file", rm_file)
    assert retention.prune("memory://run", keep_last=1) == ["memory://run/step-00000001"]
    assert retention.checkpoints("memory://run") == [(2, "memory://run/step-00000002")]


def test_a_folder_that_cannot_be_read_is_no_missing_checkpoint(here, monkeypatch):
    """A run that took it for one would begin from zero."""
    dist_ckpt.save(state(), here / "step-00000003", group=None)
    is_looked_at = Path.read_bytes

    def refuse(path):
        if path.name in (".metadata", "integrity.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return is_looked_at(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for look in (retention.latest, retention.checkpoints, lambda root: retention.prune(root, keep_last=0)):
        with pytest.raises(dist_ckpt.StorageError, match="Permission denied"):
            look(here)
    with pytest.raises(dist_ckpt.StorageError, match="Permission denied"):
        dist_ckpt.check_is_distributed_checkpoint(here / "step-00000003")
    assert (here / "step-00000003").exists()


def test_a_step_that_is_a_symlink_loses_the_link_and_not_what_it_points_to(here):
    dist_ckpt.save(state(), here / "elsewhere", group=None)
    (here / "run").mkdir()
    (here / "run" / "step-00000001").symlink_to(here / "elsewhere")
    dist_ckpt.save(state(), retention.step_path(here / "run", 2), group=None)
    assert retention.prune(here / "run", keep_last=1) == [here / "run" / "step-00000001"]
    assert os.listdir(here / "run") == ["step-00000002"]
    assert dist_ckpt.check_is_distributed_checkpoint(here / "elsewhere")


@pytest.mark.parametrize(
    "look",
    [
        dist_ckpt.load_common_state_dict,
        dist_ckpt.load_tensors_metadata,
        dist_ckpt.load_sharded_metadata,
        dist_ckpt.load_plain_tensors,
        dist_ckpt.load_content_metadata,
        dist_ckpt.check_is_distributed_checkpoint,
        core.maybe_load_config,
        serialization.get_default_load_sharded_strategy,
    ],
)
def test_what_the_system_refuses_is_a_storage_error_of_every_function_that_looks(tmp_path, look):
    """A name too long is refused as a folder that may not be looked into, also to root."""
    with pytest.raises(StorageError, match="File name too long") as told:
        look(tmp_path / ("x" * 300))
    assert told.value.errno == errno.ENAMETOOLONG
