"""``progress(bytes_done, bytes_total)`` of every long call: grows, ends at the total, and its errors lose nothing."""

import shutil
import threading

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_helpers import folder_bytes, names, one, state, value_of

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, tools
from sixfold.dist_ckpt.background import AsyncSaver
from sixfold.dist_ckpt.progress import Meter

MIB = 2**20
TENSORS, EACH = 6, 4 * MIB  # bytes of float32


class Bar:
    """Notes what it is told; raises at the n-th time where one is given."""

    def __init__(self, raise_at=None, kind=LookupError):
        self.seen, self.raise_at, self.kind = [], raise_at, kind

    def __call__(self, done, total):
        self.seen.append((done, total))
        if len(self.seen) == self.raise_at:
            raise self.kind("my bar broke")

    def check(self, *, least=TENSORS * EACH, steps=2):
        """It grew in steps to one total, which is that of the tensors and little more."""
        done = [d for d, _ in self.seen]
        totals = {total for _, total in self.seen}
        assert done == sorted(done)
        assert len(totals) == 1
        (total,) = totals
        assert done[-1] == total
        assert least <= total <= 1.2 * least + MIB
        assert len(set(done)) >= steps
        assert all(isinstance(number, int) for pair in self.seen for number in pair)


def large(value=1.0):
    return {f"w{i}": one(f"w{i}", torch.full((EACH // 4,), value + i)) for i in range(TENSORS)} | {"it": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("progress") / "c"
    dist_ckpt.save(large(), path)
    return path


def test_a_save_tells_what_it_has_written(tmp_path):
    bar = Bar()
    dist_ckpt.save(large(), tmp_path / "c", progress=bar)
    bar.check()
    assert tools.verify(tmp_path / "c")["ok"]


@pytest.mark.parametrize("verify", ["touched", "full", "off"])
def test_a_load_tells_what_it_has_read(saved, verify):
    bar = Bar()
    loaded = dist_ckpt.load(large(0.0), saved, progress=bar, verify=verify)
    bar.check()
    assert [loaded[f"w{i}"][0].item() for i in range(TENSORS)] == [1.0 + i for i in range(TENSORS)]


def test_a_load_of_a_part_ends_at_the_bytes_of_the_part(saved):
    bar = Bar()
    dist_ckpt.load({"w0": one("w0", torch.zeros(EACH // 4))}, saved, progress=bar)
    bar.check(least=EACH, steps=1)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.slow
def test_a_background_save_tells_and_has_told_all_when_wait_returns(tmp_path, explicit):
    bar = Bar()
    if explicit:
        with AsyncSaver(group=None) as saver:
            saver.save(large(), tmp_path / "c", progress=bar).wait()
    else:
        dist_ckpt.async_save(large(), tmp_path / "c", progress=bar).wait()
    bar.check(steps=1)
    assert tools.verify(tmp_path / "c")["ok"]


@pytest.mark.filterwarnings("ignore:the zarr format is deprecated")
def test_the_tools_tell(saved, tmp_path):
    pytest.importorskip("safetensors", reason="needs the extra safetensors")
    for call in (
        lambda bar: tools.verify(saved, progress=bar),
        lambda bar: tools.convert(saved, tmp_path / "d", to="torch_dist", progress=bar),
        lambda bar: tools.convert(saved, tmp_path / "z", to="zarr", progress=bar),
        lambda bar: tools.convert(saved, tmp_path / "s", to="safetensors", progress=bar),
        lambda bar: tools.diff(saved, tmp_path / "d", progress=bar),
    ):
        bar = Bar()
        call(bar)
        total = bar.seen[-1][1]
        bar.check(least=total, steps=1)
        assert total >= TENSORS * EACH


def test_a_checkpoint_of_no_bytes_ends_as_well(tmp_path):
    saving, loading = Bar(), Bar()
    dist_ckpt.save({"it": 3}, tmp_path / "c", progress=saving)
    assert dist_ckpt.load({}, tmp_path / "c", progress=loading)["it"] == 3
    for bar in (saving, loading):
        assert bar.seen
        assert all(done <= total for done, total in bar.seen)
        assert bar.seen[-1][0] == bar.seen[-1][1]


@pytest.mark.parametrize("at", [1, 2])
def test_an_error_of_the_callable_ends_a_save_and_the_old_checkpoint_stays(tmp_path, at):
    dist_ckpt.save(state(1.0, EACH // 2), tmp_path / "c")
    before = folder_bytes(tmp_path / "c")
    with pytest.raises((LookupError, CheckpointError), match="my bar broke"):
        dist_ckpt.save(state(2.0, EACH // 2), tmp_path / "c", progress=Bar(raise_at=at))
    assert folder_bytes(tmp_path / "c") == before
    assert names(tmp_path) == ["c"]
    dist_ckpt.save(state(3.0), tmp_path / "c", progress=Bar())
    assert value_of(tmp_path / "c") == 3.0


def test_an_error_of_the_callable_ends_a_load(saved):
    before = folder_bytes(saved)
    with pytest.raises((LookupError, CheckpointError), match="my bar broke"):
        dist_ckpt.load(large(0.0), saved, progress=Bar(raise_at=1))
    assert folder_bytes(saved) == before
    assert dist_ckpt.load(large(0.0), saved)["it"] == 3


def passes_on(call, kind):
    with pytest.raises(kind, match="my bar broke"):
        call(Bar(raise_at=1, kind=kind))
    with pytest.raises((kind, CheckpointError), match="my bar broke"):  # the second call may be of another thread
        call(Bar(raise_at=2, kind=kind))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_interpreter_leaves_no_half_export(saved, tmp_path, kind):
    pytest.importorskip("safetensors", reason="the export needs the extra safetensors")
    passes_on(lambda bar: tools.convert(saved, tmp_path / "s", to="safetensors", progress=bar), kind)
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.filterwarnings("ignore:the zarr format is deprecated")
def test_what_ends_the_interpreter_passes_on_the_callers_own_thread_and_leaves_nothing_half(saved, tmp_path, kind):
    dist_ckpt.save(state(1.0), tmp_path / "c")
    before = folder_bytes(tmp_path / "c")
    calls = [
        lambda bar: dist_ckpt.save(state(2.0, EACH // 2), tmp_path / "c", progress=bar),
        lambda bar: dist_ckpt.load(large(0.0), saved, progress=bar),
        lambda bar: tools.verify(saved, progress=bar),
        lambda bar: tools.convert(saved, tmp_path / "d", to="torch_dist", progress=bar),
        lambda bar: tools.convert(saved, tmp_path / "z", to="zarr", progress=bar),
    ]
    for call in calls:
        passes_on(call, kind)
    assert names(tmp_path) == ["c"]
    assert folder_bytes(tmp_path / "c") == before
    dist_ckpt.save(state(3.0), tmp_path / "c", progress=Bar())
    assert value_of(tmp_path / "c") == 3.0


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_interpreter_is_an_error_on_another_thread(kind):
    found, meter = [], Meter(Bar(raise_at=2, kind=kind), lambda: 10)

    def add():
        with pytest.raises(CheckpointError, match=rf"progress\(5, 10\) raised {kind.__name__}: my bar broke"):
            meter.add(5)
        found.append(True)

    thread = threading.Thread(target=add)
    thread.start()
    thread.join()
    assert found


@pytest.mark.slow
def test_an_error_of_the_callable_ends_a_background_save_and_comes_out_of_wait(tmp_path):
    dist_ckpt.save(state(1.0), tmp_path / "c")
    handle = dist_ckpt.async_save(state(2.0, EACH // 2), tmp_path / "c", progress=Bar(raise_at=1))
    with pytest.raises((LookupError, CheckpointError), match="my bar broke"):
        handle.wait(60)
    assert value_of(tmp_path / "c") == 1.0
    assert names(tmp_path) == ["c"]
    dist_ckpt.async_save(state(3.0), tmp_path / "c").wait(60)
    assert value_of(tmp_path / "c") == 3.0


@pytest.mark.filterwarnings("ignore:the zarr format is deprecated")
def test_an_error_of_the_callable_leaves_no_half_conversion(saved, tmp_path):
    pytest.importorskip("safetensors", reason="needs the extra safetensors")
    for to in ("torch_dist", "zarr", "safetensors"):
        with pytest.raises((LookupError, CheckpointError), match="my bar broke"):
            tools.convert(saved, tmp_path / "d", to=to, progress=Bar(raise_at=1))
        assert names(tmp_path) == []
    with pytest.raises((LookupError, CheckpointError), match="my bar broke"):
        tools.verify(saved, progress=Bar(raise_at=1))
    assert tools.verify(saved)["ok"]


def test_a_url_tells_as_a_folder_does():
    fsspec = pytest.importorskip("fsspec", reason="needs the fsspec library (extra fsspec)")
    try:
        bar = Bar()
        dist_ckpt.save(large(), "memory://progress/c", progress=bar)
        bar.check()
        bar = Bar()
        dist_ckpt.load(large(0.0), "memory://progress/c", progress=bar)
        bar.check(steps=2)
    finally:
        fsspec.filesystem("memory").rm("/progress", recursive=True)


@pytest.mark.parametrize("kind", ["of dcp", "damaged", "empty", "safetensors", "quick"])
def test_verify_ends_at_its_total_whatever_it_looks_at(tmp_path, saved, kind):
    path = tmp_path / "c"
    if kind in ("of dcp", "damaged"):
        torch_dcp.save({"w": torch.ones(9)}, checkpoint_id=str(path))
    elif kind == "safetensors":
        pytest.importorskip("safetensors", reason="the export needs the library")
        tools.convert(saved, path, to="safetensors")
    else:
        path.mkdir()
    if kind == "damaged":
        (path / "__0_0.distcp").unlink()
    bar = Bar()
    tools.verify(saved if kind == "quick" else path, quick=kind == "quick", progress=bar)
    assert bar.seen and bar.seen[-1][0] == bar.seen[-1][1]
    assert bar.seen == sorted(bar.seen)


def test_diff_tells_of_objects_too_and_ends_when_all_is_compared(tmp_path):
    record = [dist_ckpt.ShardedObject("o", bytes(MIB), (9,), (i,)) for i in range(9)]
    dist_ckpt.save({"o": record, "it": 1}, tmp_path / "c")
    bar = Bar()
    tools.diff(tmp_path / "c", tmp_path / "c", progress=bar)
    bar.check(least=9 * MIB, steps=2)
    with pytest.raises(CheckpointError, match="my bar broke"):
        tools.diff(tmp_path / "c", tmp_path / "c", progress=Bar(raise_at=1))


def test_plain_tensors_and_a_removal_tell_theirs(saved, tmp_path):
    bar = Bar()
    assert len(dist_ckpt.load_plain_tensors(saved, progress=bar)) == TENSORS
    bar.check()
    shutil.copytree(saved, tmp_path / "c")
    with pytest.raises(CheckpointError, match="my bar broke"):
        dist_ckpt.remove_sharded_tensors(tmp_path / "c", "w1", progress=Bar(raise_at=1))
    assert tools.diff(saved, tmp_path / "c")["equal"]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    bar = Bar()
    dist_ckpt.remove_sharded_tensors(tmp_path / "c", "w0", progress=bar)
    bar.check(least=(TENSORS - 1) * EACH)
    bar = Bar()
    with pytest.warns(match="no tensor"):
        dist_ckpt.remove_sharded_tensors(tmp_path / "c", "w0", progress=bar)
    assert bar.seen == [(0, 0)]
