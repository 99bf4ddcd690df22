"""What takes a save's files away while it goes on in a store: the save is whole, or it says so."""

import io
import pickle
import shutil
import time
from fractions import Fraction

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import StorageError, UnsafeError, retention
from sixfold.dist_ckpt.storage.store import Part, complete
from sixfold.dist_ckpt.stores import ByPointer, LocalStore, MemoryStore, UrlStore

POINTER = b'{"sharded_backend": "torch_dist"}'


class Acting(MemoryStore):
    """``acts``: what is done, once, before a file is made whose name ends so, before the first deletion or listing."""

    def __init__(self):
        super().__init__()
        self.acts = {}

    def _act(self, at):
        for end in [end for end in self.acts if at.endswith(end)]:
            self.acts.pop(end)()

    def create(self, name, nbytes):
        self._act(name)
        return super().create(name, nbytes)

    def delete(self, name):
        self._act("<delete>")
        super().delete(name)

    def list_files(self):
        found = super().list_files()
        self._act("<list>")
        return found


def state(value):
    return {"w": one("w", torch.full((9,), float(value)))}


def value_of(store):
    return dist_ckpt.load(state(0), store, group=None)["w"].unique().tolist()


def part_of(store, save):
    return {"__0_0.distcp": store.write_part(save, Part(name="__0_0.distcp", fill=lambda file: file.append(b"data")))}


def run_of(*steps):
    root = Acting()
    for step in steps:
        dist_ckpt.save(state(step), retention.step_path(root, step), group=None)
    return root


@pytest.mark.parametrize("at", ["common.pt", "integrity.json", "/metadata.json"])
def test_a_save_whose_unfinished_step_is_pruned_says_so(at):
    root = run_of(2, 3)
    root.acts[at] = lambda: retention.prune(root, keep_last=1)
    with pytest.raises(StorageError, match="were removed while it went on"):
        dist_ckpt.save(state(9), retention.step_path(root, 1), group=None)
    assert [step for step, _ in retention.checkpoints(root)] == [3]
    assert not [name for name in root.files if "step-00000001" in name]


@pytest.mark.parametrize("at", ["__0_0.distcp", "common.pt", "/metadata.json"])
def test_a_prune_of_the_older_checkpoint_leaves_the_save_that_replaces_it(at):
    root = run_of(1, 2, 3)
    root.acts[at] = lambda: retention.prune(root, keep_last=1)
    place = retention.step_path(root, 1)
    dist_ckpt.save(state(9), place, group=None)
    assert value_of(place) == [9.0]
    retention.prune(root, keep_last=1)
    assert {name.partition("/")[0] for name in root.files} == {"step-00000003"}


def pruned_after(root, monkeypatch, *hours):
    """What files of step 9 are left by prunes so many hours after now."""
    for hour in hours:
        with monkeypatch.context() as patch:
            now = time.time()
            patch.setattr(retention.time, "time", lambda now=now, hour=hour: now + 3600 * hour)
            retention.prune(root, keep_last=2)
    return [name.partition("/")[2] for name in root.files if name.startswith("step-00000009/")]


def test_marks_of_a_prune_work_behind_a_url_and_torch_and_loads_do_not_see_them(monkeypatch):
    pytest.importorskip("fsspec", reason="needs the extra fsspec")
    root, now = "memory://marked", time.time()
    dist_ckpt.save(state(3), retention.step_path(root, 3), group=None)
    place = UrlStore(retention.step_path(root, 9))
    part_of(place, place.begin("a" * 16, 0))
    for hours, left in ((0, 2), (23, 2), (25, 0)):
        monkeypatch.setattr(retention.time, "time", lambda hours=hours: now + 3600 * hours)
        assert retention.prune(root, keep_last=1) == []
        assert len(place.list_files()) == left
        assert retention.latest(root) == retention.step_path(root, 3)


@pytest.mark.parametrize("step", [1, 9])
def test_a_checkpoint_of_torch_that_does_not_open_here_is_no_unfinished_save(tmp_path, monkeypatch, step):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "c", no_dist=True)
    index = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    index.planner_data = Fraction(1, 2)  # of a planner of the user's
    root = run_of(2, 3)
    place = retention.step_path(root, step)
    place.replace("__0_0.distcp", (tmp_path / "c" / "__0_0.distcp").read_bytes())
    place.replace(".metadata", pickle.dumps(index))
    before = place.list_files()
    with pytest.raises(UnsafeError):
        dist_ckpt.load_tensors_metadata(place)
    pruned_after(root, monkeypatch, 0, 25, 50)
    assert place.list_files() == before


def test_a_mark_of_a_prune_is_nothing_that_a_save_must_not_replace(monkeypatch):
    root = run_of(2, 3)
    place = retention.step_path(root, 9)
    save = place.begin("a" * 16, 0)
    part_of(place, save)
    assert len(pruned_after(root, monkeypatch, 0)) == 2
    place.abandon(save)
    dist_ckpt.save(state(9), place, group=None, if_exists="error")
    assert value_of(place) == [9.0]


