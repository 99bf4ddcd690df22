"""The folder that a save replaces: what it keeps, what cannot be replaced, who else may be at it."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_ckpt_helpers import as_of_0_1_0, names, one, state, value_of
from forked_worker import Forked

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import StorageError, retention
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.background import worker_process
from sixfold.dist_ckpt.dcp import Reader as DcpReader
from sixfold.dist_ckpt.save_load import writer
from sixfold.dist_ckpt.save_load.reader import Reader
from sixfold.dist_ckpt.storage import local as storage


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("holds", ["nothing", "a checkpoint"])
@pytest.mark.parametrize("mode", [0o2770, 0o1755, 0o500])
def test_mode_group_and_extended_attributes_of_the_folder_are_kept(tmp_path, monkeypatch, mode, holds, exchange):
    if not exchange:
        monkeypatch.setattr(storage, "exchange", lambda a, b: False)
    target = tmp_path / "c"
    target.mkdir()
    if holds == "a checkpoint":
        dist_ckpt.save(state(1), target)
    groups = [4321] if os.geteuid() == 0 else os.getgroups()
    os.chown(target, -1, groups[-1])
    target.chmod(mode)
    try:
        os.setxattr(target, "user.project", b"llm")
    except OSError:
        pytest.skip("this file system keeps no extended attributes")
    before = target.stat()
    dist_ckpt.save(state(2), target)
    after = target.stat()
    assert after.st_ino != before.st_ino, "another folder has taken its place"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert os.getxattr(target, "user.project") == b"llm"
    assert value_of(target) == 2
    assert names(tmp_path) == ["c"]
    if mode & 0o2000:
        assert {path.stat().st_gid for path in target.iterdir()} == {groups[-1]}, "files inherit the group"


def test_a_folder_that_is_new_has_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        dist_ckpt.save(state(1), tmp_path / "c", group=None)
    finally:
        os.umask(before)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()} == {0o640}


def in_own_mounts(script, *arguments):
    """Run a script where it may mount; returns what it prints."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount (root, and the command unshare)")
    run = [unshare, "-m", sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


MOUNTED = """
import os, subprocess, sys, torch
from pathlib import Path
from sixfold import dist_ckpt
from sixfold.dist_ckpt import StorageError
root = Path(sys.argv[1])
for name, mount in {"tmp fs": ["-t", "tmpfs", "tmpfs"], "bind": ["--bind", str(root / "other")]}.items():
    target = root / name
    for folder in (target, root / "other"):
        folder.mkdir(exist_ok=True)
    subprocess.run(["mount", *mount, target], check=True)
    before = [sorted(map(str, root.rglob("*")))]
    try:
        dist_ckpt.save({"it": 1}, target)
    except StorageError as error:
        print(error.errno, error)
    assert before == [sorted(map(str, root.rglob("*")))]
    dist_ckpt.save({"it": 2}, target / "checkpoint")
    print(dist_ckpt.load_common_state_dict(target / "checkpoint"))
"""


@pytest.mark.slow
def test_a_mount_point_is_refused_before_the_first_byte(tmp_path):
    lines = in_own_mounts(MOUNTED, tmp_path)
    for name, line in (("tmp fs", lines[0]), ("bind", lines[2])):
        assert line.startswith(f"{errno.EBUSY} {tmp_path / name} is a mount point")
    assert lines[1] == lines[3] == "{'it': 2}"


def test_a_mount_point_is_refused_where_mounts_are_told_by_the_device(tmp_path, monkeypatch):
    (tmp_path / "c").mkdir()
    monkeypatch.setattr(storage, "_MOUNTS", tmp_path / "none")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "c")
    with pytest.raises(StorageError, match="is a mount point"):
        dist_ckpt.save(state(1), tmp_path / "c")
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == []


