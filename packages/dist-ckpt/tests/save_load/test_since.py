"""Saves with ``since``: what is written, what is linked, that each folder is whole, and what is refused."""

import errno
import logging
import os
import random
import shutil
import threading

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import dcp_save
from dist_ckpt_helpers import flip_byte, one
from plain_tensors_helpers import assert_same, by_torch, flat_tensors
from since_helpers import data_files, lora, new_bytes, shared, train, used_shares

from sixfold import dist_ckpt
from sixfold.dist_ckpt import (
    CheckpointError,
    CheckpointManager,
    CorruptError,
    MismatchError,
    ShardedObject,
    ShardingError,
    stores,
    tools,
)
from sixfold.dist_ckpt.background import AsyncSaver
from sixfold.dist_ckpt.save_load import unchanged


def saved(state, folder, since=None, **options):
    dist_ckpt.save(state, folder, group=None, since=since, **options)
    return folder


def assert_holds(folder, state):
    """torch's reader and our loads give every bit, and every byte has its checksum."""
    expected = flat_tensors(state)
    assert_same({name: value for name, value in by_torch(folder).items() if name in expected}, expected)
    asked = {name: one(name, torch.empty_like(value)) for name, value in expected.items()}
    loaded = dist_ckpt.load(asked, folder, group=None, verify="full")
    assert_same({name: loaded[name] for name in expected}, expected)
    assert tools.verify(folder)["ok"]


