"""Commit: old or new, never a mixture, whatever moment the process dies at."""

import errno
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from dist_ckpt_helpers import one

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError, StorageError, tools
from sixfold.dist_ckpt.save_load import saving, writer
from sixfold.dist_ckpt.save_load.reader import Reader
from sixfold.dist_ckpt.save_load.saving import SaveRequest
from sixfold.dist_ckpt.storage import local as storage


def state(value):
    return {"w": one("w", torch.full((100,), float(value))), "v": one("v", torch.full((9,), float(value))), "it": value}


def loaded_value(path):
    """The step that a folder holds; fails if it is a mixture."""
    loaded = dist_ckpt.load(state(0), path, group=None)
    assert bool((loaded["w"] == loaded["it"]).all())
    assert bool((loaded["v"] == loaded["it"]).all())
    return loaded["it"]


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_checkpoint_is_replaced_in_place_and_nothing_is_left_over(tmp_path):
    (tmp_path / "c").mkdir()  # the guide makes the folder before the first save
    for value in (1, 2, 3):
        dist_ckpt.save(state(value), tmp_path / "c")
        assert loaded_value(tmp_path / "c") == value
        assert hidden(tmp_path) == []


def test_leftovers_of_dead_saves_to_the_same_name_go_with_the_next_save(tmp_path):
    others = [".c.tmp-x.tmp-other", ".cc.tmp-other"]  # of targets named c.tmp-x and cc
    for name in (".c.tmp-00000000deadbeef", ".c.old-00000000deadbeef", *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"x")
    dist_ckpt.save(state(1), tmp_path / "c")
    assert sorted(hidden(tmp_path)) == others


def test_without_exchange_the_old_one_is_renamed_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "exchange", lambda a, b: False)
    for value in (1, 2):
        dist_ckpt.save(state(value), tmp_path / "c")
    assert loaded_value(tmp_path / "c") == 2
    assert hidden(tmp_path) == []


def test_a_replacement_cut_short_between_its_renames_falls_back_to_a_whole_sibling(tmp_path):
    dist_ckpt.save(state(1), tmp_path / "c")
    (tmp_path / "c").rename(tmp_path / ".c.old-0123456789abcdef")
    assert loaded_value(tmp_path / "c") == 1
    dist_ckpt.save(state(2), tmp_path / "d")
    (tmp_path / ".c.tmp-0123456789abcdef").mkdir()
    (tmp_path / "d").rename(tmp_path / ".c.tmp-0123456789abcdef" / "checkpoint")
    assert loaded_value(tmp_path / "c") == 2
    (tmp_path / ".c.tmp-0123456789abcdef" / "checkpoint" / "metadata.json").unlink()
    assert loaded_value(tmp_path / "c") == 1


def test_a_replacement_that_cannot_be_moved_in_leaves_the_old_one_in_place(tmp_path, monkeypatch):
    dist_ckpt.save(state(1), tmp_path / "c")
    monkeypatch.setattr(storage, "exchange", lambda a, b: False)

    def rename(source, target, plain=Path.rename):
        if ".tmp-" in str(source.parent):
            raise OSError(errno.EIO, "Input/output error", str(source))
        return plain(source, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StorageError, match="Input/output error"):
        dist_ckpt.save(state(2), tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert loaded_value(tmp_path / "c") == 1


def test_a_load_that_is_overtaken_by_a_save_is_an_error_and_no_mixture(tmp_path, monkeypatch):
    dist_ckpt.save(state(1), tmp_path / "c")

    def run(reader, *arguments, plain=Reader.run):
        dist_ckpt.save(state(2), tmp_path / "c", group=None)  # after the small files were read
        return plain(reader, *arguments)

    monkeypatch.setattr(Reader, "run", run)
    with pytest.raises(StorageError, match="replaced while it was read"):
        loaded_value(tmp_path / "c")
    monkeypatch.undo()
    assert loaded_value(tmp_path / "c") == 2


@pytest.mark.filterwarnings("ignore:the zarr format")
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("backend", ["torch_dist", "zarr"])
def test_every_file_and_folder_is_on_disk_before_the_move_and_the_parent_after_it(
    tmp_path, monkeypatch, backend, replaced
):
    target, events = tmp_path / "c", []
    if replaced:
        dist_ckpt.save(state(1), target, (backend, 1))
    sync, rename, swap = os.fsync, Path.rename, storage.exchange
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))) or sync(fd))
    monkeypatch.setattr(Path, "rename", lambda path, to: events.append(("move", str(path))) or rename(path, to))
    monkeypatch.setattr(storage, "exchange", lambda a, b: events.append(("move", str(a))) or swap(a, b))
    dist_ckpt.save(state(2), target, (backend, 1))
    moved = next(n for n, (kind, path) in enumerate(events) if kind == "move" and ".c.tmp-" in path)
    before = {os.path.relpath(path, events[moved][1]) for kind, path in events[:moved] if kind == "sync"}
    assert before >= {".", *(str(path.relative_to(target)) for path in target.rglob("*"))}
    assert ("sync", str(tmp_path)) in events[moved:]