FULL = """
import shutil, subprocess, sys, torch
from pathlib import Path
from sixfold import dist_ckpt
from sixfold.dist_ckpt import StorageError
from sixfold.dist_ckpt.storage import local as storage
root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", root], check=True)
def state(value, elements):
    return {"w": dist_ckpt.ShardedTensor.from_rank_offsets("w", torch.full((elements,), float(value))), "it": value}
dist_ckpt.save(state(1, 1000), root / "c")
saves = [dist_ckpt.save, lambda *a: dist_ckpt.async_save(*a).wait(60)]
def tell(save, elements):
    try:
        save(state(2, elements), root / "c")
    except StorageError as error:
        print(error.errno, error)
    print([path.name for path in root.iterdir()], dist_ckpt.load_common_state_dict(root / "c"))
for save in saves:
    tell(save, 1 << 20)  # more than there is
(root / "other").write_bytes(bytes(2 << 20))
real, storage.check_space = storage.check_space, lambda *_: None
for save in saves:
    for elements in (3 << 18, 3 << 17):  # another has filled the disk since it was asked: 3 MiB and 1.5 MiB
        tell(save, elements)
(root / "other").unlink()
for save in saves:
    save(state(3, 1000), root / "c")
print([path.name for path in root.iterdir()], dist_ckpt.load_common_state_dict(root / "c"))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_before_or_midway_leaves_the_old_checkpoint(tmp_path):
    lines = in_own_mounts(FULL, tmp_path)
    for asked, left in zip(lines[0:4:2], lines[1:4:2], strict=True):
        assert asked.startswith(f"{errno.ENOSPC} ENOSPC: the checkpoint needs 42")
        assert left == "['c'] {'it': 1}"
    midway = [line for line in lines[4:-1] if line[0].isdigit()]
    assert len(midway) >= 2
    for line in midway:
        assert line.startswith(f"{errno.ENOSPC} ENOSPC: No space left on device: this rank needs ")
    assert all("'it': 1" in line or "'it': 2" in line for line in lines[5:-1] if line[0] == "[")
    assert lines[-1] == "['c'] {'it': 3}"


def test_the_working_folder_of_a_process_is_not_replaced(tmp_path, monkeypatch):
    """The process would be left in a folder that is gone, and no relative path would work any more."""
    (tmp_path / "c").mkdir()
    monkeypatch.chdir(tmp_path / "c")
    for save in (dist_ckpt.save, lambda *a: dist_ckpt.save(*a, ("zarr", 1))):
        with pytest.raises(StorageError, match=r"is the working folder of this process.*such as .*/c/checkpoint"):
            save(state(1), ".")
    assert os.getcwd() == str(tmp_path / "c")
    assert names(tmp_path) == ["c"]
    assert names(tmp_path / "c") == []


def test_a_path_that_leads_nowhere_is_an_error_of_the_system(tmp_path, monkeypatch):
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for place in (tmp_path / "circle", "c"):
        for call in (lambda p: dist_ckpt.save(state(1), p), dist_ckpt.load_common_state_dict):
            with pytest.raises(StorageError):
                call(place)
    monkeypatch.chdir(tmp_path)
    assert names(tmp_path) == ["circle"]


def while_it_reads(monkeypatch, action):
    def run(reader, *arguments, plain=Reader.run):
        action()
        return plain(reader, *arguments)

    monkeypatch.setattr(Reader, "run", run)


def test_a_file_that_others_add_during_a_load_changes_nothing(tmp_path, monkeypatch):
    dist_ckpt.save(state(1), tmp_path / "c")
    while_it_reads(monkeypatch, lambda: (tmp_path / "c" / "notes.txt").touch())
    assert value_of(tmp_path / "c") == 1


def test_a_file_that_is_lost_during_a_load_is_told_as_such(tmp_path, monkeypatch):
    dist_ckpt.save(state(1), tmp_path / "c")
    while_it_reads(monkeypatch, lambda: (tmp_path / "c" / "integrity.json").unlink())
    with pytest.raises(StorageError, match=r"files were added to .*, or removed from it, while it was read"):
        value_of(tmp_path / "c")


def test_a_foreign_folder_that_is_written_in_place_during_a_load_is_told_as_such(tmp_path, monkeypatch):
    dcp.save({"w": torch.ones(100)}, checkpoint_id=tmp_path / "c", no_dist=True)
    while_it_reads(monkeypatch, lambda: (tmp_path / "c" / "__1_0.distcp").touch())
    with pytest.raises(StorageError, match=r"files were added to .* what was read may be of two saves"):
        dist_ckpt.load({"w": one("w", torch.zeros(100))}, tmp_path / "c", group=None)


OVERTAKEN = "another save to the same folder has ended meanwhile"


@pytest.mark.filterwarnings("ignore:the zarr format")
@pytest.mark.parametrize("strategy", [None, ("zarr", 1)])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("target_is", ["absent", "a checkpoint"])
def test_a_save_that_another_one_to_the_same_folder_overtakes_says_so(tmp_path, monkeypatch, strategy, when, target_is):
    if target_is == "a checkpoint":
        dist_ckpt.save(state(1), tmp_path / "c")
    place = storage if strategy else writer
    name = "write_file" if strategy else "write"
    plain, others = getattr(place, name), iter([lambda: dist_ckpt.save(state(2), tmp_path / "c", group=None)])

    def write(*arguments, **options):
        other = next(others, lambda: None)
        if when == "before":
            other()
        found = plain(*arguments, **options)
        other()
        return found

    monkeypatch.setattr(place, name, write)
    with pytest.raises(StorageError, match=OVERTAKEN) as caught:
        dist_ckpt.save(state(3), tmp_path / "c", strategy)
    assert caught.value.errno == errno.ESTALE
    assert value_of(tmp_path / "c") == 2
    assert names(tmp_path) == ["c"]


@pytest.fixture(scope="module")
def shared_saver():
    """Workers are forked: one that is started as a program imports torch first. In-own-mounts tests start such ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "_start_worker", Forked)
        with background.AsyncSaver(group=None, timeout_s=60) as saver:
            yield saver


