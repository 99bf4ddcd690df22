"""Plain tensors on several ranks: written once, spread over ranks, compared whole, loaded on any number of ranks."""

import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import dcp_load, everything
from dist_ckpt_helpers import flip_byte
from forked_worker import fork_workers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointManager, CorruptError, MismatchError, PerRank, ShardingError, tools
from sixfold.dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy


def refused(state, folder, **options):
    """The error of a save, and that it came within seconds."""
    began = time.monotonic()
    with warnings.catch_warnings(), pytest.raises(ShardingError) as told:
        warnings.simplefilter("ignore")
        dist_ckpt.save(state, folder, **options)
    assert time.monotonic() - began < 20
    return str(told.value)


def plain_state(fill=True):
    """Large and small plain tensors in nested containers; the same on each rank."""
    torch.manual_seed(0)
    state = {
        "model": {"w": torch.randn(64, 96), "b": torch.randn(96), "half": torch.randn(12, 4).bfloat16()},
        "list": [torch.arange(40_000), {"scalar": torch.tensor(2.5)}],
        "nan": torch.tensor([1.0, torch.nan, -0.0]),
    }
    if not fill:
        state = {
            "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
            "list": [torch.zeros(40_000, dtype=torch.int64), {"scalar": torch.zeros(())}],
            "nan": torch.zeros(3),
        }
    return state


def listed(state):
    return [*state["model"].values(), state["list"][0], state["list"][1]["scalar"], state["nan"]]


def agree(found, expected=None):
    expected = plain_state() if expected is None else expected
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for a, b in zip(listed(found), listed(expected), strict=True)
    )


def spread(rank, ranks, folder):
    state = {f"w{i}": torch.full((50_000,), float(i)) for i in range(24)}
    dist_ckpt.save(state, folder)


def test_many_equal_tensors_are_written_once_and_each_rank_writes_its_share(tmp_path):
    run_ranks(spread, 4, tmp_path / "c")
    total = 24 * 200_000
    by_rank = dict.fromkeys("0123", 0)
    for path in (tmp_path / "c").glob("*.distcp"):
        by_rank[re.fullmatch(r"__(\d)_\d+\.distcp", path.name)[1]] += path.stat().st_size
    assert total <= sum(by_rank.values()) <= 1.05 * total
    assert max(by_rank.values()) <= 1.2 * total / 4
    found = everything(torch_dcp.FileSystemReader(tmp_path / "c"))
    assert {name: value.unique().tolist() for name, value in found.items()} == {f"w{i}": [i] for i in range(24)}


def kinds(rank, ranks, fill):
    """One state per way to hold the same tensors: plain, sharded by rows, sharded by columns, replicated."""
    whole = plain_state()
    mesh = init_device_mesh("cpu", (ranks,))

    def as_dtensors(placement):
        state = plain_state(fill)
        for name in ("w", "half"):
            value = whole["model"][name] if fill else torch.zeros_like(whole["model"][name])
            state["model"][name] = distribute_tensor(value, mesh, [placement])
        return state

    yield "plain", plain_state(fill)
    yield "rows", as_dtensors(Shard(0))
    yield "columns", as_dtensors(Shard(1))
    yield "copies", as_dtensors(Replicate())


def whole_of(state):
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state["model"].items()
    }
    return {**state, "model": full}


def save_kinds(rank, ranks, folder):
    for name, state in kinds(rank, ranks, fill=True):
        dist_ckpt.save({**state, "step": 3}, folder / f"{name} of {ranks}")


def load_kinds(rank, ranks, folder, some):
    """Each kind of save into each kind of state."""
    wrong = []
    for path in sorted(folder.iterdir()):
        for name, state in kinds(rank, ranks, fill=False):
            if some and name not in ("plain", "rows"):
                continue
            loaded = dist_ckpt.load({**state, "step": 0}, path)
            if not (loaded["step"] == 3 and agree(whole_of(loaded)) and agree(whole_of(state))):
                wrong.append((path.name, name))
        if path.name.startswith("plain") and not agree(dist_ckpt.load({}, path)):
            wrong.append((path.name, "nothing asked"))
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("before", [1, 2, 4])
def test_plain_and_sharded_tensors_move_between_numbers_of_ranks(tmp_path, before):
    run_ranks(save_kinds, before, tmp_path)
    for after in (1, 2, 4):
        assert run_ranks(load_kinds, after, tmp_path, False) == [[]] * after


