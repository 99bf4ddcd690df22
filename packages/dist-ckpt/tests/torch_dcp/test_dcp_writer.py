"""``dcp.Writer``: what ``torch.distributed.checkpoint.save`` puts through it torch's own reader finds, and ours."""

import gc
import pickle

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import Meddling, contents, dcp_save, entries, everything, places, same, step_of
from dist_ckpt_helpers import folder_bytes, names, one
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, StorageWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from sixfold import dist_ckpt
from sixfold.dist_ckpt import StorageError, dcp, retention, tools


def test_torchs_reader_finds_every_leaf_that_was_saved(tmp_path):
    dcp_save(contents(), dcp.Writer(tmp_path / "c"))
    assert same(everything(FileSystemReader(tmp_path / "c")), contents())


def test_the_metadata_is_that_of_torchs_own_writer_but_for_places(tmp_path):
    returned = dcp_save(contents(), dcp.Writer(tmp_path / "ours"))
    dcp_save(contents(), torch_dcp.FileSystemWriter(tmp_path / "torchs"))
    ours, torchs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "torchs"))
    assert returned.state_dict_metadata == torchs.state_dict_metadata  # what dcp.save gives back
    assert entries(ours) == entries(torchs)
    assert ours.planner_data == torchs.planner_data
    assert places(ours).keys() == places(torchs).keys()


def test_it_is_a_storage_writer_whether_a_path_is_text_or_not(tmp_path):
    assert isinstance(dcp.Writer(tmp_path / "a"), StorageWriter)
    dcp_save(contents(), dcp.Writer(str(tmp_path / "deep" / "b")))  # parents are made
    assert step_of(tmp_path / "deep" / "b") == 1


def test_the_package_reads_and_verifies_what_it_wrote(tmp_path):
    dcp_save(contents(), dcp.Writer(tmp_path / "c"))
    found = dist_ckpt.load_plain_tensors(tmp_path / "c")
    model = contents()["model"]
    assert torch.equal(found["model.w"], model["w"])
    assert torch.equal(found["model.layers.0.b"], model["layers"][0]["b"])
    asked = {"w": one("model.w", torch.zeros(4, 6)), "t": one("model.turned", torch.zeros(4, 3))}
    loaded = dist_ckpt.load(asked, tmp_path / "c", verify="full")
    assert torch.equal(loaded["w"], model["w"])
    assert torch.equal(loaded["t"], model["turned"])
    assert tools.verify(tmp_path / "c")["problems"] == []
    assert tools.inspect(tmp_path / "c")["integrity"] is True


def test_digests_cover_every_file_that_it_wrote(tmp_path):
    dcp_save(contents(), dcp.Writer(tmp_path / "c"))
    for name in names(tmp_path / "c"):
        whole = (tmp_path / "c" / name).read_bytes()
        position = len(whole) // 2
        changed = whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :]
        (tmp_path / "c" / name).write_bytes(changed)
        assert not tools.verify(tmp_path / "c")["ok"], name
        (tmp_path / "c" / name).write_bytes(whole)
    assert tools.verify(tmp_path / "c")["ok"]


def test_checkpoint_id_goes_before_the_writers_path_and_a_writer_serves_step_after_step(tmp_path):
    writer = dcp.Writer(tmp_path / "unused")
    for step in (1, 2, 3):
        dcp_save(contents(step), writer, checkpoint_id=str(retention.step_path(tmp_path, step)))
    assert not (tmp_path / "unused").exists()
    assert [step for step, _ in retention.checkpoints(tmp_path)] == [1, 2, 3]
    assert [step_of(path) for _, path in retention.checkpoints(tmp_path)] == [1, 2, 3]
    assert all(tools.verify(path)["ok"] for _, path in retention.checkpoints(tmp_path))


def test_one_writer_saves_again_and_again_to_its_own_path(tmp_path):
    writer = dcp.Writer(tmp_path / "c")
    for step in (1, 2, 3):
        dcp_save(contents(step), writer)
        assert step_of(tmp_path / "c") == step
    assert names(tmp_path) == ["c"]


def test_a_smaller_checkpoint_over_a_larger_one_leaves_nothing_of_it(tmp_path):
    dcp_save(contents() | {"more": torch.ones(100_000)}, dcp.Writer(tmp_path / "c"))
    dcp_save(contents(2), dcp.Writer(tmp_path / "c"))
    assert step_of(tmp_path / "c") == 2
    assert sum(map(len, folder_bytes(tmp_path / "c").values())) < 100_000
    assert tools.verify(tmp_path / "c")["ok"]


def test_a_checkpoint_of_torch_is_replaced_whole(tmp_path):
    dcp_save(contents(), torch_dcp.FileSystemWriter(tmp_path / "c", single_file_per_rank=False))
    files = len(names(tmp_path / "c"))
    dcp_save(contents(2), dcp.Writer(tmp_path / "c"))
    assert step_of(tmp_path / "c") == 2
    assert len(names(tmp_path / "c")) < files  # torch's many files are gone
    assert tools.verify(tmp_path / "c")["ok"]


def test_if_exists_error_refuses_a_checkpoint_that_is_there(tmp_path):
    writer = dcp.Writer(tmp_path / "c", if_exists="error")
    dcp_save(contents(), writer)
    before = folder_bytes(tmp_path / "c")
    with pytest.raises(CheckpointException) as caught:
        dcp_save(contents(2), writer)
    (error, _) = caught.value.failures[0]
    assert isinstance(error, StorageError)
    assert str(tmp_path / "c") in str(error)
    assert folder_bytes(tmp_path / "c") == before
    assert names(tmp_path) == ["c"]