@pytest.fixture
def in_flight(shared_saver, tmp_path, monkeypatch):
    """A background save of value 2 to the relative path ``c``, whose worker is stopped; value 1 is there."""
    monkeypatch.chdir(tmp_path)
    pid = shared_saver.save(state(1), "c").worker_pid
    shared_saver._let_go()
    os.kill(pid, signal.SIGSTOP)
    yield shared_saver.save(state(2), "c")
    os.kill(pid, signal.SIGCONT)


def rouse(handle, after_s=0.0):
    threading.Timer(after_s, os.kill, (handle.worker_pid, signal.SIGCONT)).start()


def test_a_save_waits_for_a_background_save_of_this_process_to_the_same_folder(in_flight, tmp_path):
    rouse(in_flight, 0.3)
    dist_ckpt.save(state(3), tmp_path / "d" / ".." / "c")
    assert in_flight.done()
    in_flight.wait(0)
    assert value_of(tmp_path / "c") == 3
    assert names(tmp_path) == ["c"]


def by_reader(path):
    dcp.load({"w": torch.zeros(1000)}, storage_reader=DcpReader(path), no_dist=True)


READERS = {
    "load": lambda path: dist_ckpt.load({}, path, group=None),
    "load_common_state_dict": dist_ckpt.load_common_state_dict,
    "load_tensors_metadata": dist_ckpt.load_tensors_metadata,
    "load_sharded_metadata": dist_ckpt.load_sharded_metadata,
    "load_plain_tensors": dist_ckpt.load_plain_tensors,
    "load_content_metadata": dist_ckpt.load_content_metadata,
    "check_is_distributed_checkpoint": dist_ckpt.check_is_distributed_checkpoint,
    "a Reader of torch": by_reader,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_reads_waits_for_a_background_save_of_this_process_to_the_same_folder(in_flight, tmp_path, read):
    rouse(in_flight, 0.3)
    read(tmp_path / "d" / ".." / "c")
    assert in_flight.done()
    assert value_of(tmp_path / "c") == 2


def test_a_load_of_another_folder_waits_for_none(in_flight, tmp_path):
    dist_ckpt.save(state(3), tmp_path / "d", group=None)
    assert value_of(tmp_path / "d") == 3
    assert not in_flight.done()
    rouse(in_flight)
    in_flight.wait(60)


def test_a_load_in_the_progress_of_a_background_save_does_not_wait_for_it(shared_saver, tmp_path):
    found = []
    dist_ckpt.save(state(1), tmp_path / "c", group=None)

    def progress(done, total):
        found.append(dist_ckpt.load_common_state_dict(tmp_path / "c")["it"])

    shared_saver.save(state(2), tmp_path / "c", progress=progress).wait(20)
    assert found[-1] == 2
    assert set(found) <= {1, 2}


def test_a_background_save_waits_for_that_of_another_saver(in_flight, tmp_path):
    rouse(in_flight, 0.3)
    with background.AsyncSaver(group=None, timeout_s=60) as other:
        other.save(state(3), tmp_path / "c").wait(60)
    in_flight.wait(0)
    assert value_of(tmp_path / "c") == 3


def test_a_save_to_another_folder_does_not_wait(in_flight, tmp_path):
    dist_ckpt.save(state(3), tmp_path / "d")
    assert not in_flight.done()
    rouse(in_flight)
    in_flight.wait(60)


@pytest.mark.slow
def test_a_background_save_that_another_process_overtakes_says_so(in_flight, tmp_path):
    script = "import sys; from sixfold import dist_ckpt; own = [name for name in sys.modules if 'sixfold.' in name]; "
    script += (
        "assert len(own) <= 75, own; "  # what saves and loads of folders need; the rest comes when it is asked for
    )
    script += "dist_ckpt.save({'it': 5}, sys.argv[1]); "
    script += "assert not {'sympy', 'torch.distributed.checkpoint'} & {*sys.modules}, 'imports that take seconds'"
    subprocess.run([sys.executable, "-c", script, tmp_path / "c"], check=True, timeout=100)
    rouse(in_flight)
    with pytest.raises(StorageError, match=OVERTAKEN):
        in_flight.wait(60)
    assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {"it": 5}
    assert names(tmp_path) == ["c"]


def value_elsewhere(rank, ranks, path):
    return value_of(path), dist_ckpt.check_is_distributed_checkpoint(path)


def test_another_process_that_looks_while_a_background_save_is_in_flight_sees_the_old_checkpoint(in_flight, tmp_path):
    assert run_ranks(value_elsewhere, 1, tmp_path / "c") == [(1, True)]
    assert not in_flight.done()
    rouse(in_flight)
    in_flight.wait(60)
    assert run_ranks(value_elsewhere, 1, tmp_path / "c") == [(2, True)]


def test_retention_beside_a_background_save_in_flight_sees_what_is_committed_and_leaves_it_alone(
    in_flight, shared_saver, tmp_path
):
    rouse(in_flight)
    in_flight.wait(60)
    for step in (1, 2):
        dist_ckpt.save(state(step), retention.step_path(tmp_path / "run", step), group=None)
    os.kill(in_flight.worker_pid, signal.SIGSTOP)
    handle = shared_saver.save(state(3), retention.step_path(tmp_path / "run", 3))
    assert retention.latest(tmp_path / "run") == retention.step_path(tmp_path / "run", 2)
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (0, 0))  # as after a machine has slept for years
    assert retention.prune(tmp_path / "run", keep_last=1) == [retention.step_path(tmp_path / "run", 1)]
    rouse(handle)
    handle.wait(60)
    assert retention.checkpoints(tmp_path / "run")[-1] == (3, retention.step_path(tmp_path / "run", 3))
    assert value_of(retention.latest(tmp_path / "run")) == 3