@pytest.mark.slow
def test_two_ranks_plain_and_sharded_state_loads_on_one_and_four(tmp_path):
    run_ranks(save_kinds, 2, tmp_path)
    for after in (1, 4):
        assert run_ranks(load_kinds, after, tmp_path, True) == [[]] * after


def torch_reads(rank, ranks, folder):
    state = plain_state(fill=False)
    dcp_load(state, torch_dcp.FileSystemReader(folder))
    return agree(state)


def save_plain(rank, ranks, folder, options):
    dist_ckpt.save({**plain_state(), "step": 3}, folder, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"megatron": True}, {"metadata": "compact"}], ids=str)
def test_torchs_own_load_reads_all_tensors_of_two_ranks_and_files_are_the_same_tensors(tmp_path, options):
    run_ranks(save_plain, 2, tmp_path / "c", options)
    if "metadata" not in options:
        pytest.importorskip("numpy", reason="torch sends plans between ranks by numpy")
        assert run_ranks(torch_reads, 3, tmp_path / "c") == [True] * 3
    assert tools.verify(tmp_path / "c")["problems"] == []
    assert agree(dist_ckpt.load({}, tmp_path / "c", group=None))


DIFFERING = {
    "one element": lambda rank, last: {"w": torch.zeros(1_000_000).index_fill_(0, torch.tensor([7_777]), rank)},
    "one element of many integers": lambda rank, last: {
        "w": torch.zeros(400_000, dtype=torch.int64).index_fill_(0, torch.tensor([77_777]), int(rank))
    },
    "a small change of many": lambda rank, last: {"w": torch.arange(400_000.0) * (1 + 1e-6 * rank)},
    "the last of many": lambda rank, last: {
        f"w{i}": torch.full((5000,), float(i + rank * (i == 199))) for i in range(200)
    },
    "a small one": lambda rank, last: {"m": {"w": torch.tensor([1.0, float(rank)])}, "big": torch.ones(50_000)},
    "0-dim": lambda rank, last: {"step": torch.tensor(rank)},
    "a sign": lambda rank, last: {"w": torch.full((5000,), -1.0 if rank == last else 1.0)},
    "a shape": lambda rank, last: {"w": torch.zeros(40_000 + (rank == last))},
    "a view of as many": lambda rank, last: {"w": torch.zeros((200, 300) if rank == last else (300, 200))},
    "a dtype": lambda rank, last: {"w": torch.zeros(40_000, dtype=torch.int32 if rank == last else torch.float32)},
    "no tensor": lambda rank, last: {"w": 0 if rank == last else torch.tensor(0)},
}


def differing(rank, ranks, folder):
    # The first rank with each, so that a difference is a difference from the first one.
    texts = {name: refused(make(float(rank == ranks - 1), 1.0), folder / "c") for name, make in DIFFERING.items()}
    texts["unchecked"] = refused({"w": torch.full((40_000,), rank)}, folder / "c", validate_access_integrity=False)
    return texts


def test_a_tensor_that_differs_on_one_rank_is_an_error_on_all_that_names_it(tmp_path):
    results = run_ranks(differing, 3, tmp_path)
    assert results[0] == results[1] == results[2]
    named = {"the last of many": "w199", "a small one": "m.w", "0-dim": "step"}
    for name, text in results[0].items():
        assert re.search(rf"\b{re.escape(named.get(name, 'w'))}\b", text), (name, text)
    assert not (tmp_path / "c").exists()


def of_one_rank(rank, ranks, folder):
    """A small and a large tensor that one rank alone holds, the first or another."""
    own = {f"own{rank}": {"w": torch.full((40_000,), 1.0 + rank), "few": torch.full((3,), 1.0 + rank)}}
    dist_ckpt.save({"same": torch.ones(50_000), "deep": {"x": 1, **own}}, folder)
    found = dist_ckpt.load_plain_tensors(folder)
    return {name: value.unique().tolist() for name, value in found.items()}


def test_tensors_that_one_rank_alone_holds_are_saved_from_it(tmp_path):
    expected = {"same": [1]} | {f"deep.own{i}.{name}": [1 + i] for i in (0, 1) for name in ("w", "few")}
    assert run_ranks(of_one_rank, 2, tmp_path / "c") == [expected] * 2