def test_small_files_and_their_folder_are_put_on_disk_all_at_once(tmp_path, monkeypatch):
    """A disk that takes 40 ms for each is waited for once, and for the part before and the parent after it."""
    sync, together = os.fsync, threading.Barrier(6, timeout=20)

    def fsync(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if ".c.tmp-" in path and not path.endswith(".distcp"):
            together.wait()
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    dist_ckpt.save(state(2), tmp_path / "c")
    assert loaded_value(tmp_path / "c") == 2


def test_an_error_of_the_disk_when_small_files_are_put_there_ends_the_save(tmp_path, monkeypatch):
    dist_ckpt.save(state(1), tmp_path / "c")
    sync = os.fsync

    def fsync(handle):
        if os.readlink(f"/proc/self/fd/{handle}").endswith("/common.pt"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StorageError, match="ENOSPC"):
            dist_ckpt.save(state(2), tmp_path / "c")
    assert loaded_value(tmp_path / "c") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def newest_step_of_titan(root):
    """As torchtitan's manager looks for it: any name that holds step-N and has a .metadata within."""
    found = [(re.search(r"step-(\d+)", path.name), path / ".metadata") for path in root.iterdir()]
    return max((int(match.group(1)) for match, file in found if match and file.exists()), default=-1)


@pytest.mark.parametrize("call", ["save", "async_save", "convert"])
def test_a_save_that_ends_anywhere_is_no_step_for_who_looks_for_names_and_metadata(tmp_path, monkeypatch, call):
    runs, seen = tmp_path / "runs", []
    dist_ckpt.save(state(1), runs / "step-1", group=None)

    def look(handle, plain=os.fsync):
        seen.append(newest_step_of_titan(runs))
        return plain(handle)

    monkeypatch.setattr(os, "fsync", look)
    if call == "save":
        dist_ckpt.save(state(2), runs / "step-2", group=None)
    elif call == "convert":
        tools.convert(runs / "step-1", runs / "step-2", to="torch_dist")
    else:
        agreed = saving.agree_on(SaveRequest(state(2), runs / "step-2", group=None, timeout_s=9.0))
        written = writer.write(agreed.content, agreed.ticket.save, 0, False)  # as a worker does
        saving.commit([written], agreed.content, agreed.ticket)
    moved = seen.index(2)  # the parent is put on disk after the move
    assert moved >= 5, "files and folder before"
    assert set(seen[:moved]) == {1}
    assert hidden(runs) == []


def test_a_staging_folder_alone_is_no_checkpoint(tmp_path):
    dist_ckpt.save(state(1), tmp_path / "d")
    (tmp_path / ".c.tmp-0123456789abcdef").mkdir()
    (tmp_path / "d").rename(tmp_path / ".c.tmp-0123456789abcdef" / "checkpoint")
    with pytest.raises(MismatchError, match="does not exist"):
        loaded_value(tmp_path / "c")


def test_exchange_swaps_two_folders_here(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert storage.exchange(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def save_and_die(rank, ranks, folder, value, deadly_event):
    """Save, and die by SIGKILL at the n-th access to the file system; returns the number of accesses."""
    events = 0

    def count(name, arguments):
        nonlocal events
        if name in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.scandir", "shutil.rmtree") and (
            str(folder) in str(arguments[0]) or isinstance(arguments[0], int) or name == "os.remove"
        ):
            events += 1
            if events == deadly_event:
                os.kill(os.getpid(), signal.SIGKILL)

    dist_ckpt.save(state(1000), folder / "warm", group=None)  # imports of the first save open files too
    sys.addaudithook(count)
    dist_ckpt.save(state(value), folder / "c", group=None)
    total, deadly_event = events, -1
    return total


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_the_old_or_the_new_checkpoint(tmp_path):
    dist_ckpt.save(state(1), tmp_path / "c")
    (total,) = run_ranks(save_and_die, 1, tmp_path, 2, -1)
    assert total > 10, "the hook saw no file system"
    seen = set()
    for n, event in enumerate(range(1, total + 1, max(1, total // 9))):
        before = loaded_value(tmp_path / "c")
        value = 10 + n
        assert run_ranks(save_and_die, 1, tmp_path, value, event, allow_exit=(0,)) == [None]
        after = loaded_value(tmp_path / "c")
        assert after in (before, value)
        seen.add(after == value)
    assert seen == {True, False}, "kills before and after the commit"
    dist_ckpt.save(state(3), tmp_path / "c")
    assert loaded_value(tmp_path / "c") == 3
    assert [name for name in hidden(tmp_path) if name.startswith(".c.")] == []