def test_adapters_on_a_frozen_model_are_what_a_step_writes(tmp_path):
    model, optimizer = lora()
    train(model, optimizer)
    first = saved({"model": model, "optimizer": optimizer}, tmp_path / "1")
    folders = [first]
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    for step in range(2, 6):
        train(model, optimizer)
        folders.append(saved({"model": model, "optimizer": optimizer}, tmp_path / str(step), since=folders[-1]))
        wrote = new_bytes(folders[-1], *folders[:-1])
        assert 3 * trained <= wrote < 3 * trained + 40_000 < frozen, "adapters and two moments of each, and frames"
        assert shared(folders[-1], first) == sorted(data_files(first))
        assert_holds(folders[-1], {"model": model.state_dict()})
    for folder in folders[:-1]:
        shutil.rmtree(folder)
    other, moments = lora(seed=1)
    dist_ckpt.load({"model": other, "optimizer": moments}, folders[-1], group=None)
    assert_same(other.state_dict(), model.state_dict())
    for mine, theirs in zip(optimizer.state.values(), moments.state.values(), strict=True):
        assert_same(theirs, mine)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_any_changes_in_any_order_leave_each_folder_whole_and_half_used(tmp_path, seed):
    """An oracle of plain dicts: what was given is what is there, whichever older folders are gone."""
    draw, dtypes = random.Random(seed), [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    torch.manual_seed(seed)

    def drawn():
        shape = tuple(draw.choice([0, 1, 3, 64, 300]) for _ in range(draw.randint(0, 2)))
        return torch.randint(0, 100, shape).to(draw.choice(dtypes))

    state = {f"t{i}": drawn() for i in range(12)}
    kept, since = {}, None
    for step in range(12):
        for name in draw.sample(sorted(state), draw.randint(0, 6)):
            what = draw.choice(["add", "last", "new", "dtype", "rename", "reshape"])
            if what == "add":
                state[name] = state[name] + 1
            elif what == "last" and state[name].numel():
                state[name] = state[name].clone()
                state[name].view(-1)[-1] += 1
            elif what == "new":
                state[name] = drawn()
            elif what == "dtype":
                state[name] = state[name].to(draw.choice(dtypes))
            elif what == "rename":
                state[f"{name}r"] = state.pop(name)
            else:
                state[name] = state[name].reshape(-1)
        folder = saved(dict(state), tmp_path / str(step), since=since)
        for name, share in used_shares(folder).items():
            assert share >= 0.45, f"{name} is used by {share}"  # frames of nothing but heads are padded
        kept[folder], since = {name: value.clone() for name, value in state.items()}, folder
        for older in draw.sample(sorted(kept), draw.randint(0, len(kept) // 2)):
            if older != since:
                del kept[older]
                shutil.rmtree(older)
    for folder, values in kept.items():
        assert_holds(folder, values)


def test_what_is_frozen_among_more_that_trains_is_written_once_more_and_linked_from_then_on(tmp_path):
    state = {"frozen": torch.randn(300, 100), **{f"w{i}": torch.randn(300, 100) for i in range(4)}}
    folders, wrote = [saved(state, tmp_path / "0")], []
    for step in range(1, 5):
        state |= {name: value + 1 for name, value in state.items() if name != "frozen"}
        folders.append(saved(state, tmp_path / str(step), since=folders[-1]))
        wrote.append(new_bytes(folders[-1], *folders[:-1]) // state["frozen"].nbytes)
    assert wrote == [5, 4, 4, 4]
    assert [len(data_files(folder)) for folder in folders] == [1, 2, 2, 2, 2]
    assert min(used_shares(folders[-1]).values()) > 0.99
    assert_holds(folders[-1], state)


def test_an_average_that_has_not_moved_and_the_state_of_a_loader_are_linked(tmp_path):
    """EMA is updated every second step; the loader's order of samples is bytes that stay."""
    ema, order = {"w": torch.zeros(400, 50)}, bytes(at * at % 251 for at in range(72_000))

    def state(step):
        return {"ema": ema, "w": torch.full((50,), step), "loader": ShardedObject("order", order, (1,), (0,))}

    folders = [saved(state(0), tmp_path / "0")]
    for step in range(1, 6):
        if step % 2 == 0:
            ema["w"] += 1
        folders.append(saved(state(step), tmp_path / str(step), since=folders[-1]))
        if step > 2 and step % 2:
            assert new_bytes(folders[-1], *folders[:-1]) < 2_000
        asked = {"ema": {"w": torch.ones(400, 50)}, "loader": ShardedObject("order", None, (1,), (0,))}
        loaded = dist_ckpt.load(asked, folders[-1], group=None)
        assert loaded["loader"] == order and torch.equal(asked["ema"]["w"], ema["w"])


def test_it_links_by_key_place_dtype_and_bits_alone(tmp_path):
    rows = torch.randn(60, 40)
    older = saved({"a": one("a", rows), "b": one("b", rows), "c": one("c", rows), "d": one("d", rows)}, tmp_path / "0")
    cut = [one("b", rows[:30]), one("b", rows[30:])]
    for part, start in zip(cut, (0, 30), strict=True):
        part.global_shape, part.global_offset, part.axis_fragmentations = (60, 40), (start, 0), None
    other = rows.clone()
    other[59, 39] += 1
    state = {"b": cut, "c": one("c", rows.view(torch.int32)), "d": one("d", other), "new": one("new", rows)}
    folder = saved(
        {"a": one("a", rows), "b": cut[0], "b2": cut[1], **{k: state[k] for k in ("c", "d", "new")}},
        tmp_path / "1",
        since=older,
    )
    assert not shared(folder, older), "a quarter of the file is not worth a link"
    third = saved({"a": one("a", rows), "b": cut[0], "b2": cut[1], "d": one("d", rows)}, tmp_path / "2", since=folder)
    assert len(shared(third, folder)) == 1
    assert_holds(third, {"a": rows, "b": rows, "d": rows})


def test_zero_and_minus_zero_and_nan_are_bits(tmp_path):
    state = {"w": torch.zeros(5_000), "n": torch.full((5_000,), torch.nan)}
    older = saved(state, tmp_path / "0")
    assert new_bytes(saved(state, tmp_path / "1", since=older), older) == 0
    assert new_bytes(saved({**state, "w": -state["w"]}, tmp_path / "2", since=older), older) > 20_000
    assert torch.signbit(by_torch(tmp_path / "2")["w"]).all()


def test_a_tensor_that_lies_oddly_in_memory_is_compared_as_it_is_stored(tmp_path):
    wide = torch.randn(100, 80)
    odd = {"t": wide.t(), "s": wide[:, ::2], "e": wide[:1].expand(50, 80)}
    older = saved(odd, tmp_path / "0")
    folder = saved({name: value.contiguous() for name, value in odd.items()}, tmp_path / "1", since=older)
    assert new_bytes(folder, older) == 0
    folder = saved(odd, tmp_path / "2", since=tmp_path / "1")
    assert new_bytes(folder, older) == 0
    assert_holds(folder, odd)


@pytest.mark.slow
def test_a_background_save_links_too(tmp_path):
    model, optimizer = lora()
    train(model, optimizer)
    with AsyncSaver(None) as saver:
        for step in range(4):
            older = tmp_path / str(step - 1) if step else None
            handle = saver.save({"model": model, "optimizer": optimizer}, tmp_path / str(step), since=older)
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            train(model, optimizer)
            handle.wait()
            assert_holds(tmp_path / str(step), {"model": expected})
    assert shared(tmp_path / "3", tmp_path / "0") == sorted(data_files(tmp_path / "0"))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.slow
def test_a_manager_links_the_newest_step_and_removes_as_it_does_otherwise(tmp_path, background):
    model, optimizer = lora(layers=2)
    with CheckpointManager(tmp_path / "run", keep_last=1, incremental=True, background=background, group=None) as run:
        for step in range(1, 6):
            train(model, optimizer)
            run.save(step, {"model": model, "optimizer": optimizer})
            expected = {name: value.clone() for name, value in model.state_dict().items()}
        run.wait()
        assert run.steps() == [5]
    newest = tmp_path / "run" / "step-00000005"
    assert len(data_files(newest)) == 2, "the frozen ones, as the first save wrote them, and those that train"
    assert {path.stat().st_nlink for path in data_files(newest).values()} == {1}, "nothing else has them"
    assert_holds(newest, {"model": expected})


def test_consolidated_files_are_its_own_and_hold_nothing_else(tmp_path):
    state = {"a": torch.randn(300, 300), "b": torch.randn(200, 300), "w": torch.zeros(3), "step": 7}
    older = saved(state, tmp_path / "0")
    state |= {"b": state["b"] + 1, "w": state["w"] + 1}
    folder = saved(state, tmp_path / "1", since=older)
    assert shared(folder, older) and min(used_shares(folder).values()) < 0.7
    found = tools.consolidate(folder)
    assert found["nbytes"] == sum(path.stat().st_size for path in folder.iterdir()) < found["nbytes_before"]
    assert {path.stat().st_nlink for path in folder.iterdir()} == {1}
    assert min(used_shares(folder).values()) > 0.98
    assert_holds(folder, {name: value for name, value in state.items() if name != "step"})
    assert dist_ckpt.load_common_state_dict(folder)["step"] == 7
    flip_byte(next(iter(data_files(older).values())), 9_000)
    assert tools.verify(folder)["ok"] and not tools.verify(older)["ok"]
    third = saved(state, tmp_path / "2", since=folder)
    assert new_bytes(third, folder) == 0
    with pytest.raises(CheckpointError, match=r"backend 'zarr'; written here: torch_dist"):
        with pytest.warns(match="zarr"):
            dist_ckpt.save({"z": one("z", state["a"])}, tmp_path / "z", ("zarr", 1), group=None)
        tools.consolidate(tmp_path / "z")


def test_a_save_over_its_own_since_is_whole(tmp_path):
    state = {"a": torch.randn(300, 300), "w": torch.zeros(3)}
    folder = saved(state, tmp_path / "c")
    for _ in range(3):
        state["w"] += 1
        saved(state, folder, since=folder)
        assert_holds(folder, state)
    assert len(data_files(folder)) == 2


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOENT])
def test_where_no_link_can_be_made_all_is_written_and_the_log_says_so(tmp_path, monkeypatch, caplog, code):
    state = {"a": torch.randn(300, 300), "w": torch.zeros(3)}
    older = saved(state, tmp_path / "0")

    def refused(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    with caplog.at_level(logging.WARNING):
        folder = saved(state, tmp_path / "1", since=older)
    assert not shared(folder, older) and os.strerror(code) in caplog.text
    assert_holds(folder, state)


def test_a_since_that_is_replaced_while_it_is_looked_at_gives_none_of_its_new_bytes(tmp_path, monkeypatch):
    """The files of another save under the same names: they are neither compared nor linked."""
    state = {"a": torch.randn(300, 300), "w": torch.zeros(3)}
    older = saved(state, tmp_path / "0")
    found = unchanged.open_checkpoint

    def then_replaced(path):
        opened = found(path)
        saved({"a": state["a"] + 1, "w": state["w"]}, older)
        return opened

    opened = unchanged._opened

    def replaced_when_open(path):
        both = opened(path)
        saved({"a": state["a"] + 2, "w": state["w"]}, older)
        return both

    for number, (name, stand_in) in enumerate((("open_checkpoint", then_replaced), ("_opened", replaced_when_open))):
        with monkeypatch.context() as patch:
            patch.setattr(unchanged, name, stand_in)
            folder = saved(state, tmp_path / f"{number + 1}", since=older)
        assert not shared(folder, older)
        assert_holds(folder, state)
        saved(state, older)


@pytest.mark.slow
def test_a_since_that_is_removed_meanwhile_leaves_a_whole_save(tmp_path):
    draw, outcomes = random.Random(5), set()
    state = {f"t{i}": torch.randn(200, 100) for i in range(12)}
    for turn in range(24):
        older = saved(state, tmp_path / "0")
        remover = threading.Timer(draw.random() * 0.02, shutil.rmtree, (older, True))
        remover.start()
        try:
            folder = saved(state, tmp_path / f"{turn + 1}", since=older)
        except MismatchError:  # it was gone before the call looked
            outcomes.add("refused")
        else:
            outcomes.add("saved")
            assert_holds(folder, state)
        remover.join()
    assert "saved" in outcomes


def test_damage_of_what_is_linked_is_found_in_both_and_of_the_index_of_the_older_one_is_not_inherited(tmp_path):
    state = {"a": torch.randn(300, 300), "w": torch.zeros(3_000)}
    older = saved(state, tmp_path / "0")
    state["w"] = state["w"] + 1
    folder = saved(state, tmp_path / "1", since=older)
    for name in ("integrity.json", "shard_manifest.pt"):
        whole = (older / name).read_bytes()
        flip_byte(older / name, len(whole) // 2)
        assert_holds(saved(state, tmp_path / "2", since=older), state)
        (older / name).write_bytes(whole)
    flip_byte(data_files(older)[shared(folder, older)[0]], 200_000)
    for place in (older, folder):
        assert [problem["kind"] for problem in tools.verify(place)["problems"]] == ["checksum"]
        with pytest.raises(CorruptError):
            dist_ckpt.load({"a": torch.zeros(300, 300)}, place, group=None)
    # Not linked before, so it is read, and found to be another: the new save is whole.
    assert_holds(saved(state, tmp_path / "3", since=older), state)


def test_nan_in_what_is_linked_is_told(tmp_path):
    state = {"a": torch.full((3_000,), torch.nan)}
    older = saved(state, tmp_path / "0")
    with pytest.raises(ShardingError, match="is nan on rank 0, and check_finite is set"):
        saved(state, tmp_path / "1", since=older, check_finite=True)


def test_progress_reaches_its_total_when_most_is_linked(tmp_path):
    state, calls = {"a": torch.randn(300, 300), "w": torch.zeros(3)}, []
    older = saved(state, tmp_path / "0")
    saved(state, tmp_path / "1", since=older, progress=lambda done, total: calls.append((done, total)))
    assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_what_others_wrote_is_not_linked(tmp_path, caplog):
    """torch writes over its files in place, which would change ours."""
    state = {"a": torch.randn(300, 300)}
    dcp_save(state, torch_dcp.FileSystemWriter(tmp_path / "torch"), no_dist=True)
    with caplog.at_level(logging.WARNING):
        folder = saved(state, tmp_path / "1", since=tmp_path / "torch")
    assert "nothing of since=" in caplog.text and not shared(folder, tmp_path / "torch")
    assert_holds(folder, state)


def test_a_checkpoint_of_the_compact_form_links_and_is_linked(tmp_path):
    state = {"a": torch.randn(300, 300)}
    older = saved(state, tmp_path / "0", metadata="compact")
    folder = saved(state, tmp_path / "1", since=older, metadata="compact")
    assert new_bytes(folder, older) == 0
    tools.metadata(folder)
    assert_holds(folder, state)


@pytest.mark.parametrize("since", ["s3://bucket/run", 7, "gone"])
def test_what_cannot_be_a_since_is_refused_before_anything_is_written(tmp_path, since):
    place = tmp_path / since if since == "gone" else since
    with pytest.raises(CheckpointError, match="since"):
        saved({"a": torch.zeros(3)}, tmp_path / "1", since=place)
    assert not (tmp_path / "1").exists()


def test_since_goes_with_folders_and_torch_dist(tmp_path):
    older = saved({"a": one("a", torch.zeros(3))}, tmp_path / "0")
    with pytest.raises(CheckpointError, match=r"since is .* is no local folder; since goes with torch_dist"):
        saved({"a": torch.zeros(3)}, stores.MemoryStore("run/1"), since=older)
    with pytest.raises(CheckpointError, match=r"is written by a strategy of its own"):
        saved({"a": one("a", torch.zeros(3))}, tmp_path / "1", since=older, sharded_strategy=("zarr", 1))
    with pytest.raises(CheckpointError, match=r"incremental is set, but 'memory://x/run' is no local folder"):
        CheckpointManager("memory://x/run", incremental=True, group=None)


@pytest.mark.parametrize("again", ["async_save", "AsyncSaver", "save", "save over it"])
def test_a_save_since_one_that_this_process_still_writes_waits_for_it(again, tmp_path):
    state = {"weight": torch.arange(3_000_000.0)}
    first = dist_ckpt.async_save(state, tmp_path / "1", group=None)
    options = {"since": tmp_path / "1"}
    if again == "async_save":
        dist_ckpt.async_save(state, tmp_path / "2", group=None, **options).wait()
    elif again == "AsyncSaver":
        with AsyncSaver(None) as saver:
            saver.save(state, tmp_path / "2", **options).wait()
    else:
        dist_ckpt.save(state, tmp_path / ("1" if again == "save over it" else "2"), group=None, **options)
    first.wait()
    assert_holds(tmp_path / ("1" if again == "save over it" else "2"), state)