def same_values_other_forms(rank, ranks, folder):
    """Equal values, held in another order, memory layout and kind on the second rank."""
    base = torch.arange(60_000.0).view(200, 300)
    values = {
        "turned": base if rank == 0 else base.t().contiguous().t(),
        "part": torch.ones(30_000) if rank == 0 else torch.ones(60_000)[::2],
        "parameter": nn.Parameter(base + 1) if rank == 0 else base + 1,
        "small": torch.arange(6.0).view(2, 3) if rank == 0 else torch.arange(6.0).view(2, 3).t().contiguous().t(),
        "conj": (base + 0j) if rank == 0 else (base - 0j).conj().conj(),
        "nan": torch.full((30_000,), torch.nan),
    }
    order = list(values) if rank == 0 else list(values)[::-1]
    dist_ckpt.save({name: values[name] for name in order}, folder)
    asked = {name: torch.zeros_like(values[name].detach()) for name in reversed(order)}
    dist_ckpt.load(asked, folder)
    return all(torch.equal(asked[name].nan_to_num(3), value.detach().nan_to_num(3)) for name, value in values.items())


def test_equal_values_in_other_strides_kinds_and_orders_of_keys_are_equal(tmp_path):
    assert run_ranks(same_values_other_forms, 2, tmp_path / "c") == [True, True]


def asks_alone(rank, ranks, folder):
    """Ranks ask for different tensors of one checkpoint, and for parts that overlap."""
    whole = plain_state()
    asked = [{"model": {"w": torch.zeros(64, 96)}}, {"list": [torch.zeros(40_000, dtype=torch.int64)]}, {}][rank]
    loaded = dist_ckpt.load(asked, folder)
    if rank == 0:
        return torch.equal(asked["model"]["w"], whole["model"]["w"])
    if rank == 1:
        return torch.equal(loaded["list"][0], whole["list"][0])
    return agree(loaded)


def test_ranks_may_ask_for_different_plain_tensors(tmp_path):
    run_ranks(save_plain, 2, tmp_path / "c", {})
    assert run_ranks(asks_alone, 3, tmp_path / "c") == [True] * 3


def damaged(rank, ranks, folder):
    texts = []
    for asked in (plain_state(fill=False), {}):
        with pytest.raises(CorruptError) as told:
            dist_ckpt.load(asked, folder)
        texts.append(str(told.value))
    return texts


def test_damage_of_a_plain_tensor_is_told_to_all_ranks_with_its_name(tmp_path):
    run_ranks(save_plain, 2, tmp_path / "c", {})
    metadata = torch_dcp.FileSystemReader(tmp_path / "c").read_metadata()
    (place,) = [info for index, info in metadata.storage_data.items() if index.fqn == "list.0"]
    flip_byte(tmp_path / "c" / place.relative_path, place.offset + place.length - 5000)
    first, second = run_ranks(damaged, 2, tmp_path / "c")
    assert first == second
    assert all("list.0" in text and place.relative_path in text for text in first)


def in_turn(rank, ranks, folder):
    """One strategy saves again and again: values, shapes and the share of each rank change."""
    strategy, found = TorchDistSaveShardedStrategy(), []
    for number, sizes in enumerate([(3, 40_000, 50_000), (3, 40_000, 50_000), (50_000, 3, 40_000), (3, 40_000)]):
        state = {f"w{i}": torch.full((size,), float(number * 10 + i)) for i, size in enumerate(sizes)}
        dist_ckpt.save(state, folder, strategy)
        loaded = dist_ckpt.load({}, folder, verify="full")
        asked = {name: torch.zeros_like(value) for name, value in state.items()}
        dist_ckpt.load(asked, folder)
        found += [loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)]
        found += [all(torch.equal(asked[name], state[name]) for name in state)]
        dist.barrier()
    return found


@pytest.mark.slow
def test_saves_in_a_row_on_two_ranks_keep_nothing_of_before(tmp_path):
    assert run_ranks(in_turn, 2, tmp_path / "c") == [[True] * 8] * 2


def in_the_background(rank, ranks, folder):
    fork_workers()
    state = plain_state()
    handle = dist_ckpt.async_save({**state, "step": 3}, folder / "c")
    for value in listed(state):
        value.zero_()
    handle.wait()
    with CheckpointManager(folder / "run") as manager:
        state = plain_state()
        manager.save(7, state, force=True)
        for value in listed(state):
            value.zero_()
        manager.wait()
        asked = plain_state(fill=False)
        step = manager.restore(asked).step
    text = refused({"w": torch.full((40_000,), float(rank))}, folder / "d")
    with pytest.raises(ShardingError, match=r"\bw\b"):
        dist_ckpt.async_save({"w": torch.full((40_000,), float(rank))}, folder / "d").wait()
    return agree(dist_ckpt.load({}, folder / "c")), agree(asked), step, "w" in text


