"""Stateful leaves and Hugging Face folders on several ranks, and what ``progress`` is told on each."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from dist_ckpt_dcp_helpers import dcp_save
from dist_ckpt_helpers import flip_byte, names, one
from forked_worker import fork_workers
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardedTensor, dcp, tools


class Weights:
    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict):
        assert all(isinstance(value, DTensor) for value in state_dict.values())
        set_model_state_dict(self.model, state_dict)


class Moments:
    def __init__(self, model, adam):
        self.model, self.adam = model, adam

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.adam)

    def load_state_dict(self, state_dict):
        set_optimizer_state_dict(self.model, self.adam, state_dict)


class Progress:
    """DTensors and plain values side by side."""

    def __init__(self, step):
        self.step = step
        self.seen = distribute_tensor(torch.arange(5.0) * step, mesh_of(dist.get_world_size()), [Shard(0)])

    def state_dict(self):
        return {"step": self.step, "seen": self.seen, "names": ["a", {"b": 2}]}

    def load_state_dict(self, state_dict):
        assert state_dict["names"] == ["a", {"b": 2}]
        self.step, self.seen = state_dict["step"], state_dict["seen"]


@functools.cache
def mesh_of(ranks):
    return init_device_mesh("cpu", (ranks,))


def trained(seed, steps):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))  # 7 and 3: uneven
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 5)).sum().backward()
        adam.step()
        adam.zero_grad()
    progress = Progress(steps)
    return model, adam, progress, {"app": [Weights(model), Moments(model, adam)], "deep": {"p": progress}, "it": steps}


def whole_of(model, adam, progress):
    found = {key: value.full_tensor().tolist() for key, value in model.state_dict().items()}
    for number, parts in adam.state_dict()["state"].items():
        found |= {f"{number}.{name}": torch.as_tensor(full(part)).tolist() for name, part in parts.items()}
    return found | {"step": progress.step, "seen": progress.seen.full_tensor().tolist()}


def full(part):
    return part.full_tensor() if isinstance(part, DTensor) else part


def save(rank, ranks, folder):
    fork_workers()
    model, adam, progress, state = trained(0, 2)
    dist_ckpt.save(state, folder / "c")
    dist_ckpt.async_save(state, folder / "async").wait()
    return whole_of(model, adam, progress)


def load(rank, ranks, folder):
    found = []
    for name in ("c", "async"):
        model, adam, progress, state = trained(1, 1)
        loaded = dist_ckpt.load(state, folder / name)
        assert loaded["app"][0] is state["app"][0]
        assert loaded["it"] == 2
        found.append(whole_of(model, adam, progress))
        model(torch.ones(2, 5)).sum().backward()
        adam.step()  # it goes on
    return found


@pytest.mark.slow
def test_fsdp2_as_stateful_objects_moves_between_numbers_of_ranks(tmp_path):
    expected = run_ranks(save, 2, tmp_path)[0]
    for ranks in (1, 2, 3):
        assert run_ranks(load, ranks, tmp_path) == [[expected] * 2] * ranks


def with_torch(rank, ranks, folder):
    """torch's own load finds a Stateful of ours under the same names, and ours one of torch's."""
    model, _, _, _ = trained(0, 1)
    expected = {key: value.full_tensor() for key, value in model.state_dict().items()}
    dist_ckpt.save({"model": Weights(model)}, folder / "ours")
    dcp_save({"model": Weights(model)}, dcp.Writer(folder / "writers"))
    torch_dcp.save({"model": Weights(model)}, checkpoint_id=str(folder / "torchs"))
    wrong = []
    for name in ("ours", "writers", "torchs"):
        for way in ("ours", "torchs"):
            other, _, _, _ = trained(4, 0)
            if way == "torchs":
                torch_dcp.load({"model": Weights(other)}, checkpoint_id=str(folder / name))
            else:
                dist_ckpt.load({"model": Weights(other)}, folder / name)
            found = other.state_dict()
            wrong += [(name, way, key) for key in expected if not torch.equal(found[key].full_tensor(), expected[key])]
    return wrong


@pytest.mark.slow
def test_names_of_a_statefuls_tensors_are_those_of_torch(tmp_path):
    assert run_ranks(with_torch, 2, tmp_path) == [[]] * 2


class Failing:
    """Its methods fail on one rank."""

    def __init__(self, rank, method):
        self.rank, self.method, self.loaded = rank, method, 0

    def state_dict(self):
        if (self.rank, self.method) == (1, "state_dict"):
            raise LookupError("my own bug")
        return {"value": 1}

    def load_state_dict(self, state_dict):
        self.loaded += 1


def caught(action):
    try:
        action()
    except (CheckpointError, LookupError) as error:
        return str(error)
    return None


def failing(rank, ranks, folder):
    texts = [caught(lambda: dist_ckpt.save({"f": Failing(rank, "state_dict")}, folder / "c"))]
    kept = Failing(rank, None)
    dist_ckpt.save({"f": kept}, folder / "d")
    texts.append(caught(lambda: dist_ckpt.load({"f": Failing(rank, "state_dict")}, folder / "d")))
    dist_ckpt.load({"f": kept}, folder / "d")
    return texts, kept.loaded


def test_an_error_in_the_state_dict_of_one_rank_ends_the_call_on_all(tmp_path):
    results = run_ranks(failing, 2, tmp_path)
    for texts, loaded in results:
        assert all(text and "my own bug" in text for text in texts)
        assert loaded == 1
    assert names(tmp_path) == ["d"]


def hugging_face(rank, ranks, folder, whole):
    """Each rank takes rows as a DTensor, columns as records, and a replicated whole."""
    mesh = mesh_of(ranks)
    columns = whole["q"].chunk(ranks, dim=1)[rank].contiguous()
    asked = {
        "embed": distribute_tensor(torch.zeros_like(whole["embed"]), mesh, [Shard(0)]),
        "q": ShardedTensor.from_rank_offsets("q", torch.zeros_like(columns), (1, rank, ranks)),
        "all": one("all", torch.zeros_like(whole["all"]), replica_id=rank),
    }
    loaded = dist_ckpt.load(asked, folder)
    expected = distribute_tensor(whole["embed"], mesh, [Shard(0)])
    return (
        torch.equal(loaded["embed"].to_local(), expected.to_local()),
        torch.equal(loaded["q"], columns),
        torch.equal(loaded["all"], whole["all"]),
    )


@pytest.mark.slow
def test_a_hugging_face_folder_loads_on_ranks_by_rows_columns_and_whole(tmp_path):
    safe = pytest.importorskip("safetensors.torch", reason="needs the extra safetensors")
    whole = {"embed": torch.randn(7, 4), "q": torch.randn(3, 6).to(torch.bfloat16), "all": torch.randn(3)}
    safe.save_file(whole, tmp_path / "model.safetensors")
    for ranks in (2, 3):
        assert run_ranks(hugging_face, ranks, tmp_path, whole) == [(True, True, True)] * ranks


def told(rank, ranks, folder):
    """What progress is told on this rank, of a save, a load and a background save; one fails on a single rank."""
    fork_workers()
    seen = {"save": [], "load": [], "async": []}

    def state(value):
        shard = torch.full((2_000_000,), value)
        return {f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", shard.clone(), (0, rank, ranks)) for i in range(2)}

    def bar(name):
        return lambda done, total: seen[name].append((done, total))

    def broken(done, total):
        if rank == 1:
            raise LookupError("my bar broke")

    dist_ckpt.save(state(1.0), folder / "c", progress=bar("save"))
    dist_ckpt.load(state(0.0), folder / "c", progress=bar("load"))
    dist_ckpt.async_save(state(1.0), folder / "d", progress=bar("async")).wait()
    dist.barrier()
    texts = [caught(lambda: dist_ckpt.save(state(2.0), folder / "c", progress=broken))]
    texts.append(caught(lambda: dist_ckpt.load(state(0.0), folder / "c", progress=broken)))
    handle = dist_ckpt.async_save(state(2.0), folder / "d", progress=broken)
    texts.append(caught(handle.wait))
    grows = all(pairs and pairs == sorted(pairs) and pairs[-1][0] == pairs[-1][1] for pairs in seen.values())
    values = [dist_ckpt.load(state(0.0), folder / name)["w0"][0].item() for name in ("c", "d")]
    return grows, {name: pairs[-1][1] for name, pairs in seen.items()}, texts, values


@pytest.mark.slow
def test_each_rank_is_told_and_an_error_of_one_callable_ends_the_call_on_all(tmp_path):
    results = run_ranks(told, 2, tmp_path)
    for grows, totals, texts, values in results:
        assert grows
        assert all(16_000_000 <= total <= 40_000_000 for total in totals.values())  # of the rank's bytes, or of all
        assert all(text and "my bar broke" in text for text in texts)
        assert values == [1.0, 1.0]
    assert names(tmp_path) == ["c", "d"]
    assert all(tools.verify(tmp_path / name)["ok"] for name in ("c", "d"))


def compact(rank, ranks, folder):
    whole = torch.arange(24.0).view(6, 4)
    shard = ShardedTensor.from_rank_offsets("w", whole.chunk(ranks)[rank].clone(), (0, rank, ranks))
    dist_ckpt.save({"w": shard, "it": 3}, folder / "c", metadata="compact")
    columns = ShardedTensor.from_rank_offsets("w", torch.zeros(6, 4 // ranks), (1, rank, ranks))
    loaded = dist_ckpt.load({"w": columns}, folder / "c")
    equal = torch.equal(loaded["w"], whole.chunk(ranks, dim=1)[rank])
    dist.barrier()
    if rank == 0:
        flip_byte(folder / "c" / "__1_0.distcp", 200)
    dist.barrier()
    return equal, caught(lambda: dist_ckpt.load({"w": columns}, folder / "c"))


def test_a_compact_save_of_two_ranks_loads_at_another_cut_and_its_damage_is_told_to_both(tmp_path):
    (first, text), (second, other) = run_ranks(compact, 2, tmp_path)
    assert first and second
    assert text == other
    assert "__1_0.distcp" in text
