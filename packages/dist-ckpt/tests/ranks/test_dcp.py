"""``dcp.Writer`` and ``dcp.Reader`` under torch.distributed.checkpoint on several ranks: layouts, faults, groups."""

import gc
import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import Meddling, dcp_load, dcp_save
from dist_ckpt_helpers import flip_byte, folder_bytes, names
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, CorruptError, dcp, tools

#: name -> global shape, placement
LAYOUTS = {
    "even": ((8, 3), Shard(0)),
    "uneven": ((7, 3), Shard(0)),
    "short": ((1, 4), Shard(0)),  # nothing of it on all ranks but the first
    "columns": ((3, 6), Shard(1)),
    "replicated": ((4, 3), Replicate()),
    "scalar": ((), Replicate()),
}


def whole(shape, value=1.0):
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1) * value


def state_of(value, fill=True):
    """DTensors of all layouts, replicated plain tensors and values, and what each rank has of its own."""
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    model = {
        name: distribute_tensor(whole(shape, value) if fill else torch.zeros(shape), mesh, [placement])
        for name, (shape, placement) in LAYOUTS.items()
    }
    own = {f"rank{rank}": torch.full((3,), value + rank if fill else 0.0)}
    plain = torch.full((2,), value) if fill else torch.zeros(2)
    return {"model": model, "plain": plain, "own": own, "step": int(value) if fill else None}


def wrong_of(state, value):
    """Which leaves are not those of ``state_of(value)``."""
    expected = state_of(value)
    wrong = [
        name for name in LAYOUTS if not torch.equal(state["model"][name].to_local(), expected["model"][name].to_local())
    ]
    wrong += [name for name in expected["own"] if not torch.equal(state["own"][name], expected["own"][name])]
    wrong += ["plain"] * (not torch.equal(state["plain"], expected["plain"]))
    return wrong + ["step"] * (state["step"] != expected["step"])


STORES = {"ours": (dcp.Writer, dcp.Reader), "torchs": (FileSystemWriter, FileSystemReader)}


def save_and_load(rank, ranks, folder):
    """All pairs of who writes and who reads, at the same layout; what was wrong."""
    wrong = {}
    for writing, (writer, _) in STORES.items():
        dcp_save(state_of(2.0), writer(folder / writing))
        for reading, (_, reader) in STORES.items():
            state = state_of(2.0, fill=False)
            dcp_load(state, reader(folder / writing))
            wrong[writing, reading] = wrong_of(state, 2.0)
    return wrong


def load_at_another_size(rank, ranks, folder):
    wrong = {}
    for writing in STORES:
        for reading, (_, reader) in STORES.items():
            state = state_of(2.0, fill=False)
            state["own"] = {"rank0": torch.zeros(3)}
            dcp_load(state, reader(folder / writing))
            state["own"] = state_of(2.0)["own"]  # of another rank here
            wrong[writing, reading] = wrong_of(state, 2.0)
    return wrong


@pytest.mark.slow
def test_dtensors_move_between_one_two_and_three_ranks_and_between_the_libraries(tmp_path):
    nothing = {(a, b): [] for a in STORES for b in STORES}
    assert run_ranks(save_and_load, 2, tmp_path) == [nothing] * 2
    for ranks in (1, 3):
        assert run_ranks(load_at_another_size, ranks, tmp_path) == [nothing] * ranks
    assert run_ranks(save_and_load, 1, tmp_path / "one") == [nothing]
    assert run_ranks(load_at_another_size, 2, tmp_path / "one") == [nothing] * 2
    assert tools.verify(tmp_path / "ours")["ok"]
    plain = dist_ckpt.load_plain_tensors(tmp_path / "ours")
    assert torch.equal(plain["model.uneven"], whole((7, 3), 2.0))
    assert {"own.rank0", "own.rank1", "plain"} <= plain.keys()
    files = {name.split("_")[2] for name in names(tmp_path / "ours") if name.endswith(".distcp")}
    assert files == {"0", "1"}  # each rank writes its own


def one_of_many(rank, ranks, folder):
    """Saves by a group of some ranks and by each rank alone, one after the other and side by side."""
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        mine = torch.full((2,), float(rank))
        dcp_save({f"of{rank}": mine, "step": 3}, dcp.Writer(folder / "pair"), process_group=pair)
        state = {"of0": torch.zeros(2), "of2": torch.zeros(2)}
        dcp_load(state, dcp.Reader(folder / "pair"), process_group=pair)
        assert [state["of0"].tolist(), state["of2"].tolist()] == [[0, 0], [2, 2]]
    dcp_save({"mine": torch.full((2,), float(rank))}, dcp.Writer(folder / f"alone-{rank}"), no_dist=True)
    state = {"mine": torch.zeros(2)}
    dist.barrier()
    dcp_load(state, dcp.Reader(folder / f"alone-{(rank + 1) % ranks}"), no_dist=True)
    return state["mine"].tolist()