@pytest.mark.slow
def test_background_saves_and_the_manager_on_two_ranks_have_the_values_of_the_call(tmp_path):
    assert run_ranks(in_the_background, 2, tmp_path) == [(True, True, 7, True)] * 2
    total = sum(value.nbytes for value in listed(plain_state()))
    assert sum(path.stat().st_size for path in (tmp_path / "c").glob("*.distcp")) < total + 20_000


def through_wrappers(rank, ranks, folder):
    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy())
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    found = []
    for name, state in kinds(rank, ranks, fill=True):
        dist_ckpt.save(state, folder / name, saver)
        dist.barrier()
        for strategy in (loader, None):
            asked = dict(kinds(rank, ranks, fill=False))[name]
            found.append(agree(whole_of(dist_ckpt.load(asked, folder / name, strategy))))
    found.append(agree(dist_ckpt.load({}, folder / "plain", loader)))
    return found


@pytest.mark.slow
def test_fully_parallel_wrappers_save_and_load_plain_tensors(tmp_path):
    assert run_ranks(through_wrappers, 2, tmp_path) == [[True] * 9] * 2
    total = sum(value.nbytes for value in listed(plain_state()))
    assert sum(path.stat().st_size for path in (tmp_path / "plain").glob("*.distcp")) < total + 20_000