def test_a_relative_path_is_of_the_working_folder_at_the_call(in_flight, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert in_flight.checkpoint_dir == tmp_path / "c"
    rouse(in_flight)
    in_flight.wait(60)
    assert names(tmp_path / "elsewhere") == []
    assert value_of(tmp_path / "c") == 2


def test_verify_off_decodes_metadata_no_slower_than_touched_though_its_digest_may_be_wrong(tmp_path, monkeypatch):
    """Bytes that no digest vouches for are walked through opcode by opcode first, which takes five times as long."""
    from sixfold.dist_ckpt.checkpoint import opening
    from sixfold.dist_ckpt.formats import metadata

    dist_ckpt.save(state(1), tmp_path / "c", group=None)
    as_of_0_1_0(tmp_path / "c")
    decoded, plain = [], metadata.decode

    def decode(data, *, trusted_bytes):
        decoded.append(trusted_bytes)
        return plain(data, trusted_bytes=trusted_bytes)

    monkeypatch.setattr(metadata, "decode", decode)
    for verify in ("touched", "off"):
        opening.open_checkpoint(tmp_path / "c", verify=verify)
    assert retention.latest(tmp_path) is None
    assert opening.is_complete(tmp_path / "c")
    assert len(decoded) >= 3
    assert all(decoded)
    trusted = len(decoded)
    path = tmp_path / "c" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"sixfold_save_id", b"sixfold_save_ie"))  # a digest finds it
    with pytest.raises(dist_ckpt.CorruptError, match="not those that were saved"):
        opening.open_checkpoint(tmp_path / "c")
    with pytest.raises(dist_ckpt.CheckpointError):
        opening.open_checkpoint(tmp_path / "c", verify="off")
    assert decoded[trusted:] == [False], "not trusted"


def test_a_background_save_is_committed_without_any_further_call(shared_saver, tmp_path):
    shared_saver.save(state(4), tmp_path / "c")
    until = time.monotonic() + 60
    while not (tmp_path / "c").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert value_of(tmp_path / "c") == 4