def test_a_dead_save_of_the_newest_step_goes_when_a_prune_finds_it_as_one_did_a_day_before(monkeypatch):
    root = run_of(2, 3)
    place = retention.step_path(root, 9)
    part_of(place, place.begin("a" * 16, 0))
    assert len(pruned_after(root, monkeypatch, 0)) == 2, "the part, and a mark of what was seen"
    assert len(pruned_after(root, monkeypatch, 1, 23, 23.9)) == 2
    assert pruned_after(root, monkeypatch, 24.1) == []
    assert [step for step, _ in retention.checkpoints(root)] == [2, 3]


def test_a_save_of_the_newest_step_that_writes_on_outlives_any_number_of_prunes(monkeypatch):
    root = run_of(2, 3)
    place = retention.step_path(root, 9)
    save = place.begin("a" * 16, 0)
    parts = part_of(place, save)
    pruned_after(root, monkeypatch, 0, 20)
    place.replace("job-00000001-aaaaaaaaaaaaaaaa/alive-0", b"1")  # a sign of life is a change
    pruned_after(root, monkeypatch, 25, 40)
    place.replace("job-00000001-aaaaaaaaaaaaaaaa/alive-0", b"2")
    assert len(pruned_after(root, monkeypatch, 50, 60)) == 3
    complete(place, save, parts, {"common.pt": b"c"}, POINTER)
    assert place.holds("a" * 16)
    assert not [name for name in place.list_files() if "seen-" in name]


def test_what_a_prune_noted_of_a_step_that_is_gone_goes_too(monkeypatch):
    root = run_of(2, 3)
    place = retention.step_path(root, 9)
    save = place.begin("a" * 16, 0)
    part_of(place, save)
    pruned_after(root, monkeypatch, 0)
    place.abandon(save)
    assert pruned_after(root, monkeypatch, 1) == []


@pytest.mark.parametrize("at", ["/gone", "<delete>"])
def test_a_commit_in_the_middle_of_a_prune_is_told_or_stays(at):
    root, outcome = run_of(3), []
    place = retention.step_path(root, 1)
    save = place.begin("a" * 16, 0)
    parts = part_of(place, save)

    def commit():
        try:
            complete(place, save, parts, {"common.pt": b"c"}, POINTER)
            outcome.append("saved")
        except StorageError as error:
            outcome.append(str(error))

    root.acts[at] = commit
    retention.prune(root, keep_last=1)
    assert len(outcome) == 1
    left = {name.rpartition("/")[2] for name in root.files if "step-00000001" in name}
    if outcome == ["saved"]:
        assert left == {"__0_0.distcp", "common.pt", "integrity.json", "metadata.json"}
    else:
        assert "were removed while it went on" in outcome[0]
        assert not place.holds("a" * 16)


def test_a_commit_that_misses_a_file_leaves_the_older_checkpoint_visible():
    store = Acting()
    dist_ckpt.save(state(1), store, group=None)
    store.acts["/metadata.json"] = lambda: [
        store.files.pop(name) for name in list(store.files) if name.startswith("save-00000002") and "distcp" in name
    ]
    with pytest.raises(StorageError, match="were removed while it went on"):
        dist_ckpt.save(state(2), store, group=None)
    assert value_of(store) == [1.0]


@pytest.mark.parametrize("kind", ["memory", "url", "folder"])
def test_a_part_that_is_gone_cannot_be_taken_over_and_that_is_told(kind, tmp_path):
    if kind == "url":
        pytest.importorskip("fsspec", reason="needs the extra fsspec")
    stores = {"memory": MemoryStore(), "url": UrlStore("memory://lost"), "folder": LocalStore(tmp_path / "c")}
    store = stores[kind]
    mine, other = store.begin("a" * 16, 0), store.begin("b" * 16, 0)
    with pytest.raises(StorageError, match="were removed while it went on"):
        store.take_over(other, mine, "__1_0.distcp")


def test_a_file_of_a_users_store_that_cannot_be_discarded_is_named():
    class Naive(MemoryStore):
        def create(self, name, nbytes):
            return io.BytesIO()

    assert issubclass(Naive, ByPointer)
    with pytest.raises(StorageError, match=r"this store in memory: create\(.*\) gives a BytesIO without discard\(\)"):
        dist_ckpt.save(state(1), Naive(), group=None)


@pytest.mark.parametrize(("deleted", "words"), [("run", "/run is not there"), ("run/.c.", "/c is not there")])
def test_a_first_save_whose_folder_is_deleted_says_so_and_not_that_one_is_whole(tmp_path, deleted, words):
    def progress(done, total):
        for path in tmp_path.glob(f"{deleted}*"):
            shutil.rmtree(path)

    with pytest.raises(StorageError, match=f"were removed while it went on: .*{words}. Something has deleted it"):
        dist_ckpt.save({"w": torch.ones(1000)}, tmp_path / "run/c", group=None, progress=progress)


def test_a_working_folder_that_was_removed_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageError, match="c: the working folder of this process was removed; give the whole path"):
        dist_ckpt.save({"w": torch.ones(2)}, "c", group=None)
    with pytest.raises(StorageError, match="the working folder of this process was removed; give the whole path"):
        dist_ckpt.CheckpointManager("run", group=None)