@pytest.mark.slow
def test_a_group_of_some_ranks_and_each_rank_alone_have_checkpoints_of_their_own(tmp_path):
    assert run_ranks(one_of_many, 3, tmp_path) == [[1, 1], [2, 2], [0, 0]]
    assert all(tools.verify(path)["ok"] for path in tmp_path.iterdir())


def failures_of(action):
    """rank -> (type, text) of what torch's error holds; it is the same on every rank."""
    try:
        action()
    except CheckpointException as caught:
        return {rank: (type(error).__name__, str(error)) for rank, (error, _) in caught.failures.items()}
    return None


def fail_in_many_ways(rank, ranks, folder):
    def broken():
        if rank == 1:
            raise ValueError("my own bug")

    dcp_save(state_of(1.0), dcp.Writer(folder / "c"))
    dist.barrier()
    before = folder_bytes(folder / "c")
    seen = {"planner": failures_of(lambda: dcp_save(state_of(2.0), dcp.Writer(folder / "c"), planner=Meddling(broken)))}
    unchanged = folder_bytes(folder / "c") == before
    dist.barrier()
    if rank == 0:
        shutil.copytree(folder / "c", folder / "d")
        data = FileSystemReader(folder / "d").read_metadata().storage_data
        (info,) = [at for index, at in data.items() if index.fqn == "own.rank1"]
        flip_byte(folder / "d" / info.relative_path, info.offset + info.length // 2)
    dist.barrier()
    seen["damage"] = failures_of(lambda: dcp_load(state_of(0.0, fill=False), dcp.Reader(folder / "d")))
    dcp_save(state_of(3.0), dcp.Writer(folder / "c"))
    state = state_of(0.0, fill=False)
    dcp_load(state, dcp.Reader(folder / "c"))
    return seen, unchanged, wrong_of(state, 3.0)


@pytest.mark.slow
def test_an_error_on_one_rank_is_torchs_error_on_all_and_the_old_checkpoint_stays(tmp_path):
    first, second = run_ranks(fail_in_many_ways, 2, tmp_path)
    assert first == second
    seen, unchanged, wrong = first
    assert seen["planner"] == {1: ("ValueError", "my own bug")}
    assert unchanged
    assert wrong == []
    assert seen["damage"]
    kinds, texts = zip(*seen["damage"].values(), strict=True)
    assert set(kinds) == {CorruptError.__name__}
    assert ".distcp" in texts[0]
    assert "own.rank1" in " ".join(texts)
    assert names(tmp_path) == ["c", "d"]  # the save after the failed one has cleared up


def misused(rank, ranks, folder):
    """Calls that would let each rank commit for itself: what each was told."""
    texts = []
    for path, options in ((folder / f"of-{rank}", {}), (folder / "c", {"use_collectives": False})):
        try:
            dcp_save(state_of(1.0), dcp.Writer(path), **options)
        except (CheckpointException, CheckpointError) as error:
            texts.append(str(error))
        gc.collect()  # a Writer that goes takes its staging folder along; torch's exceptions hold it in a circle
        dist.barrier()
    return texts


def test_ranks_that_would_each_commit_alone_are_told_so(tmp_path):
    """Different folders on the ranks; torch's experimental save without rank coordination."""
    for folders, alone in run_ranks(misused, 2, tmp_path):
        assert "of-0" in folders and "of-1" in folders
        assert "use_collectives" in alone
    assert names(tmp_path) == []


def die_in_mid_save(rank, ranks, folder, victim, at):
    dcp_save(state_of(1.0), dcp.Writer(folder / "c"))
    dist.barrier()

    def die():
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        dcp_save(state_of(2.0), dcp.Writer(folder / "c"), planner=Meddling(die, at))
    except BaseException as error:  # torch's CheckpointException is no Exception
        return type(error).__name__
    return "saved"


def load_alone(rank, ranks, folder):
    state = state_of(1.0, fill=False)
    state["own"] = {"rank0": torch.zeros(3)}
    dcp_load(state, dcp.Reader(folder / "c"))
    dcp_save(state, dcp.Writer(folder / "c"))
    return wrong_of(state, 1.0)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.slow
def test_a_rank_killed_in_mid_save_leaves_the_old_checkpoint_whole(tmp_path, victim):
    ends = run_ranks(die_in_mid_save, 2, tmp_path, victim, 3, allow_exit=(victim,))
    assert ends[victim] is None
    assert ends[1 - victim] != "saved"
    assert tools.verify(tmp_path / "c")["ok"]
    assert run_ranks(load_alone, 1, tmp_path) == [[]]
    assert names(tmp_path) == ["c"]


def async_step_by_step(rank, ranks, folder):
    """As trainers do: a gloo group of its own, the last save awaited before the next; values change meanwhile."""
    group, future, writer = dist.new_group(backend="gloo"), None, dcp.Writer(folder / "unused")
    for step in (1, 2, 3):
        state = state_of(float(step))
        if future is not None:
            future.result()
        future = torch_dcp.async_save(
            state, checkpoint_id=str(folder / f"step-{step}"), storage_writer=writer, process_group=group
        )
        for tensor in (*state["model"].values(), state["plain"], *state["own"].values()):
            tensor.zero_()
        dist.all_reduce(torch.ones(1))  # the trainer's own collectives go on
    future.result()
    wrong = []
    for step in (1, 2, 3):
        state = state_of(0.0, fill=False)
        dcp_load(state, dcp.Reader(folder / f"step-{step}"))
        wrong += wrong_of(state, float(step))
    return wrong


@pytest.mark.slow
def test_async_saves_of_two_ranks_hold_the_values_of_their_calls(tmp_path):
    assert run_ranks(async_step_by_step, 2, tmp_path) == [[]] * 2
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


def async_in_a_process(rank, ranks, folder):
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    stager = DefaultStager(StagingOptions(False, True, False, False))  # in shared memory, as torchtitan's
    wrong = []
    for step in (1, 2):
        state = state_of(float(step))
        response = torch_dcp.async_save(
            state,
            storage_writer=dcp.Writer(folder / f"step-{step}"),
            async_checkpointer_type=torch_dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        response.result()
        again = state_of(0.0, fill=False)
        dcp_load(again, dcp.Reader(folder / f"step-{step}"))
        wrong += wrong_of(again, float(step))
    stager.close()
    return wrong


@pytest.mark.slow
def test_async_saves_by_torchs_own_process_go_through_the_writer(tmp_path):
    assert run_ranks(async_in_a_process, 1, tmp_path) == [[]]
    assert all(tools.verify(tmp_path / f"step-{step}")["ok"] for step in (1, 2))


def meta_tensors(rank, ranks, folder):
    dcp_save(state_of(2.0), dcp.Writer(folder / "c"))
    state = {"plain": torch.empty(2, device="meta"), "model": {"uneven": torch.empty(7, 3, device="meta")}}
    dcp_load(state, dcp.Reader(folder / "c"))
    return state["plain"].tolist(), torch.equal(state["model"]["uneven"], whole((7, 3), 2.0))


def test_meta_tensors_are_given_memory_as_torch_gives_it(tmp_path):
    assert run_ranks(meta_tensors, 2, tmp_path) == [([2.0, 2.0], True)] * 2


def sharded_optimizer(rank, ranks, folder):
    """FSDP1's way: names come from the folder, tensors are torch's own sharded ones."""
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

    moments = {"w": {"exp_avg": whole((8, 3)), "step": torch.tensor(3.0)}}
    state = {"model": {"w": whole((8, 3))}, "optim": {"state": moments, "param_groups": [{"lr": 0.1}]}}
    dcp_save(state, dcp.Writer(folder / "c"))
    found = load_sharded_optimizer_state_dict({"w": whole((8, 3))}, "optim", dcp.Reader(folder / "c"))["optim"]
    (shard,) = found["state"]["w"]["exp_avg"].local_shards()
    at = shard.metadata.shard_offsets[0]
    equal = torch.equal(shard.tensor, whole((8, 3))[at : at + 4])
    return equal, at, found["state"]["w"]["step"].item(), found["param_groups"]


def test_an_optimizer_is_loaded_sharded_as_fsdp1_does(tmp_path):
    groups = [{"lr": 0.1}]
    assert run_ranks(sharded_optimizer, 2, tmp_path) == [(True, 0, 3.0, groups), (True, 4, 3.0, groups)]


def legacy_calls(rank, ranks, folder):
    torch_dcp.save_state_dict({"w": torch.full((2,), 5.0)}, dcp.Writer(folder / "c"))
    state = {"w": torch.zeros(2)}
    torch_dcp.load_state_dict(state, dcp.Reader(folder / "c"))
    return state["w"].tolist()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_older_names_of_torchs_functions_work_too(tmp_path):
    assert run_ranks(legacy_calls, 2, tmp_path) == [[5.0, 5.0]] * 2