def test_a_folder_of_other_files_is_refused_and_not_touched(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointException) as caught:
        dcp_save(contents(), dcp.Writer(tmp_path / "c"))
    (error, _) = caught.value.failures[0]
    assert isinstance(error, StorageError)
    assert "thesis.tex" in str(error)
    assert folder_bytes(tmp_path / "c") == {"thesis.tex": b"years"}
    assert names(tmp_path) == ["c"]


def test_an_empty_folder_made_before_is_filled(tmp_path):
    (tmp_path / "c").mkdir()  # as accelerate does: os.makedirs(ckpt_dir, exist_ok=True)
    dcp_save(contents(), dcp.Writer(tmp_path / "c"))
    assert step_of(tmp_path / "c") == 1


def test_nothing_shows_at_the_target_before_all_of_it_does(tmp_path):
    dcp_save(contents(), dcp.Writer(tmp_path / "c"))
    before, seen = folder_bytes(tmp_path / "c"), []
    for place in (2, 5, 9):
        planner = Meddling(lambda: seen.append(folder_bytes(tmp_path / "c")), at=place)
        dcp_save(contents(), dcp.Writer(tmp_path / "c"), planner=planner)
        assert seen.pop() == before
        before = folder_bytes(tmp_path / "c")
    fresh = Meddling(lambda: seen.append((tmp_path / "d").exists()), at=9)
    dcp_save(contents(), dcp.Writer(tmp_path / "d"), planner=fresh)
    assert seen == [False]


def test_a_planner_without_flattening_keeps_its_names(tmp_path):
    state = {"w": torch.arange(3.0), "epoch": 4, "nest": {"a": 1}}
    planner = torch_dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp_save(state, dcp.Writer(tmp_path / "c"), planner=planner)
    metadata = FileSystemReader(tmp_path / "c").read_metadata()
    assert set(metadata.state_dict_metadata) == {"w", "epoch", "nest"}
    assert same(everything(FileSystemReader(tmp_path / "c")), state)


def test_a_cached_plan_writes_the_new_values(tmp_path):
    planner_of = torch_dcp.DefaultSavePlanner
    try:
        for step in (1, 2, 3):
            planner = planner_of(enable_plan_caching=True)
            dcp_save(contents(step), dcp.Writer(tmp_path / f"step-{step}"), planner=planner)
    finally:
        for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
            getattr(torch_dcp.SavePlanner, f"_cached_{cache}").clear()
    assert [step_of(tmp_path / f"step-{step}") for step in (1, 2, 3)] == [1, 2, 3]
    assert all(tools.verify(tmp_path / f"step-{step}")["ok"] for step in (1, 2, 3))


def second_save_of_a_kept_plan(folder, state):
    """Of rank 1 of 2, by [Note: cached plans]: its part is written, and no first rank ends the save."""
    first, second = dcp.Writer(folder / "c"), dcp.Writer(folder / "c")
    planner = torch_dcp.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=False)
    _, plan = first.prepare_global_plan([planner.create_local_plan()] * 2)
    second.set_up_storage_writer(False, rank=1, use_collectives=True)
    second.write_data(plan, planner)
    first.prepare_global_plan([plan] * 2)  # the first save has ended, a second one begins
    first._end()
    second.path = folder / "d"
    second.write_data(plan, planner)
    return second, plan, planner


def test_what_a_rank_with_a_kept_plan_wrote_goes_with_its_writer_or_its_next_save(tmp_path):
    second, plan, planner = second_save_of_a_kept_plan(tmp_path, contents())
    (before,) = names(tmp_path)
    second.write_data(plan, planner)
    (after,) = names(tmp_path)
    assert before != after
    del second
    gc.collect()
    assert names(tmp_path) == []


def test_a_rank_with_a_kept_plan_of_nothing_begins_nothing(tmp_path):
    second_save_of_a_kept_plan(tmp_path, {})
    assert names(tmp_path) == []


def test_dcp_to_torch_save_takes_the_folder(tmp_path):
    dcp_save(contents(), dcp.Writer(tmp_path / "c"))
    dcp_to_torch_save(tmp_path / "c", tmp_path / "whole.pt")
    assert same(torch.load(tmp_path / "whole.pt", weights_only=False), contents())


@pytest.mark.slow
def test_many_small_tensors_and_one_large_come_back(tmp_path):
    state = {f"layers.{n}.b": torch.full((3,), float(n)) for n in range(500)} | {"big": torch.arange(1_500_000)}
    dcp_save(state, dcp.Writer(tmp_path / "c"))
    assert same(everything(FileSystemReader(tmp_path / "c")), state)
    assert len([name for name in names(tmp_path / "c") if name.endswith(".distcp")]) < 20


def test_tensors_of_every_dtype_come_back(tmp_path):
    plain = (torch.float64, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool)
    other = (torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)
    state = {str(dtype): torch.arange(6).to(dtype) for dtype in (*plain, *other)}
    dcp_save(state, dcp.Writer(tmp_path / "c"))
    found = everything(FileSystemReader(tmp_path / "c"))
    assert found.keys() == state.keys()
    for key, value in state.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key].view(torch.uint8), value.view(torch.uint8)), key


def test_parameters_and_tensors_that_need_gradients_are_saved_as_values(tmp_path):
    layer = torch.nn.Linear(3, 2)
    dcp_save({"layer": layer.state_dict(keep_vars=True)}, dcp.Writer(tmp_path / "c"))
    found = everything(FileSystemReader(tmp_path / "c"))["layer"]
    assert torch.equal(found["weight"], layer.weight.detach())
    assert not found["weight"].requires_grad


def test_a_writer_travels_to_another_process(tmp_path):
    again = pickle.loads(pickle.dumps(dcp.Writer(tmp_path / "c")))  # what AsyncCheckpointerType.PROCESS does with it
    dcp_save(contents(), again)
    assert step_of(tmp_path / "c") == 1