def meshes(rank, ranks, fill):
    """HSDP, TP, FSDP with TP: two mesh axes over four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = plain_state()["model"]
    for name, placements in {
        "hsdp": [Replicate(), Shard(0)],
        "tp": [Replicate(), Shard(1)],
        "fsdp and tp": [Shard(0), Shard(1)],
    }.items():
        state = plain_state(fill)
        for key in ("w", "half"):
            value = whole[key] if fill else torch.zeros_like(whole[key])
            state["model"][key] = distribute_tensor(value, mesh, placements)
        yield name, state


def save_meshes(rank, ranks, folder):
    for name, state in meshes(rank, ranks, fill=True):
        dist_ckpt.save(state, folder / name)
        found = dist_ckpt.load(plain_state(fill=False), folder / name)
        assert agree(found), name


def load_meshes(rank, ranks, folder):
    wrong = []
    for path in sorted(folder.iterdir()):
        for name, state in meshes(rank, ranks, fill=False):
            dist_ckpt.load(state, path)
            wrong += [] if agree(whole_of(state)) else [(path.name, name)]
    return wrong


@pytest.mark.slow
def test_plain_saves_load_into_hsdp_and_tp_and_theirs_into_plain(tmp_path):
    run_ranks(save_meshes, 4, tmp_path)
    dist_ckpt.save(plain_state(), tmp_path / "plain", group=None)
    assert run_ranks(load_meshes, 4, tmp_path) == [[]] * 4
    for path in sorted(tmp_path.iterdir()):
        asked = plain_state(fill=False)
        dist_ckpt.load(asked, path, group=None)
        assert agree(asked), path.name
        found = everything(torch_dcp.FileSystemReader(path))
        assert torch.equal(found["model.w"], plain_state()["model"]["w"]), path.name
        assert torch.equal(found["list.0"], plain_state()["list"][0]), path.name


def ddp_model(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 400), nn.BatchNorm1d(400), nn.Linear(400, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def go_on(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(rank, ranks, folder):
    """State dicts, as most scripts save them; the new optimizer has no moments."""
    model, optimizer = ddp_model(0)
    wrapped = nn.parallel.DistributedDataParallel(model)
    go_on(wrapped, optimizer, range(2))
    dist_ckpt.save({"model": wrapped.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, folder)
    go_on(wrapped, optimizer, range(2, 4))
    other, new = ddp_model(1)
    again = nn.parallel.DistributedDataParallel(other)
    state = {"model": again.state_dict(), "optimizer": new.state_dict(), "step": 0}
    loaded = dist_ckpt.load(state, folder)
    new.load_state_dict(loaded["optimizer"])
    go_on(again, new, range(2, 4))
    return loaded["step"], all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


@pytest.mark.slow
def test_state_dicts_of_ddp_go_on_bit_for_bit_with_a_new_optimizer(tmp_path):
    assert run_ranks(ddp, 2, tmp_path / "c") == [(2, True)] * 2


def save_on_first(rank, ranks, folder):
    if rank == 0:
        dist_ckpt.save(plain_state(), folder, group=None)
    dist.barrier()
    asked = plain_state(fill=False)
    dist_ckpt.load(asked, folder)
    return agree(asked)


def test_what_the_first_rank_saved_alone_loads_on_all(tmp_path):
    assert run_ranks(save_on_first, 3, tmp_path / "c") == [True] * 3


def own_tensors(rank, ranks, folder):
    """PerRank of tensors small and large, of dicts that hold them, beside plain ones of like names."""
    value = {"rng": torch.full((5056,), rank, dtype=torch.uint8), "buffer": [torch.full((40_000,), float(rank))]}
    state = {"own": PerRank(value), "w": torch.ones(40_000), "big": PerRank(torch.full((40_000,), 10.0 + rank))}
    dist_ckpt.save(state, folder)
    asked = {"own": PerRank(None), "w": torch.zeros(40_000), "big": PerRank(torch.zeros(40_000))}
    loaded = dist_ckpt.load(asked, folder)
    assert loaded["w"].unique().tolist() == [1]
    assert loaded["own"]["rng"].unique().tolist() == [rank]
    assert loaded["own"]["buffer"][0].unique().tolist() == [rank]
    assert loaded["big"].unique().tolist() == [10 + rank]


def other_number(rank, ranks, folder):
    for name in ("own", "big"):
        with pytest.raises(MismatchError, match=f"{name}: 2 ranks saved a value each, and 1 load"):
            dist_ckpt.load({name: PerRank(None)}, folder)
    asked = {
        "own": PerRank(None, lambda values, rank, ranks: [int(value["rng"][0]) for value in values]),
        "big": PerRank(None, lambda values, rank, ranks: torch.cat(values)),
    }
    loaded = dist_ckpt.load(asked, folder)
    assert loaded["own"] == [0, 1]
    assert loaded["big"].unique().tolist() == [10, 11]
    assert dist_ckpt.load({"w": torch.zeros(40_000)}, folder)["w"].unique().tolist() == [1]
    for wrong in ({"big": torch.zeros(40_000)}, {"w": PerRank(None)}):
        with pytest.raises(MismatchError):
            dist_ckpt.load(wrong, folder)


def test_tensors_of_each_rank_come_back_to_it_and_a_function_joins_them(tmp_path):
    run_ranks(own_tensors, 2, tmp_path / "c")
    run_ranks(other_number, 1, tmp_path / "c")


def left_out_of_the_check(rank, ranks, folder):
    """Running statistics of DDP differ between ranks; the remedy of the error saves the first rank's."""
    stats = {f"mean{i}": torch.full((40_000,), float(rank)) for i in range(3)}  # of which each rank would write some
    stats["few"] = torch.full((3,), float(rank))
    state = {"model": {"w": torch.ones(40_000), **stats}, "step": 3}
    text = refused(state, folder)
    assert "model.mean1" in text and "model.few" in text

    def without(common):
        return {**common, "model": {k: v for k, v in common["model"].items() if k not in stats}}

    dist_ckpt.save(state, folder, preprocess_common_before_consistancy_check=without)
    asked = {"model": {name: torch.full_like(value, 9) for name, value in state["model"].items()}}
    dist_ckpt.load(asked, folder)
    return {name: value.unique().tolist() for name, value in asked["model"].items()}


def test_what_is_left_out_of_the_check_is_saved_as_the_first_rank_has_it(tmp_path):
    expected = {"w": [1], "mean0": [0], "mean1": [0], "mean2": [0], "few": [0]}
    assert run_ranks(left_out_of_the_check, 2, tmp_path / "c") == [expected] * 2


def alike_on_one_rank(rank, ranks, folder):
    """Two places read alike on the second rank alone: an error, and nothing is written."""
    big = torch.ones(40_000)
    texts = [refused({"m": {"w": big}, **({"m.w": big * 2} if rank else {})}, folder)]
    texts += [refused({"m": {"w": big}} if rank == 0 else {"m.w": big}, folder)]
    return texts


def test_names_that_read_alike_on_one_rank_only_are_an_error_on_all(tmp_path):
    first, second = run_ranks(alike_on_one_rank, 2, tmp_path / "c")
    assert first == second
    assert not (tmp_path / "c").exists()
